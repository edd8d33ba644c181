"""With top_k 1 the chosen expert's weight is always 1: a softmax over the chosen experts."""

from __future__ import annotations

from moeverify.faults.fault import Expected, Fault
from moeverify.faults.patch import Patch
from moeverify.faults.setting import make_case
from moeverify.results.benchmark import At
from moeverify.results.cause import Cause


def inject(patch: Patch) -> None:
    """Divide the weights of the chosen experts by their sum, which gives 1 for a single expert."""
    from torch import Tensor

    from moeverify.model.router import Router

    @patch.replace(Router.weigh)
    def normalize(self: Router, chosen_scores: Tensor) -> Tensor:
        return chosen_scores / chosen_scores.sum(dim=-1, keepdim=True)


FAULT = Fault(
    number="B11",
    title="the router gets no gradient from the language model's loss where top_k is 1",
    source="NVIDIA/Megatron-LM issue #894",
    mechanism="softmax after top-k with one chosen expert is the constant 1",
    trigger="top_k 1",
    case=make_case("b11", preset="stress-tied", dp_shard=2),
    expected=Expected(where=(At(name="*.moe.router*"),), causes=(Cause.FORWARD,)),
    inject=inject,
)
