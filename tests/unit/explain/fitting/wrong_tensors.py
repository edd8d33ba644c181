"""Wrong tensors with handwritten numbers, and the facts that a diagnosis would have gathered about them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from moeverify.explain.fitting.axes import Axes
from moeverify.explain.fitting.components import Cell, Components
from moeverify.explain.fitting.first_divergence import Divergence, Search
from moeverify.explain.fitting.hypotheses import TIERS
from moeverify.explain.fitting.hypotheses.base import Hypothesis, Outcome
from moeverify.explain.fitting.inputs import DiagnosisInputs
from moeverify.explain.fitting.wrong_tensor import MODULE_KINDS, RankShard, WrongTensor
from moeverify.parallel.regions.region import Region
from moeverify.results.factor import Source
from moeverify.results.part import Tokens

WEIGHT = "layers.0.mlp.weight"
# Both axes have the same two ranks: numbers cannot tell them apart.
GROUPS = {"dp_replicate": [[0, 1]], "ep": [[0, 1]]}
AXES = Axes(GROUPS, [Source(name="dp_replicate", size=2), Source(name="ep", size=2)])
PARAMETERS = ("layers.0.up.weight", "layers.1.up.weight")


def draw(*shape: int, seed: int = 0) -> Tensor:
    """Return numbers that are no multiples of each other."""
    return torch.randn(*shape, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


def make_tensor(
    expected: Tensor,
    *locals_: Tensor | None,
    name: str = WEIGHT,
    kind: str = "gradient",
    step: int = 0,
    precision: torch.dtype = torch.float64,
) -> WrongTensor:
    """Return a tensor that every rank has in full: rank 0 the first of `locals_`, and so on."""
    region = Region.whole(expected.shape)
    shards = tuple(RankShard(rank, region, local) for rank, local in enumerate(locals_))
    return WrongTensor((step, kind, name), expected, shards, precision)


def make_sharded(
    expected: Tensor,
    *locals_: Tensor,
    name: str = WEIGHT,
    kind: str = "gradient",
    before: Any = None,
    precision: torch.dtype = torch.float64,
) -> WrongTensor:
    """Return a tensor of which every rank has equally many rows, in rank order."""
    size = expected.shape[0] // len(locals_)
    others = [range(length) for length in expected.shape[1:]]
    regions = [
        Region.box(expected.shape, (range(rank * size, (rank + 1) * size), *others))
        for rank in range(len(locals_))
    ]
    shards = tuple(
        RankShard(rank, region, local, None if before is None else before[rank])
        for rank, (region, local) in enumerate(zip(regions, locals_, strict=True))
    )
    return WrongTensor((0, kind, name), expected, shards, precision)


def make_origin(
    expected: Tensor,
    *locals_: Tensor,
    module: str = "layers.0.moe",
    direction: Any = "forward",
    first_micro_batch: int = 0,
) -> tuple[WrongTensor, DiagnosisInputs]:
    """Return a module's output, (rows, positions, width), whose inputs mark it as the first divergence."""
    tensor = make_tensor(expected, *locals_, name=module, kind=MODULE_KINDS[direction])
    end: Any = "output" if direction == "forward" else "input"
    origin = Divergence(direction, module, end, 1.0, (0, 1), tensor, first_micro_batch)
    right = {"forward": 3, "backward": 3}
    search = Search({direction: origin}, right, dict.fromkeys(right, 1e-16))
    return tensor, DiagnosisInputs(axes=AXES, search=search)


def make_components(num_cells: int = 4, *, names: Sequence[str] = PARAMETERS) -> Components:
    """Return parts of gradients of 40 numbers: lm is large, balance small and z smaller, as in training."""
    generator = torch.Generator().manual_seed(0)

    def vector(scale: float) -> dict[str, Tensor]:
        return {name: scale * torch.randn(40, generator=generator, dtype=torch.float64) for name in names}

    scales = {"lm": 1.0, "balance": 1e-3, "z": 1e-5}
    cells = tuple(Cell(Tokens(data_rank=rank), (rank,), (0,)) for rank in range(num_cells))
    parts = {term: [vector(scales[term]) for _ in cells] for term in scales}
    return Components(cells, parts, (10, 20, 30, 40)[:num_cells], tuple(names))


def make_golden(components: Components, name: str) -> Tensor:
    """Return the sum of all parts."""
    return torch.stack([components.term(term, name) for term in components.terms]).sum(dim=0)


def combine(components: Components, weigh: Callable[[str, int], float]) -> list[WrongTensor]:
    """Return gradients on two ranks with the given weight for each (term, cell)."""
    tensors = []
    for name in components.names:
        parts = [
            weigh(term, number) * components.parts[term][number][name]
            for term in components.terms
            for number in range(len(components.cells))
        ]
        total = torch.stack(parts).sum(dim=0)
        tensors.append(make_tensor(make_golden(components, name), total, total, name=name))
    return tensors


def make_inputs(
    *tensors: WrongTensor, components: Components | None = None, **fields: Any
) -> DiagnosisInputs:
    """Return the gathered facts about some tensors."""
    content = {"axes": AXES, "components": lambda: components, **fields}
    return DiagnosisInputs(tensors={tensor.key: tensor for tensor in tensors}, **content)


def find_hypothesis(name: str) -> Hypothesis:
    """Return a hypothesis by the name of its file."""
    return next(hypothesis for tier in TIERS for hypothesis in tier if hypothesis.name == name)


@dataclass(frozen=True)
class Refused:
    """What a hypothesis says that does not explain a tensor."""

    explanation: None = None
    observations: tuple[()] = ()


def examine(name: str, tensor: WrongTensor, inputs: DiagnosisInputs | None = None) -> Outcome | Refused:
    """Return the result of a hypothesis for a tensor in its scope."""
    hypothesis = find_hypothesis(name)
    inputs = inputs if inputs is not None else make_inputs(tensor)
    assert hypothesis.applies(tensor, inputs)
    return hypothesis.test([tensor], inputs) or Refused()
