"""With torch.distributed: in-place tensor comparison, meshes, collective timeouts and hanging ranks."""

import re
import subprocess
import sys
import time

import pytest
from debugger_site import PROGRAMS, poll


def start_torchrun(site, world, program, *arguments):
    """Start torchrun on one node."""
    return site.start(
        *site.python.command(),
        *["-m", "torch.distributed.run", "--nproc-per-node", world, "--standalone"],
        *["--no-python", *site.python.command(), PROGRAMS / program, *arguments],
        env={"MPDB_JOB": site.job},
    )


def test_tensors_are_compared_in_place_and_ranks_chosen_by_mesh(site):
    process = start_torchrun(site, 4, "experts.py")
    site.await_ranks(4)
    table = site.ask("ls")
    assert [re.search(r"dp=\d tp=\d", line)[0] for line in table.splitlines()[1:5]] == [
        "dp=0 tp=0",
        "dp=0 tp=1",
        "dp=1 tp=0",
        "dp=1 tp=1",
    ]
    same = site.ask("diff same")
    assert same.startswith("ranks 0-3: float32[300, 7] cpu norm ")
    assert same.endswith("(equal on all)\n")
    other = site.ask("diff other").splitlines()
    assert other[0].startswith("ranks 0-2: float32[300, 7] cpu norm ")
    assert other[1].startswith("rank 3: float32[300, 7] cpu norm ")
    assert re.fullmatch(r"rank 3 differs from ranks 0-2 first at \[123, 4\]: 9\.5 against -?\d.*", other[2])
    assert "first at [4, 123]: 9.5 against" in site.ask("diff strided")
    assert "rank 2 differs from ranks 0-1, 3 in shape [4] against [3]" in site.ask("diff odd_shape")
    assert "rank 3:" in site.ask("diff nested")
    assert "rank 1 differs from ranks 0, 2-3 first at [0]: 1 against 0" in site.ask("diff integers")
    assert "bfloat16[300, 7]" in site.ask("diff half")
    placed = site.ask("diff placed")
    assert "placement (R)" in placed or "Replicate" in placed
    assert "local [150, 7]" in placed
    assert site.ask("@tp=1 diff dist.get_rank()").splitlines() == ["rank 1: 1", "rank 3: 3"]
    assert site.ask("@dp=0:1,tp=1 p dist.get_rank()") == "rank 1: 1\n"
    assert site.ask("@0,1:4:2 diff 1") == "ranks 0-1, 3: 1 (equal on all selected)\n"
    assert "known: dp, tp" in site.ask("@pp=0 diff 1")
    site.ask("c")
    site.await_exit(process)


def stay_stopped(site, seconds):
    """Keep a rank stopped for longer than the timeout of its group."""
    site.await_ranks(1)  # a console that waits, and not one after another
    poll(lambda: "long stop" in site.ask("ls"), "the stop")
    begun = time.monotonic()
    while time.monotonic() - begun < seconds:
        assert "rank 0" in site.ask("@0 diff 1")
        time.sleep(0.5)


def test_a_later_collective_survives_a_long_stop_and_timeouts_come_back(site):
    process = start_torchrun(site, 2, "collective.py", "later", "arm")
    stay_stopped(site, 9)
    site.ask("c")
    site.await_exit(process)
    out = site.read()
    assert out.count("sum [3.0, 3.0, 3.0, 3.0]") == 2
    assert out.count("restored [6.0, 6.0]") == 2
    assert out.count("done") == 2


def test_a_stop_on_another_node_is_learned_through_the_store(site):
    process = start_torchrun(site, 2, "collective.py", "later", "arm", "apart")
    site.runtime = site.home / "run0"  # rank 0's directory; rank 1 looks into another one
    site.env["MPDB_DIR"] = str(site.runtime)
    stay_stopped(site, 7)
    site.ask("c")
    site.await_exit(process)
    assert site.read().count("sum [3.0, 3.0, 3.0, 3.0]") == 2
    assert site.read().count("restored [6.0, 6.0]") == 2


def test_the_recorded_session_of_the_documentation(site):
    process = start_torchrun(site, 4, "expert_parallel.py")
    site.await_ranks(4)
    assert "(equal on all)" in site.ask("diff loss")
    found = site.ask("diff bias")
    assert "rank 3 differs from ranks 0-2 first at [0]: 0.0 against 0.0099" in found
    site.ask("c")
    site.await_exit(process)


def test_hold_saves_even_a_collective_in_flight(site):
    process = start_torchrun(site, 2, "collective.py", "flight", "hold")
    stay_stopped(site, 9)
    site.ask("c")
    site.await_exit(process)
    assert site.read().count("sum [3.0, 3.0, 3.0, 3.0]") == 2


def test_a_collective_in_flight_is_said_with_a_countdown(site):
    start_torchrun(site, 2, "collective.py", "flight", "arm")
    site.await_ranks(1)
    text = poll(
        lambda: next((t for t in [site.ask("ls")] if "all_reduce" in t), ""), "the collective in flight"
    )
    assert re.search(
        r"rank 1 waits in all_reduce, begun before its timeout could be raised: it cannot be saved, "
        r"and ends in 00:0\d at the latest",
        text,
    ), text


def test_peers_that_are_not_armed_are_said(site):
    start_torchrun(site, 2, "collective.py", "later", "plain")
    site.await_ranks(1)
    text = poll(lambda: next((t for t in [site.ask("ls")] if "long stop" in t), ""), "the stop")
    assert "1 rank(s) neither stopped nor armed here" in text
    assert "ends after 00:06" in text


@pytest.mark.parametrize("how", ["py-spy", "faulthandler"])
def test_stacks_of_ranks_that_hang_in_c_and_never_stopped(site, how):
    site.start_ranks(2, "hang.py", *(["arm"] if how == "faulthandler" else []))
    site.await_ranks(1)
    text = site.ask("stacks", options=[site.job], env={"MPDB_STACKS": how}, timeout=120)
    hung = text[text.index("rank 1 (pid") :]
    assert re.search(r"sink.*hang\.py|hang\.py.*sink", hung), text


def test_stacks_group_equal_ones(site):
    code = "import time\ntime.sleep(600)\n"
    (site.home / "sleep.py").write_text(code)
    for rank in range(2):
        env = {"MPDB_JOB": site.job, "RANK": str(rank)}
        site.start(sys.executable, "sleep.py", env=env, name=f"r{rank}", stdin=subprocess.DEVNULL)
    grouped = re.compile(r"rank 0 \(pid \d+\), rank 1 \(pid \d+\):(?s:.*)sleep\.py")
    # a rank that is not yet in its sleep has a stack of its own
    poll(lambda: grouped.search(site.ask("stacks", options=[site.job])), "one stack of both ranks")
