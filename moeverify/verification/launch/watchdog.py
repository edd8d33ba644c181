"""Thread that detects the timeout of a job while the main thread is stuck in a collective."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

THREAD_NAME = "moeverify-watchdog"
_INTERVAL = 0.25


class Watchdog:
    """Thread that calls `on_tick` about every 0.25 s, and `on_expiry` once when the armed time has passed.

    `clock` measures that time. `on_tick` gets the time that is left, or None if none is armed.
    """

    def __init__(
        self,
        on_expiry: Callable[[], None],
        on_tick: Callable[[float | None], None],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._clock = clock
        self._on_expiry = on_expiry
        self._on_tick = on_tick
        self._deadline: float | None = None
        self._stopped = threading.Event()
        self._thread = threading.Thread(target=self._watch, name=THREAD_NAME, daemon=True)
        self._thread.start()

    def arm(self, seconds: float) -> None:
        """Start the timer of a job."""
        self._deadline = self._clock() + seconds

    @property
    def left(self) -> float | None:
        """Return the time until the armed time is over, or None if none is armed. Units: seconds."""
        deadline = self._deadline
        return None if deadline is None else max(deadline - self._clock(), 0.0)

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
            left = self.left
            self._on_tick(left)
            if left == 0.0:
                self._deadline = None
                self._on_expiry()
            wait = _INTERVAL if not left else min(_INTERVAL, max(0.001, left))
