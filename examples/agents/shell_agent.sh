#!/usr/bin/env bash
# An agent in bash: has a number guessed. molt_gym.CommandAgent sets the variables; set them by hand to try the script
# with any other OpenAI-compatible server.
set -euo pipefail

with_json() { python3 -c "import json, os, sys; $1"; }

secret=$(with_json 'print(json.loads(os.environ["MOLT_GYM_TASK"])["secret"])')
messages='[{"role": "user", "content": "Guess my number from 1 to 9. Answer with one digit."}]'

for turn in 1 2 3; do
    response=$(curl --silent --show-error --fail "$OPENAI_BASE_URL/chat/completions" --data @- \
        --header "Authorization: Bearer $OPENAI_API_KEY" --header "Content-Type: application/json" \
        <<<"{\"model\": \"policy\", \"messages\": $messages}")
    # The reply goes back as it came: what is changed begins another row of training data.
    messages=$(printf '%s\n' "$messages" "$response" | with_json 'messages, response = map(json.loads, sys.stdin)
print(json.dumps([*messages, response["choices"][0]["message"]]))')
    guess=$(with_json 'print(json.load(sys.stdin)[-1]["content"].strip())' <<<"$messages")
    if [[ $guess == "$secret" ]]; then
        echo "{\"reward\": 1, \"info\": {\"guesses\": $turn}}"
        exit
    elif [[ $guess =~ ^[1-9]$ ]]; then
        hint=$( ((guess < secret)) && echo larger || echo smaller)
    else
        hint="one digit"
    fi
    messages="${messages%]}, {\"role\": \"user\", \"content\": \"No, it is $hint.\"}]"
done
# The last line that is printed is the result: a number is the reward.
echo 0
