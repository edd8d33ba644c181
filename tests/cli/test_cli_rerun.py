"""`moeverify run --watch`: the cases that a real file change affects."""

from __future__ import annotations

import io
import sys
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import pytest
from rich.console import Console

from moeverify.cases.schema import Case
from moeverify.cases.validation.load import LoadedCases
from moeverify.cli.arguments import CaseSelection
from moeverify.cli.context import CommandContext
from moeverify.cli.reply import Reply
from moeverify.cli.rerun import Verified, check_watch, list_folders, rerun_on_changes
from moeverify.errors import CaseError
from moeverify.results.run import CaseResult
from moeverify.verification.controller.finished import make_key
from moeverify.verification.controller.options import RunOptions

MODEL = (
    "{vocab_size: 64, hidden: 32, num_layers: 2, num_heads: 4, num_kv_heads: 2, head_dim: 8, ffn_hidden: 64}"
)
OPTIONS = RunOptions(golden_folder=Path("golden"))


class _EnoughError(Exception):
    """The test has made all of its changes."""


@dataclass
class Session:
    """The loop under test in this thread. Each change is made after the response to the previous one."""

    folder: Path
    changes: Iterator[Callable[[], object]]
    runs: list[tuple[list[str], list[str]]] = field(default_factory=list)
    errors: io.StringIO = field(default_factory=io.StringIO)

    def change(self) -> None:
        make = next(self.changes, None)
        if make is None:
            raise _EnoughError
        threading.Timer(0.1, make).start()

    def verify(self, loaded: LoadedCases, known: Mapping[str, CaseResult]) -> Verified:
        ran = [case.name for case in loaded.cases if case.name not in known]
        self.runs.append((ran, sorted(known)))
        self.change()
        return verified(loaded.cases)

    def go(self) -> None:
        context = CommandContext(
            Console(file=io.StringIO()), Console(file=self.errors), is_first=True, reply=Reply()
        )
        selection = CaseSelection([self.folder])
        self.change()
        with pytest.raises(_EnoughError):
            rerun_on_changes(selection, read_keys, self.verify, verified(selection.load()), context)


def read_keys(cases: Sequence[Case]) -> dict[str, str]:
    return {case.name: make_key(case, OPTIONS) for case in cases}


def verified(cases: Sequence[Case]) -> Verified:
    results = {
        case.name: CaseResult(name=case.name, file=case.file, verdict="pass", ranks=1, seconds=0.0)
        for case in cases
    }
    return Verified(0, cases, results, read_keys(cases))


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    folder = tmp_path / "cases"
    (folder / "recipes").mkdir(parents=True)
    (folder / "recipes" / "tiny.yaml").write_text(f"model: {MODEL}\nsteps: 2\n")
    (folder / "a.yaml").write_text("recipe: tiny\nlayout: {dp_replicate: 2}\n")
    (folder / "b.yaml").write_text("recipe: tiny\nlayout: {dp_shard: 2}\n")
    (folder / "own.py").write_text("def parallelize(model, mesh):\n    return model\n")
    own = "layout: {dp_replicate: 2, parallelize: 'own:parallelize'}\n"
    (folder / "c.yaml").write_text(f"recipe:\n  name: other\n  model: {MODEL}\n{own}")
    return folder


def test_a_change_runs_the_cases_that_it_touches(folder: Path) -> None:
    pytest.importorskip("watchfiles")
    case, recipe, code = folder / "a.yaml", folder / "recipes" / "tiny.yaml", folder / "own.py"

    def refuse_then_mend() -> None:
        case.write_text("recipe: tiny\nlayout: {dp_replicat: 2}\n")
        while "dp_replicat" not in session.errors.getvalue():
            threading.Event().wait(0.05)
        case.write_text("recipe: tiny\nlayout: {tp: 2}\n")

    def say_the_same_then_change_code() -> None:
        case.write_text("# a comment\nrecipe: tiny\nlayout: {tp: 2}\n")
        threading.Event().wait(2.0)
        code.write_text("def parallelize(model, mesh):\n    return model.double()\n")

    session = Session(
        folder,
        iter(
            (
                lambda: case.write_text("recipe: tiny\nlayout: {dp_replicate: 4}\n"),
                lambda: recipe.write_text(recipe.read_text().replace("steps: 2", "steps: 3")),
                refuse_then_mend,
                say_the_same_then_change_code,
                lambda: (folder / "d.yaml").write_text("recipe: tiny\n"),
                (folder / "b.yaml").unlink,
            )
        ),
    )
    session.go()
    assert session.runs == [
        (["a"], ["b", "c"]),
        (["a", "b"], ["c"]),
        (["a"], ["b", "c"]),
        (["c"], ["a", "b"]),
        (["d"], ["a", "b", "c"]),
        ([], ["a", "c", "d"]),
    ]


def test_no_folder_is_inside_another(folder: Path, tmp_path: Path) -> None:
    (tmp_path / "e.yaml").write_text((folder / "c.yaml").read_text().replace("own:", "cases.own:"))
    (folder / "__init__.py").touch()
    cases = [*CaseSelection([folder]).load(), *CaseSelection([tmp_path / "e.yaml"]).load()]
    assert list_folders(cases) == [tmp_path]


def test_what_is_missing_is_said_before_anything_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "watchfiles", None)
    for name, value in {
        "RANK": "0",
        "WORLD_SIZE": "2",
        "MASTER_ADDR": "localhost",
        "MASTER_PORT": "1",
    }.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(CaseError) as caught:
        check_watch()
    messages = [problem.message for problem in caught.value.problems]
    assert messages == [
        "--watch needs the package watchfiles",
        "--watch starts ranks again and again, and these belong to another launcher",
    ]
