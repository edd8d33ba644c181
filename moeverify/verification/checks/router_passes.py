"""Observation of the reference routers' forward passes, and the tokens that they should receive."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Generic, TypeVar

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from moeverify.cases.schema import MoE, Recipe
from moeverify.model.router import Router, Routing
from moeverify.parallel.regions.local_shard import logical_name
from moeverify.parallel.regions.placement import local_part
from moeverify.parallel.regions.region import Region
from moeverify.parallel.regions.unseen import unseen
from moeverify.results.checks import Kind
from moeverify.train.data import make_batch, whole_share
from moeverify.verification.checks.base import R, Watch

P = TypeVar("P")


class RouterPasses(Watch[R]):
    """Hooks on every forward pass of the reference routers on this rank, with the weight that was used."""

    def __init__(self, model: nn.Module) -> None:
        self.step = -1
        self._weights: dict[nn.Module, Tensor] = {}
        self._handles: list[RemovableHandle] = []
        for name, module in model.named_modules():
            if isinstance(module, Router):
                self._handles.append(module.register_forward_pre_hook(unseen(self._keep_weight)))
                self._handles.append(
                    module.register_forward_hook(
                        unseen(self._make_hook(logical_name(name))), with_kwargs=True
                    )
                )

    def begin_step(self, step: int) -> None:
        """Record the number of the step; see `Watch`."""
        self.step = step

    def close(self) -> None:
        """Remove the hooks; see `Watch`."""
        for handle in self._handles:
            handle.remove()
        self._handles = []
        self._weights = {}

    def see(
        self, name: str, router: Router, weight: Tensor, x: Tensor, valid: Tensor | None, routing: Routing
    ) -> None:
        """Handle one pass. Shapes: weight (E, H) float64, x (B, S, H), valid (B, S); local tokens only."""
        raise NotImplementedError

    @torch.no_grad()
    def _keep_weight(self, module: nn.Module, _: Any) -> None:
        # Before the forward pass: a layout may free gathered weights before other hooks run.
        if not torch.compiler.is_compiling():
            assert isinstance(module, Router)
            self._weights[module] = local_part(module.view(module.weight)).to(torch.float64, copy=True)

    def _make_hook(self, name: str) -> Any:
        @torch.no_grad()
        def hook(module: Router, inputs: tuple[Any, ...], named: dict[str, Any], routing: Routing) -> None:
            weight = self._weights.pop(module, None)
            if weight is None or torch.compiler.is_compiling() or module.record is None:
                return
            arguments = dict(zip(("x", "valid"), inputs, strict=False)) | named
            x = local_part(arguments["x"]).detach()
            self.see(name, module, weight, x, arguments.get("valid"), routing)

        return hook


class MicroBatchPasses(RouterPasses[R], Generic[R, P]):
    """Values kept of each pass, filed by step with the rows of the pass's micro-batch.

    A pass belongs to the micro-batch whose token losses are shown next. A recomputation of activations
    happens later, in the backward pass. It is filed under the next micro-batch, or with rows None.
    """

    def __init__(self, model: nn.Module) -> None:
        super().__init__(model)
        self.passes: dict[int, list[tuple[P, Sequence[int] | None]]] = {}
        self._pending: list[P] = []

    def keep(self, seen: P) -> None:
        """Keep the values of a pass."""
        self._pending.append(seen)

    def observe(self, step: int, kind: str, name: str, local: Tensor | None, region: Region) -> None:
        """File the values kept since the last micro-batch was shown; see `Watch`."""
        if local is not None and kind in (Kind.TOKEN_LOSS, Kind.LOSS):
            rows = region.dims[0] if kind == Kind.TOKEN_LOSS else None
            self.passes.setdefault(step, []).extend((each, rows) for each in self._pending)
            self._pending = []


def find_lengths(recipe: Recipe, step: int) -> Tensor:
    """Return the number of valid tokens (B) of each row of a step's global batch, as float64."""
    whole = whole_share(recipe.data)
    batch = make_batch(recipe.data, recipe.model.vocab_size, recipe.seed, step, whole, torch.device("cpu"))
    return batch.row_valid.to(torch.float64)


def list_scopes(moe: MoE, lengths: Tensor) -> dict[int, float]:
    """Return the valid tokens of each scope of the balance loss: each row, or key 0 for the whole batch.

    Shape: lengths (B).
    """
    return dict(enumerate(lengths.tolist())) if moe.balance_scope == "sequence" else {0: float(lengths.sum())}


def count_times(num_seen: float, num_valid: float) -> float | None:
    """Return how often each valid token was seen: `count_times(12, 4)` is 3; None if not an integer of at least 1."""
    times = num_seen / num_valid
    return times if times >= 1.0 and times == round(times) else None
