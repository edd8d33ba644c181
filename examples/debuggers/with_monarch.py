"""The three tasks with Monarch's debugger, which sees actors at breakpoints only: netcat on its port."""

from __future__ import annotations

import re

import pexpect
from desk import PROMPT, SHORT, WORLD, Desk, FailedError, name_odd_one, read_bias

_CONSOLE = "monarch_dbg> "


def _train(desk: Desk, task: str) -> None:
    """Start the actors."""
    program = desk.start(f"{desk.python} monarch_tasks.py {task}", is_step=False)
    desk.expect(program, "ready")


def _open_console(desk: Desk, num_stopped: int) -> pexpect.spawn:
    """Open the console, and request the list until all ranks are in it, which counts as one line."""
    console = desk.start(f"{desk.python} netcat.py localhost 27000")
    desk.expect(console, _CONSOLE)
    desk.typed.append("list")
    for _ in range(30):
        console.sendline("list")
        listed = desk.expect(console, _CONSOLE, SHORT)
        if listed.count("| trainer ") >= num_stopped:
            return console
    raise FailedError(f"the list has no {num_stopped} ranks: {listed[-200:]}")


def find_bias(desk: Desk) -> str:
    """Attach to each rank, since `cast` shows no responses."""
    _train(desk, "bias")
    console = _open_console(desk, WORLD)
    answers = desk.send(console, "cast trainer ranks(0:4) p bias", _CONSOLE)
    if "tensor(" in answers:
        raise FailedError("cast shows answers: this try is out of date")
    values = []
    for rank in range(WORLD):
        values.append(read_bias(desk.send(console, f"attach trainer {rank}", PROMPT)))
        desk.send(console, "detach", _CONSOLE)
    return f"{name_odd_one(values)}, after attaching to each; `cast` shows no answers"


def find_hang(desk: Desk) -> str:
    """Fail: only actors at a breakpoint are listed."""
    _train(desk, "hang")
    try:
        _open_console(desk, 1)
    except FailedError:
        raise FailedError("its list is empty, as no actor comes to a breakpoint") from None
    return "a rank is listed"


def step_exchange(desk: Desk) -> str:
    """Step two ranks with `cast`; the other two continue."""
    _train(desk, "exchange")
    console = _open_console(desk, WORLD)
    desk.send(console, "cast trainer ranks(2:4) c", _CONSOLE)
    desk.send(console, "cast trainer ranks(0:2) n", _CONSOLE)
    places = []
    for rank in range(2):
        desk.send(console, f"attach trainer {rank}", PROMPT, SHORT)
        text = desk.send(console, "where", PROMPT, SHORT)
        places += re.findall(r"> \S*tasks.py\((\d+)\)train", text)[-1:]
        desk.send(console, "detach", _CONSOLE, SHORT)
    if len(places) != 2 or places[0] != places[1]:
        raise FailedError(f"the ranks stand at lines {places}")
    return f"both over it, at line {places[0]}"
