"""Stacks of both kinds: the position of the user's code, without the agent's frames."""

from __future__ import annotations

import faulthandler
import sys
import traceback
from pathlib import Path

from moeverify.verification.launch.tracebacks import find_place, trim_stack

DUMP = """Fatal Python error: Aborted

Thread 0x01 (most recent call first):
  File "/usr/lib/python3.11/threading.py", line 324 in wait

Current thread 0x02 (most recent call first):
  File "/v/site-packages/torch/distributed/distributed_c10d.py", line 3252 in all_reduce
  File "/home/me/model.py", line 12 in forward
  File "/x/moeverify/verification/launch/agent.py", line 150 in run_entry
  File "/x/moeverify/verification/launch/agent.py", line 40 in main

Extension modules: torch._C
"""
STACK = """Thread MainThread, most recent call last:
  File "/x/moeverify/verification/launch/agent.py", line 40, in main
    end = _launch(plan, plan_path)
  File "/x/moeverify/verification/launch/agent.py", line 150, in run_entry
    _run_as_main(entry)
    ^^^^^^^^^^^^^^^^^^^
  File "/home/me/model.py", line 12, in forward
    dist.all_reduce(x)
  File "/v/site-packages/torch/distributed/distributed_c10d.py", line 3252, in all_reduce
    work.wait()

Thread helper, most recent call last:
  File "/home/me/other.py", line 1, in run
    sleep()
"""


def test_the_place_in_a_dump_of_the_fault_handler() -> None:
    assert find_place(DUMP) == "/home/me/model.py:12 in forward"


def test_the_place_in_a_stack_of_traceback() -> None:
    assert find_place(STACK) == "/home/me/model.py:12 in forward"


def test_no_place() -> None:
    assert find_place("") == ""


def test_real_stacks_name_this_file(tmp_path: Path) -> None:
    here = "".join(traceback.format_stack(sys._getframe()))
    assert f"{__file__}:" in find_place("Thread MainThread, most recent call last:\n" + here)
    path = tmp_path / "stack"
    with path.open("w") as file:
        faulthandler.dump_traceback(file)
    assert f"{__file__}:" in find_place(path.read_text())


def test_a_dump_without_the_agent() -> None:
    trimmed = trim_stack(DUMP)
    assert "agent.py" not in trimmed
    assert trimmed.endswith("in forward\n\nExtension modules: torch._C\n")
    assert trimmed.startswith("Fatal Python error")


def test_a_stack_without_the_agent() -> None:
    trimmed = trim_stack(STACK)
    assert trimmed.startswith('Thread MainThread, most recent call last:\n  File "/home/me/model.py"')
    assert "agent.py" not in trimmed
    assert "_run_as_main" not in trimmed
    assert "Thread helper" in trimmed


def test_a_stack_of_a_rank_that_was_not_forked_stays() -> None:
    stack = 'Traceback (most recent call last):\n  File "a.py", line 1, in f\n    g()\nValueError\n'
    assert trim_stack(stack) == stack
