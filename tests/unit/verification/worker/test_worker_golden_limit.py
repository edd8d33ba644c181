"""The time limit of a golden, in a thread that no signal reaches."""

import subprocess
import sys
import threading
import time
from collections.abc import Callable
from contextlib import suppress

import pytest

from moeverify.verification.worker import golden


class LateEvent(threading.Event):
    """An event that comes too late: the interruption is already on its way when the limit ends."""

    def set(self) -> None:
        pass


def limit_in_a_thread(seconds: float, work: float) -> list[str]:
    """Return the outcome of a limit and of the code that ran after it, in a separate thread."""
    seen: list[str] = []

    def run() -> None:
        try:
            try:
                with golden._limit(seconds):
                    # Waits in short steps: the exception comes between two lines of Python.
                    until = time.monotonic() + work
                    while time.monotonic() < until:
                        time.sleep(0.01)
            except golden._OverTimeError:
                seen.append("over time")
            until = time.monotonic() + 0.5
            while time.monotonic() < until:
                time.sleep(0.01)
            seen.append("later code ran")
        except golden._OverTimeError:
            seen.append("later code was hit")

    run_in_a_thread(run)
    return seen


def run_in_a_thread(function: Callable[[], None]) -> None:
    thread = threading.Thread(target=function)
    thread.start()
    thread.join()


def test_what_runs_too_long_is_interrupted() -> None:
    assert limit_in_a_thread(0.1, work=60.0) == ["over time", "later code ran"]


def test_a_limit_counts_the_time_of_its_clock() -> None:
    readings: list[float] = []

    def read() -> float:
        readings.append(0.02 * len(readings))
        return readings[-1]

    def wait() -> None:
        with suppress(golden._OverTimeError), golden._limit(0.05, read):
            while True:
                time.sleep(0.01)

    for run in (wait, lambda: run_in_a_thread(wait)):  # a signal, and an asynchronous exception
        readings.clear()
        run()
        assert readings == [0.0, 0.02, 0.04, 0.06]


def test_what_ends_in_time_leaves_no_timer_behind() -> None:
    before = threading.active_count()
    assert limit_in_a_thread(60.0, work=0.0) == ["later code ran"]
    assert threading.active_count() == before


def test_a_limit_that_fires_at_the_very_end_does_not_hit_later_code(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(golden, "Event", LateEvent)
    assert limit_in_a_thread(0.2, work=0.0)[-1] == "later code ran"


TRACED = """
import sys, threading
from moeverify.verification.worker import golden

def limited():
    with golden._limit(60.0):
        pass

def called():
    return None

def traced():
    sys.settrace(lambda *event: None)
    str.upper("traced")
    called()

for function in (limited, traced):
    thread = threading.Thread(target=function)
    thread.start()
    thread.join()
"""


@pytest.mark.slow
def test_a_limit_lets_traced_threads_go_on() -> None:
    """A pending exception that is withdrawn must not keep the thread from calling functions."""
    subprocess.run([sys.executable, "-c", TRACED], check=True, timeout=120)
