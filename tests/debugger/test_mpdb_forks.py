"""A forked child of a stopped thread: it is reachable for as long as it is stopped itself."""

import pytest
from debugger_site import poll


def await_tick(site):
    """Wait until the server has checked its socket file and recreated it if it was removed."""
    (name,) = site.sockets()
    (site.runtime / name).unlink()
    poll(lambda: site.sockets() == [name], "the socket file")


@pytest.mark.parametrize("thread", ["main", "other"])
def test_a_stopped_child_keeps_its_way_in(site, thread):
    (process,) = site.start_ranks(1, "forks.py", thread)
    site.await_ranks(1)
    site.ask("c")
    poll(lambda: "child" in site.ask("ls"), "the stop of the child")
    for _ in range(2):  # the second response comes after all work for the first
        await_tick(site)
    assert "child" in site.ask("ls")
    site.ask("@all answer = 8", "n", "@all answer = 9", "c")
    site.await_exit(process)
    assert site.read("rank0") == "child 9\n"


def test_a_child_that_is_forked_at_the_prompt_stops_there_too(site):
    (process,) = site.start_ranks(1, "forks.py", "main")
    site.await_ranks(1)
    site.ask("@all p os.fork()")
    site.await_ranks(2)
    assert "2" in site.ask("@all p len('ab')")
    site.ask("c")
    poll(lambda: site.ask("ls").count("child") == 2, "the stops of the children of both")
    site.ask("c")
    site.await_exit(process)
    poll(lambda: site.read("rank0") == "child 7\n" * 2, "what both say")
