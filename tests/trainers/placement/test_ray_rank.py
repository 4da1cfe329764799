"""What a rank does by itself."""

import pytest

ray_rank = pytest.importorskip("molt_gym.trainers.placement.ray_rank")


def test_rows_that_are_here_but_take_a_while_are_not_taken_for_lost_and_those_that_do_not_come_are(monkeypatch):
    def get(source: str, timeout: float) -> list[str]:
        if timeout < 1:
            raise ray_rank.GetTimeoutError
        return [source]

    monkeypatch.setattr(ray_rank.ray, "wait", lambda sources, **_: (sources[:1], sources[1:]))
    monkeypatch.setattr(ray_rank.ray, "get", get)
    assert ray_rank.Rank().fetch(["here", "away", "here"]) == [False, True, False]


def test_an_interface_is_known_by_its_address_and_an_address_of_elsewhere_has_none():
    assert ray_rank._interface("127.0.0.1") == "lo"
    assert ray_rank._interface("192.0.2.77") is None
