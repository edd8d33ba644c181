"""Batches and generator states of two ranks, replayed by one device that draws others."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import nn
from torch.nn import functional

from moeverify.scripts.record.read import RecordedRun
from moeverify.scripts.record.recorder import ScriptRecorder
from moeverify.scripts.record.settings import Settings
from moeverify.train.calls.hooks import install

pytestmark = pytest.mark.slow


def get_batch(data: torch.Tensor, num_rows: int) -> tuple[torch.Tensor, torch.Tensor]:
    start = int(torch.randint(len(data) - 5 * num_rows, ()))
    part = data[start : start + 4 * num_rows + 1]  # views of the data set, as in many scripts
    return part[:-1].view(num_rows, 4), part[1:].view(num_rows, 4)


def train(settings: Settings, rank: int, *, ranks: int, passes: int, rows: int = 2) -> list[float]:
    """Train one rank, and return its losses. The labels are no input of the model."""
    recorder = ScriptRecorder(settings, rank, ranks)
    hooks = install(recorder)
    torch.manual_seed(0)
    model = nn.Sequential(nn.Embedding(8, 4), nn.Dropout(0.5), nn.Linear(4, 8))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    torch.manual_seed(7 + rank + 10 * ranks)
    data, losses = torch.randint(8, (200,)), []
    original = data.clone()
    for _ in range(2):
        for _ in range(passes):
            tokens, labels = get_batch(data, rows)
            loss = functional.cross_entropy(model(tokens).transpose(1, 2), labels)
            loss.backward()
            losses.append(loss.item())
        optimizer.step()
    recorder.close()
    hooks.remove()
    assert torch.equal(data, original)
    return losses


@pytest.fixture(scope="module")
def drawn(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[list[float]]]:
    folder = tmp_path_factory.mktemp("replay") / "ranks"
    settings = Settings(out=folder, last=1)
    return folder, [train(settings, rank, ranks=2, passes=2) for rank in range(2)]


def notes_of(folder: Path) -> set[str]:
    return {note.about for note in RecordedRun.read(folder).ranks[0].notes}


def test_the_same_passes_have_the_rows_labels_and_masks_of_the_ranks(
    drawn: tuple[Path, list[list[float]]], tmp_path: Path
) -> None:
    folder, (first, second) = drawn
    found = train(Settings(out=tmp_path / "one", last=1, replay=folder), 0, ranks=1, passes=4)
    # Passes in order, and in each of them the ranks in order.
    assert found == [loss for pair in zip(first, second, strict=True) for loss in pair]
    sites = {rows.site for rows in RecordedRun.read(tmp_path / "one").ranks[0].rows}
    assert {site.partition(":")[0] for site in sites} == {Path(__file__).name}
    assert "mixed" not in notes_of(tmp_path / "one")


def test_wider_passes_have_the_rows_labels_and_masks_of_all_ranks(
    drawn: tuple[Path, list[list[float]]], tmp_path: Path
) -> None:
    folder, ranks = drawn
    found = train(Settings(out=tmp_path / "one", last=1, replay=folder), 0, ranks=1, passes=2, rows=4)
    assert found == pytest.approx([sum(pair) / 2 for pair in zip(*ranks, strict=True)])
    assert "mixed" not in notes_of(tmp_path / "one")


def test_parts_of_passes_have_the_rows_of_all_ranks_and_no_generators(
    drawn: tuple[Path, list[list[float]]], tmp_path: Path
) -> None:
    train(Settings(out=tmp_path / "one", last=1, replay=drawn[0]), 0, ranks=1, passes=8, rows=1)
    one, many = RecordedRun.read(tmp_path / "one"), RecordedRun.read(drawn[0])
    rows = [
        sorted(row for rank in run.ranks for line in rank.rows if line.step == 0 for row in line.rows)
        for run in (one, many)
    ]
    assert rows[0] == rows[1]
    assert "mixed" in notes_of(tmp_path / "one")


def test_a_device_that_asks_for_more_rows_stops_with_both_numbers(
    drawn: tuple[Path, list[list[float]]], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    losses = train(Settings(out=tmp_path / "one", last=1, replay=drawn[0]), 0, ranks=1, passes=5)
    assert len(losses) == 10  # the script goes on
    assert "asks for 2 rows (4,) of input 0, and 0 rows (4,) are left" in capsys.readouterr().err


class Denoiser:
    """A loss with noise that the model does not get alone, and a teacher."""

    def __init__(self) -> None:
        self.teacher = nn.Linear(4, 4)

    def compute(self, model: nn.Module, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        noise = torch.randn_like(x)
        with torch.no_grad():
            goal = self.teacher(x)
        output = model(x + noise)
        return functional.mse_loss(output, noise), goal


def denoise(settings: Settings, rank: int, *, ranks: int, rows: int) -> tuple[float, torch.Tensor]:
    """Train one step, and return the loss and the output of the teacher."""
    recorder = ScriptRecorder(settings, rank, ranks)
    hooks = install(recorder)
    torch.manual_seed(0)
    model, denoiser = nn.Linear(4, 4), Denoiser()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    torch.manual_seed(7 + rank + 10 * ranks)
    loss, goal = denoiser.compute(model, torch.rand(rows, 4))
    loss.backward()
    optimizer.step()
    recorder.close()
    hooks.remove()
    return loss.item(), goal


def test_noise_of_a_loss_is_replayed_and_the_output_of_another_module_is_not(tmp_path: Path) -> None:
    folder = tmp_path / "ranks"
    ranks = [denoise(Settings(out=folder, last=0), rank, ranks=2, rows=2) for rank in range(2)]
    loss, goal = denoise(Settings(out=tmp_path / "one", last=0, replay=folder), 0, ranks=1, rows=4)
    assert loss == pytest.approx(sum(each for each, _ in ranks) / 2)
    assert not torch.equal(goal, torch.cat([each for _, each in ranks]))
