"""Mistakes that a user of megablocks could make, for `--fault megablocks_faults:NAME`."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch

from moeverify.faults.patch import Original, Patch
from moeverify.model.megablocks.package import import_package
from moeverify.parallel.plan import parallelize


def forget_the_share_of_ep(patch: Patch) -> None:
    """Divide the experts' gradients by all ranks of the loss although the package has divided by ep."""
    import_package(torch.float64)
    from moeverify.model.megablocks.block import DroplessExperts

    @patch.wrap(DroplessExperts.__init__)
    def build(original: Original[None], self: DroplessExperts, args: Any) -> None:
        original(self, args)
        self.gradient_share = 1.0


def sum_router_gradients(patch: Patch) -> None:
    """Sum the routers' gradients over the two ranks instead of averaging them."""

    @patch.wrap(parallelize)
    def parallelize_summing(original: Original[Any], *arguments: Any, **named: Any) -> Any:
        done = original(*arguments, **named)

        def finalize() -> None:
            done.finalize()
            for shard in done.shards:
                if shard.name.endswith("router.weight"):
                    shard.local(shard.tensor.grad).mul_(2.0)

        return replace(done, finalize=finalize)


def forget_the_number_of_layers(patch: Patch) -> None:
    """Pass the balance loss weight unchanged to the package, which divides it by the number of layers."""
    import_package(torch.float64)
    from moeverify.model.megablocks.losses import OwnLosses

    @patch.wrap(OwnLosses.__init__)
    def build(original: Original[None], self: OwnLosses, model: Any, spec: Any) -> None:
        original(self, model, spec)
        for module in model.modules():
            if hasattr(module, "divide_experts"):
                module.args.moe_loss_weight = spec.balance_coef
