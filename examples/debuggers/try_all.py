"""Run each debugger on the three tasks through its real interface, and print what it took.

    python try_all.py [--only ours,madbg] [--python314 PATH] [--python PATH]

`--python` has torch and the debuggers (multiprocessing_pdb is taken from this repository), `--python314` is a
Python 3.14 with torch, for `pdb -p`. Prints a Markdown table: what a user types (each line typed into any terminal,
opening it included) and the outcome. Nothing here is a model: what fails has failed on this machine.
"""

from __future__ import annotations

import argparse
import re
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import pexpect
import with_debugpy
import with_monarch
from desk import PATIENCE, PROMPT, SHORT, WORLD, Desk, FailedError, find_line, name_odd_one, read_bias

# multiprocessing_pdb


def open_console(desk: Desk) -> pexpect.spawn:
    """Open our console when all ranks are there."""
    desk.find_ranks()
    console = desk.start(f"{sys.executable} -m multiprocessing_pdb tasks")
    desk.expect(console, "mpdb> ")
    return console


def ours_bias(desk: Desk) -> str:
    """Use one `diff`."""
    desk.train("bias", "ours")
    console = open_console(desk)
    desk.send(console, "wait 4", "mpdb> ")
    text = desk.send(console, "diff bias", "mpdb> ")
    found = re.search(r"rank (\d) differs from ranks 0-2", text)
    if not found:
        raise FailedError(text)
    return f"rank {found[1]}, and the first element that differs"


def ours_hang(desk: Desk) -> str:
    """Use one `stacks`."""
    desk.train("hang", "ours")
    console = open_console(desk)
    text = desk.send(console, "stacks", "mpdb> ")
    blocks = re.split(r"\n(?=rank|pid)", text)
    waiting = [block for block in blocks if "all_to_all_single" in block]
    hanging = [block for block in blocks if "wait_for_data" in block]
    if len(hanging) != 1 or "rank 1" not in hanging[0] or not waiting:
        raise FailedError(text[-300:])
    return "rank 1 in wait_for_data, the others in all_to_all_single"


def ours_exchange(desk: Desk) -> str:
    """Step two ranks; then the other two arrive too."""
    desk.train("exchange", "ours")
    console = open_console(desk)
    desk.send(console, "wait 4", "mpdb> ")
    desk.send(console, "@2,3 c", "mpdb> ")
    desk.send(console, "@0,1 next", "mpdb> ")
    text = desk.send(console, "@0,1 diff arrived.shape", "mpdb> ")
    for _ in range(6):
        if "equal on all" in text:
            return "both over it, the values compared"
        desk.send(console, "@0,1 step", "mpdb> ")
        text = desk.send(console, "@0,1 diff arrived.shape", "mpdb> ")
    raise FailedError(text)


# torch.distributed.breakpoint


def torch_bias(desk: Desk) -> str:
    """Use one rank's prompt per run; the others wait in a barrier."""
    values = []
    for rank in range(WORLD):
        desk.typed.append(f"torchrun ... breakpoint(rank={rank})")
        program = desk.train("bias", f"torch{rank}")
        desk.expect(program, PROMPT)
        desk.send(program, "up", PROMPT)
        text = desk.send(program, "p bias", PROMPT)
        values.append(read_bias(text))
        desk.send(program, "c", "done")
    return f"{name_odd_one(values)}, after four runs"


def torch_hang(desk: Desk) -> str:
    """Fail: ranks at a breakpoint wait for the one that does not arrive."""
    program = desk.train("hang", "torch0")
    desk.expect(program, PROMPT, SHORT)
    return "a prompt"


def torch_exchange(desk: Desk) -> str:
    """Use `next` over a collective that the others cannot enter: they wait in the barrier."""
    program = desk.train("exchange", "torch0")
    desk.expect(program, PROMPT)
    desk.send(program, "up", PROMPT)
    desk.send(program, "next", PROMPT, SHORT)
    desk.send(program, "next", PROMPT, SHORT)
    return "rank 0 over it; rank 1 has no prompt"


# Python 3.14: pdb -p


def open_pdb(desk: Desk, pid: int) -> pexpect.spawn:
    """Ask a running process for a prompt; it appears at the next bytecode of its main thread."""
    return desk.start(f"{desk.python314} -m pdb -p {pid}")


def gather_at_step(desk: Desk, ranks: Sequence[int]) -> list[pexpect.spawn]:
    """Bring running ranks to the exchange of one step, with a prompt each. Raises FailedError.

    A stopped rank keeps the others in a collective, where they run no bytecode and give no prompt. So all are
    asked first. The one that responds gets a breakpoint at a later step and continues, which frees the next.
    """
    pids = desk.find_ranks()
    children = [open_pdb(desk, pids[rank]) for rank in ranks]
    waiting, step = list(children), 0
    deadline = time.monotonic() + PATIENCE
    while waiting:
        if time.monotonic() > deadline:
            raise FailedError(f"no prompt from {len(waiting)} of {len(children)} ranks in {PATIENCE:.0f} s")
        for child in list(waiting):
            if child.expect([PROMPT, pexpect.TIMEOUT], timeout=1) == 1:
                continue
            waiting.remove(child)
            step = step or find_step(desk, child) + 2000
            desk.send(child, f"tbreak tasks.py:{find_line('dist.all_to_all')}, step == {step}", PROMPT)
            desk.typed.append("c")
            child.sendline("c")
    for child in children:
        desk.expect(child, PROMPT, PATIENCE)
    return children


def find_step(desk: Desk, child: pexpect.spawn) -> int:
    """Go up to the frame of the training loop, and return its step: a process may stop anywhere."""
    for _ in range(30):
        text = desk.send(child, "p step", PROMPT)
        number = re.search(r"^(\d+)\s*$", text, re.MULTILINE)
        if number:
            return int(number[1])
        desk.send(child, "up", PROMPT)
    raise FailedError("the training loop is not on the stack")


def pdb_bias(desk: Desk) -> str:
    """Use four terminals, with a conditional breakpoint in each."""
    desk.train("bias", "none", python=desk.python314, steps=100000)
    values = []
    for child in gather_at_step(desk, range(WORLD)):
        desk.send(child, "up", PROMPT)
        values.append(read_bias(desk.send(child, "p bias", PROMPT)))
    return f"{name_odd_one(values)}, from four terminals"


def pdb_hang(desk: Desk) -> str:
    """Fail: a rank that waits in C has no next bytecode."""
    desk.train("hang", "none", python=desk.python314)
    pids = desk.find_ranks()
    silent, where = [], ""
    for rank, pid in enumerate(pids):
        child = open_pdb(desk, pid)
        try:
            desk.expect(child, PROMPT, SHORT)
        except FailedError:
            silent.append(rank)
            continue
        text = desk.send(child, "where", PROMPT)
        if "wait_for_data" in text and rank == 1:
            where = "rank 1 in wait_for_data"
    if silent != [0, 2, 3]:
        raise FailedError(f"no prompt for ranks {silent}")
    return f"{where}; the waiting ranks 0, 2, 3 gave no prompt in {SHORT:.0f} s each, nor where they are"


def pdb_exchange(desk: Desk) -> str:
    """Use two terminals, and type the steps in turn."""
    desk.train("exchange", "none", python=desk.python314, steps=100000)
    children = gather_at_step(desk, [0, 1])
    for child in children:
        desk.typed.append("next")
        child.sendline("next")
    for child in children:
        desk.expect(child, "return arrived", SHORT)
    return "both over it, from two terminals"


# madbg


def madbg_attach(desk: Desk, rank: int, seconds: float = PATIENCE) -> pexpect.spawn:
    """Connect to the port of one rank."""
    child = desk.start(f"{Path(desk.python).parent}/madbg connect 127.0.0.1 {3513 + rank}")
    desk.expect(child, r"ipdb>|\(Pdb\)", seconds)
    return child


def madbg_bias(desk: Desk) -> str:
    """Use one terminal per rank."""
    desk.train("bias", "madbg")
    desk.find_ranks()
    values = []
    for rank in range(WORLD):
        child = madbg_attach(desk, rank)
        desk.typed.append("p bias")
        child.sendline("p bias")
        values.append(read_bias(desk.expect(child, r"(?s)tensor\(.*?\]\)") + str(child.after)))
    return f"{name_odd_one(values)}, from four terminals"


def madbg_hang(desk: Desk) -> str:
    """Fail: ranks that reach no set_trace have no port."""
    desk.train("hang", "madbg")
    desk.find_ranks()
    madbg_attach(desk, 0, SHORT)
    return "a prompt"


def madbg_exchange(desk: Desk) -> str:
    """Use two terminals for two ranks, and two more to let the others arrive."""
    desk.train("exchange", "madbg")
    desk.find_ranks()
    children = [madbg_attach(desk, rank) for rank in range(WORLD)]
    for child in children:
        desk.typed.append("c" if child in children[2:] else "next")
        child.sendline(desk.typed[-1])
    for child in children[:2]:
        desk.send(child, "p arrived.shape", r"torch\.Size\(\[8, 4\]\)", SHORT)
    return "both over it, from four terminals"


TRIES: dict[str, tuple[Callable[[Desk], str], ...]] = {
    "ours": (ours_bias, ours_hang, ours_exchange),
    "torch": (torch_bias, torch_hang, torch_exchange),
    "pdb -p": (pdb_bias, pdb_hang, pdb_exchange),
    "madbg": (madbg_bias, madbg_hang, madbg_exchange),
    "debugpy": (with_debugpy.find_bias, with_debugpy.find_hang, with_debugpy.step_exchange),
    "monarch": (with_monarch.find_bias, with_monarch.find_hang, with_monarch.step_exchange),
}


def try_one(attempt: Callable[[Desk], str], options: argparse.Namespace) -> tuple[str, int]:
    """Return the outcome and the number of lines typed."""
    desk = Desk(options.python, options.python314)
    try:
        outcome = attempt(desk)
    except FailedError as error:
        outcome = f"**failed**: {' '.join(str(error).split())[:150]}"
    finally:
        desk.close()
    return outcome, len(desk.typed)


def list_rows(options: argparse.Namespace) -> Iterator[str]:
    """Yield the lines of the table."""
    yield "| Debugger | Task | Outcome | Lines typed |"
    yield "|---|---|---|---|"
    for name in options.only.split(","):
        for task, attempt in zip(("bias", "hang", "exchange"), TRIES[name], strict=True):
            outcome, typed = try_one(attempt, options)
            yield f"| {name} | {task} | {outcome} | {typed} |"


def main() -> None:
    """Try all debuggers, and print the results."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--python", default=sys.executable)
    parser.add_argument("--python314", default="python3.14")
    parser.add_argument("--only", default=",".join(TRIES))
    for row in list_rows(parser.parse_args()):
        sys.stdout.write(f"{row}\n")
        sys.stdout.flush()


if __name__ == "__main__":
    main()
