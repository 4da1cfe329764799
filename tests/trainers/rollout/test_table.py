"""Games in a runner: each seat of the policy leaves a rollout, with its own tokens and its own reward."""

import asyncio
import json
from dataclasses import replace

import pytest

import molt_gym
from molt_gym import EnvFailure, GameEnv, IllegalMove, as_policy
from molt_gym.tokens import Sampling, Trajectory
from molt_gym.tokens.trajectory import read_jsonl, write_jsonl
from molt_gym.trainers.rollout.gate import OpenGate, WaveGate
from molt_gym.trainers.rollout.pool import Plan, Pool, TaskStream
from molt_gym.trainers.rollout.runner import Limits, Runner
from molt_gym.trainers.rollout.seats import PolicySeat, TokenSeat
from molt_gym.trainers.rollout.ticket import Ticket

WAIT = 20.0
TICKET = Ticket(index=3, group=5, rollout=2, seed=7, step=1)


class Pairs(GameEnv):
    """Two seats write something twice each; the longer text of a round gets 1 point, the other -1."""

    seats = ("left", "right")

    def begin(self, index):
        self.index, self.texts = index, []

    def turn(self):
        return None if len(self.texts) == 4 else self.seats[len(self.texts) % 2]

    def rules(self, seat):
        return f"Task {self.index}. You are {seat}."

    def view(self, seat):
        return f"Round {len(self.texts) // 2}. Write."

    def move(self, seat, message):
        text = molt_gym.text_of(message)
        if text == "illegal":
            raise IllegalMove("write something else")
        if text == "broken":
            raise EnvFailure("judge", "gone")
        self.texts.append(text)
        if len(self.texts) % 2:
            return {}
        left, right = map(len, self.texts[-2:])
        return {"left": float((left > right) - (left < right)), "right": float((right > left) - (right < left))}

    def random_move(self, seat, rng):
        return "x" * int(rng.integers(1, 5))


def runner_of(policy, others=None, **options):
    policy = as_policy(policy)
    return Runner("Pairs-v0", lambda: Pairs(**options), lambda ticket, attempt: PolicySeat(policy), Limits(retries=0),
                  others=others)


def token_runner(engine, renderer, gate=None, others=None, **options):
    gate = gate or OpenGate(engine)
    return Runner("Pairs-v0", lambda: Pairs(**options), lambda ticket, attempt: TokenSeat(
        renderer, "rerender", Sampling(max_tokens=6), 256, ticket, attempt, gate), Limits(), live=gate.rollout,
        others=others)


async def seats_of(runner, ticket=TICKET):
    trajectory = await asyncio.wait_for(runner.play(ticket), WAIT)
    return [trajectory, *trajectory.others]


def role(conversation):
    return conversation["messages"][0]["content"].split()[-1].rstrip(".")


async def test_self_play_leaves_a_rollout_of_each_seat_with_its_own_reward_and_conversation() -> None:
    left, right = await seats_of(runner_of(lambda conversation: "long" if role(conversation) == "left" else "s"))
    assert [(seat.seat, seat.reward, seat.turns, seat.terminated) for seat in (left, right)] == [
        ("left", 2.0, 2, True), ("right", -2.0, 2, True)]
    for seat, text in ((left, "long"), (right, "s")):
        assert [message["content"] for message in seat.messages] == [
            f"Task 3. You are {seat.seat}.", "Round 0. Write.", text, "Round 1. Write.", text]
        assert (seat.group, seat.rollout, seat.index, seat.step) == (5, 2, 3, 1)
    assert left.info == {"opponent": "self", "task_index": 3, "illegal": 0, "result": "win"}
    assert right.info["result"] == "loss"


async def test_the_tokens_of_a_seat_are_its_own_and_sampled_with_its_own_seeds(engine, renderer) -> None:
    left, right = await seats_of(token_runner(engine, renderer))
    for seat in (left, right):
        assert seat.rows and sum(seat.rows[0].mask) > 0
        text = renderer.decode(seat.rows[0].ids)
        assert f"You are {seat.seat}." in text and "You are" in text and text.count("You are") == 1
    keys = []

    class Watched:
        max_context = 256

        def submit(self, requests):
            keys.extend((request.key, request.sampling.seed) for request in requests)
            return engine.submit(requests)

    again = await seats_of(token_runner(Watched(), renderer))
    assert [seat.rows for seat in again] == [left.rows, right.rows]
    assert len({key for key, _ in keys}) == len({seed for _, seed in keys}) == len(keys) == 4


async def test_only_the_policys_seat_is_trained_against_opponents_of_the_env() -> None:
    rewards = {}
    for index in range(8):
        (only,) = await seats_of(runner_of(lambda conversation: "y" * 9, opponent="random"), Ticket(index, index))
        assert (only.reward, only.info["opponent"], only.info["result"]) == (2.0, "random", "win")
        rewards[only.seat] = only.reward
    assert set(rewards) == {"left", "right"}


async def test_a_player_from_outside_answers_for_its_seat_and_leaves_nothing(engine, renderer) -> None:
    asked = []

    def others(player, ticket, attempt):
        asked.append((player, ticket.seat, attempt))
        return "step-000007", PolicySeat(as_policy(lambda conversation: "y" * 99))

    (only,) = await seats_of(token_runner(engine, renderer, others=others, opponent="league"))
    assert (only.reward, only.info["opponent"], only.info["result"]) == (-2.0, "step-000007", "loss")
    assert "yyy" not in renderer.decode(only.rows[0].ids)
    assert len(asked) == 1 and asked[0][0] == "league" and asked[0][2] == 0


async def test_who_is_not_here_cannot_play() -> None:
    (failed,) = await seats_of(runner_of(lambda conversation: "y", opponent="league"))
    assert failed.failure.reason == "opponent" and "'league' plays only against a model" in failed.failure.message


async def test_a_game_that_fails_is_one_failed_rollout_without_a_reward() -> None:
    def policy(conversation):
        return "broken" if role(conversation) == "right" else "fine"

    (failed,) = await seats_of(runner_of(policy))
    assert (failed.failure.reason, failed.reward, failed.seat) == ("judge", None, "")


async def test_a_seat_that_loses_by_illegal_moves_is_told_in_its_info() -> None:
    (left,) = await seats_of(runner_of(lambda conversation: "illegal"))
    assert (left.seat, left.reward, left.info["illegal"], left.info["result"]) == ("left", -1.0, 3, "loss")


async def test_a_seat_that_runs_out_of_context_cuts_the_game_for_all(engine, renderer) -> None:
    gate = OpenGate(engine)
    runner = Runner("Pairs-v0", Pairs, lambda ticket, attempt: TokenSeat(
        renderer, "rerender", Sampling(max_tokens=40), 100, ticket, attempt, gate), Limits())
    left, right = await seats_of(runner)
    assert left.truncated and right.truncated and not left.terminated
    assert left.length_limited and "result" not in left.info


async def test_a_group_of_a_game_becomes_one_group_for_each_seat_and_counts_once() -> None:
    def policy(conversation):
        return "long" if role(conversation) == "left" else "s"

    pool = Pool(runner_of(policy), TaskStream(None, 0), Plan(3, 2), seed=0)
    batch = await asyncio.wait_for(pool.next_batch(1), WAIT)
    assert len(batch.groups) == 6 and len(batch.played) == 12 and batch.dispatched == batch.kept == 3
    for group in batch.groups:
        assert len(group) == 2 and len({(seat.seat, seat.index, seat.group) for seat in group}) == 1
        assert {seat.reward for seat in group} == {2.0 if group[0].seat == "left" else -2.0}


async def test_a_failed_game_is_missing_in_the_group_of_every_seat() -> None:
    games = 0

    class Unsteady(Pairs):
        def begin(self, index):
            nonlocal games
            games += 1
            super().begin(index)
            if games == 2:
                raise EnvFailure("judge", "gone")

    policy = as_policy(lambda conversation: "y")
    runner = Runner("Pairs-v0", Unsteady, lambda ticket, attempt: PolicySeat(policy), Limits(retries=0))
    batch = await asyncio.wait_for(Pool(runner, TaskStream(None, 0), Plan(1, 3), seed=0).next_batch(1), WAIT)
    assert [sorted(seat.seat for seat in group) for group in batch.groups] == [["", "left", "left"],
                                                                              ["", "right", "right"]]
    assert len(batch.played) == 5


async def test_the_filter_drops_the_seats_whose_rewards_are_all_the_same() -> None:
    class Halves(Pairs):
        """Only the left seat's reward differs between the rollouts of a group."""

        def move(self, seat, message):
            rewards = super().move(seat, message)
            return {"left": float(len(molt_gym.text_of(message)))} if rewards else {}

    count = iter(range(1000))
    policy = as_policy(lambda conversation: "y" * next(count))
    runner = Runner("Pairs-v0", Halves, lambda ticket, attempt: PolicySeat(policy), Limits())
    pool = Pool(runner, TaskStream(None, 0), Plan(2, 2, dynamic_filter=(0.0, 1e9)), seed=0)
    batch = await asyncio.wait_for(pool.next_batch(1), WAIT)
    assert [group[0].seat for group in batch.groups] == ["left", "left"]
    assert batch.dropped == {"filtered": 2}


async def test_waves_make_self_play_a_function_of_the_seed(engine, renderer) -> None:
    played = []
    for _ in range(2):
        await engine.reset_prefix_cache()
        runner = token_runner(engine, renderer, WaveGate(engine))
        found = await asyncio.wait_for(asyncio.gather(*(runner.play(Ticket(i, i)) for i in range(4))), WAIT)
        played.append([[seat.rows for seat in (one, *one.others)] for one in found])
    assert played[0] == played[1]


def test_a_record_names_its_seat_and_older_records_have_none(tmp_path) -> None:
    path = tmp_path / "rollouts.jsonl"
    seat = Trajectory("Pairs-v0", 1, seat="left", reward=1.0)
    seat.others = [Trajectory("Pairs-v0", 1, seat="right", reward=-1.0)]
    write_jsonl(path, [seat, *seat.others])
    assert [(one.seat, one.reward) for one in read_jsonl(path)] == [("left", 1.0), ("right", -1.0)]
    record = json.loads(path.read_text().splitlines()[0])
    assert "others" not in record
    del record["seat"]
    path.write_text(json.dumps(record) + "\n")
    assert read_jsonl(path)[0].seat == ""


@pytest.mark.parametrize("more", [(), (3,), (3, 4)])
def test_seats_have_seeds_of_their_own(more: tuple) -> None:
    assert len({replace(TICKET, seat=seat).derive(*more) for seat in range(5)}) == 5
