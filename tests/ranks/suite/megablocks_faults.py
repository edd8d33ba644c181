"""What a user of megablocks could get wrong, for `--fault megablocks_faults:NAME`."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch

from moeverify.model.megablocks.package import import_package
from moeverify.train import assemble


def forget_the_share_of_ep() -> None:
    """Divide the experts' gradients by all ranks of the loss although the package has divided by ep."""
    import_package(torch.float64)
    from moeverify.model.megablocks.block import DroplessExperts

    original = DroplessExperts.__init__

    def build(self: Any, args: Any) -> None:
        original(self, args)
        self.gradient_share = 1.0

    DroplessExperts.__init__ = build


def sum_router_gradients() -> None:
    """Leave the routers' gradients a sum over the two ranks, where they are the average."""
    original = assemble.parallelize

    def parallelize(*arguments: Any) -> Any:
        done = original(*arguments)

        def finalize() -> None:
            done.finalize()
            for held in done.shards:
                if held.name.endswith("router.weight"):
                    held.local(held.tensor.grad).mul_(2.0)

        return replace(done, finalize=finalize)

    assemble.parallelize = parallelize


def forget_the_number_of_layers() -> None:
    """Give the package the weight of the balance loss as it is, which it divides by the number of layers."""
    import_package(torch.float64)
    from moeverify.model.megablocks.losses import OwnLosses

    original = OwnLosses.__init__

    def build(self: Any, model: Any, spec: Any) -> None:
        original(self, model, spec)
        for module in model.modules():
            if hasattr(module, "divide_experts"):
                module.args.moe_loss_weight = spec.balance_coef

    OwnLosses.__init__ = build
