"""How long an engine has been at work."""

import threading
import time


class BusyClock:
    """Adds up the time in which something is in flight and not paused. Safe to use from any thread."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._flying, self._paused, self._total, self._since = 0, False, 0.0, time.perf_counter()

    def enter(self) -> None:
        """Something more is in flight."""
        self._change(flying=1)

    def leave(self) -> None:
        """Something less is."""
        self._change(flying=-1)

    def pause(self) -> None:
        """Nothing is computed from now on."""
        self._change(paused=True)

    def resume(self) -> None:
        """What is in flight is computed again."""
        self._change(paused=False)

    def read(self) -> float:
        """Seconds so far."""
        return self._change()

    def _change(self, flying: int = 0, paused: bool | None = None) -> float:
        with self._lock:
            now = time.perf_counter()
            if self._flying and not self._paused:
                self._total += now - self._since
            self._since = now
            self._flying += flying
            self._paused = self._paused if paused is None else paused
            return self._total
