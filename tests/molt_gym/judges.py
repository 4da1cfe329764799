"""An OpenAI-compatible endpoint that is really listening and answers as a test says."""

import json
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any


@dataclass
class Answer:
    """One answer. text: of the reply, with status 200. status: of an error; 0 hangs up. seconds: before it."""

    text: str = ""
    status: int = 200
    headers: dict[str, str] = field(default_factory=dict)
    seconds: float = 0.0
    finish: str = "stop"


def verdict(score: Any, reasoning: str = "so it is") -> str:
    """What a judge should reply."""
    return json.dumps({"reasoning": reasoning, "score": score})


class Endpoint:
    """Answers from `script`, then with what `always` makes of a request."""

    def __init__(self) -> None:
        self.script: list[Answer | str] = []
        self.always: Callable[[dict[str, Any]], Answer | str] = lambda request: verdict(10)
        self.requests: list[dict[str, Any]] = []
        self.times: list[float] = []
        self.running = self.most = 0
        self.url = ""
        self._lock = threading.Lock()

    def take(self, request: dict[str, Any]) -> Answer:
        """The answer to a request."""
        with self._lock:
            self.requests.append(request)
            self.times.append(time.monotonic())
            answer = self.script.pop(0) if self.script else None
        # Outside, as it may wait for other requests.
        answer = self.always(request) if answer is None else answer
        return Answer(answer) if isinstance(answer, str) else answer

    @contextmanager
    def counted(self) -> Iterator[None]:
        """A request is under way within this block."""
        with self._lock:
            self.running += 1
            self.most = max(self.most, self.running)
        try:
            yield
        finally:
            with self._lock:
                self.running -= 1


@contextmanager
def listening() -> Iterator[Endpoint]:
    """An endpoint, at `url`."""
    endpoint = Endpoint()

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def do_POST(self) -> None:
            request = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            with endpoint.counted():
                answer = endpoint.take(request)
                time.sleep(answer.seconds)
            self.close_connection = answer.status == 0
            if answer.status:
                self.reply(answer)

        def reply(self, answer: Answer) -> None:
            message = {"role": "assistant", "content": answer.text}
            choice = {"index": 0, "message": message, "finish_reason": answer.finish}
            completion = {"id": "c", "object": "chat.completion", "created": 1, "model": "m", "choices": [choice],
                          "usage": {"prompt_tokens": 5, "completion_tokens": 7, "total_tokens": 12}}
            body = json.dumps(completion if answer.status == 200 else {"error": {"message": "no"}}).encode()
            self.send_response(answer.status)
            for name, value in {"Content-Length": str(len(body)), **answer.headers}.items():
                self.send_header(name, value)
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, *args: object) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    server.daemon_threads = True
    endpoint.url = f"http://127.0.0.1:{server.server_port}/v1"
    thread = threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True)
    thread.start()
    try:
        yield endpoint
    finally:
        server.shutdown()
        server.server_close()
