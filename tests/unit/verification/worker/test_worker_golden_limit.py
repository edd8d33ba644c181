"""The time limit of a golden, in a thread that no signal reaches."""

import subprocess
import sys
import threading
import time

import pytest

from moeverify.verification.worker import golden


class LateTimer(threading.Timer):
    """A timer that cannot be cancelled any more: it is about to fire when its limit ends."""

    def cancel(self) -> None:
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

    thread = threading.Thread(target=run)
    thread.start()
    thread.join()
    return seen


def test_what_runs_too_long_is_interrupted() -> None:
    assert limit_in_a_thread(0.1, work=60.0) == ["over time", "later code ran"]


def test_what_ends_in_time_leaves_no_timer_behind() -> None:
    before = threading.active_count()
    assert limit_in_a_thread(60.0, work=0.0) == ["later code ran"]
    assert threading.active_count() == before


def test_a_limit_that_fires_at_the_very_end_does_not_hit_later_code(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(threading, "Timer", LateTimer)
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


def test_a_limit_lets_traced_threads_go_on() -> None:
    """A pending exception that is withdrawn must not keep the thread from calling functions."""
    subprocess.run([sys.executable, "-c", TRACED], check=True, timeout=120)
