"""`moeverify comm`: real collectives against their definitions, and refused inputs."""

from __future__ import annotations

import io
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from moeverify.report.collective_run import render_collective
from moeverify.results.collective_name import CollectiveName
from moeverify.results.collective_run import CollectiveRun
from moeverify.verification.collectives.definition import define_transfer
from moeverify.verification.controller.tasks import make_job
from moeverify.verification.jobs import CollectiveJob, CollectiveResult, read_result
from moeverify.verification.launch.launcher import run_jobs

Invoke = Callable[..., Any]

ODD = str(Path(__file__).parent / "programs" / "odd_collectives.py")
SIZES = {
    CollectiveName.ALL_TO_ALL: [[1, 0, 2], [3, 1, 0], [0, 0, 4]],
    CollectiveName.ALL_GATHER: [[3, 0, 1]],
    CollectiveName.REDUCE_SCATTER: [[0, 2, 3]],
    CollectiveName.ALL_REDUCE: [[2, 2, 2]],
    CollectiveName.BROADCAST: [[2, 2, 2]],
}


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> dict[str, CollectiveRun]:
    """Return all collectives with uneven parts, some empty, and two wrong ones, by job name."""
    transfers = {
        name.value: define_transfer(name, SIZES[name], int(name == "broadcast")) for name in CollectiveName
    }
    transfers["odd exchange"] = define_transfer(CollectiveName.ALL_TO_ALL, [[2, 2], [2, 2]])
    transfers["odd gather"] = define_transfer(CollectiveName.ALL_GATHER, [[2, 2]])
    jobs = [
        make_job(name, len(each.ranks), 60.0, CollectiveJob(transfer=each, backward=True))
        for name, each in transfers.items()
    ]
    found = {}
    environment = {"backend": "gloo", "device": "cpu", "torch": "-"}
    for outcome in run_jobs(jobs, entry=ODD, folder=tmp_path_factory.mktemp("comm")):
        assert outcome.result is not None, outcome
        answer = read_result(outcome.result)
        assert isinstance(answer, CollectiveResult)
        found[outcome.job] = CollectiveRun(
            transfer=transfers[outcome.job], values=answer.values, environment=environment
        )
    return found


@pytest.mark.ranks
@pytest.mark.parametrize("collective", CollectiveName)
def test_a_collective_and_its_backward_are_what_the_definition_says(
    runs: dict[str, CollectiveRun], collective: CollectiveName
) -> None:
    run = runs[collective.value]
    assert len(run.values) == 3
    assert all(values.input_gradient is not None for values in run.values)
    assert run.wrong_ranks == ()
    assert "pass  output and gradient of every rank" in _render(run)


@pytest.mark.ranks
@pytest.mark.parametrize(("name", "wrong"), [("odd exchange", "101(not 0)"), ("odd gather", "1(not 102)")])
def test_what_goes_wrong_is_shown_where_it_does(
    runs: dict[str, CollectiveRun], name: str, wrong: str
) -> None:
    assert runs[name].wrong_ranks == (0, 1)
    text = _render(runs[name])
    assert wrong in text
    assert "WRONG" in text
    assert "mismatch  ranks 0, 1" in text


def _render(run: CollectiveRun) -> str:
    file = io.StringIO()
    render_collective(run, Console(file=file, width=200))
    return file.getvalue()


@pytest.mark.ranks
def test_an_uneven_exchange_is_shown_and_written(tmp_path: Path, invoke: Invoke) -> None:
    splits, file = tmp_path / "splits.yaml", tmp_path / "comm.json"
    splits.write_text("splits:\n  - [1, 2]\n  - [0, 3]\n")
    done = invoke(
        "comm", "all_to_all", "--world-size", 2, "--splits", splits, "--device", "cpu", "--json", file
    )
    assert done.exit_code == 0, done.output
    rows = [line.split() for line in done.stdout.splitlines()]
    assert ["0", "0", "|", "1", "2", "1", "2", "1", "0", "0", "|", "-", "equal"] in rows
    assert [
        "1",
        "-",
        "|",
        "100",
        "101",
        "102",
        "0",
        "3",
        "2",
        "3",
        "1",
        "2",
        "|",
        "100",
        "101",
        "102",
        "equal",
    ] in rows
    assert "gradient" not in done.stdout
    run = CollectiveRun.model_validate(json.loads(file.read_text()))
    assert run.values[1].output == (1, 2, 100, 101, 102)


@pytest.mark.parametrize(
    ("collective", "text", "wrong"),
    [
        (
            "all_to_all",
            "splits: [[1, 2], [3, 4, 5]]",
            ["splits[1]: expected 2 sizes, one for each rank, got a list of 3"],
        ),
        (
            "all_to_all",
            "splits:\n- [1, -2]\n- [x, 65]",
            ["splits.yaml:2: splits[0][1]", "got `-2`", "splits.yaml:3: splits[1][0]", "got `65`"],
        ),
        ("all_to_all", "splits: [1, 2]", ["splits[0]: expected a list of sizes", "splits[1]"]),
        ("all_to_all", "splits: [[1, 1]]", ["expected 2 rows, one for each rank"]),
        ("all_to_all", "splits: [[0, 0], [0, 0]]", ["all parts are empty"]),
        ("all_gather", "splits: [[1, 2], [3, 4]]", ["splits[0]: expected an integer", "splits[1]"]),
        ("reduce_scatter", "splits: [1.5, true]", ["got `1.5`", "got `true`"]),
        ("all_gather", "sizes: [1, 2]", ["unknown field `sizes`", "the field `splits` is missing"]),
        ("all_gather", "", ["this file is empty", "write `splits: [3, 1, 0, 2]`"]),
        ("all_gather", "splits: [1", ["splits.yaml:1: the text ends too early"]),
    ],
)
def test_a_file_of_splits_is_refused_with_all_that_is_wrong(
    tmp_path: Path, invoke: Invoke, collective: str, text: str, wrong: list[str]
) -> None:
    file = tmp_path / "splits.yaml"
    file.write_text(text)
    done = invoke("comm", collective, "--world-size", 2, "--splits", file)
    assert done.exit_code == 2
    for each in wrong:
        assert each in done.output


@pytest.mark.parametrize(
    ("words", "wrong"),
    [
        (("all_reduce", "--splits", "a.yaml"), ["--splits: every rank of all_reduce has the same number"]),
        (("broadcast", "--source", 4), ["--source: there is no rank 4 among 4"]),
        (("all_gather", "--source", 1, "--splits", "a.yaml"), ["--source: all_gather begins at no rank"]),
        (("all_gather", "--splits", "/no/such.yaml"), ["there is no such file"]),
        (
            ("all_gather", "--world-size", 1000, "--device", "cpu"),
            ["needs 1000 ranks", "use a smaller --world-size"],
        ),
        (("gather",), ["all_to_all", "broadcast"]),
    ],
)
def test_options_are_refused_before_a_rank_starts(
    invoke: Invoke, words: tuple[Any, ...], wrong: list[str]
) -> None:
    done = invoke("comm", *words)
    assert done.exit_code == 2
    for each in wrong:
        assert each in " ".join(done.output.split())
