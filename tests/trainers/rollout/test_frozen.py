import asyncio
import shutil

import pytest

from molt_gym import EnvFailure
from molt_gym.tokens import Sampling, Trajectory
from molt_gym.trainers.config import load_config
from molt_gym.trainers.rollout.engine import Request
from molt_gym.trainers.rollout.frozen import FrozenModels
from molt_gym.trainers.rollout.gate import OpenGate
from molt_gym.trainers.rollout.ticket import Ticket
from molt_gym.trainers.session import load_renderer

WAIT = 20.0
ASK = {"messages": [{"role": "user", "content": "What is 3 + 4?"}], "tools": []}


@pytest.fixture
def models(tmp_path, tiny_path):
    """Of a run with two members."""
    for step in (2, 4):
        shutil.copytree(tiny_path, tmp_path / "league" / f"step-{step:06d}")
    settings = {"out": str(tmp_path), "rollout.max_context": 128, "rollout.max_tokens": 4, "rollout.max_concurrency": 2}
    return FrozenModels(load_config("Test-v0", preset=settings), tiny_path, load_renderer)


async def test_the_rollouts_of_a_group_meet_the_same_member_and_groups_meet_all(models):
    chosen = {group: {models.choose("league", Ticket(1, group, rollout)).name for rollout in range(3)}
              for group in range(20)}
    assert all(len(names) == 1 for names in chosen.values())
    assert set.union(*chosen.values()) == {"step-000002", "step-000004"}


async def test_the_model_that_training_began_with_plays_until_there_is_a_member(models, tmp_path, tiny_path):
    shutil.rmtree(tmp_path / "league")
    with pytest.raises(EnvFailure, match="'league' needs a run that trains"):
        models.choose("league", Ticket(1, 1))
    (tmp_path / "league").mkdir()
    assert models.choose("league", Ticket(1, 1)) == tiny_path
    assert models.others(None, Sampling(), None)("league", Ticket(1, 1), 0)[0] == "start"
    assert models.choose(f"model:{tmp_path}", Ticket(1, 1)) == tmp_path


async def test_a_model_is_loaded_once_and_dropped_when_it_has_left_the_league(models, tmp_path, tiny_path):
    shutil.copytree(tiny_path, tiny_path.parent / "given")
    first, second = tmp_path / "league/step-000002", tmp_path / "league/step-000004"
    (_, engine), (_, again) = await asyncio.wait_for(asyncio.gather(models.get(first, 1), models.get(first, 1)), WAIT)
    assert engine is again
    await models.get(second, 1)
    given = (await models.get(tiny_path.parent / "given", 1))[1]
    shutil.rmtree(first)
    assert (await models.get(second, 2))[1] is not engine
    with pytest.raises(RuntimeError, match="closed"):
        await OpenGate(engine).generate(_request())
    assert (await models.get(tiny_path.parent / "given", 2))[1] is given
    await models.aclose()


async def test_a_folder_that_is_no_model_fails_the_reply_and_may_be_mended(models, tmp_path, tiny_path):
    (tmp_path / "odd").mkdir()
    with pytest.raises((OSError, ValueError)):
        await models.get(tmp_path / "odd", 1)
    shutil.copytree(tiny_path, tmp_path / "odd", dirs_exist_ok=True)
    assert (await asyncio.wait_for(models.get(tmp_path / "odd", 1), WAIT))[1].max_context == 128
    await models.aclose()


async def test_a_folder_whose_readers_had_gone_before_it_proved_to_be_no_model_troubles_nobody_later(
    models, tmp_path, tiny_path
):
    (tmp_path / "odd").mkdir()
    reader = asyncio.create_task(models.get(tmp_path / "odd", 1))
    await asyncio.sleep(0)
    await asyncio.sleep(0)
    reader.cancel()
    await asyncio.wait([models._loaded[tmp_path / "odd"]], timeout=WAIT)
    assert (await asyncio.wait_for(models.get(tiny_path, 2), WAIT))[1].max_context == 128
    await models.aclose()


async def test_its_seat_answers_as_the_ticket_says_and_records_nothing(models, engine):
    others = models.others(OpenGate(engine), Sampling(max_tokens=4), None)
    replies = []
    for ticket in (Ticket(1, 1, seat=1), Ticket(1, 1, seat=1), Ticket(1, 1, 1, seat=1)):
        name, seat = others("league", ticket, 0)
        replies.append((await asyncio.wait_for(seat.reply(ASK), WAIT))["content"])
        seat.record(trajectory := Trajectory("Test-v0", 1))
        assert trajectory == Trajectory("Test-v0", 1) and name.startswith("step-")
    assert replies[0] == replies[1] != replies[2]
    await models.aclose()


def _request() -> Request:
    return Request([5, 6], Sampling(max_tokens=1))
