"""A rank's own count is overwritten by the total, which then scales its part of the balance loss."""

from __future__ import annotations

from moeverify.faults.catalogue.auxiliary_losses.balance import scale_gradient
from moeverify.faults.fault import Expected, Fault
from moeverify.faults.patch import Original, Patch
from moeverify.faults.setting import make_case
from moeverify.results.benchmark import At
from moeverify.results.cause import Cause


def inject(patch: Patch) -> None:
    """Scale each rank's gradient of the balance loss by the tokens of all tp ranks over its own."""
    import torch.distributed as dist
    from torch import Tensor

    from moeverify.model.router import Router, Routing

    @patch.wrap(Router.forward)
    def scale_by_total(
        original: Original[Routing], self: Router, x: Tensor, valid: Tensor | None = None
    ) -> Routing:
        routing = original(self, x, valid)
        assert valid is not None
        own = valid.sum()
        total = own.clone()
        dist.all_reduce(total)  # in this case the tp group contains all ranks
        sums = scale_gradient(routing.stats.probability_sum, float(total / own))
        return routing._replace(stats=routing.stats._replace(probability_sum=sums))


FAULT = Fault(
    number="C13",
    title="the balance loss of each tp rank is scaled by the tokens of all over its own",
    source="NVIDIA/Megatron-LM issue #7452, item 10",
    mechanism=(
        "an in-place all-reduce over tp overwrites the count of a rank's own tokens, by which the loss "
        "is scaled later"
    ),
    trigger="tp that slices tokens, padding",
    case=make_case("c13", tp=2, ep=2),
    expected=Expected(
        where=(
            At(term="balance"),
            At(name="*.moe.router*"),
        ),
        causes=(
            Cause.TERM_SCALE,
            Cause.SHARE_WEIGHTS,
        ),
    ),
    inject=inject,
)
