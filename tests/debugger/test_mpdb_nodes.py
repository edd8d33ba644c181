"""Ranks of several nodes in one console. A directory behind a fake ssh serves as the other node."""

import os
import sys

import pytest

from multiprocessing_pdb.console.registry import RankRegistry
from multiprocessing_pdb.console.remote import RemoteSource

# Run the last argument as ssh does, in an environment with the other node's runtime directory.
STAND_IN = """#!/bin/sh
echo "Welcome to the other node"
for last; do :; done
export MPDB_DIR="$OTHER_NODE"
exec sh -c "$(printf %s "$last" | sed 's/MPDB_DIR=[^ ]* //')"
"""


@pytest.fixture
def nodes(site):
    """Return a site with one stopped rank here and one on the other node, and the commands to reach them."""
    tools = site.home / "bin"
    tools.mkdir()
    other = site.home / "other"
    for name, text in {
        "ssh": STAND_IN,
        "srun": STAND_IN,
        "squeue": "#!/bin/sh\necho node[1-1]\n",
        "scontrol": "#!/bin/sh\necho node1\n",
    }.items():
        (tools / name).write_text(text)
        (tools / name).chmod(0o755)
    site.env["PATH"] = f"{tools}:{os.environ['PATH']}"
    site.env["OTHER_NODE"] = str(other)
    site.other_ranks = [
        site.start_python(
            "work.py",
            env={"RANK": str(rank), "WORLD_SIZE": "3", "MPDB_JOB": site.job, "MPDB_DIR": str(other)},
            name=f"far{rank}",
        )
        for rank in (1, 2)
    ]
    site.start_ranks(1, "work.py", env={"WORLD_SIZE": "3"})
    return site


@pytest.mark.parametrize(
    "way", [["--ssh", "node1"], ["--srun", "77"], ["--via", "ssh -q node1"]], ids=["ssh", "srun", "via"]
)
def test_ranks_behind_a_relay_are_like_ranks_here(nodes, way):
    assert nodes.run_console("wait 3 60", options=way, timeout=90).returncode == 0, nodes.explain()
    assert nodes.ask("diff value", options=way).splitlines() == ["rank 0: 0", "rank 1: 10", "rank 2: 20"]
    assert "work.py" in nodes.ask("next", options=way)
    assert nodes.ask("diff total > 0", options=way) == "ranks 0-2: True (equal on all)\n"
    assert "killed rank 2" in nodes.ask("kill 2", options=way)
    nodes.await_exit(nodes.other_ranks[1], -9)
    stacks = nodes.ask("stacks", options=way, timeout=120)
    assert "rank 0 (pid" in stacks
    assert "rank 1 (pid" in stacks
    assert nodes.ask("c", options=way) == "ranks 0-1: runs on\n"
    nodes.await_exit(nodes.other_ranks[0])


def test_attach_through_a_relay_and_lose_it(nodes):
    nodes.run_console("wait 3 60", options=["--ssh", "node1"], timeout=90)
    console = nodes.open_console("--ssh", "node1")
    console.sendline("attach 1")
    console.expect_exact("(Pdb++) ")
    console.send("p spec\t")
    console.expect_exact("special")
    console.sendline("")
    console.expect_exact("'odd'")
    console.expect_exact("(Pdb++) ")
    console.kill(9)
    console.wait()
    assert nodes.ask("@1 p value", options=["--ssh", "node1"]) == "rank 1: 10\n"


def test_a_node_that_cannot_be_reached_does_not_hide_the_others(nodes):
    nodes.run_console("wait 3 60", options=["--ssh", "node1"], timeout=90)
    done = nodes.run_console("diff value", options=["--via", "false", "--ssh", "node1"])
    assert "multiprocessing_pdb: false: " in done.stderr
    assert done.stdout.splitlines() == ["rank 0: 0", "rank 1: 10", "rank 2: 20"]


def test_all_nodes_are_asked_before_the_first_answer_is_waited_for(tmp_path, monkeypatch):
    monkeypatch.setenv("MPDB_DIR", str(tmp_path / "nobody"))
    events = []
    sources = [RemoteSource("sh -c", sys.executable, pytest.fail) for _ in range(2)]
    for number, source in enumerate(sources):
        send, ask = source.send, source._ask

        def note_send(frame, number=number, send=send):
            events.append(("sent to", number))
            send(frame)

        def note_answer(frame, seconds, number=number, ask=ask):
            events.append(("waits for", number))
            return ask(frame, seconds)

        monkeypatch.setattr(source, "send", note_send)
        monkeypatch.setattr(source, "_ask", note_answer)
    registry = RankRegistry(sources, "job")
    looks = (
        registry.refresh,
        registry.take_deaths,
        registry.list_armed,
        lambda: registry.list_processes("job", "list"),
    )
    try:
        for look in looks:
            events.clear()
            look()
            assert events == [("sent to", 0), ("sent to", 1), ("waits for", 0), ("waits for", 1)]
    finally:
        registry.close()
