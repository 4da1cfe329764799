import torch

from molt_gym.trainers.rollout.prefix_cache import PrefixCache


def filled(*entries, room=20):
    cache = PrefixCache(room)
    for number, ids in enumerate(entries):
        cache.put(ids, torch.tensor(number))
    return cache


def found(cache, ids):
    length, saved = cache.longest(ids)
    return (length, None if saved is None else saved.item())


def test_the_longest_beginning_is_found():
    cache = filled([1, 2], [1, 2, 3], [1, 2, 9, 9])
    assert found(cache, [1, 2, 3, 4]) == (3, 1)
    assert found(cache, [1, 2, 4]) == (2, 0)


def test_an_entry_that_is_all_of_the_ids_or_more_is_none():
    cache = filled([1, 2, 3])
    for ids in ([1, 2, 3], [1, 2], [2, 3, 4, 5], []):
        assert found(cache, ids) == (0, None)


def test_the_least_recently_used_is_forgotten_when_the_room_is_full():
    cache = filled([1] * 4, [2] * 4, room=8)
    assert found(cache, [1] * 5) == (4, 0)
    cache.put([3] * 4, torch.tensor(3))
    assert found(cache, [2] * 5) == (0, None)
    assert found(cache, [1] * 5) == (4, 0) and found(cache, [3] * 5) == (4, 3)


def test_the_room_counts_positions_and_is_never_exceeded():
    cache = filled(*([n] * 3 for n in range(10)), room=10)
    assert [found(cache, [n] * 4)[0] for n in range(10)] == [0] * 7 + [3] * 3
    cache.put([50] * 10, torch.tensor(0))
    assert found(cache, [9] * 4) == (0, None) and found(cache, [50] * 11) == (10, 0)


def test_what_is_longer_than_the_room_is_not_kept_and_drives_nothing_out():
    cache = filled([1] * 4, room=5)
    cache.put([2] * 6, torch.tensor(0))
    assert found(cache, [2] * 7) == (0, None) and found(cache, [1] * 5) == (4, 0)


def test_putting_the_same_ids_again_takes_no_more_room():
    cache = filled([1] * 4, [1] * 4, [1] * 4, [2] * 4, room=8)
    assert found(cache, [1] * 5) == (4, 0) and found(cache, [2] * 5) == (4, 3)


def test_clearing_gives_all_the_room_back():
    cache = filled([1] * 20)
    cache.clear()
    assert found(cache, [1] * 21) == (0, None)
    cache.put([2] * 20, torch.tensor(5))
    assert found(cache, [2] * 21) == (20, 5)
