import pytest

from molt_gym.server.errors import WireError
from molt_gym.server.memory import WireMemory


@pytest.fixture
def memory() -> WireMemory:
    return WireMemory()


def test_equal_bytes_are_read_once(memory):
    made = []

    def make(value):
        made.append(value)
        return [value]

    raw = b'{"role":"user","content":"ok"}'
    first, second = memory.intern(raw, make), memory.intern(bytes(raw), make)
    assert first[0] is second[0] and len(made) == 1
    with pytest.raises(TypeError):
        first[0]["content"] = "changed"


def test_what_cannot_be_read_is_not_kept(memory):
    def refuse(value):
        raise WireError("invalid_request", "no")

    for _ in range(2):
        with pytest.raises(WireError, match="no"):
            memory.intern(b"{}", refuse)
    assert memory.intern(b"{}", lambda value: []) == []


def test_equal_tools_are_one_list_that_nobody_changes(memory):
    raw = b'[{"type":"function"}]'
    tools = memory.intern_tools(raw, list)
    assert memory.intern_tools(bytes(raw), list) is tools == [{"type": "function"}]
    with pytest.raises(TypeError):
        tools.append({})
