import asyncio

import pytest

from molt_gym.errors import PromptTooLong
from molt_gym.server.errors import WireError
from molt_gym.server.exchange import Call, Options, Reply
from molt_gym.server.session import Identity, Session

ASK = Call([{"role": "user", "content": "ok"}])
FRESH = Identity(b"body", attempt=0)
AGAIN = Identity(b"body", attempt=1)
PLAIN = Identity(b"body")


class Respondent:
    """Numbers its replies; does what `next_ones` say first."""

    def __init__(self, *next_ones) -> None:
        self.next_ones = list(next_ones)
        self.calls = self.cancelled = 0
        self.release = asyncio.Event()
        self.release.set()

    async def answer(self, call):
        self.calls += 1
        number = self.calls
        try:
            await self.release.wait()
        except asyncio.CancelledError:
            self.cancelled += 1
            raise
        outcome = self.next_ones.pop(0) if self.next_ones else None
        if isinstance(outcome, Exception):
            raise outcome
        return [Reply({"role": "assistant", "content": f"{number}"})] * call.n

    async def count(self, call):
        return 7


def session_of(respondent, **options) -> Session:
    return Session("secret", "http://here", respondent, **options)


@pytest.fixture
def respondent() -> Respondent:
    return Respondent()


@pytest.fixture
def session(respondent) -> Session:
    return session_of(respondent)


async def test_an_sdk_that_retries_gets_the_recorded_answer(session, respondent):
    first = await session.complete(ASK, FRESH)
    assert await session.complete(ASK, AGAIN) is first
    assert (respondent.calls, session.turns) == (1, 1)


async def test_an_sdk_that_asks_the_same_again_gets_a_new_sample(session, respondent):
    first, second = await session.complete(ASK, FRESH), await session.complete(ASK, FRESH)
    assert first.id != second.id and first.replies != second.replies
    assert (respondent.calls, session.turns) == (2, 2)


async def test_a_client_without_the_retry_header_that_sends_the_same_body_is_retrying(session, respondent):
    first = await session.complete(ASK, PLAIN)
    assert await session.complete(ASK, PLAIN) is first and respondent.calls == 1
    assert await session.complete(ASK, Identity(b"other")) is not first


async def test_the_same_body_twice_at_once_is_generated_once(session, respondent):
    respondent.release.clear()
    both = asyncio.gather(session.complete(ASK, PLAIN), session.complete(ASK, PLAIN))
    await asyncio.sleep(0.01)
    respondent.release.set()
    first, second = await both
    assert first is second and (respondent.calls, session.turns) == (1, 1)


async def test_samples_that_an_sdk_asks_for_at_once_are_all_new(session, respondent):
    completions = await asyncio.gather(*(session.complete(ASK, FRESH) for _ in range(8)))
    assert len({completion.id for completion in completions}) == 8 == respondent.calls


async def test_an_idempotency_key_decides_whatever_the_retry_header_says(session, respondent):
    keyed = Identity(b"body", attempt=0, idempotency_key="k")
    first = await session.complete(ASK, keyed)
    assert await session.complete(ASK, keyed) is first
    assert await session.complete(ASK, Identity(b"body", 0, "other")) is not first
    with pytest.raises(WireError, match="'k': came with another body") as refused:
        await session.complete(ASK, Identity(b"changed", 0, "k"))
    assert refused.value.status == 400 and respondent.calls == 2


async def test_a_failure_leaves_nothing_behind_and_the_retry_is_answered(session, respondent):
    respondent.next_ones = [RuntimeError("engine is down")]
    with pytest.raises(WireError, match="RuntimeError: engine is down") as failed:
        await session.complete(ASK, FRESH)
    assert failed.value.status == 503 and failed.value.retry
    assert isinstance(session.failure, RuntimeError) and session.turns == 0
    await session.complete(ASK, AGAIN)
    assert (respondent.calls, session.turns, session.failure) == (2, 1, None)


async def test_the_retry_of_one_of_several_equal_requests_gets_no_other_ones_reply(session, respondent):
    respondent.next_ones = [RuntimeError("once")]
    outcomes = await asyncio.gather(*(session.complete(ASK, FRESH) for _ in range(3)), return_exceptions=True)
    assert [type(outcome) for outcome in outcomes].count(WireError) == 1
    again = await session.complete(ASK, AGAIN)
    assert again not in outcomes and (respondent.calls, session.turns) == (4, 3)
    assert await session.complete(ASK, AGAIN) in [*outcomes, again] and respondent.calls == 4


async def test_a_request_that_nobody_waits_for_is_cancelled(session, respondent):
    respondent.release.clear()
    waiting = asyncio.ensure_future(session.complete(ASK, FRESH))
    await asyncio.sleep(0.01)
    waiting.cancel()
    with pytest.raises(asyncio.CancelledError):
        await waiting
    await asyncio.sleep(0)
    assert respondent.cancelled == 1 and session.turns == 0
    respondent.release.set()
    await session.complete(ASK, AGAIN)
    assert session.turns == 1


async def test_one_of_two_waiting_clients_may_leave(session, respondent):
    respondent.release.clear()
    stays, leaves = (asyncio.ensure_future(session.complete(ASK, PLAIN)) for _ in range(2))
    await asyncio.sleep(0.01)
    leaves.cancel()
    await asyncio.sleep(0.01)
    respondent.release.set()
    await stays
    assert (respondent.calls, respondent.cancelled, session.turns) == (1, 0, 1)


async def test_a_retry_after_the_client_left_is_generated_anew_even_if_the_old_work_ends_slowly(session, respondent):
    respondent.release.clear()
    waiting = asyncio.ensure_future(session.complete(ASK, FRESH))
    await asyncio.sleep(0.01)
    waiting.cancel()
    await asyncio.sleep(0)
    respondent.release.set()
    assert (await session.complete(ASK, AGAIN)).replies[0].message["content"] == "2"


async def test_a_closed_session_answers_nobody(session, respondent):
    respondent.release.clear()
    waiting = asyncio.ensure_future(session.complete(ASK, FRESH))
    await asyncio.sleep(0.01)
    session.close()
    session.close()
    for work in (waiting, session.complete(ASK, Identity(b"new", 0))):
        with pytest.raises(WireError, match="is over") as refused:
            await work
        assert refused.value.status == 410 and not refused.value.retry
    await asyncio.sleep(0)
    assert respondent.cancelled == 1 and session.turns == 0


async def test_a_deadline_is_an_error_that_is_not_to_be_retried():
    respondent = Respondent()
    respondent.release.clear()
    session = session_of(respondent, timeout=0.02)
    with pytest.raises(WireError, match=r"no reply within 0\.02 s") as failed:
        await session.complete(ASK, FRESH)
    assert (failed.value.status, failed.value.code, failed.value.retry) == (503, "deadline_exceeded", False)
    assert respondent.cancelled == 1 and isinstance(session.failure, TimeoutError)


async def test_a_conversation_that_is_too_long_is_refused_and_the_session_goes_on(session, respondent):
    respondent.next_ones = [PromptTooLong("9 tokens, where the context has 8")]
    with pytest.raises(WireError, match="9 tokens") as refused:
        await session.complete(ASK, FRESH)
    assert (refused.value.status, refused.value.code) == (400, "context_length_exceeded")
    assert session.overflowed and session.failure is None
    await session.complete(ASK, FRESH)
    assert not session.overflowed and session.turns == 1


async def test_replies_beyond_the_limit_are_refused_and_say_so(respondent):
    session = session_of(respondent, max_turns=3)
    await session.complete(Call(ASK.messages, n=2), FRESH)
    with pytest.raises(WireError, match="may have 3 replies") as refused:
        await session.complete(Call(ASK.messages, n=2), FRESH)
    assert refused.value.code == "turn_limit" and session.over.is_set()
    await session.complete(ASK, FRESH)
    assert session.turns == 3


async def test_a_failed_turn_does_not_use_up_the_limit(respondent):
    session = session_of(respondent, max_turns=1)
    respondent.next_ones = [RuntimeError("once")]
    with pytest.raises(WireError):
        await session.complete(ASK, FRESH)
    await session.complete(ASK, AGAIN)
    assert session.turns == 1 and not session.over.is_set()


async def test_too_many_requests_at_once_are_told_to_wait(session, respondent, monkeypatch):
    monkeypatch.setattr("molt_gym.server.session.MAX_PENDING", 2)
    respondent.release.clear()
    running = [asyncio.ensure_future(session.complete(ASK, FRESH)) for _ in range(2)]
    await asyncio.sleep(0.01)
    with pytest.raises(WireError, match="under way") as refused:
        await session.complete(ASK, FRESH)
    assert refused.value.status == 429 and refused.value.retry
    respondent.release.set()
    await asyncio.gather(*running)


async def test_options_reach_the_respondent(session, respondent):
    seen = []

    async def answer(call):
        seen.append(call.options)
        return [Reply({"role": "assistant", "content": ""})]

    respondent.answer = answer
    await session.complete(Call(ASK.messages, options=Options(temperature=0.5)), FRESH)
    assert seen == [Options(temperature=0.5)] and await session.count(ASK) == 7


async def test_a_session_that_does_not_remember_holds_nothing_of_what_it_answered(respondent):
    session = session_of(respondent, remember=False, max_turns=3)
    respondent.release.clear()
    asked = [asyncio.ensure_future(session.complete(ASK, identity)) for identity in (FRESH, AGAIN)]
    await asyncio.sleep(0)
    respondent.release.set()
    assert (await asked[0]) is (await asked[1]) and respondent.calls == 1
    assert (await session.complete(ASK, AGAIN)) is not asked[0].result() and respondent.calls == 2
    assert not session._by_body and session.memory("wire") is not session.memory("wire")
    await session.complete(ASK, FRESH)
    with pytest.raises(WireError, match="may have 3 replies"):
        await session.complete(ASK, FRESH)
