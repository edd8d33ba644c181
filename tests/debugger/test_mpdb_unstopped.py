"""Threads never stop while they hold a debugger lock: they and all ranks that wait would be unreachable."""

import pytest
from debugger_site import poll


@pytest.mark.parametrize(
    ("place", "commands"),
    [
        # Steps into arm() and over the Python calls under its lock.
        ("hold", ["s", "s", "s", "s", "c"]),
    ],
)
def test_garbage_that_stops_is_collected_under_a_lock(site, place, commands):
    go = site.home / "go"
    (rank,) = site.start_ranks(1, "under_lock.py", place, go)
    site.await_ranks(1)
    site.ask(*commands)
    poll(lambda: site.ask("c") and "done" in site.read("rank0"), "the end of the stops")
    assert not list(site.runtime.glob("*.sock"))
    go.touch()
    site.await_exit(rank)
