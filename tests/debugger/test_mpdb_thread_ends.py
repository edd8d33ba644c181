"""A thread that ends while it is debugged: its sockets are closed and its objects are freed."""

import pytest
from debugger_site import PROGRAMS, poll

PROGRAM = PROGRAMS / "thread_ends.py"
COLLECTED = PROGRAMS / "thread_collected.py"


def find_line(program):
    """Return an unreachable line: a breakpoint there keeps a thread's endpoint open until its end."""
    return next(at for at, line in enumerate(program.read_text().splitlines(), 1) if "return None" in line)


@pytest.mark.parametrize("flavour", ["pdb", "pdbpp"])
def test_nothing_is_left_of_a_thread_that_ended_under_a_breakpoint(site, flavour):
    go = site.home / "go"
    ranks = site.start_ranks(1, "thread_ends.py", go, env={"MPDB_PDB": flavour})
    site.await_ranks(1)
    site.ask(f"break {PROGRAM}:{find_line(PROGRAM)}", "c")
    poll(lambda: "late" in site.ask("ls"), "the stop in what the thread destroys as it ends")
    site.ask("c")
    poll(lambda: "first" in site.ask("ls"), "the stop in the main thread, after the other one's end")
    poll(lambda: len(list(site.runtime.glob("*.sock"))) == 1, "the end of what was open for the other thread")
    site.ask("clear 1", "c")
    poll(lambda: "alive" in site.read("rank0"), "the end of the stops")
    assert "alive [False, False]" in site.read("rank0")
    go.touch()
    for rank in ranks:
        site.await_exit(rank)


def test_a_thread_whose_locals_the_server_collects_leaves_no_endpoint(site):
    go = site.home / "go"
    (rank,) = site.start_ranks(1, "thread_collected.py", go)
    site.await_ranks(1)
    site.ask(f"break {COLLECTED}:{find_line(COLLECTED)}", "c")
    poll(lambda: not list(site.runtime.glob("*.sock")), "the end of what was open for the thread")
    go.touch()
    site.await_exit(rank)
