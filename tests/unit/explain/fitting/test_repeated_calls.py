"""Modules that are called more than once in a micro-batch, of which a pipeline stage runs some calls alone."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from wrong_tensors import draw

from moeverify.explain.fitting.first_divergence import Search, find_origins
from moeverify.explain.fitting.rank_readings import RankReadings
from moeverify.train.module_taps import Tap


class Model(nn.Module):
    """A model that takes its table for the first and for the last values, or its stages one after the other."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.table, self.inner = nn.Linear(4, 4), nn.Linear(4, 4)

    def begin(self, x: Tensor) -> Tensor:
        y: Tensor = self.inner(self.table(x))
        return y

    def end(self, x: Tensor, y: Tensor) -> Tensor:
        return y + self.table(x.flip(1))

    def forward(self, x: Tensor) -> Tensor:
        return self.end(x, self.begin(x))


def read(model: Model, *, is_stage: bool = False) -> Tap:
    tap, x = Tap(model.double(), 2, 3, scale=1.0, limit=1 << 20), draw(2, 3, 4)
    with tap.reading():
        if is_stage:
            model.end(x, draw(2, 3, 4, seed=1)).sum().backward()
        else:
            model(x).sum().backward()
    return tap


def search(tap: Tap) -> Search:
    ranks = [RankReadings(tap.readings, [(range(2), range(3))], frozenset(tap.silent))]
    return find_origins(read(Model()).readings, ranks, {0: {}}, 1, torch.float64)


def test_a_stage_that_runs_only_the_last_call_of_a_module_has_no_wrong_module() -> None:
    assert search(read(Model(), is_stage=True)).origins == {}


def test_modules_that_are_called_once_are_judged_beside_it() -> None:
    wrong = Model()
    wrong.inner.weight.data *= 2
    assert search(read(wrong)).origins["forward"].module == "inner"


def test_a_recomputed_module_is_called_once() -> None:
    model = Model()
    tap = Tap(model.double(), 2, 3, scale=1.0, limit=1 << 20)
    with tap.reading():
        torch.utils.checkpoint.checkpoint(model.begin, draw(2, 3, 4), use_reentrant=False).sum().backward()
    assert {each.module for each in tap.readings} == {"table", "inner"}
