"""Sessions opened, ended and read over HTTP."""

import asyncio
import json
from types import SimpleNamespace

import aiohttp
import pytest

from molt_gym.server import admin as admin_module
from molt_gym.server.admin import Admin
from molt_gym.tokens import Trajectory

OK = {"role": "user", "content": "ok"}
ADMIN = "the-admin-key"

pytestmark = pytest.mark.timeout(60)


class Seat:
    """Records what a toy respondent sampled."""

    def __init__(self, respondent) -> None:
        self.respondent = respondent

    def record(self, trajectory: Trajectory) -> None:
        graph, last = self.respondent.graph, self.respondent.last
        trajectory.rows, trajectory.turns = graph.rows(), graph.turns
        trajectory.messages = [*last[0].messages, last[1].message] if last else []


class Harness:
    """A program outside that has the admin key, and what was handed on so far."""

    def __init__(self, admin: Admin, handed_on: list[Trajectory], failures: list[Exception]) -> None:
        self.admin, self.handed_on, self.failures = admin, handed_on, failures

    async def ask(self, method: str, path: str, body=None, *, key: str | None = ADMIN) -> tuple[int, dict]:
        headers = {} if key is None else {"Authorization": f"Bearer {key}"}
        data = body if isinstance(body, bytes | None) else json.dumps(body).encode()
        async with aiohttp.ClientSession() as client:
            async with client.request(method, self.admin.url + path, data=data, headers=headers) as response:
                return response.status, await response.json()

    async def open(self, **fields) -> dict:
        status, opened = await self.ask("POST", "/sessions", fields)
        assert status == 200
        return opened

    async def chat(self, key: str, content: str = "ok") -> int:
        message = {"role": "user", "content": content}
        return (await self.ask("POST", "/v1/chat/completions", {"model": "m", "messages": [message]}, key=key))[0]


@pytest.fixture
async def harness_of(server, respondent_of):
    harnesses = []

    def make(**options) -> Harness:
        handed_on, failures = [], []

        def ended(trajectory: Trajectory) -> None:
            if failures:
                raise failures.pop()
            handed_on.append(trajectory)

        admin = Admin(server, ADMIN, lambda number: Seat(respondent_of()), ended=ended, **options)
        server.admin = admin
        harnesses.append(Harness(admin, handed_on, failures))
        return harnesses[-1]

    yield make
    for harness in harnesses:
        harness.admin.close()


@pytest.fixture
async def harness(harness_of) -> Harness:
    return harness_of(env="Toy-v0")


async def test_a_session_is_opened_used_read_and_ended(harness, prompt_ids):
    opened = await harness.open(env="Shop-v0", index=3, metadata={"split": "dev"})
    assert opened == {"id": opened["id"], "api_key": opened["api_key"], "openai_base_url": f"{harness.admin.url}/v1",
                      "anthropic_base_url": harness.admin.url}
    assert await harness.chat(opened["api_key"]) == 200
    path = f"/sessions/{opened['id']}"
    assert await harness.ask("GET", path) == (200, {"id": opened["id"], "open": True, "turns": 1, "tokens": 3})
    status, so_far = await harness.ask("GET", f"{path}/trajectory")
    assert status == 200 and so_far["reward"] is None and so_far["rows"][0]["ids"][:20] == prompt_ids
    assert harness.handed_on == []
    summary = {"id": opened["id"], "turns": 1, "rows": 1, "trained_tokens": 3}
    assert await harness.ask("POST", f"{path}/end", {"reward": 1, "info": {"why": "won"}}) == (200, summary)
    (trajectory,) = harness.handed_on
    assert (trajectory.env, trajectory.index, trajectory.reward) == ("Shop-v0", 3, 1.0)
    assert trajectory.terminated and not trajectory.truncated and trajectory.failure is None
    assert trajectory.info == {"session": opened["id"], "metadata": {"split": "dev"}, "why": "won"}
    assert await harness.ask("GET", path) == (200, {"id": opened["id"], "open": False, "turns": 1, "tokens": 3})
    kept = (await harness.ask("GET", f"{path}/trajectory"))[1]
    assert Trajectory.from_json(json.dumps(kept)) == trajectory
    assert await harness.chat(opened["api_key"]) == 401 and len(harness.handed_on) == 1


async def test_a_session_may_be_opened_and_ended_without_a_body(harness):
    _, opened = await harness.ask("POST", "/sessions")
    status, summary = await harness.ask("POST", f"/sessions/{opened['id']}/end")
    assert (status, summary["turns"], harness.handed_on[0].env, harness.handed_on[0].reward) == (200, 0, "Toy-v0", None)


@pytest.mark.parametrize("method, path", [
    ("POST", "/sessions"), ("GET", "/sessions/default"), ("POST", "/sessions/default/end"),
    ("GET", "/sessions/default/trajectory"), ("GET", "/sessions/none"), ("GET", "/sessions/a/b/c"),
])
async def test_only_the_admin_key_opens_what_is_under_sessions(harness, method, path):
    opened = await harness.open()
    before = harness.admin._server.sessions
    for key in (None, "", "wrong", opened["api_key"], harness.admin.default.session.key, ADMIN + "x", ADMIN[:-1], "é"):
        status, body = await harness.ask(method, path, {}, key=key)
        assert status == 401 and "admin key" in body["error"]["message"] and ADMIN not in str(body)
    assert harness.admin._server.sessions == before and harness.handed_on == []


async def test_the_admin_key_opens_no_model(harness, engine):
    assert await harness.chat(ADMIN) == 401 and engine.received == []


async def test_without_an_admin_there_is_nothing_under_sessions(server, respondent_of):
    session = server.open(respondent_of())
    harness = Harness(SimpleNamespace(url=server.url), [], [])
    assert (await harness.ask("POST", "/sessions", {}, key=session.key))[0] == 404
    assert (await harness.ask("POST", "/sessions", {}))[0] == 401


@pytest.mark.parametrize("field, value", [
    ("max_turns", "3"), ("max_turns", 0), ("max_turns", -1), ("max_turns", True), ("max_turns", 1.5), ("max_turns", []),
    ("env", 1), ("env", ["a"]), ("index", "0"), ("index", -1), ("index", False), ("metadata", []), ("metadata", "text"),
    ("max_turn", 3), ("reward", 1.0),
])
async def test_a_wrong_field_of_an_opening_is_named(harness, field, value):
    status, body = await harness.ask("POST", "/sessions", {field: value})
    assert status == 400 and body["error"]["param"] == field and body["error"]["message"].startswith(f"{field}: ")
    assert harness.admin._server.sessions == 1


@pytest.mark.parametrize("field, value", [
    ("reward", "1"), ("reward", True), ("reward", [1]), pytest.param("reward", 10**400, id="huge"),
    ("info", []), ("info", "text"), ("truncated", 1), ("truncated", "yes"), ("score", 1.0),
])
async def test_a_wrong_field_of_an_ending_is_named_and_ends_nothing(harness, field, value):
    opened = await harness.open()
    status, body = await harness.ask("POST", f"/sessions/{opened['id']}/end", {field: value})
    assert status == 400 and body["error"]["param"] == field and body["error"]["message"].startswith(f"{field}: ")
    assert harness.handed_on == [] and await harness.chat(opened["api_key"]) == 200


@pytest.mark.parametrize("body", [b"{", b"[]", b"1", b'{"reward": NaN}', b'{"reward": 1e999}', b"\xff", b"[" * 100_000])
async def test_a_body_that_is_no_json_object_is_refused(harness, body):
    opened = await harness.open()
    for path in ("/sessions", f"/sessions/{opened['id']}/end"):
        status, answer = await harness.ask("POST", path, body)
        assert status == 400 and answer["error"]["message"].startswith("body: ")
    assert harness.handed_on == []


async def test_null_is_the_same_as_nothing(harness):
    opened = await harness.open(max_turns=None, env=None, index=None, metadata=None)
    body = {"reward": None, "info": None, "truncated": None}
    assert (await harness.ask("POST", f"/sessions/{opened['id']}/end", body))[0] == 200
    assert harness.handed_on[0].info == {"session": opened["id"]}


@pytest.mark.parametrize("method, path, said", [
    ("GET", "/sessions/none", "there is none"), ("POST", "/sessions/none/end", "there is none"),
    ("GET", "/sessions/none/trajectory", "there is none"), ("GET", "/sessions", "no such route"),
    ("DELETE", "/sessions/default", "no such route"), ("POST", "/sessions/default", "no such route"),
    ("GET", "/sessions/default/end", "no such route"), ("GET", "/sessions/default/trajectory/0", "no such route"),
])
async def test_an_unknown_session_or_route_is_not_found(harness, method, path, said):
    status, body = await harness.ask(method, path)
    assert status == 404 and said in body["error"]["message"]


async def test_a_session_whose_turns_are_used_up_is_truncated(harness):
    opened = await harness.open(max_turns=1)
    assert [await harness.chat(opened["api_key"], content) for content in ("ok", "he")] == [200, 410]
    await harness.ask("POST", f"/sessions/{opened['id']}/end", {"reward": 0.5})
    (trajectory,) = harness.handed_on
    assert trajectory.truncated and not trajectory.terminated and trajectory.turns == 1 and trajectory.reward == 0.5


async def test_who_ends_a_session_can_say_that_it_was_cut(harness):
    opened = await harness.open()
    await harness.ask("POST", f"/sessions/{opened['id']}/end", {"truncated": True})
    assert harness.handed_on[0].truncated and not harness.handed_on[0].terminated


async def test_ending_twice_the_same_way_records_once_and_another_way_is_refused(harness):
    opened = await harness.open()
    path = f"/sessions/{opened['id']}/end"
    first = await harness.ask("POST", path, {"reward": 1.0})
    assert await harness.ask("POST", path, {"reward": 1.0}) == first and first[0] == 200
    status, body = await harness.ask("POST", path, {"reward": 0.0})
    assert status == 410 and "ended already" in body["error"]["message"]
    assert [trajectory.reward for trajectory in harness.handed_on] == [1.0]


async def test_a_request_under_way_when_its_session_ends_is_refused_and_leaves_nothing(harness, engine):
    opened = await harness.open()
    engine.seconds = 30.0
    asking = asyncio.create_task(harness.chat(opened["api_key"]))
    await engine.until(running=1)
    await harness.ask("POST", f"/sessions/{opened['id']}/end")
    assert await asking == 410 and engine.aborted == 1
    assert harness.handed_on[0].turns == 0 and harness.handed_on[0].rows == []


async def test_the_next_default_session_has_the_key_of_the_one_that_ended(harness):
    key = harness.admin.default.session.key
    for reward in (1.0, 2.0):
        assert await harness.chat(key) == 200
        status, summary = await harness.ask("POST", "/sessions/default/end", {"reward": reward})
        assert (status, summary["turns"]) == (200, 1)
        assert (await harness.ask("GET", f"/sessions/{summary['id']}/trajectory"))[1]["reward"] == reward
    assert [trajectory.reward for trajectory in harness.handed_on] == [1.0, 2.0]
    status, body = await harness.ask("POST", "/sessions/default/end", {"reward": 3.0})
    assert status == 400 and "no replies" in body["error"]["message"] and len(harness.handed_on) == 2


async def test_a_session_left_alone_ends_and_says_why(harness_of, engine):
    harness = harness_of(idle_timeout=0.6)
    left, watched, busy = [await harness.open() for _ in range(3)]
    assert await harness.chat(left["api_key"]) == 200
    engine.seconds = 1.3
    asking = asyncio.create_task(harness.chat(busy["api_key"]))
    for _ in range(12):
        await asyncio.sleep(0.1)
        await harness.ask("GET", f"/sessions/{watched['id']}")
    (trajectory,) = harness.handed_on
    assert trajectory.info["session"] == left["id"] and trajectory.turns == 1 and trajectory.reward is None
    assert trajectory.failure.reason == "idle" and not trajectory.terminated
    assert await harness.chat(left["api_key"]) == 401 and await asking == 200
    status, body = await harness.ask("POST", f"/sessions/{left['id']}/end", {"reward": 1.0})
    assert status == 410 and "0.6 s" in body["error"]["message"]


async def test_the_default_session_left_alone_is_recorded_if_it_was_used_and_goes_on(harness_of):
    harness = harness_of(idle_timeout=0.2)
    first = harness.admin.default
    assert await harness.chat(first.session.key) == 200
    await asyncio.sleep(0.7)
    (trajectory,) = harness.handed_on
    assert trajectory.turns == 1 and trajectory.failure is None
    assert harness.admin.default is not first and await harness.chat(first.session.key) == 200


async def test_a_session_that_cannot_be_recorded_stays_open(harness):
    opened = await harness.open()
    harness.failures.append(OSError(28, "No space left on device"))
    path = f"/sessions/{opened['id']}/end"
    status, body = await harness.ask("POST", path, {"reward": 1.0})
    assert status == 503 and "No space left" in body["error"]["message"]
    assert await harness.chat(opened["api_key"]) == 200
    assert (await harness.ask("POST", path, {"reward": 1.0}))[1]["turns"] == 1
    assert len(harness.handed_on) == 1


async def test_one_left_alone_that_cannot_be_recorded_is_kept_for_another_try(harness_of):
    harness = harness_of(idle_timeout=0.2)
    await harness.open()
    harness.failures.append(OSError(28, "No space left on device"))
    with pytest.warns(UserWarning, match="No space left"):
        await asyncio.sleep(0.3)
    assert harness.handed_on == []
    await asyncio.sleep(0.3)
    assert len(harness.handed_on) == 1


async def test_closing_ends_all_sessions_even_if_one_cannot_be_recorded(harness, server):
    opened = [await harness.open() for _ in range(3)]
    await harness.chat(harness.admin.default.session.key)
    harness.failures.append(OSError(28, "No space left on device"))
    with pytest.raises(OSError, match="No space left"):
        harness.admin.close()
    assert server.sessions == 0 and len(harness.handed_on) == 3
    assert [t.failure and t.failure.reason for t in harness.handed_on] == ["shutdown"] * 3
    assert {t.info["session"] for t in harness.handed_on} == {session["id"] for session in opened}
    harness.admin.close()


async def test_a_default_session_that_was_never_used_leaves_no_trajectory(harness, server):
    harness.admin.close()
    assert harness.handed_on == [] and server.sessions == 0


async def test_only_the_latest_trajectories_are_kept(harness, monkeypatch):
    monkeypatch.setattr(admin_module, "KEPT", 2)
    opened = [await harness.open() for _ in range(3)]
    for session in opened:
        await harness.ask("POST", f"/sessions/{session['id']}/end")
    found = [(await harness.ask("GET", f"/sessions/{session['id']}/trajectory"))[0] for session in opened]
    assert found == [404, 200, 200] and len(harness.handed_on) == 3


async def test_any_text_of_the_info_survives(harness):
    opened = await harness.open(env="\ud800", metadata={"n": 10**30})
    body = b'{"info": {"text": "\\ud83d\\ude00 \\ud800 \\u2028", "list": [1.5, null, true]}}'
    assert (await harness.ask("POST", f"/sessions/{opened['id']}/end", body))[0] == 200
    kept = (await harness.ask("GET", f"/sessions/{opened['id']}/trajectory"))[1]
    assert kept["info"]["text"] == "\U0001f600 \ud800 \u2028" and kept["info"]["metadata"] == {"n": 10**30}
    assert kept["env"] == "\ud800"
