"""Attention, rotary positions and the feed-forward part."""

from __future__ import annotations

from typing import Any

from moeverify.faults.patch import Patch


def mlxlm_767(patch: Patch) -> None:
    """Gate and up projections are swapped."""
    from torch import Tensor
    from torch.nn import functional

    from moeverify.model.mlp import MLP

    @patch.replace(MLP.forward)
    def forward(self: MLP, x: Tensor) -> Tensor:
        inner = functional.silu(self.up_proj(x)) * self.gate_proj(x)  # plant: mlxlm-767
        return self.down_proj(inner)


def minigpt_1(patch: Patch) -> None:
    """Frequencies are those of a head of twice the width."""
    import torch

    from moeverify.model.rope import compute_rotation

    @patch.replace(compute_rotation)
    def rotation(positions: Any, head_dim: int, theta: float, yarn: Any = None) -> Any:
        exponents = torch.arange(0, head_dim, 2, dtype=torch.float64) / (2 * head_dim)  # plant: minigpt-1
        angles = (positions.double().unsqueeze(-1) * theta**-exponents).unsqueeze(-2)
        return angles.cos(), angles.sin()


def aneforge_253(patch: Patch) -> None:
    """Biases of queries, keys and values are dropped."""
    from torch import Tensor
    from torch.nn import functional

    from moeverify.model.attention import Attention
    from moeverify.model.rope import compute_rotation, rotate

    @patch.replace(Attention.forward)
    def forward(self: Attention, x: Tensor, positions: Tensor) -> Tensor:
        q = self._split(functional.linear(x, self.q_proj.weight), self.q_norm)  # plant: aneforge-253
        k = self._split(functional.linear(x, self.k_proj.weight), self.k_norm)  # plant: aneforge-253
        v = self._split(functional.linear(x, self.v_proj.weight), None)  # plant: aneforge-253
        rotation = compute_rotation(positions, self.head_dim, self.rope_theta, self.yarn)
        heads = self.core(rotate(q, rotation), rotate(k, rotation), v, positions)
        return self.o_proj(heads.flatten(-2))


def automodel_1324(patch: Patch) -> None:
    """A fused projection stores queries, keys and values per group, but is split as contiguous parts."""
    import torch
    from torch import Tensor

    from moeverify.model.attention import Attention
    from moeverify.model.rope import compute_rotation, rotate

    @patch.replace(Attention.forward)
    def forward(self: Attention, x: Tensor, positions: Tensor) -> Tensor:
        q, k, v = self.q_proj(x), self.k_proj(x), self.v_proj(x)
        groups = k.shape[-1] // self.head_dim
        parts = [each.unflatten(-1, (groups, -1)) for each in (q, k, v)]
        fused = torch.cat(parts, -1).flatten(-2)
        sizes = [each.shape[-1] for each in (q, k, v)]
        q, k, v = fused.split(sizes, -1)  # plant: automodel-1324
        q, k, v = self._split(q, self.q_norm), self._split(k, self.k_norm), self._split(v, None)
        rotation = compute_rotation(positions, self.head_dim, self.rope_theta, self.yarn)
        heads = self.core(rotate(q, rotation), rotate(k, rotation), v, positions)
        return self.o_proj(heads.flatten(-2))


def p09(patch: Patch) -> None:
    """The factor of YaRN is the default."""
    from moeverify.model.rope import compute_rotation

    @patch.wrap(compute_rotation)
    def rotation(original: Any, positions: Any, head_dim: int, theta: float, yarn: Any = None) -> Any:
        if yarn is not None:
            yarn = yarn.model_copy(update={"factor": 8.0})  # plant: p09-builtin
        return original(positions, head_dim, theta, yarn)


def p10(patch: Patch) -> None:
    """YaRN is omitted if the cache is no longer than the original length."""
    from torch import Tensor

    from moeverify.model.mla import LatentAttention
    from moeverify.model.rope import compute_rotation

    @patch.wrap(compute_rotation)
    def rotation(original: Any, positions: Any, head_dim: int, theta: float, yarn: Any = None) -> Any:
        length = positions.shape[1]
        if yarn is not None and length <= yarn.original_length:
            yarn = None  # plant: p10-builtin
        return original(positions, head_dim, theta, yarn)

    @patch.replace(LatentAttention._scale)
    def scale(self: LatentAttention, q: Tensor) -> Tensor:
        return q  # plant: p10-builtin
