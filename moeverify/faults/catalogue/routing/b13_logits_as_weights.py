"""The gate returns the logits of the chosen experts as combine weights instead of their softmax."""

from __future__ import annotations

from moeverify.faults.fault import Expected, Fault
from moeverify.faults.patch import Original, Patch
from moeverify.faults.setting import make_case
from moeverify.results.benchmark import At
from moeverify.results.cause import Cause


def inject(patch: Patch) -> None:
    """Combine the experts' outputs by raw logits."""
    from torch import Tensor

    from moeverify.model.router import Router, Routing

    @patch.wrap(Router.forward)
    def forward(original: Original[Routing], self: Router, x: Tensor, valid: Tensor | None = None) -> Routing:
        routing = original(self, x, valid)
        weights = self.compute_logits(x).gather(-1, routing.ids).to(x.dtype)
        if self.record is not None:
            self.record = self.record._replace(weights=weights.detach())
        return routing._replace(weights=weights)


FAULT = Fault(
    number="B13",
    title="raw logits are used as combine weights",
    source="laekov/fastmoe a6ca7f6",
    mechanism="the naive gate returns the top-k logits that it should have put through a softmax",
    trigger="any layout with this gate; softmax over the chosen experts",
    case=make_case("b13", preset="tiny-mixtral-8x7b", dp_replicate=2, data_parallel="ddp", ep=2),
    expected=Expected(where=(At(name="*.moe.router*"),), causes=(Cause.FORWARD,)),
    inject=inject,
)
