"""Thread that detects the timeout of a job while the main thread is stuck in a collective."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

THREAD_NAME = "moeverify-watchdog"
_INTERVAL = 0.25


class Watchdog:
    """Thread that calls `on_tick` about every 0.25 s, and `on_expiry` once when the armed time has passed."""

    def __init__(self, on_expiry: Callable[[], None], on_tick: Callable[[], None]) -> None:
        self._on_expiry = on_expiry
        self._on_tick = on_tick
        self._deadline: float | None = None
        self._stopped = threading.Event()
        self._thread = threading.Thread(target=self._watch, name=THREAD_NAME, daemon=True)
        self._thread.start()

    def arm(self, seconds: float) -> None:
        """Start the timer of a job."""
        self._deadline = time.monotonic() + seconds

    def extend(self, seconds: float) -> None:
        """Add time to the running timer."""
        if self._deadline is not None:
            self._deadline += seconds

    def disarm(self) -> None:
        """Stop the timer."""
        self._deadline = None

    def stop(self) -> None:
        self._stopped.set()
        self._thread.join()

    def _watch(self) -> None:
        wait = _INTERVAL
        while not self._stopped.wait(wait):
            self._on_tick()
            deadline = self._deadline
            if deadline is None:
                wait = _INTERVAL
            elif time.monotonic() >= deadline:
                self._deadline = None
                self._on_expiry()
            else:
                wait = min(_INTERVAL, max(0.001, deadline - time.monotonic()))
