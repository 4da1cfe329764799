"""A judge, asked over real connections: scores, verdicts that are none, errors that pass and that do not, limits."""

import asyncio
import importlib.util
import json
import math
import pickle
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from molt_gym import ChatEnv, EnvFailure, Judge, Turn, text_of
from molt_gym.errors import ConfigError
from molt_gym.judge import Calls, Judgement
from molt_gym.judge_calls import metered, rehearsal
from molt_gym.threads import call_in_thread

_spec = importlib.util.spec_from_file_location("judges", Path(__file__).with_name("judges.py"))
judges = importlib.util.module_from_spec(_spec)
sys.modules["judges"] = judges
_spec.loader.exec_module(judges)
Answer, verdict = judges.Answer, judges.verdict


@pytest.fixture
def endpoint(monkeypatch):
    import openai._base_client

    monkeypatch.setattr(openai._base_client, "INITIAL_RETRY_DELAY", 0.01)
    with judges.listening() as endpoint:
        yield endpoint


@pytest.fixture
def judge_of(endpoint):
    """Makes judges that ask the endpoint."""
    def make(rubric="Is it kind?", **options):
        calls = {name: options.pop(name) for name in list(options) if name in Calls.__dataclass_fields__}
        return Judge(endpoint.url, rubric, model="m", calls=Calls(**{"deadline": 10.0, **calls}), **options)
    return make


def test_a_score_is_the_share_of_the_scale_and_the_judge_is_told_all_that_it_needs(endpoint, judge_of):
    endpoint.always = lambda request: verdict(4, "mostly")
    found = judge_of(scale=(1, 5)).score("Say hello.", "Hello!", reference="Hi.")
    assert (found.score, found.reasoning, found.parts) == (0.75, "mostly", {}) and math.isnan(found.error)
    request, = endpoint.requests
    assert (request["model"], request["temperature"], request["max_tokens"]) == ("m", 0, 512) and "seed" not in request
    system, user = (message["content"] for message in request["messages"])
    assert "from 1 (worst) to 5 (best)" in system
    assert all(text in user for text in ("Is it kind?", "Say hello.", "Hello!", "Hi."))


def test_each_criterion_has_a_score_and_the_whole_is_their_mean(endpoint, judge_of):
    endpoint.always = lambda request: json.dumps({"scores": {"kind": 1, "short": 0}})
    found = judge_of({"kind": "Is it kind?", "short": "Is it short?"}, scale=(0, 1)).score("x", "y")
    assert found.parts == {"kind": 1.0, "short": 0.0} and found.score == 0.5


def test_a_conversation_is_shown_and_so_is_the_rubric_of_a_single_question(endpoint, judge_of):
    judge_of().score([{"role": "user", "content": "Sum?"}, {"role": "assistant", "content": "Of what?"}], "3",
                     rubric="Is it right?")
    user = endpoint.requests[0]["messages"][1]["content"]
    assert "user: Sum?" in user and "assistant: Of what?" in user and "Is it right?" in user and "kind" not in user


MALFORMED = ["", "I like it.", "{", '{"score": "4"}', '{"score": 11}', '{"score": NaN}', '{"score": true}', "[7]",
             '{"reasoning": 3, "score": 4}', '{"scores": {"score": 3}}', '{"a":' * 3000]


@pytest.mark.parametrize("wrong", MALFORMED)
def test_a_malformed_verdict_is_asked_for_once_more_with_the_reason(endpoint, judge_of, wrong):
    endpoint.script = [wrong, verdict(10)]
    assert judge_of().score("x", "y").score == 1.0
    first, second = endpoint.requests
    assert second["messages"][:2] == first["messages"] and second["messages"][2]["content"] == wrong
    assert "That is no verdict" in second["messages"][3]["content"]


@pytest.mark.parametrize("wrong", MALFORMED[:4])
def test_a_verdict_that_stays_malformed_is_a_failure_and_not_remembered(endpoint, judge_of, wrong):
    judge = judge_of()
    endpoint.script = [wrong, wrong]
    with pytest.raises(EnvFailure, match="malformed verdict") as caught:
        judge.score("x", "y")
    assert caught.value.reason == "judge" and len(endpoint.requests) == 2
    assert judge.score("x", "y").score == 1.0 and len(endpoint.requests) == 3


def test_a_verdict_that_was_cut_off_says_so(endpoint, judge_of):
    endpoint.script = [Answer('{"reasoning": "well', finish="length")] * 2
    with pytest.raises(EnvFailure, match="as max_tokens cut it off"):
        judge_of().score("x", "y")


@pytest.mark.parametrize("trouble", [429, 500, 503, 0], ids=["rate limit", "error", "overloaded", "hangs up"])
def test_trouble_that_passes_is_waited_out(endpoint, judge_of, trouble):
    endpoint.script = [Answer(status=trouble)] * 2
    assert judge_of().score("x", "y").score == 1.0 and len(endpoint.requests) == 3


def test_retry_after_is_obeyed(endpoint, judge_of):
    endpoint.script = [Answer(status=429, headers={"Retry-After": "0.4"})]
    assert judge_of().score("x", "y").score == 1.0
    assert endpoint.times[1] - endpoint.times[0] >= 0.4


def test_trouble_that_stays_is_a_failure_after_as_many_retries_as_are_allowed(endpoint, judge_of):
    endpoint.always = lambda request: Answer(status=500)
    with pytest.raises(EnvFailure, match="InternalServerError") as caught:
        judge_of(retries=2).score("x", "y")
    assert caught.value.reason == "judge" and len(endpoint.requests) == 3


def test_a_request_that_is_refused_is_not_sent_again(endpoint, judge_of):
    endpoint.always = lambda request: Answer(status=401)
    with pytest.raises(EnvFailure, match="AuthenticationError"):
        judge_of().score("x", "y")
    assert len(endpoint.requests) == 1


def test_nobody_there_is_a_failure():
    with pytest.raises(EnvFailure, match="judge m at http://127.0.0.1:9/v1: .*Connection"):
        Judge("http://127.0.0.1:9/v1", "r", model="m", calls=Calls(retries=0)).score("x", "y")


def test_a_judge_that_is_late_is_given_up_with_its_retries(endpoint, judge_of):
    endpoint.script = [Answer(verdict(1), seconds=6.0), Answer(status=429, headers={"Retry-After": "30"})]
    for _ in range(2):
        started = time.monotonic()
        with pytest.raises(EnvFailure, match=r"no verdict within 0.3 s \(calls.deadline\)"):
            judge_of(deadline=0.3).score("x", "y")
        assert time.monotonic() - started < 5


def test_what_was_judged_is_known_by_its_content(endpoint, judge_of):
    with metered() as counted:
        for judge in (judge_of(), judge_of()):
            assert judge.score("x", "y").score == 1.0
    assert counted["judge/requests"] == counted["judge/cached"] == 1 and counted["judge/tokens"] == 7
    assert counted["judge/seconds"] > 0
    judge_of().score("x", "y ")
    judge_of(scale=(0, 10)).score("x", "y")
    judge_of("Is it short?").score("x", "y")
    judge_of(cache=False).score("x", "y")
    assert len(endpoint.requests) == 5


def test_what_is_being_judged_is_joined_and_a_failure_is_told_to_all(endpoint, judge_of):
    endpoint.script = [Answer(verdict(1), seconds=0.2)]
    with ThreadPoolExecutor(8) as threads:
        assert {found.score for found in threads.map(lambda _: judge_of().score("x", "y"), range(8))} == {0.0}
    assert len(endpoint.requests) == 1
    endpoint.always = lambda request: Answer(status=401, seconds=0.2)
    with ThreadPoolExecutor(8) as threads:
        failed = [threads.submit(judge_of().score, "x", "z") for _ in range(8)]
    assert all(isinstance(future.exception(), EnvFailure) for future in failed) and len(endpoint.requests) < 9


def together(number):
    """Answers when so many requests are under way."""
    barrier = threading.Barrier(number, timeout=10)

    def always(request):
        barrier.wait()
        return verdict(10)

    return always


def test_many_are_asked_at_a_time_and_no_more_than_the_limit(endpoint, judge_of):
    endpoint.always = together(6)
    with ThreadPoolExecutor(24) as threads:
        list(threads.map(lambda number: judge_of(concurrency=6).score("x", str(number)), range(24)))
    assert endpoint.most == 6


async def test_coroutines_ask_without_holding_up_their_loop(endpoint, judge_of):
    endpoint.always = together(8)
    found = await asyncio.gather(*(judge_of().score_async("x", str(number)) for number in range(8)))
    assert [one.score for one in found] == [1.0] * 8


def prefers(better):
    """A judge of pairs that names the place where `better` stands."""
    def always(request):
        user = request["messages"][1]["content"]
        return json.dumps({"winner": "A" if user.index(better) < user.index("</reply-A") else "B"})
    return always


@pytest.mark.parametrize(("better", "winner", "score"), [("good", "a", 1.0), ("bad", "b", 0.0)])
def test_a_pair_is_judged_in_both_orders(endpoint, judge_of, better, winner, score):
    endpoint.always = prefers(better)
    found = judge_of().compare("x", "good", "bad")
    assert (found.winner, found.score, found.consistent) == (winner, score, 1.0) and len(endpoint.requests) == 2


@pytest.mark.parametrize("place", ["A", "B"])
def test_a_judge_that_likes_a_place_has_no_winner(endpoint, judge_of, place):
    endpoint.always = lambda request: json.dumps({"winner": place})
    found = judge_of().compare("x", "good", "bad")
    assert (found.winner, found.score, found.consistent) == ("tie", 0.5, 0.0)
    alone = judge_of(swap=False).compare("x", "good", "bad")
    assert alone.winner == {"A": "a", "B": "b"}[place] and math.isnan(alone.consistent)


def test_a_tie_is_a_tie_in_both_orders(endpoint, judge_of):
    endpoint.always = lambda request: '{"winner": "tie"}'
    found = judge_of().compare("x", "one", "other")
    assert (found.winner, found.score, found.consistent, found.error) == ("tie", 0.5, 1.0, 0.0)


def test_repeated_judgements_are_samples_with_a_mean_and_an_error(endpoint, judge_of):
    endpoint.always = lambda request: verdict({0: 2, 1: 4, 2: 6}[request["seed"]])
    found = judge_of(repeats=3, scale=(0, 10)).score("x", "y")
    assert found.score == pytest.approx(0.4) and found.error == pytest.approx(0.2 / math.sqrt(3))
    assert sorted(request["seed"] for request in endpoint.requests) == [0, 1, 2]
    assert {request["temperature"] for request in endpoint.requests} == {1.0}


def test_agreement_is_measured_over_rows(endpoint, judge_of):
    scores = {"a": (2, 4), "b": (8, 6)}
    endpoint.always = lambda request: verdict(
        scores["a" if "\na\n" in request["messages"][1]["content"] else "b"][request["seed"]])
    found = judge_of(repeats=2, scale=(0, 10)).agreement([{"prompt": "x", "reply": reply} for reply in "ab"])
    assert found.mean == pytest.approx(0.5) and found.error == pytest.approx(0.1)
    # Units (.2, .4) and (.8, .6): 1 - 3 * (.08 + .08) / (2 * (4 * 1.2 - 4)).
    assert found.alpha == pytest.approx(0.7) and len(found.verdicts) == 2


def test_agreement_of_comparisons_tells_how_often_the_order_decides(endpoint, judge_of):
    endpoint.always = lambda request: json.dumps({"winner": "A"})
    found = judge_of().agreement([{"prompt": "x", "a": str(number), "b": "other"} for number in range(4)])
    assert (found.mean, found.consistent) == (0.5, 0.0) and found.alpha < 0


def test_any_policy_may_judge():
    judge = Judge(lambda observation: verdict(10 if "please" in observation["messages"][1]["content"] else 1), "r")
    assert (judge.score("x", "please").score, judge.score("x", "now").score) == (1.0, 0.0)


def test_what_a_policy_raises_is_the_judges_failure():
    def lost(observation):
        raise KeyError("keys")

    with pytest.raises(EnvFailure, match="judge .*lost: KeyError: 'keys'"):
        Judge(lost, "r").score("x", "y")


def test_a_judge_that_would_wait_for_itself_says_so():
    inner = Judge(lambda seen: verdict(5), "Is it kind?")

    async def asks_another(seen):
        return json.dumps({"score": inner.score("p", "r").score})

    failure = call_in_thread(lambda: Judge(asks_another, "Is it kind?").score("p", "r")).exception(timeout=60)
    assert isinstance(failure, EnvFailure) and "await its score_async" in failure.detail


def test_a_judge_may_have_a_form_of_its_own():
    class Terse(Judge):
        def question(self, prompt, reply, rubric, reference):
            return [{"role": "user", "content": f"{prompt}: {reply}. 0 or 1?"}]

        def read(self, text, rubric):
            return Judgement(float(text))

    def judge(observation):
        return "1" if observation["messages"][0]["content"] == "x: y. 0 or 1?" else "none"

    assert Terse(judge, "r").score("x", "y").score == 1.0
    with pytest.raises(EnvFailure, match="could not convert string to float"):
        Terse(judge, "r").score("x", "z")


def test_judges_that_read_otherwise_do_not_share_what_is_known(endpoint, judge_of):
    class OutOf(Judge):
        most = 10.0

        def question(self, prompt, reply, rubric, reference):
            return [{"role": "user", "content": reply}]

        def read(self, text, rubric):
            return Judgement(5 / self.most, parts=dict.fromkeys(rubric, 0.5))

    one, other = (OutOf(lambda messages: "5", {"kind": "Is it?"}) for _ in range(2))
    other.source, other.most = one.source, 20.0
    assert (one.score("p", "r").score, other.score("p", "r").score) == (0.5, 0.25)
    assert one.score("p", "r", rubric={"clear": "Is it?"}).parts == {"clear": 0.5}


def test_a_judge_that_fails_fails_the_step_and_earns_nothing(endpoint, judge_of):
    class Poem(ChatEnv):
        def begin(self, index):
            return [{"role": "user", "content": "A poem."}]

        def answer(self, message):
            return Turn(reward=judge_of().score("A poem.", text_of(message)).score, terminated=True)

    endpoint.always = lambda request: "no comment"
    env = Poem()
    env.reset(seed=0)
    with pytest.raises(EnvFailure, match="^judge: "):
        env.step({"role": "assistant", "content": "Roses"})


def test_models_of_a_run_are_nowhere_else():
    for name in ("policy", "frozen"):
        with pytest.raises(EnvFailure, match=f"'{name}' is a model of the run"):
            Judge(name, "r").score("x", "y")


def test_nobody_is_asked_in_a_rehearsal(endpoint, judge_of):
    with rehearsal():
        found = judge_of({"kind": "?", "short": "?"}).score("x", "y")
        assert found.score == 0.5 and found.parts == {"kind": 0.5, "short": 0.5}
        assert judge_of().compare("x", "y", "z").winner == "tie"
    assert not endpoint.requests


def test_a_judge_can_be_sent(endpoint, judge_of):
    assert pickle.loads(pickle.dumps(judge_of())).score("x", "y").score == 1.0


def test_half_a_character_can_be_judged(judge_of):
    assert judge_of().score("x", "\ud800").score == 1.0


def test_threads_and_loops_share_what_is_known(endpoint, judge_of):
    judge_of().score("x", "y")
    with ThreadPoolExecutor(1) as threads:
        assert threads.submit(lambda: asyncio.run(judge_of().score_async("x", "y"))).result().score == 1.0
    assert judge_of().score("x", "y").score == 1.0 and len(endpoint.requests) == 1


@pytest.mark.parametrize(("arguments", "complaint"), [
    ({"source": ""}, "judge.source: is empty"),
    ({"source": "http://localhost:8000/v1"}, r"judge.model: None with the endpoint .*Judge\('http"),
    ({"source": "http:///v1", "model": "m"}, "judge.model"),
    ({"source": "frozen", "model": "m"}, "judge.model: 'm' with 'frozen'"),
    ({"source": len, "model": "m"}, "judge.model: 'm' with a policy"),
    ({"rubric": " "}, "judge.rubric"),
    ({"rubric": {}}, "judge.rubric"),
    ({"rubric": {"kind": 3}}, "judge.rubric"),
    ({"scale": (5, 1)}, r"judge.scale: \(5, 1\)"),
    ({"scale": (0, math.inf)}, "judge.scale"),
    ({"scale": 5}, "judge.scale: 5"),
    ({"repeats": 0}, "judge.repeats: 0"),
    ({"repeats": 2, "temperature": 0}, "2 greedy judgements are all the same"),
    ({"temperature": -1}, "judge.calls.temperature: -1"),
    ({"temperature": math.nan}, "judge.calls.temperature: nan"),
    ({"deadline": 0}, "judge.calls.deadline: 0"),
    ({"deadline": math.inf}, "judge.calls.deadline: inf"),
    ({"retries": -1}, "judge.calls.retries: -1"),
    ({"concurrency": 0}, "judge.calls.concurrency: 0"),
    ({"max_tokens": True}, "judge.calls.max_tokens: True"),
])
def test_what_makes_no_sense_is_refused_by_its_name(arguments, complaint):
    options = {"source": "frozen", "rubric": "r", **arguments}
    calls = {name: options.pop(name) for name in list(options) if name in Calls.__dataclass_fields__}
    with pytest.raises(ConfigError, match=complaint):
        Judge(options.pop("source"), options.pop("rubric"), calls=Calls(**calls), **options)


def test_agreement_of_one_judgement_is_refused(judge_of):
    with pytest.raises(ConfigError, match="judge.repeats: 1 judgement of each row"):
        judge_of().agreement([{"prompt": "x", "reply": "y"}])
    with pytest.raises(ConfigError, match="there are no rows"):
        judge_of(repeats=2).agreement([])
