"""Outputs of modules, recorded in this process: rows in other passes, recomputation, token order, size."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from moeverify.parallel.regions.region import Region
from moeverify.results.finding import Finding
from moeverify.results.run import CaseResult
from moeverify.scripts.compare.compare import compare_runs
from moeverify.scripts.record.lines import Output
from moeverify.scripts.record.outputs import ModuleOutputs, choose_stride, split_rows
from moeverify.scripts.record.rank_file import RankFile
from moeverify.scripts.record.read import RecordedRun
from moeverify.scripts.record.recorder import ScriptRecorder
from moeverify.scripts.record.settings import Settings
from moeverify.train.calls.hooks import Hooks, install

pytestmark = pytest.mark.slow

ROWS, LENGTH, WIDTH = 4, 6, 8
Record = Callable[..., RecordedRun]


@pytest.fixture
def record(tmp_path: Path) -> Iterator[Record]:
    installed: list[Hooks] = []

    def run(*, limit: int = 2**20, **options: object) -> RecordedRun:
        out = tmp_path / str(len(list(tmp_path.iterdir())))
        recorder = ScriptRecorder(Settings(out=out, first=0, last=1, outputs=True, limit=limit), 0, 1)
        installed.append(install(recorder))
        train(**options)
        recorder.close()
        installed.pop().remove()
        return RecordedRun.read(out)

    yield run
    for hooks in installed:
        hooks.remove()


class Sorted(nn.Module):
    """A linear map of tokens that are flattened and reordered before it, and restored after it."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(WIDTH, WIDTH)
        self.order = torch.arange(ROWS * LENGTH)

    def forward(self, x: Tensor) -> Tensor:
        flat = x.reshape(-1, WIDTH)
        order = self.order[self.order < len(flat)]
        return torch.zeros_like(flat).index_copy(0, order, self.inner(flat[order])).reshape(x.shape)


class Block(nn.Module):
    """One module that is called twice, and one that sees several tokens together."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.twice = nn.Linear(WIDTH, WIDTH)
        self.sorted = Sorted()
        self.factor = 1.0

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.twice(self.twice(x)) * self.factor
        return x + self.sorted(self.norm(x))


class Model(nn.Module):
    """Two blocks, optionally checkpointed or with positions before rows."""

    def __init__(self, recompute: str, is_turned: bool) -> None:
        super().__init__()
        self.embed = nn.Embedding(16, WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(2))
        self.recompute, self.is_turned = recompute, is_turned

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embed(tokens)
        x = x.transpose(0, 1) if self.is_turned else x
        for block in self.blocks:
            reentrant = self.recompute == "reentrant"
            x = (
                checkpoint(block, x, use_reentrant=reentrant)
                if self.recompute and torch.is_grad_enabled()
                else block(x)
            )
        return x


def train(
    rows: int = ROWS,
    change: Callable[[Model], object] = lambda model: None,
    recompute: str = "",
    is_turned: bool = False,
) -> None:
    """Train two steps of ROWS rows, with the given number in a forward pass."""
    torch.manual_seed(0)
    model = Model(recompute, is_turned)
    change(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for _ in range(2):
        tokens = torch.randint(16, (ROWS, LENGTH))
        for part in tokens.split(rows):
            (model(part).square().mean() * rows / ROWS).backward()
        with torch.no_grad():
            model(tokens)  # an evaluation is not part of the step
        optimizer.step()
        optimizer.zero_grad()


def origin(result: CaseResult) -> Finding:
    (found,) = (finding for finding in result.findings if not finding.follows)
    return found


def count(result: CaseResult) -> int:
    return next(check.tensors for check in result.checks if check.name == "activations")


@pytest.mark.parametrize("recompute", ["", "reentrant", "again"])
@pytest.mark.parametrize("is_turned", [False, True])
def test_rows_are_compared_wherever_they_are_computed(
    record: Record, recompute: str, is_turned: bool
) -> None:
    expected = record(is_turned=is_turned)
    actual = record(rows=2, recompute=recompute, is_turned=is_turned)
    parts: list[tuple[int, int]] = []
    result = compare_runs(expected, actual, on_part=lambda *part: parts.append(part))
    assert parts == [(0, 2), (1, 2)]
    assert result.verdict == "pass", result.findings
    # In each of two steps the input and the output of the model, the embedding and six calls per block. On
    # the first call of the model, no hook sees its input yet.
    num_lines = 2 * 2 * (2 + 2 * 6)
    assert count(result) == len(expected.ranks[0].outputs) == num_lines - 1
    assert len(actual.ranks[0].outputs) == 2 * num_lines - 1  # nothing that is recomputed


def double_inner(model: Model) -> None:
    model.blocks[1].sorted.inner.register_forward_hook(lambda module, inputs, output: output * 2)


def double_between(model: Model) -> None:
    model.blocks[1].factor = 2.0


def double_one_token(model: Model) -> None:
    def change(module: nn.Module, inputs: object, output: Tensor) -> Tensor:
        scale = torch.ones_like(output)
        scale[0, 0] = 2.0
        return output * scale

    model.blocks[0].norm.register_forward_hook(change)


@pytest.mark.parametrize(
    ("change", "tensor", "module", "inner"),
    [
        (double_inner, "blocks.1.sorted.inner", "blocks.1.sorted.inner", ""),
        (double_between, "blocks.1.norm input", "blocks.1", "blocks.1.norm"),
        (double_one_token, "blocks.0.norm", "blocks.0.norm", ""),
    ],
)
def test_the_first_divergence_is_the_innermost_module_whose_input_matches(
    record: Record, change: Callable[[Model], object], tensor: str, module: str, inner: str
) -> None:
    found = origin(compare_runs(record(), record(change=change)))
    assert (found.check, found.tensor, found.step) == ("activations", tensor, 0)
    assert found.explanation is not None
    assert (found.explanation.subject.module, found.explanation.subject.inner) == (module, inner)


def turn_tokens(model: Model) -> None:
    for block in model.blocks:
        block.sorted.order = torch.arange(ROWS * LENGTH).flip(0)


def test_tokens_in_another_order_inside_of_a_module_are_no_divergence(record: Record) -> None:
    result = compare_runs(record(), record(change=turn_tokens))
    assert result.verdict == "pass", result.findings
    assert any(check.note for check in result.checks if check.name == "activations")


def test_a_wrong_module_is_named_where_tokens_are_in_another_order_too(record: Record) -> None:
    def change(model: Model) -> None:
        turn_tokens(model)
        double_between(model)

    found = origin(compare_runs(record(), record(change=change)))
    assert found.tensor == "blocks.1.norm input"


def test_of_a_large_tensor_every_nth_position_is_kept(record: Record) -> None:
    size = ROWS * LENGTH * WIDTH * 4
    expected, actual = record(limit=size // 2), record(limit=size // 2, rows=2)
    assert {line.stride for line in expected.ranks[0].outputs} == {1, 2}
    assert {line.stride for line in actual.ranks[0].outputs} == {1}
    result = compare_runs(expected, actual)
    assert result.verdict == "pass", result.findings
    found = origin(compare_runs(expected, record(limit=size // 4, change=double_inner)))
    assert found.tensor == "blocks.1.sorted.inner"


def test_a_run_without_outputs_is_compared_without_them(record: Record) -> None:
    expected, actual = record(), record()
    actual.ranks[0].outputs.clear()
    result = compare_runs(expected, actual)
    assert result.verdict == "pass"
    assert "activations" not in {check.name for check in result.checks}


@pytest.mark.parametrize(
    "shape", [(ROWS + 1, LENGTH, WIDTH), (ROWS * LENGTH + 1, WIDTH), (ROWS, LENGTH + 1, 1), (9,)]
)
def test_what_is_no_row_of_the_batch_is_left_out(shape: tuple[int, ...]) -> None:
    assert split_rows(torch.ones(shape), Region.whole(shape), (ROWS, LENGTH)) is None


def test_every_nth_position_stays_below_the_limit() -> None:
    assert [choose_stride(size, 10) for size in (1, 10, 11, 20, 21)] == [1, 1, 2, 2, 4]


def test_a_tensor_that_a_module_changes_in_place_is_hashed_again(tmp_path: Path) -> None:
    lines: list[Output] = []
    file = RankFile(tmp_path, 0)
    file.add = lines.append  # type: ignore[method-assign, assignment]
    outputs = ModuleOutputs(lambda: file, 2**20, lambda error: pytest.fail(str(error)))
    same, relu = nn.Identity(), nn.ReLU(inplace=True)
    outputs.watch([("same", same), ("relu", relu)])
    outputs.begin(0, 0, (ROWS, LENGTH))
    relu(same(torch.randn(ROWS, LENGTH, WIDTH)))
    file.close()
    assert [len({line.bits for line in lines[:count]}) for count in (1, 3, 4)] == [1, 1, 2]
