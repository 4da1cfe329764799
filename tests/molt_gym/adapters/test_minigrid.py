"""MiniGrid in words, on the package itself."""

import pytest

import molt_gym

pytest.importorskip("minigrid")


def say(text):
    return {"role": "assistant", "content": text}


@pytest.fixture
def env():
    made = molt_gym.make("minigrid:MiniGrid-DoorKey-6x6-v0")
    yield made
    made.close()


def test_the_agent_reads_its_mission_its_view_and_what_is_in_it(env):
    opening, _ = env.reset(options={"index": 0})
    system, user = (message["content"] for message in opening["messages"])
    assert "Actions: 0 (left), 1 (right), 2 (forward), 3 (pickup), 4 (drop), 5 (toggle), 6 (done)." in system
    assert user.splitlines() == [
        "Mission: use the key to open the door and then get to the goal", "You face south.",
        "What you see (ahead is up, you are @, # wall, . free, ? not seen):",
        "???????", "???????", "???????", "???????", "?####??", "?#..#??", "?#K@#??",
        "In view: yellow key 1 to the left."]


def test_things_move_as_the_agent_turns_and_what_it_carries_is_told(env):
    env.reset(options={"index": 0})
    observation, *_ = env.step(say("I turn to the key.\nleft"))
    assert "You face east." in observation["messages"][-1]["content"]
    assert "yellow key 1 ahead" in observation["messages"][-1]["content"]
    observation, *_ = env.step(say("pickup"))
    assert "and carry a yellow key." in observation["messages"][-1]["content"]


def test_it_is_solved_by_words(env):
    env.reset(options={"index": 0})
    for word in ("left", "pickup"):
        env.step(say(word))
    reward, over = 0.0, False
    while not over:
        _, reward, terminated, truncated, _ = env.step(say(_next(env.unwrapped.env.unwrapped)))
        over = terminated or truncated
    assert reward > 0.5 and not truncated


def _next(grid) -> str:
    """What a solver with the whole map does next, to the door and then to the goal."""
    from collections import deque

    from minigrid.core.constants import DIR_TO_VEC

    target = next((x, y) for x in range(grid.width) for y in range(grid.height)
                  if (cell := grid.grid.get(x, y)) and cell.type == "goal")
    start = (*map(int, grid.agent_pos), int(grid.agent_dir))
    seen, queue = {start}, deque([(start, [])])
    while queue:
        (x, y, turn), path = queue.popleft()
        if (x, y) == target:
            ahead = grid.grid.get(*(grid.agent_pos + DIR_TO_VEC[grid.agent_dir]))
            shut = ahead is not None and ahead.type == "door" and not ahead.is_open
            return "toggle" if path[0] == "forward" and shut else path[0]
        ahead = (x + int(DIR_TO_VEC[turn][0]), y + int(DIR_TO_VEC[turn][1]))
        cell = grid.grid.get(*ahead)
        moves = [("left", (x, y, (turn - 1) % 4)), ("right", (x, y, (turn + 1) % 4))]
        if cell is None or cell.type in ("goal", "door"):
            moves.append(("forward", (*ahead, turn)))
        for word, state in moves:
            if state not in seen:
                seen.add(state)
                queue.append((state, [*path, word]))
    raise AssertionError("there is no way")
