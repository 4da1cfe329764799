"""What holds for all servers, without one."""

import asyncio
import time

import pytest

from molt_gym import ConfigError, EnvFailure
from molt_gym.adapters.remote import Servers, checked_timeout, to_json, wait_for


def test_urls_are_read_in_all_their_spellings():
    assert Servers("ws://localhost:8000/a/").urls == ("http://localhost:8000/a",)
    assert Servers(["https://a", "wss://b/"]).urls == ("https://a", "https://b")
    for wrong in ("a.b", "ftp://a", "http://", None, [], [3]):
        with pytest.raises(ConfigError, match="url: "):
            Servers(wrong)


def test_servers_are_asked_in_turn_over_all_who_have_the_same():
    asked = [Servers(["http://turn-a", "http://turn-b", "http://turn-c"]).connect(lambda url, _: url, 1)
             for _ in range(6)]
    assert asked[:3] == asked[3:] and sorted(set(asked)) == ["http://turn-a", "http://turn-b", "http://turn-c"]


def test_busy_servers_are_asked_again_until_the_time_is_up_and_broken_ones_are_not():
    def opening(reason, times):
        calls = []

        def open_(url, seconds):
            calls.append(seconds)
            if len(calls) > times:
                return len(calls)
            raise EnvFailure(reason, url)

        return open_

    servers = Servers(["http://again-a", "http://again-b"])
    assert servers.connect(opening("capacity", 5), 10) == 6
    start = time.monotonic()
    with pytest.raises(EnvFailure, match="server_gone: http://again"):
        servers.connect(opening("server_gone", 10**6), 0.5)
    assert 0.2 < time.monotonic() - start < 5
    with pytest.raises(EnvFailure, match="server_error"):
        servers.connect(opening("server_error", 2), 60)


def test_what_takes_too_long_or_loses_its_connection_is_a_failure():
    with pytest.raises(EnvFailure, match="timeout: it: no answer within 0.1 s"):
        wait_for(asyncio.sleep(60), 0.1, "it")

    async def lose():
        raise ConnectionResetError("gone")

    with pytest.raises(EnvFailure, match="server_gone: it: ConnectionResetError: gone"):
        wait_for(lose(), 1, "it")


def test_half_a_surrogate_pair_is_sent_as_a_question_mark():
    assert to_json({"a": "é\ud800"}) == '{"a": "é?"}'


@pytest.mark.parametrize("wrong", [0, -1, True, "3", None, float("inf"), float("nan")])
def test_a_timeout_is_a_number_of_seconds(wrong):
    with pytest.raises(ConfigError, match="timeout: .*; write seconds, a number above 0"):
        checked_timeout(wrong)
