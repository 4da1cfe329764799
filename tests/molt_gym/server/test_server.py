"""Who may ask, for what, and how a refusal looks."""

import asyncio
import socket

import aiohttp
import anthropic
import openai
import pytest

from molt_gym.server.server import LoopbackServer

OK = {"role": "user", "content": "ok"}
BODY = {"model": "m", "messages": [OK], "input": [OK], "max_tokens": 64}

pytestmark = pytest.mark.timeout(60)
every_wire = pytest.mark.parametrize("name", ["chat", "responses", "messages"])


async def request(url: str, method: str = "GET", *, body=None, **headers) -> tuple[int, dict]:
    async with aiohttp.ClientSession() as client:
        async with client.request(method, url, json=body, headers=headers) as response:
            return response.status, await response.json()


async def test_the_server_listens_on_loopback_alone_and_frees_its_port(engine, respondent_of):
    async with LoopbackServer() as server:
        (site,) = server._runner.sites
        assert [bound.getsockname()[0] for bound in site._server.sockets] == ["127.0.0.1"]
        port = int(server.url.rpartition(":")[2])
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", port))


async def test_the_address_in_use_is_an_error_and_a_second_close_none(server):
    other = LoopbackServer(port=int(server.url.rpartition(":")[2]))
    with pytest.raises(OSError):
        await other.start()
    await other.close()
    await other.close()


@pytest.mark.parametrize("host, url", [("0.0.0.0", "http://127.0.0.1:8"), ("::1", "http://[::1]:8"),
                                       ("::", "http://[::1]:8"), ("10.0.0.1", "http://10.0.0.1:8")])
def test_the_url_is_one_that_clients_here_can_reach(host, url):
    assert LoopbackServer(host=host, port=8).url == url


async def test_clients_are_told_the_public_url(respondent_of):
    async with LoopbackServer(public_url="http://host.docker.internal:8000/") as server:
        assert server.open(respondent_of()).url == "http://host.docker.internal:8000" == server.url


async def test_health_needs_no_key(server):
    assert await request(server.url + "/health") == (200, {"status": "ok"})


@pytest.mark.parametrize("headers", [
    {}, {"Authorization": "Bearer wrong"}, {"x-api-key": "wrong"}, {"Authorization": "Bearer "}, {"x-api-key": ""},
    {"Authorization": "Basic {key}"}, {"Authorization": "{key}"}, {"Cookie": "key={key}"},
    {"Authorization": "Bearer {key}x"}, {"x-api-key": "é"},
])
@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/responses", "/v1/messages", "/v1/messages/count_tokens",
                                  "/v1/models", "/", "/v1/secret"])
async def test_nothing_is_answered_without_the_key_in_its_place(server, respondent_of, engine, headers, path):
    session = server.open(respondent_of())
    headers = {name: value.format(key=session.key) for name, value in headers.items()}
    status, body = await request(server.url + path, "POST", body=BODY, **headers)
    assert status == 401 and body["error"]["message"] and session.key not in str(body)
    assert engine.received == [] and session.turns == 0


@pytest.mark.parametrize("headers", [
    {"Authorization": "Bearer {key}"}, {"Authorization": "bearer {key}"}, {"x-api-key": "{key}"},
    {"X-Api-Key": "{key}", "Authorization": "Bearer other"},
])
@every_wire
async def test_every_wire_takes_the_key_as_bearer_token_or_as_api_key(server, respondent_of, wire, headers, name):
    session = server.open(respondent_of())
    headers = {key: value.format(key=session.key) for key, value in headers.items()}
    assert (await request(server.url + wire.paths[name], "POST", body=BODY, **headers))[0] == 200


@pytest.mark.parametrize("headers", [{"x-api-key": "of another service", "Authorization": "Bearer {key}"},
                                     {"x-api-key": "{key}", "Authorization": "Basic dXNlcjpw"}])
async def test_a_second_key_that_is_not_ours_does_no_harm(server, respondent_of, wire, headers):
    session = server.open(respondent_of())
    headers = {key: value.format(key=session.key) for key, value in headers.items()}
    for path in wire.paths.values():
        assert (await request(server.url + path, "POST", body=BODY, **headers))[0] == 200


@every_wire
async def test_a_mistake_of_the_server_has_the_shape_of_the_wire(agent_of, engine, monkeypatch, name):
    from molt_gym.server import server as module

    def wrong(*args):
        raise ZeroDivisionError("a mistake")

    agent = agent_of(max_retries=2)
    wire = {"chat": module._CHAT, "responses": module._RESPONSES, "messages": module._MESSAGES}[name]
    monkeypatch.setattr(wire, "parse", wrong)
    with pytest.raises((openai.InternalServerError, anthropic.InternalServerError), match="a mistake") as failed:
        await agent.ask(name, OK)
    assert failed.value.status_code == 500 and failed.value.response.headers["x-should-retry"] == "false"
    monkeypatch.undo()
    await agent.ask(name, OK)
    monkeypatch.setattr(wire, "events", wrong)
    monkeypatch.setattr("molt_gym.server.streaming.KEEP_ALIVE", 0.01)
    engine.seconds = 0.05
    with pytest.raises(Exception, match="(?i)peer closed|incomplete|connection"):
        async for _ in await agent.ask(name, OK | {"content": "he"}, stream=True):
            pass


@every_wire
async def test_the_sdks_raise_their_authentication_error(agent, server, name):
    agent.openai.api_key = agent.anthropic.api_key = "wrong"
    with pytest.raises((openai.AuthenticationError, anthropic.AuthenticationError), match="no open session"):
        await agent.ask(name, OK)
    assert agent.session.turns == 0


async def test_a_key_opens_its_own_session_only(agent_of, engine, wire):
    engine.script = [[262, 257], [266, 257]]
    one, other = agent_of(), agent_of()
    first = await one.responses(OK)
    await other.responses(OK)
    assert (one.session.turns, other.session.turns) == (1, 1) and one.rows != other.rows
    with pytest.raises(openai.NotFoundError, match="no response of this session"):
        await other.responses(OK, previous_response_id=first.id)
    assert len(engine.received) == 2


async def test_a_closed_session_has_no_key_and_the_other_goes_on(agent_of, engine, server):
    over, open_one = agent_of(max_retries=2), agent_of()
    over.session.close()
    with pytest.raises(openai.AuthenticationError, match="may be over"):
        await over.chat(OK)
    with pytest.raises(anthropic.AuthenticationError, match="may be over"):
        await over.messages(OK)
    await open_one.chat(OK)
    assert len(engine.received) == 1 and server.sessions == 1


async def test_two_open_sessions_never_share_a_key(server, respondent_of):
    session = server.open(respondent_of(), key="mine")
    with pytest.raises(ValueError, match="another open session"):
        server.open(respondent_of(), key="mine")
    session.close()
    server.open(respondent_of(), key="mine")
    assert len({server.open(respondent_of()).key for _ in range(50)}) == 50


async def test_models_are_listed_as_each_sdk_reads_them(agent):
    assert [model.id async for model in agent.openai.models.list()] == ["policy"]
    assert (await agent.openai.models.retrieve("policy")).object == "model"
    assert [model.id async for model in agent.anthropic.models.list()] == ["policy"]
    assert (await agent.anthropic.models.retrieve("policy")).type == "model"
    for sdk, client in ((openai, agent.openai), (anthropic, agent.anthropic)):
        with pytest.raises(sdk.NotFoundError, match="there is one, 'policy'"):
            await client.models.retrieve("other")


@pytest.mark.parametrize("method, path", [
    ("GET", "/v1/chat/completions"), ("DELETE", "/v1/responses"), ("PUT", "/v1/messages"), ("POST", "/v1/completions"),
    ("POST", "/v1/embeddings"), ("POST", "/v1/models"), ("GET", "/v1/responses/resp_1"), ("GET", "/../etc/passwd"),
    ("GET", "/v1//models"), ("POST", "/V1/MESSAGES"), ("OPTIONS", "/v1/messages"), ("GET", "/v1/modelsx"),
])
async def test_another_route_or_method_is_named_and_not_found(server, agent, method, path):
    status, body = await request(server.url + path, method, **{"x-api-key": agent.session.key})
    assert status == 404 and "no such route" in body["error"]["message"] and method in body["error"]["message"]


async def test_sdk_calls_for_which_there_is_no_route_raise_not_found(agent):
    with pytest.raises(openai.NotFoundError):
        await agent.openai.embeddings.create(model="m", input="ok")
    with pytest.raises(openai.NotFoundError):
        await agent.openai.responses.retrieve("resp_1")
    with pytest.raises(anthropic.NotFoundError):
        await agent.anthropic.messages.batches.list()


async def test_a_trailing_slash_is_the_same_route(agent, wire):
    assert (await wire.post(agent.session, "/v1/chat/completions/", BODY))[0] == 200


@pytest.mark.parametrize("path, anthropic_shape", [
    ("/v1/chat/completions", False), ("/v1/responses", False), ("/v1/messages", True),
    ("/v1/messages/count_tokens", True), ("/v1/unknown", False),
])
async def test_errors_have_the_shape_of_the_wire(agent, wire, path, anthropic_shape):
    status, headers, body = await wire.post(agent.session, path, b"{")
    assert status in (400, 404) and headers["x-should-retry"] == "false"
    assert headers["Content-Type"].startswith("application/json")
    if anthropic_shape:
        assert body["type"] == "error" and body["error"].keys() == {"type", "message"}
    else:
        assert body.keys() == {"error"} and body["error"].keys() == {"message", "type", "param", "code"}


async def test_more_replies_than_the_rollout_may_have_are_refused(agent_of, engine, wire):
    agent = agent_of(max_turns=1, max_retries=2)
    first = await agent.chat(OK)
    for sdk, ask in ((openai, agent.chat), (openai, agent.responses), (anthropic, agent.messages)):
        with pytest.raises(sdk.APIStatusError, match="may have 1 replies") as refused:
            await ask(OK, {"role": "assistant", "content": "hello"}, OK)
        assert refused.value.status_code == 410
    assert agent.session.over.is_set() and len(engine.received) == 1 and wire.text_of(first) == "hello"


async def test_too_many_requests_at_once_raise_the_sdks_rate_limit_error(agent, engine, monkeypatch):
    monkeypatch.setattr("molt_gym.server.session.MAX_PENDING", 1)
    engine.seconds = 30.0
    running = asyncio.ensure_future(agent.chat(OK))
    await engine.until(1)
    for sdk, ask in ((openai, agent.chat), (anthropic, agent.messages)):
        with pytest.raises(sdk.RateLimitError, match="under way") as refused:
            await ask(OK)
        assert refused.value.response.headers["x-should-retry"] == "true"
    running.cancel()
    await engine.until(0)


@pytest.mark.parametrize("headers", [
    {"x-stainless-retry-count": "9" * 5000}, {"x-stainless-retry-count": "-1"}, {"x-stainless-retry-count": "\u0663"},
    {"Idempotency-Key": ""}, {"Content-Type": "text/plain"}, {"Accept": "image/png"},
    {"anthropic-version": "1"}, {"Content-Type": "application/json; charset=utf-16"},
])
async def test_odd_headers_are_no_reason_to_fail(agent, engine, wire, headers):
    for name, path in wire.paths.items():
        assert (await wire.post(agent.session, path, BODY, **headers))[0] == 200, name
