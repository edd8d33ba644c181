"""The mixture-of-experts block: router, routed experts and shared expert.

Letters: B rows, S tokens, H hidden, k choices.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import cache

from torch import Tensor, nn

from moeverify.cases.schema import MoE as MoESpec
from moeverify.model.dispatcher import Dispatcher, LocalDispatcher, Overlapping
from moeverify.model.expert_backends import EXPERTS
from moeverify.model.experts import Experts
from moeverify.model.mlp import MLP
from moeverify.model.precision import Factory
from moeverify.model.router import Router, RouterStats, Routing
from moeverify.seams import seam


class MoELayer(nn.Module):
    """Sum over the chosen experts of weight * expert(x), plus the shared expert with optional gate.

    Experts and shared expert are SwiGLU, whatever the activation of dense layers. `dispatcher` may be
    replaced, for example by one that exchanges tokens between ranks.

    Source: DeepSeek-V3, equation 12; the shared expert's gate as in Hugging Face transformers,
    models/qwen2_moe/modeling_qwen2_moe.py.
    """

    def __init__(self, hidden: int, spec: MoESpec, *, mlp_bias: bool, backend: str, factory: Factory) -> None:
        super().__init__()
        self.router = Router(hidden, spec, factory)
        self.experts = Experts(
            spec.num_experts,
            hidden,
            spec.expert_hidden,
            bias=spec.expert_bias,
            backend=backend,
            factory=factory,
        )
        self.dispatcher: Dispatcher = LocalDispatcher(spec.num_experts)
        shared = spec.shared_hidden > 0
        self.shared = (
            MLP(hidden, spec.shared_hidden, activation="swiglu", bias=mlp_bias, factory=factory)
            if shared
            else None
        )
        self.shared_gate = nn.Linear(hidden, 1, bias=False, **factory) if spec.shared_gate else None

    @seam
    def forward(self, x: Tensor, valid: Tensor | None = None) -> tuple[Tensor, RouterStats]:
        """Return the output (B, S, H) for x (B, S, H), and the router's sums over `valid` (B, S) tokens."""
        routing: Routing = self.router(x, valid)
        shared = cache(lambda: self._compute_shared(x))
        if isinstance(self.dispatcher, Overlapping):
            self.dispatcher.meanwhile = shared
        routed = self.dispatcher(
            x.flatten(0, 1), routing.ids.flatten(0, 1), routing.weights.flatten(0, 1), self.experts
        ).view_as(x)
        found = shared()
        return routed if found is None else routed + found, routing.stats

    def _compute_shared(self, x: Tensor) -> Tensor | None:
        if self.shared is None:
            return None
        shared: Tensor = self.shared(x)
        return shared if self.shared_gate is None else shared * self.shared_gate(x).sigmoid()


def build_moe(hidden: int, spec: MoESpec, *, mlp_bias: bool, backend: str, factory: Factory) -> nn.Module:
    """Return the block of an expert backend: the reference block, or one of the backend's own package.

    Raises: CaseError when the backend does not support the dtype or the sizes, or is not installed.
    """
    block = EXPERTS.find(backend).build_block(hidden, spec, factory=factory)
    return (
        MoELayer(hidden, spec, mlp_bias=mlp_bias, backend=backend, factory=factory)
        if block is None
        else block
    )


def list_moe_layers(model: nn.Module) -> Iterator[MoELayer]:
    """Yield the MoE blocks of a model, in the order of its modules."""
    for module in model.modules():
        if isinstance(module, MoELayer):
            yield module
