"""Stochastic gradient descent, with momentum if it is set."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from moeverify.case.schema import Optimizer
from moeverify.train.optimizer_kinds import OptimizerKind

if TYPE_CHECKING:
    from torch.optim import Optimizer as TorchOptimizer


class _Sgd(OptimizerKind):
    uses = frozenset({"momentum"})

    def build(
        self, groups: Sequence[dict[str, Any]], spec: Optimizer, kernels: Mapping[str, bool]
    ) -> TorchOptimizer:
        from torch.optim import SGD

        return SGD(groups, lr=spec.lr, momentum=spec.momentum, **kernels)


IMPLEMENTATION = _Sgd()
