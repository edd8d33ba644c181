"""megablocks' dMoE as the mixture-of-experts block of the reference model.

Router, dispatch, experts and shared expert are the package's. This module adds a router whose choice can be
observed and replayed, and logical names for the parameters.

Letters: B rows, S tokens, N = B * S, H hidden, E experts (e local), F expert hidden (f local), k choices.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

import torch
from megablocks.layers.arguments import Arguments
from megablocks.layers.dmoe import ParallelDroplessMLP, dMoE
from megablocks.layers.router import LearnedRouter
from torch import Tensor, nn
from torch.distributed import ProcessGroup
from torch.nn import functional

from moeverify.cases.schema import MoE as MoESpec
from moeverify.model.experts import DividesExperts, ExpertHolder
from moeverify.model.precision import Factory, widen
from moeverify.model.router import RouterRecord, RouterSlot, RouterStats, summarize


class StorageLayout(NamedTuple):
    """Storage of a parameter: its logical name, experts stacked along dim 0, and whether it is transposed.

    `rows` is the number of rows per expert; 0 for a parameter that is stored in its logical layout.
    """

    name: str
    rows: int = 0
    is_transposed: bool = False


def make_arguments(hidden: int, spec: MoESpec, factory: Factory, group: ProcessGroup | None = None) -> Any:
    """Return the package's arguments for these experts, with expert parallelism over `group` if given.

    Nothing is initialized here, since values are filled later, and the package's own losses are disabled.
    """
    return Arguments(
        hidden_size=hidden,
        ffn_hidden_size=spec.expert_hidden,
        bias=False,
        return_bias=False,
        activation_fn=functional.silu,
        moe_num_experts=spec.num_experts,
        moe_top_k=spec.top_k,
        moe_normalize_expert_weights=1.0 if spec.renormalize else None,
        moe_loss_weight=0.0,
        moe_expert_model_parallelism=group is not None,
        expert_parallel_group=group,
        mlp_type="glu",
        mlp_impl="grouped",
        fp16=False,
        bf16=factory["dtype"] is torch.bfloat16,
        device=factory["device"],
        init_method=_leave,
        output_layer_init_method=_leave,
        shared_expert=spec.shared_hidden > 0,
        shared_expert_hidden_size=spec.shared_hidden or None,
    )


def _leave(_: Tensor) -> None:
    """Initialize nothing."""


class ObservedRouter(LearnedRouter, RouterSlot):  # type: ignore[misc]
    """The package's router, extended to record its routing and to replay a choice."""

    def __init__(self, args: Any, spec: MoESpec) -> None:
        super().__init__(args)
        self.spec = spec
        self.replay: Tensor | None = None
        self.record: RouterRecord | None = None
        self.selection_bias: Tensor | None = None
        self.layer.register_forward_hook(self._keep_logits)

    def _keep_logits(self, _: Any, __: Any, logits: Tensor) -> None:
        self._logits = logits

    def _top_k(self, scores: Tensor) -> tuple[Tensor, Tensor]:
        weights, ids = super()._top_k(scores)
        self._chosen = ids
        if self.replay is None:
            return weights, ids
        ids = self.replay.reshape(ids.shape)
        return scores.gather(-1, ids), ids

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Return scores (N, E), combine weights and ids (N, k) for x (B, S, H)."""
        self._scores, self._weights, self._ids = super().forward(x)
        return self._scores, self._weights, self._ids

    def conclude(self, valid: Tensor) -> RouterStats:
        """Return the sums over `valid` (B, S) tokens of the last forward pass, and set the record."""

        def by_row(flat: Tensor) -> Tensor:
            return flat.view(*valid.shape, flat.shape[-1])

        scores, ids = by_row(self._scores), by_row(self._ids)
        # The package scores in the dtype of x. Sums over tokens in bfloat16 would lose whole tokens.
        wide = widen(scores.dtype)
        stats = summarize(by_row(self._logits).to(wide), scores.to(wide), ids, valid)
        best = scores.detach().sort(dim=-1, descending=True).values
        margin = (
            best[..., self.spec.top_k - 1] - best[..., self.spec.top_k]
            if self.spec.top_k < self.spec.num_experts
            else torch.full_like(best[..., 0], torch.inf)
        )
        weights = by_row(self._weights).detach()
        self.record = RouterRecord(by_row(self._chosen), weights, stats.counts.sum(dim=0), margin)
        del self._logits, self._scores, self._weights, self._ids, self._chosen
        return stats


class DroplessExperts(ParallelDroplessMLP, ExpertHolder):  # type: ignore[misc]
    """The package's dispatch and experts, which divide the experts' gradients by the number of ep ranks."""

    mlp: Any
    ffn_hidden_size: int

    def __init__(self, args: Any) -> None:
        super().__init__(args)
        scale = self.mlp.gradient_scale
        self.gradient_share = 1.0 if scale is None else float(scale)


class DroplessMoE(dMoE, DividesExperts):  # type: ignore[misc]
    """megablocks' dMoE with the interface of `moeverify.model.moe.MoELayer`.

    Parameters of `experts.mlp` on a rank: w1 (gate) and v1 (up) (e * f, H), w2 (down) (e * f, H).
    """

    experts: DroplessExperts
    router: ObservedRouter
    shared_expert: Any

    def __init__(self, hidden: int, spec: MoESpec, *, factory: Factory) -> None:
        self.spec, self.hidden, self.factory = spec, hidden, factory
        self.args = make_arguments(hidden, spec, factory)
        super().__init__(self.args)
        self.router = ObservedRouter(self.args, spec)
        self.to(factory["dtype"])  # the package does not create float64

    def _init_experts_mlp(self, args: Any) -> DroplessExperts:
        return DroplessExperts(args)

    def divide_experts(self, group: ProcessGroup) -> nn.Module:
        """Replace the experts by this rank's experts of the group, on the same device.

        Return the module of w1, v1 and w2. Source: megablocks 0.10.0, layers/moe.py
        (parallel_forward_once).
        """
        self.args = make_arguments(self.hidden, self.spec, self.factory, group)
        self.experts = DroplessExperts(self.args).to(self.factory["dtype"])
        self.router.args = self.args
        weights: nn.Module = self.experts.mlp
        return weights

    @property
    def stored_as(self) -> Mapping[str, StorageLayout]:
        """Return the storage of each parameter, by its name in this module."""
        rows = self.experts.ffn_hidden_size
        names = {
            "router.layer.weight": StorageLayout("router.weight"),
            "experts.mlp.w1": StorageLayout("experts.gate", rows),
            "experts.mlp.v1": StorageLayout("experts.up", rows),
            "experts.mlp.w2": StorageLayout("experts.down", rows, is_transposed=True),
        }
        if self.shared_expert is not None:
            for name in ("gate_proj", "up_proj", "down_proj"):
                names[f"shared_expert.{name}.weight"] = StorageLayout(f"shared.{name}.weight")
        return names

    def forward(self, x: Tensor, valid: Tensor | None = None) -> tuple[Tensor, RouterStats]:
        """Return the output (B, S, H) for x (B, S, H), and the router's sums over `valid` (B, S) tokens."""
        if valid is None:
            valid = torch.ones(x.shape[:-1], dtype=torch.bool, device=x.device)
        y = super().forward(x)
        return y, self.router.conclude(valid)
