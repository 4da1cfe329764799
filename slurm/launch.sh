#!/usr/bin/env bash
# One run as one Slurm job, which goes on where it was as often as the job is requeued:
#
#   slurm/launch.sh [sbatch options] VERB RECIPE RUN [words of molt-gym VERB]
#   slurm/launch.sh --account=mine train slurm/recipes/dense-4b.toml runs/dense --steps 500
#
# VERB is train, distill or sft. RECIPE is a settings file whose `#SBATCH` lines say what the job needs; options of sbatch
# given here win over them, and words over the settings. RUN is the run's folder, on a file system that all nodes have and
# that outlives the job; RUN.slurm gets the log. From the environment:
#
#   VENV   virtual environment (default: .venv here), on a file system that all nodes have
#   WRAP   command that everything is run by, such as "apptainer exec --nv molt-gym.sif"; VENV is then inside, or unset
#   PORT   first of two ports of Ray's head (default: from the job's number)
#
# Before the time limit and on preemption the batch shell gets SIGTERM and passes it to the run alone, which saves and
# exits with 143; the job then requeues itself. With more than one node, Ray is started on each of them through srun.
set -euo pipefail

SAVING=240 # seconds that a run has to save; less than the 300 before the time limit

fail() { echo "launch.sh: $*" >&2; exit 2; }

submit() {
    local options=() wanted=() said words verbs='^(train|distill|sft)$'
    # An option's value may be a word of its own.
    while [[ ${1:-} == -* && $# -gt 1 ]]; do
        options+=("$1"); shift
        if [[ $1 != -* && ! $1 =~ $verbs && ${options[-1]} != *=* ]]; then options+=("$1"); shift; fi
    done
    (($# >= 3)) || fail "usage: slurm/launch.sh [sbatch options] train|distill|sft RECIPE RUN [words of molt-gym]"
    [[ $1 =~ $verbs ]] || fail "verb: got '$1'; write train, distill or sft"
    [[ -f $2 ]] || fail "recipe: no file '$2'"
    words=("$1" "$(realpath -- "$2")" "$(realpath -m -- "$3")" "${@:4}")
    if [[ -z ${WRAP:-} ]]; then
        VENV=$(realpath -s -- "${VENV:-.venv}")
        [[ -x $VENV/bin/molt-gym ]] || fail "no molt-gym in $VENV; set VENV, or WRAP for a container"
        export VENV
    fi
    mkdir -p "${words[2]}.slurm"
    # As sbatch reads them: words, quoted where they hold blanks, up to a comment.
    said=$(sed -n 's/\r$//; s/^#SBATCH[[:blank:]]\+//; T; s/\(^\|[[:blank:]]\)#.*//; p' "$2" | xargs -r printf '%s\n') ||
        fail "recipe: #SBATCH lines of '$2' that cannot be cut into words; close the quotes"
    [[ -z $said ]] || readarray -t wanted <<<"$said"
    exec sbatch --job-name="molt-gym-$(basename "${words[2]}")" --requeue --open-mode=append --signal=B:TERM@300 \
        --ntasks-per-node=1 --output="${words[2]//%/%%}.slurm/%j.log" "${wanted[@]}" "${options[@]}" \
        "${BASH_SOURCE[0]}" --inside "${words[@]}"
}

command_of() { echo "${VENV:+$VENV/bin/}$1"; }

steps_done() { if [[ -f $1/metrics.jsonl ]]; then wc -l <"$1/metrics.jsonl"; else echo 0; fi; }

# Runs a command that `stop` can end; returns what it does.
attended() {
    local code
    [[ -z $ended ]] || return 143
    rm -f "$number"
    # shellcheck disable=SC2016
    ${WRAP:-} bash -c 'echo $$ 2>/dev/null >"$0"; exec "$@"' "$number" "$@" &
    attended=$!
    # A signal ends `wait`, but not the command.
    until woken='' code=0; wait "$attended" || code=$?; [[ -z $woken ]]; do :; done
    return "$code"
}

# What does not end in time is killed, so that the job can still requeue itself.
stop() {
    woken=yes
    [[ -z $ended ]] || return 0
    ended=$1
    [[ -n $attended ]] || return 0
    local run
    run=$(cat "$number" 2>/dev/null || :)
    # WRAP may not pass signals on. If it hides the run's number, or its processes, it has to.
    grep -qz "^SLURM_JOB_ID=$SLURM_JOB_ID$" "/proc/${run:-none}/environ" 2>/dev/null || run=$attended
    kill -TERM "$run" 2>/dev/null || :
    (sleep "$SAVING" && kill -KILL "$run" "$attended" 2>/dev/null) &
}

# Ray's head on the first node, where this shell is, and a worker on each of the others: one step with a task a node.
start_ray() {
    local first=${PORT:-$((20000 + SLURM_JOB_ID % 10000 * 2))}
    RAY_ADDRESS=$(hostname -I | cut -d' ' -f1):$first
    RAY_AUTH_TOKEN=$(od -An -N32 -tx1 /dev/urandom | tr -d ' \n')
    export RAY_ADDRESS RAY_AUTH_TOKEN RAY_AUTH_MODE=token RAY_USAGE_STATS_ENABLED=0
    # srun does not take this over from sbatch, and would give Ray one CPU.
    [[ -z ${SLURM_CPUS_PER_TASK:-} ]] || export SRUN_CPUS_PER_TASK=$SLURM_CPUS_PER_TASK
    # shellcheck disable=SC2016,SC2086
    {
        srun --overlap --ntasks-per-node=1 --kill-on-bad-exit=1 bash -c '
            if [[ $SLURM_NODEID = 0 ]]; then
                exec "$@" --head --node-ip-address="${RAY_ADDRESS%:*}" --port="${RAY_ADDRESS#*:}" \
                    --ray-client-server-port="$((${RAY_ADDRESS#*:} + 1))" --include-dashboard=false
            fi
            until (exec 3<>"/dev/tcp/${RAY_ADDRESS/://}") 2>/dev/null; do
                ((SECONDS < 300)) || { echo "no head of Ray at $RAY_ADDRESS within $SECONDS s" >&2; exit 1; }
                sleep 1
            done
            exec "$@" --address="$RAY_ADDRESS"' \
            ray ${WRAP:-} "$(command_of ray)" start --block --log-style=record --num-cpus="$SLURM_CPUS_ON_NODE" || :
        echo "launch.sh: Ray has ended" >&2
        kill -USR1 $$ 2>/dev/null
    } &
    attended "$(command_of python)" -c '
import sys, time, ray
deadline, there = time.monotonic() + 600, 0
while time.monotonic() < deadline and there < int(sys.argv[1]):
    try:
        ray.init(ignore_reinit_error=True, log_to_driver=False, logging_level="error")
        there = sum(node["Alive"] for node in ray.nodes())
    except ConnectionError:
        pass
    time.sleep(0.2)
sys.exit(there < int(sys.argv[1]) and f"launch.sh: {there} of {sys.argv[1]} nodes have joined Ray within 600 s")
' "$SLURM_JOB_NUM_NODES"
}

inside() {
    local verb=$1 recipe=$2 run=$3 before code=0
    before=$(steps_done "$run") ended='' attended='' woken='' number=${TMPDIR:-/tmp}/molt-gym-$SLURM_JOB_ID.pid
    trap 'stop asked' TERM
    trap 'stop lost' USR1
    { ((SLURM_JOB_NUM_NODES == 1)) || start_ray; } &&
        attended "$(command_of molt-gym)" "$verb" --config "$recipe" --out "$run" "${@:4}" || code=$?
    echo "launch.sh: molt-gym $verb has ended with $code" >&2
    trap '' USR1
    rm -f "$number"
    # Ray would take half a minute to let go of what is over.
    ((SLURM_JOB_NUM_NODES == 1)) || scancel --signal=KILL "$SLURM_JOB_ID.0" || :
    # What Ray's end broke is worth another start if this one got anywhere.
    if [[ $code != 0 && $ended = asked ]] || { [[ $code != 0 && $ended = lost ]] && (($(steps_done "$run") > before)); }
    then
        scontrol requeue "$SLURM_JOB_ID" || :
    fi
    exit "$code"
}

if [[ ${1:-} == --inside ]]; then
    shift
    inside "$@"
else
    submit "$@"
fi
