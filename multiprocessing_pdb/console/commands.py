"""Implementation of the console's commands on the selected ranks."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Sequence

from multiprocessing_pdb.console.arming import ArmError, arm_process
from multiprocessing_pdb.console.broadcast import Answer, ask, explain_silence
from multiprocessing_pdb.console.grouping import group, name_ranks, show_block, show_groups
from multiprocessing_pdb.console.link import LinkClosedError
from multiprocessing_pdb.console.registry import RankRegistry
from multiprocessing_pdb.console.table import show_countdowns, show_table
from multiprocessing_pdb.console.target import ENDS, Target, read_text
from multiprocessing_pdb.console.terminal import find_size
from multiprocessing_pdb.wire.framing import Frame

_STATUS_SECONDS = 2.0


class CommandError(ValueError):
    """An invalid command."""


# Debugger commands that are useful on all ranks at once, with their full names.
STEPS = {
    "step": "step",
    "s": "step",
    "next": "next",
    "n": "next",
    "until": "until",
    "unt": "until",
    "return": "return",
    "r": "return",
    "continue": "continue",
    "cont": "continue",
    "c": "continue",
    "watch": "watch",
    "unwatch": "unwatch",
}


def list_ranks(registry: RankRegistry, targets: Sequence[Target], armed: Sequence[Target]) -> str:
    """Return the table of `ls`."""
    answers = ask([*targets, *armed], {"do": "status"}, _STATUS_SECONDS)
    explain_silence(answers, _STATUS_SECONDS)
    return "\n".join([show_table(answers), *show_countdowns(targets, registry.list_armed())])


def run_line(targets: Sequence[Target], line: str, seconds: float, *, command: bool = False) -> str:
    """Run one debugger line on every rank, and return the grouped answers.

    `command` marks the line as a debugger command, even if a variable has the same name.
    """
    request: Frame = {"do": "line", "text": line, "command": command, "size": list(find_size())}
    if command:
        request["nested"] = False  # a step does not answer a question of pdb
    answers = ask(targets, request, seconds)
    explain_silence(answers, _STATUS_SECONDS)
    return show_groups([(answer.target, _show_end(answer)) for answer in answers])


def _show_end(answer: Answer) -> str:
    if answer.failure:
        return f"{answer.out}*** {answer.failure}"
    end = ENDS.get(read_text(answer.frame, "end"), "")
    if answer.frame.get("nested") is True:
        who = f"@{answer.target.label}"
        end = f"{read_text(answer.frame, 'prompt')} (answer with {who} TEXT; {who} EOF ends the input)"
    return answer.out + end


def show_stacks(targets: Sequence[Target], seconds: float) -> str:
    """Return the stacks of stopped ranks, grouped by equality."""
    answers = ask(targets, {"do": "where"}, seconds)
    explain_silence(answers, _STATUS_SECONDS)
    return show_groups([(answer.target, _show_stack(answer)) for answer in answers])


def _show_stack(answer: Answer) -> str:
    stack = answer.frame.get("stack")
    if answer.failure or not isinstance(stack, list):
        return f"*** {answer.failure or 'malformed answer'}"
    return "\n".join(map(str, stack))


def interrupt(targets: Sequence[Target]) -> str:
    """Interrupt the evaluation on busy ranks, and request a stop of running ones."""
    answers = ask(targets, {"do": "interrupt"}, _STATUS_SECONDS)
    texts = {"busy": "interrupted", "running": "asked to stop at its next line", "stopped": "was idle"}
    return show_groups(
        [(a.target, a.failure or texts.get(read_text(a.frame, "interrupted"), "?")) for a in answers]
    )


def stop(targets: Sequence[Target]) -> str:
    """Request that running ranks, armed or with a breakpoint set, stop at the next line of user code."""
    answers = [
        *ask([t for t in targets if t.state == "armed"], {"do": "stop"}, _STATUS_SECONDS),
        *ask([t for t in targets if t.state != "armed"], {"do": "interrupt"}, _STATUS_SECONDS),
    ]
    asked = "asked to stop at the next line; a call into C has to end first"
    texts = {"stopped": "is stopped already", "busy": "is stopped already; its evaluation was interrupted"}
    return show_groups(
        [(a.target, a.failure or texts.get(read_text(a.frame, "interrupted"), asked)) for a in answers]
    )


def set_breakpoint(targets: Sequence[Target], rest: str, seconds: float) -> str:
    """Set a breakpoint (FILE:LINE, or FILE:LINE if CONDITION) on stopped or armed ranks."""
    place, _, condition = (part.strip() for part in rest.partition(" if "))
    file, _, line = place.rpartition(":")
    if not line.isdecimal() or not file:
        raise CommandError(
            f"break needs FILE:LINE and may have a condition: break {place or 'train.py:7'} if x > 1"
        )
    file = os.path.realpath(file)
    armed = [t for t in targets if t.state == "armed"]
    request = {"do": "break", "place": f"{file}:{line}", "condition": condition}
    texts = [(a.target, a.failure or f"stops at {place}") for a in ask(armed, request, seconds)]
    blocks = [show_groups(texts)] if texts else []
    stopped = [t for t in targets if t.state != "armed"]
    if stopped:
        text = f"break {file}:{line}" + (f", {condition}" if condition else "")
        blocks.append(run_line(stopped, text, seconds, command=True))
    return "\n".join(blocks)


def arm(registry: RankRegistry, which: str) -> str:
    """Arm a process by pid, or with "all" every unarmed rank of the job. Raises CommandError."""
    if which.isdecimal():
        try:
            return f"pid {which} is armed, in job {arm_process(int(which))}"
        except (ArmError, OSError) as error:
            raise CommandError(str(error)) from None
    if which != "all":
        raise CommandError("arm needs a pid, or all: arm 4711")
    job = registry.find_job()
    found = registry.list_processes(job, "arm")
    if not found:
        raise CommandError(f"no rank of {job} that is not armed was found")
    groups = group((str(process.get("text", "")), process) for process in found)
    text = "\n".join(
        show_block(", ".join(_name(process) for process in members), str(members[0]["text"]) or "armed")
        for members in groups
    )
    if any(process.get("text") for process in found):
        raise CommandError(text)
    return text


def kill(targets: Sequence[Target]) -> str:
    """Kill the processes of these ranks."""
    for target in targets:
        with contextlib.suppress(LinkClosedError):
            target.link.kill()
    return f"killed {name_ranks(targets)}"


def kill_job(registry: RankRegistry) -> str:
    """Kill every process of the job that can be found: first the stopped ranks, then the rest."""
    job = registry.find_job()
    stopped = registry.find()
    text = kill(stopped) if stopped else "no rank is stopped"
    others = registry.list_processes(job, "kill")
    return f"{text}; sent SIGKILL to {len(others)} process(es) of {job}"


def dump_stacks(registry: RankRegistry) -> str:
    """Return the stacks of all processes of the job, in any state, grouped by equality."""
    processes = registry.list_processes(registry.find_job(), "stacks")
    if not processes:
        return "no process of the job was found"
    groups = group((read_text(process, "text"), process) for process in processes)
    return "\n".join(
        show_block(", ".join(_name(process) for process in members), read_text(members[0], "text"))
        for members in groups
    )


def _name(process: dict[str, object]) -> str:
    rank = process.get("rank")
    return f"rank {rank} (pid {process.get('pid')})" if isinstance(rank, int) else f"pid {process.get('pid')}"
