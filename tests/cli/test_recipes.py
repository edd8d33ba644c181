"""The recipes of CONTRIBUTING, followed in a copy of the package: one file, at most one line elsewhere."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
Run = Callable[..., str]

CHECK = '''
"""Whether there is silence."""

from moeverify.verification.checks.base import Check, make_outcome
from moeverify.results.checks import CheckName


class Silence(Check[None]):
    name = CheckName.SILENCE

    def judge(self, shown, reports):
        return make_outcome(self.name, [], 1)


CHECKS = (Silence(),)
'''
HYPOTHESIS = '''
"""The hypothesis that nothing is wrong."""

from moeverify.explain.fitting.hypotheses.base import Hypothesis
from moeverify.results.explanation import Quantity


class Nothing(Hypothesis):
    name = "nothing"
    quantities = frozenset(Quantity)

    def test(self, tensors, inputs):
        return None


HYPOTHESIS = Nothing()
'''
FORMAT = '''
"""A run as one line."""


def write(run, path):
    path.write_text(f"{run.verdict}\\n")
'''
VARIANT = '''
"""Positions stay where they are."""

from moeverify.parallel.context_parallel.allgather import IMPLEMENTATION
'''


@pytest.fixture
def copy(tmp_path: Path) -> Path:
    for name in ("moeverify", "multiprocessing_pdb"):
        shutil.copytree(ROOT / name, tmp_path / name)  # with its bytecode: compiling takes seconds
    return tmp_path


@pytest.fixture
def run(copy: Path) -> Run:
    """Return a function that runs Python with the copied package and returns its output."""

    def do(*arguments: str) -> str:
        path = os.pathsep.join(filter(None, [str(copy), os.environ.get("PYTHONPATH")]))
        variables = {**os.environ, "PYTHONPATH": path, "COLUMNS": "200", "TERM": "dumb"}
        done = subprocess.run(
            [sys.executable, *arguments], cwd=copy, env=variables, capture_output=True, text=True, check=False
        )
        assert done.returncode == 0, done.stderr
        return done.stdout

    return do


def add(copy: Path, file: str, text: str, *, line: str = "", after: str = "", into: str = "") -> None:
    """Write the new file and the one line of a list."""
    (copy / "moeverify" / file).write_text(text.lstrip())
    if line:
        listed = copy / "moeverify" / into
        content = listed.read_text()
        assert content.count(after) == 1, f"{into} has no single {after!r} any more"
        listed.write_text(content.replace(after, after + line))


@pytest.mark.slow
def test_a_check_is_a_file_and_its_name(copy: Path, run: Run) -> None:
    line = '\n    SILENCE = "silence", "whether there is silence"'
    after = 'LOADED = "loaded", "a loaded state against the one that was saved, bit for bit"'
    add(copy, "verification/checks/silence.py", CHECK, line=line, after=after, into="results/checks.py")
    assert "silence: whether there is silence" in run("-m", "moeverify", "check", "--help")
    listed = (
        "from moeverify.verification.checks.registry import CHECKS; print(*(check.name for check in CHECKS))"
    )
    assert run("-c", listed).split()[:2] == ["loaded", "silence"]


@pytest.mark.slow
def test_a_hypothesis_is_a_file_and_its_place(copy: Path, run: Run) -> None:
    package = "explain/fitting/hypotheses"
    add(
        copy,
        f"{package}/nothing.py",
        HYPOTHESIS,
        line='\n    ("nothing",),',
        after="ORDER = (",
        into="explain/fitting/order.py",
    )
    assert (
        run("-c", "from moeverify.explain.fitting.hypotheses import TIERS; print(TIERS[0][0].name)")
        == "nothing\n"
    )


@pytest.mark.slow
def test_a_report_format_is_a_file_and_its_line(copy: Path, run: Run) -> None:
    line = '\n    Format("line", "Write one line."),'
    add(
        copy,
        "report/formats/line.py",
        FORMAT,
        line=line,
        after="FORMATS = (",
        into="report/formats/registry.py",
    )
    for command in ("run", "report", "reshard"):
        assert "--line" in run("-m", "moeverify", command, "--help"), command
    writes = (
        "from pathlib import Path; from moeverify.report.formats.registry import write_run; "
        "from moeverify.results.run import RunResult; "
        "write_run('line', RunResult.model_construct(verdict='pass'), Path('out'))"
    )
    run("-c", writes)
    assert (copy / "out").read_text() == "pass\n"


@pytest.mark.slow
def test_a_choice_of_implementation_is_a_file_and_its_option(copy: Path, run: Run) -> None:
    file = "parallel/context_parallel/still.py"
    add(copy, file, VARIANT, line='"still", ', after="ContextParallel = Literal[", into="cases/schema.py")
    (copy / "case.yaml").write_text(
        "recipe: {model: {preset: tiny-mixtral-8x7b}}\nlayout: {cp: 2, context_parallel: still}\n"
    )
    assert "still" in run("-m", "moeverify", "check", "case.yaml")


@pytest.mark.slow
def test_a_fault_is_a_decorated_function(copy: Path, run: Run) -> None:
    known = copy / "moeverify/faults/catalogue/routing.py"
    text = known.read_text()
    begin, end = (text.index(f'@fault(\n    "{number}"') for number in ("B05", "B06"))
    known.write_text(text + "\n\n" + text[begin:end].replace("B05", "B99").replace("b05", "b99"))
    assert "B99" in run("-m", "moeverify", "faults", "list", "B99")


def test_what_the_recipes_name_is_there() -> None:
    text = (ROOT / "CONTRIBUTING.md").read_text().partition("## How to add")[2].partition("\n## ")[0]
    named = {word.strip("`") for word in text.split() if word.startswith("`moeverify/")}
    assert len(named) > 6
    for name in named:
        place = name.rstrip("`.,;:'s").replace("CLASS/", "")
        assert (ROOT / place).exists(), name
