"""`--debug` on real ranks: they stop at the first finding, and a console shows the expected values."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from forked.python import ForkedPython

from moeverify.cases.schema import Case
from moeverify.errors import RankFailure
from moeverify.faults.catalogue import load_faults
from moeverify.faults.setting import make_case
from moeverify.results.run import CaseResult
from moeverify.verification.controller.debug import debug_case, find_stop
from moeverify.verification.controller.options import RunOptions
from moeverify.verification.controller.run import run_cases
from moeverify.verification.jobs import BlamedPlace, StopPoint

pytestmark = pytest.mark.timeout(900)


@pytest.fixture(autouse=True)
def sockets(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Keep the ranks' sockets apart, and check that none is left."""
    monkeypatch.setenv("MPDB_JOB", "debugged")
    monkeypatch.setenv("MPDB_DIR", str(tmp_path / "sockets"))
    yield
    assert not list((tmp_path / "sockets").iterdir())


@pytest.fixture
def faults(monkeypatch: pytest.MonkeyPatch) -> str:
    """Return the module of faults that ranks can import."""
    path = [str(Path(__file__).parent), os.environ.get("PYTHONPATH")]
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(filter(None, path)))
    return "suite_faults"


def make_options(cache: Path, fault: str) -> RunOptions:
    """Return the options of a run with a fault, without the search for the first wrong operation."""
    golden = Path("no", "goldens")
    return RunOptions(
        device="cpu", cache_folder=cache, golden_folder=golden, fault=fault, explain_seconds=0.0
    )


def debug(case: Case, at: StopPoint, options: RunOptions, *asked: str, end: str = "@all c") -> str:
    """Return the console's output when all ranks of a case have stopped, then end or continue the case."""
    size = case.layout.world_size
    commands = [word for each in (f"wait {size}", *asked, *end.split("; ")) for word in ("-c", each)]
    consoles: list[subprocess.Popen[str]] = []

    def open_console() -> None:
        command = [sys.executable, "-m", "multiprocessing_pdb", "debugged", *commands]
        consoles.append(subprocess.Popen(command, stdout=subprocess.PIPE, text=True))

    if end == "@all c":
        assert debug_case(case, at, options, open_console) == tuple(range(size))
    else:
        with pytest.raises(RankFailure):
            debug_case(case, at, options, open_console)
    (console,) = consoles
    return console.communicate(timeout=60)[0]


def test_ranks_stop_where_the_first_finding_is_made(known_goldens: Path) -> None:
    fault = load_faults()["A01"]  # gradients of experts become twice as large
    size = fault.case.layout.world_size
    options = make_options(known_goldens, fault.target)
    result = run_cases([fault.case], options, lambda event: None)
    assert result is not None
    at = find_stop(result.cases[0])
    assert at is not None
    (first,) = [finding for finding in result.cases[0].findings if not finding.follows]
    assert (at.kind, at.tensor, at.step) == ("gradient", first.tensor, 0)
    said = debug(
        fault.case,
        at,
        options,
        "@all p (actual.double() / expected).median().item()",
        "@all p step",
        "diff --golden actual",
        "diff --golden",
        "diff --golden program.shards[0].tensor",
        "diff --golden step",
    )
    assert said.count("2.0") >= 1, said
    assert f"ranks 0-{size - 1}: 0" in said, said
    wrong = f"{first.kind} {first.tensor} at step 0"
    assert f"{wrong} differs from the golden: relative error 1, bound 1e-10" in said
    element = re.search(r"on ranks 0-1; most on rank [01] at (\[.*\]): expected (\S+), actual (\S+)\n", said)
    assert element is not None, said
    assert float(element[3]) == pytest.approx(2 * float(element[2]))
    assert f"1 of 118 tensors differ from the golden\n  {wrong}: relative error 1" in said
    assert "initial weight embed.weight before step 0 is as in the golden: relative error 0, bound 0" in said
    assert "this int is nothing that the golden has at step 0" in said


def test_ranks_stop_inside_the_module_that_is_blamed(known_goldens: Path) -> None:
    fault = load_faults()["E13"]  # the combine reads other rows, so the dispatcher's output is wrong
    options = make_options(known_goldens, fault.target)
    place = BlamedPlace(about="the dispatcher", module="layers.1.moe.dispatcher")
    at = StopPoint(kind="loss", tensor="lm", step=0, about="the loss", place=place)
    said = debug(fault.case, at, options, "ls", "@0 p self.group.size()", "diff --golden actual", "n", "ls")
    assert said.count("the dispatcher") == 4, said
    assert said.count("parallel/expert.py:") == said.count("model/moe.py:") == 2, said  # in it, and after it
    assert "rank 0: 2\n" in said
    assert "ranks 0-1: module output layers.1.moe.dispatcher at step 0 differs from the golden" in said


def find_stop_of(case: Case, options: RunOptions) -> tuple[CaseResult, StopPoint]:
    """Return the outcome of a case, and where its ranks must stop."""
    result = run_cases([case], options, lambda event: None)
    assert result is not None
    at = find_stop(result.cases[0])
    assert at is not None
    return result.cases[0], at


def test_ranks_stop_before_the_first_collective_that_differs(known_goldens: Path, faults: str) -> None:
    # In the middle of training: the counts of the second run must match those of the first.
    case = make_case("differing", model={"num_layers": 2}, data={"batch": 4}, dp_shard=2, tp=2)
    options = make_options(known_goldens, f"{faults}:reduce_late")
    result, at = find_stop_of(case, options)
    assert [finding.check for finding in result.findings] == ["trace"]
    said = debug(case, at, options, "ls", "diff issued", "@0,1 p peers", "@all p [len(t) for t in operands]")
    assert said.count("of tp group (0,1), in which they differ") == 4, said
    assert said.count("suite_faults.py:") == 4, said
    assert "rank 0: 'all_reduce on float32[2, 8]'" in said
    assert "ranks 1-3: 'all_reduce on float32[16]'" in said  # the other group is shown for comparison
    assert "{0: 'all_reduce on float32[2, 8]', 1: 'all_reduce on float32[16]'}" in said
    assert "rank 0: [2]" in said


def test_ranks_of_a_run_that_hung_stop_before_they_hang(
    tmp_path: Path, known_goldens: Path, faults: str
) -> None:
    case = make_case("hung", model={"num_layers": 2}, data={"batch": 4}, dp_shard=2, checks={"timeout": 8.0})
    options = make_options(known_goldens, f"{faults}:swap")
    result, at = find_stop_of(case, options)
    assert result.verdict == "error"
    said = debug(case, at, options, "diff issued", end="kill 0; kill 1")
    assert "rank 0: 'all_reduce on float64[4]'" in said
    assert "rank 1: 'broadcast on float64[4], root 0'" in said
    for path in (tmp_path / "sockets").iterdir():  # killed ranks leave their notes to consoles
        path.unlink()


MODEL = """
import torch.distributed as dist
from torch import nn
from multiprocessing_pdb import MultiprocessingPdb

Tra = MultiprocessingPdb().set_trace
SINGLE = iter([True])


class Net(nn.Module):
    def __init__(self, vocab_size):
        super().__init__()
        self.embed = nn.Embedding(vocab_size, 8)
        self.head = nn.Linear(8, vocab_size)

    def forward(self, tokens):
        hidden = self.embed(tokens)
        Tra(when=dist.get_world_size() > 1 or next(SINGLE, False))  # once in the one device
        return self.head(hidden)


def make():
    return Net(16)
"""
CASE = """
recipe: {name: net, model: {factory: "net:make", vocab_size: 16}, data: {batch: 4, seq_len: 8}, steps: 2}
layout: {dp_replicate: 2, data_parallel: ddp}
checks: {skip: [repeat]}
"""


def test_a_stop_of_the_users_own_knows_the_golden(tmp_path: Path, python: ForkedPython) -> None:
    (tmp_path / "net.py").write_text(MODEL)
    (tmp_path / "net.yaml").write_text(CASE)
    command = [*python.command(), "-m", "moeverify", "run", "net.yaml", "--device", "cpu"]
    command += ["--cache", "cache", "--explain-seconds", "0"]
    asked = ["diff --golden", "diff --golden self.head.weight", "diff --golden hidden"]
    stops = ["wait 2", *asked, "@all self.head.weight.data[0, 0] += 1", "diff --golden self.head", "@all c"]
    words = [word for each in ("wait 1", *asked[:1], "@all c", *stops) for word in ("-c", each)]
    with subprocess.Popen(command, cwd=tmp_path, stdout=subprocess.PIPE, text=True) as run:
        console = [sys.executable, "-m", "multiprocessing_pdb", "debugged", *words]
        said = subprocess.run(console, stdout=subprocess.PIPE, text=True, timeout=300, check=False).stdout
        while run.poll() is None:  # the second step, and a diagnosis of the actions at the prompt
            subprocess.run(
                [*console[:4], "-c", "wait 1 1", "-c", "@all c"], stdout=subprocess.DEVNULL, check=False
            )
        assert run.wait() == 1
    golden, layout = said.split("2 stopped: ranks 0-1\n")
    assert "rank 0: *** LookupError: this rank computes the golden itself" in golden
    assert "ranks 0-1: 3 tensors are as in the golden" in layout
    assert "initial weight head.weight before step 0 is as in the golden: relative error 0, bound 0" in layout
    assert "this Tensor of shape (2, 8, 8) is nothing that the golden has at step 0" in layout
    assert (
        "ranks 0-1: 1 of 2 tensors differ from the golden\n  initial weight head.weight before step 0"
        in layout
    )
