"""Two servers of tasks that speak the protocols of NeMo Gym: `python nemo_gym_server.py PORT`.

/count is of the classic one: a counter to be brought to a number by tools. /guess is of the gymnasium one: a number to
be found. Sessions are carried by signed cookies, and bodies are checked by the types of OpenAI's SDK.
"""

import asyncio
import sys
import uuid
from typing import Any, Literal

import uvicorn
from fastapi import FastAPI, HTTPException, Request
from openai.types.responses import (
    Response,
    ResponseFunctionToolCall,
    ResponseOutputMessage,
    ResponseReasoningItem,
)
from pydantic import BaseModel, ConfigDict
from starlette.middleware.sessions import SessionMiddleware


class CallOutput(BaseModel):
    model_config = ConfigDict(extra="forbid")

    type: Literal["function_call_output"]
    call_id: str
    output: str


class Given(Response):
    """What a policy said, and what tools said to it."""

    output: list[ResponseOutputMessage | ResponseFunctionToolCall | ResponseReasoningItem | CallOutput]


class Row(BaseModel):
    model_config = ConfigDict(extra="allow")

    responses_create_params: dict[str, Any]


class Answered(Row):
    response: Given


def new_app(name):
    """An app that gives each client a session by a signed cookie."""
    app = FastAPI()

    @app.middleware("http")
    async def add_session_id(request: Request, call_next):
        request.session["session_id"] = request.session.get("session_id", str(uuid.uuid4()))
        return await call_next(request)

    app.add_middleware(SessionMiddleware, secret_key=name, session_cookie=name)
    return app


count, guess = new_app("count"), new_app("guess")
counters: dict[str, int] = {}
games: dict[str, dict] = {}


@count.post("/seed_session")
async def seed_session(body: Row, request: Request):
    counters.setdefault(request.session["session_id"], body.model_extra["initial"])
    return {}


@count.post("/add")
async def add(body: dict, request: Request):
    await asyncio.sleep(body.get("seconds", 0))
    if not isinstance(body.get("number"), int):
        raise HTTPException(422, "number: write an integer")
    counters[request.session["session_id"]] += body["number"]
    return {"count": counters[request.session["session_id"]]}


@count.post("/break_down")
async def break_down():
    raise HTTPException(503, "no machine is free")


@count.post("/verify")
async def verify(body: Answered, request: Request):
    right = counters.pop(request.session["session_id"]) == body.model_extra["expected"]
    calls = [item for item in body.response.output if item.type == "function_call"]
    results = [item for item in body.response.output if item.type == "function_call_output"]
    assert [call.call_id for call in calls] == [result.call_id for result in results]
    trouble = {"mask_sample": True, "failure_kind": "judge", "failure_reason": "it sleeps"} if body.model_extra.get(
        "masked") else {}
    return body.model_dump() | {"reward": float(right), "reward_components": {"calls": len(calls)}} | trouble


@guess.post("/reset")
async def reset(body: Row, request: Request):
    games[request.session["session_id"]] = {"secret": body.model_extra["secret"], "tries": 0}
    return {"observation": "A number below 10.", "info": {"supports_explicit_close": True,
                                                         "supports_step_idempotency": True}}


@guess.post("/step")
async def step(body: Answered, request: Request):
    game = games[request.session["session_id"]]
    assert len(body.model_extra["_ng_step_request_id"]) == 32
    game["tries"] += 1
    said = "".join(part.text for item in body.response.output if item.type == "message" for part in item.content)
    tools = [{"call_id": item.call_id, "output": f"{item.name} helps little"}
             for item in body.response.output if item.type == "function_call"]
    right, late = said.strip() == str(game["secret"]), game["tries"] == 4
    if right or late:
        return {"reward": 1.0 if right else -1.0, "terminated": right, "truncated": late and not right,
                "info": {"tries": game["tries"]}}
    hint = None if tools else "higher" if said.strip() < str(game["secret"]) else "lower"
    return {"observation": hint, "reward": -0.25, "info": {"tool_outputs": tools}}


@guess.post("/close")
async def close(request: Request):
    games.pop(request.session["session_id"], None)
    return {}


app = FastAPI()


@app.get("/open")
async def still_open():
    """How many sessions there are."""
    return {"count": len(counters), "guess": len(games)}


app.mount("/count", count)
app.mount("/guess", guess)

if __name__ == "__main__":
    uvicorn.run(app, port=int(sys.argv[1]), log_level="error", timeout_keep_alive=1)
