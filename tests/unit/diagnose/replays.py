"""A small model that is read right and then with something wrong in it, and what a replay says of the difference."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any, Literal

import pytest
import torch
from torch import Tensor

from moeverify.case.presets import PRESETS
from moeverify.case.schema import ReferenceModel
from moeverify.diagnose.first_divergence import Origin, find_origins
from moeverify.diagnose.rank_readings import RankReadings
from moeverify.diagnose.replay.attention import AttentionFormula
from moeverify.diagnose.replay.attention_gradient import AttentionGradientFormula
from moeverify.diagnose.replay.chunks import Chunks
from moeverify.diagnose.replay.experts import ExpertLayout
from moeverify.diagnose.replay.formulas import RightModules
from moeverify.diagnose.replay.language import Found, find_variant
from moeverify.diagnose.wrong_tensor import MODULE_KINDS, RankShard, WrongTensor
from moeverify.layout.region import Region
from moeverify.model.attention import Attention, attend
from moeverify.model.init import initialize
from moeverify.model.rope import compute_rotation, rotate
from moeverify.model.transformer import Transformer
from moeverify.train.module_taps import Reading, Tap

ROWS, LENGTH = 2, 8
# Two ranks that divide the experts, each with one row, and the slices of each expert.
CALL = (torch.arange(LENGTH), torch.arange(LENGTH, 2 * LENGTH))
EXPERTS = ExpertLayout((0, 1), (0, 1), 2, (CALL,))
ZIGZAG = ((0, 1, 6, 7), (2, 3, 4, 5))


@cache
def make_model(preset: str) -> Transformer:
    spec = ReferenceModel(**{**PRESETS[preset], "num_layers": 2})
    model = Transformer(spec)
    initialize(model, spec, 0)
    return model


TOKENS = torch.randint(0, 90, (ROWS, LENGTH), generator=torch.Generator().manual_seed(0))


def read(model: Transformer, positions: Tensor | None = None) -> list[Reading]:
    tap = Tap(model, ROWS, LENGTH, scale=1.0, limit=1 << 30)
    with tap.reading(), torch.no_grad():
        model(TOKENS, positions)
    return tap.readings


@cache
def read_right(preset: str) -> list[Reading]:
    return read(make_model(preset))


def break_model(
    preset: str, patch: pytest.MonkeyPatch, target: Any, name: str, wrong: Any
) -> tuple[Origin, RightModules]:
    """Return where one rank first differs while an attribute is replaced, and the right modules."""
    model, right = make_model(preset), read_right(preset)
    with patch.context() as within:
        within.setattr(target, name, wrong)
        readings = RankReadings(read(model), [(range(ROWS), range(LENGTH))])
    search = find_origins(right, [readings], {0: {}}, 1, torch.float64)
    modules = RightModules(model, right, Chunks([range(LENGTH)]), None, EXPERTS, TOKENS)
    return search.origins["forward"], modules


def name_changes(found: Found | None) -> list[list[tuple[str, str]]] | None:
    """Return part and way of the changes of all variants."""
    return (
        None if found is None else [[(each.part, each.way) for each in changes] for changes in found.variants]
    )


class Heads:
    """Queries, keys and values of an attention, and its output as two ranks of a context group compute it."""

    def __init__(self) -> None:
        self.module = make_model("stress").layers["0"].attention
        assert isinstance(self.module, Attention)
        self.x = torch.randn(
            ROWS, LENGTH, 32, dtype=torch.float64, generator=torch.Generator().manual_seed(1)
        )
        self.formula = AttentionFormula(self.module, self.x, None, Chunks(ZIGZAG))
        self.positions = torch.arange(LENGTH).expand(ROWS, LENGTH)
        self.q, self.k, self.v = self.formula.q, self.formula.k, self.formula.v

    def turn(self, x: Tensor, positions: Tensor | None = None, theta: float = 10000.0) -> Tensor:
        at = self.positions if positions is None else positions
        return rotate(x, compute_rotation(at, 8, theta))

    def attend(self, own: Tensor, **others: Tensor) -> Tensor:
        """Return the output of the queries at some positions, with some of what goes in replaced."""
        given = {"q": self.turn(self.q), "k": self.turn(self.k), "v": self.v, "key_positions": self.positions}
        given |= {"query_positions": own.expand(ROWS, len(own))} | others
        q = given["q"] if given["q"].shape[1] == len(own) else given["q"][:, own]
        return attend(q, given["k"], given["v"], given["query_positions"], given["key_positions"])

    def explain(
        self,
        compute: Callable[[int, Tensor], Tensor],
        dtype: torch.dtype = torch.float64,
        bound: float = 1e-9,
    ) -> Found | None:
        """Return the variant that two ranks compute; `compute` is given a rank and its positions."""
        expected = self.attend(torch.arange(LENGTH)).flatten(2)
        shards = []
        for rank, part in enumerate(ZIGZAG):
            region = Region.box(expected.shape, (range(ROWS), part, range(expected.shape[2])))
            shards.append(RankShard(rank, region, compute(rank, torch.tensor(part)).flatten(2).to(dtype)))
        tensor = WrongTensor((0, MODULE_KINDS["forward"], "o_proj"), expected, tuple(shards), dtype)
        return find_variant(self.formula, tensor, bound)

    def explain_gradient(
        self, of: Literal["q", "k", "v"], compute: Callable[[int, Tensor, Tensor, Tensor], Tensor]
    ) -> Found | None:
        """Return the variant of what is passed back; `compute` has rank, positions, the heads, and their gradient."""
        gradient = torch.randn(
            ROWS, LENGTH, 64, dtype=torch.float64, generator=torch.Generator().manual_seed(2)
        )
        like = {"q": self.q, "k": self.k, "v": self.v}[of]
        formula = AttentionGradientFormula(self.formula, of, gradient, like)
        expected = self.pull_back(of, gradient)
        shards = []
        for rank, part in enumerate(ZIGZAG):
            region = Region.box(expected.shape, (range(ROWS), part, *map(range, expected.shape[2:])))
            shards.append(RankShard(rank, region, compute(rank, torch.tensor(part), expected, gradient)))
        tensor = WrongTensor((0, MODULE_KINDS["backward"], "k_norm"), expected, tuple(shards))
        return find_variant(formula, tensor, 1e-9)

    def pull_back(self, of: str, gradient: Tensor, queries: Tensor | None = None, mask: int = 1) -> Tensor:
        """Return the gradient of queries, keys or values, of some queries or of all."""
        leaves = {name: getattr(self, name).clone().requires_grad_() for name in ("q", "k", "v")}
        own = torch.arange(LENGTH) if queries is None else queries
        output = self.attend(
            own,
            q=self.turn(leaves["q"]),
            k=self.turn(leaves["k"]),
            v=leaves["v"],
            key_positions=self.positions * mask,
        )
        return torch.autograd.grad(output.flatten(2), leaves[of], gradient[:, own])[0]
