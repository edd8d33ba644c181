"""Floating-point inputs of two recorded runs, such as images: their rows are those of the global batch."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from moeverify.results.script import BatchFacts
from moeverify.scripts.compare.batch import find_other_rows
from moeverify.scripts.compare.float_rows import add_float_rows
from moeverify.scripts.record.read import RecordedRun
from moeverify.scripts.record.recorder import ScriptRecorder
from moeverify.scripts.record.settings import Settings
from moeverify.train.calls.hooks import install

IMAGES = torch.rand(4, 3, 8, generator=torch.Generator().manual_seed(0)) + 0.1


def record(folder: Path, *batches: Tensor) -> RecordedRun:
    """Return a run of one step, whose ranks get these batches in a list."""
    for rank, batch in enumerate(batches):
        recorder = ScriptRecorder(Settings(out=folder, last=0), rank, len(batches))
        hooks = install(recorder)
        model, criterion = Net(), nn.MSELoss()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        output = model([batch])
        # The target is no input of a model, though it is computed on each rank.
        criterion(output, output.detach() + 1.0).backward()
        optimizer.step()
        recorder.close()
        hooks.remove()
    return RecordedRun.read(folder)


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8)

    def forward(self, images: Sequence[Tensor]) -> Tensor:
        output: Tensor = self.linear(images[0])
        return output


@pytest.mark.parametrize(
    ("batches", "ranks"),
    [
        ((IMAGES[[2, 0]] * (1 + 1e-6), IMAGES[[1, 3]]), ()),  # rounded, in another order
        ((IMAGES[:2], IMAGES[2:] + 0.01), (1,)),
        ((IMAGES[:2], IMAGES[:2]), (0, 1)),
        ((IMAGES, IMAGES.exp()), ()),  # a later stage of a pipeline gets activations
        ((IMAGES.nan_to_num(), IMAGES), ()),  # two ranks that work together
    ],
)
def test_rows_are_compared_up_to_rounding(
    tmp_path: Path, batches: tuple[Tensor, ...], ranks: tuple[int, ...]
) -> None:
    one, many = record(tmp_path / "one", IMAGES), record(tmp_path / "many", *batches)
    found = list(find_other_rows(*add_float_rows(one, many, {0: 2.0**-13}), [0]))
    assert [finding.ranks for finding in found] == ([ranks] if ranks else [])
    assert [finding.tensor for finding in found] == (["input 0.0"] if ranks else [])
    assert all(isinstance(finding.facts, BatchFacts) and finding.facts.num_missing == 2 for finding in found)


def test_an_input_has_the_line_that_drew_it(tmp_path: Path) -> None:
    def draw() -> Tensor:
        return IMAGES[:2].clone()

    recorder = ScriptRecorder(Settings(out=tmp_path / "run", last=0), 0, 1)
    hooks = install(recorder)
    model = Net()
    batch = draw()
    model([batch]).sum().backward()
    torch.optim.SGD(model.parameters(), lr=0.1).step()
    recorder.close()
    hooks.remove()
    lines = Path(__file__).read_text().splitlines()
    place = next(number for number, line in enumerate(lines, 1) if line.strip() == "batch = draw()")
    sites = {line.name: line.site for line in RecordedRun.read(tmp_path / "run").ranks[0].drawn}
    assert sites == {"input 0.0": f"{Path(__file__).name}:{place}", "generator cpu": ""}
