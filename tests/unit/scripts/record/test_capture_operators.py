"""Every operator of one step of a script is recorded, and two recordings are compared by operator."""

from __future__ import annotations

import gzip
import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from moeverify.errors import FormatError
from moeverify.results.operator_table import OperatorTable
from moeverify.scripts.compare.operators import compare_operators
from moeverify.scripts.record.operators import LIST_FILE, VALUES_FILE, read_operators
from moeverify.scripts.record.recorder import ScriptRecorder
from moeverify.scripts.record.settings import Settings
from moeverify.train.calls.hooks import install

Record = Callable[..., Path]


class Model(nn.Module):
    """A layer with a configurable number."""

    def __init__(self, factor: float) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(6, 8), nn.Linear(8, 3)
        self.factor = factor

    def forward(self, rows: Tensor) -> Tensor:
        return self.down(torch.tanh(self.up(rows)) * self.factor)


def train(factor: float = 1.5, rows: slice = slice(None), num_steps: int = 3) -> Model:
    """Train on the same rows in each step, and return the model."""
    torch.manual_seed(0)
    model = Model(factor).double()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    batch = torch.randn(4, 6, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    for _ in range(num_steps):
        optimizer.zero_grad()
        model(batch[rows]).square().sum().backward()
        optimizer.step()
    return model


@pytest.fixture
def record(tmp_path: Path) -> Iterator[Record]:
    """Return a function that records a script."""
    installed = []

    def run(
        name: str, *, rank: int = 0, world_size: int = 1, step: int = 1, limit: int = 2**20, **options: Any
    ) -> Path:
        recorder = ScriptRecorder(
            Settings(out=tmp_path / name, first=0, last=2, operators=step, limit=limit), rank, world_size
        )
        hooks = install(recorder)
        installed.append((recorder, hooks))
        train(**options)
        recorder.close()
        hooks.remove()
        return tmp_path / name

    yield run
    for recorder, hooks in installed:
        recorder.close()
        hooks.remove()


def list_outcomes(table: OperatorTable, rank: int = 0) -> list[tuple[str, str, str]]:
    """Return module, operator and outcome of the computed operators."""
    return [
        (op.module, op.name.partition(".")[0], each.outcome)
        for op, each in zip(table.actual[rank].operators, table.compared[rank], strict=True)
        if op.phase == "forward" and op.name.startswith(("mm", "tanh", "mul", "add"))
    ]


def test_one_step_is_recorded_from_its_forward_pass_to_its_update(record: Record) -> None:
    step, (listed,) = read_operators(record("run"))
    operators = listed.operators.operators
    assert step == 1
    assert [op.phase for op in operators] == sorted(
        (op.phase for op in operators), key=["forward", "backward", "step"].index
    )
    assert sum(op.name.startswith("tanh.") for op in operators) == 1  # of three steps
    files = {Path(site.file).name for site in listed.operators.sites}
    assert files == {Path(__file__).name}  # no operator of the recorder's own computations
    assert "up.weight" in {each for op in operators for each in op.inputs}


def test_the_recorded_script_trains_as_it_would(record: Record) -> None:
    right = train()
    record("run")
    for mine, theirs in zip(train().parameters(), right.parameters(), strict=True):
        assert torch.equal(mine, theirs)


def test_a_run_equals_itself(record: Record) -> None:
    table = compare_operators(record("one"), record("two"))
    assert {each.outcome for each in table.compared[0]} <= {"match", "uncompared"}
    assert len(list_outcomes(table)) > 2


def test_ranks_with_other_rows_match_until_the_wrong_number(record: Record) -> None:
    one = record("one", step=0)
    for rank in (0, 1):
        many = record(
            "many", step=0, rank=rank, world_size=2, rows=slice(2 * rank, 2 * rank + 2), factor=1.75
        )
    table = compare_operators(one, many)
    assert (table.title, table.step, table.bound) == ("many against one", 0, 1e-8)
    for rank in (0, 1):
        outcomes = [
            outcome
            for module, name, outcome in list_outcomes(table, rank)
            if module == "up" or name == "tanh"
        ]
        assert set(outcomes) == {"match"}
        by_name = {name: outcome for module, name, outcome in list_outcomes(table, rank) if module == ""}
        assert by_name["mul"] == "multiple"
        assert list_outcomes(table, rank)[-1][0::2] == ("down", "differs")


def test_large_tensors_are_not_kept(record: Record) -> None:
    _, (listed,) = read_operators(record("run", limit=8 * 8 * 4 - 1))
    sizes = [each.numel() for results in listed.data for each in results if each is not None]
    assert max(sizes) < 8 * 4
    assert any(each is None for results in listed.data for each in results)


def spoil(folder: Path, change: Callable[[dict[str, Any]], object]) -> None:
    path = folder / LIST_FILE.format(rank=0)
    content = json.loads(gzip.decompress(path.read_bytes()))
    change(content)
    path.write_bytes(gzip.compress(json.dumps(content).encode()))


@pytest.mark.parametrize(
    ("change", "told"),
    [
        (lambda content: content.update(version=7), "version: this moeverify reads 2"),
        (lambda content: content.update(step="x"), "step: Input should be"),
        (lambda content: content.update(world_size=2), "lacks the operators of the ranks 1 of 2"),
        (lambda content: content.update(offsets=[]), "offsets: not as many as there are results"),
        (lambda content: content["taken"].__setitem__(0, [[10**6, 0]]), "taken: no such result"),
        (lambda content: content["operators"]["operators"][0].update(sites=[99]), "sites: no such call site"),
        (
            lambda content: content["offsets"].__setitem__(0, [10**9]),
            "damaged at operator 0: it ends too early",
        ),
    ],
)
def test_a_wrong_field_is_told_by_its_name(
    record: Record, change: Callable[[dict[str, Any]], object], told: str
) -> None:
    folder = record("run")
    spoil(folder, change)
    with pytest.raises(FormatError, match=told) as raised:
        read_operators(folder)
    assert raised.value.remedy == "record it with `moeverify watch --operators STEP`"


def test_a_run_without_operators_or_of_another_step_is_refused(record: Record, tmp_path: Path) -> None:
    one, other = record("one"), record("other", step=0)
    with pytest.raises(FormatError, match=r"step 1, .* step 0; record the same step of both"):
        compare_operators(one, other)
    (other / LIST_FILE.format(rank=0)).unlink()
    (other / VALUES_FILE.format(rank=0)).unlink()
    with pytest.raises(FormatError, match="has no operators"):
        compare_operators(one, other)
    with pytest.raises(FormatError, match="is no folder"):
        compare_operators(one, tmp_path / "nowhere")
