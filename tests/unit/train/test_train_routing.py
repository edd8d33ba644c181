"""Observation of routers whose choices differ from the golden's under a replay."""

from __future__ import annotations

from collections.abc import Mapping
from types import SimpleNamespace
from typing import Any, cast

import torch
from torch import Tensor

from moeverify.model.router import RouterRecord
from moeverify.parallel.regions.region import Region
from moeverify.results.checks import Kind
from moeverify.train.routing import observe_routing


class Golden:
    """Routing of two tokens, each to two of four experts."""

    values: Mapping[str, Tensor] = {
        Kind.ROUTER_IDS: torch.tensor([[[0, 1], [2, 3]]]),
        Kind.ROUTER_MARGIN: torch.tensor([[0.5, 0.25]]),
    }

    def read(self, step: int, kind: str, name: str, region: Region) -> Tensor:
        return region.take(self.values[kind])


def observe(ids: Tensor) -> dict[str, tuple[Tensor, Region]]:
    """Return what a router with this own choice shows; the weights are those of the replayed choice."""
    record = RouterRecord(ids, torch.ones(1, 2, 2), torch.zeros(4), torch.zeros(1, 2))
    module = SimpleNamespace(record=record, spec=SimpleNamespace(top_k=2))
    router = SimpleNamespace(name="r", module=module, positions=lambda positions: positions)
    batch = SimpleNamespace(share=SimpleNamespace(rows=range(1), positions=range(2)))
    recipe = SimpleNamespace(data=SimpleNamespace(batch=1, seq_len=2))
    shown: dict[str, tuple[Tensor, Region]] = {}

    def note(step: int, kind: str, name: str, local: Tensor, region: Region) -> None:
        shown[kind] = (local, region)

    inputs: list[Any] = [recipe, SimpleNamespace(routers=[router]), batch, SimpleNamespace(observe=note)]
    observe_routing(*inputs, 0, cast(Any, Golden()))
    return shown


def test_tokens_that_would_choose_others_are_shown_with_the_margin_of_the_golden() -> None:
    flips, _ = observe(torch.tensor([[[1, 0], [2, 1]]]))[Kind.ROUTER_FLIPS]
    assert flips.tolist() == [[0.0, 0.25]]


def test_another_number_of_choices_differs_for_each_token() -> None:
    shown = observe(torch.tensor([[[0, 1, 2], [2, 3, 0]]]))
    assert shown[Kind.ROUTER_FLIPS][0].tolist() == [[0.5, 0.25]]
    weights, region = shown[Kind.ROUTER_WEIGHTS]
    assert tuple(weights.shape) == region.local_shape
