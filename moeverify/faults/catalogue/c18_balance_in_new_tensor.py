"""The balance losses of the layers are put into a new tensor, which has no graph."""

from __future__ import annotations

from torch import Tensor

from moeverify.case.schema import MoE
from moeverify.diagnose.cause import Cause
from moeverify.faults.fault import Expected, Fault
from moeverify.faults.setting import make_case
from moeverify.model.router import RouterStats
from moeverify.train import objective
from moeverify.train.data import Batch
from moeverify.train.objective import Normalizers, Sums


def inject() -> None:
    """Copy each layer's value into a tensor of its own."""

    def balance(
        spec: MoE, stats: RouterStats, batch: Batch, normalizers: Normalizers, sums: Sums
    ) -> Tensor:
        value = original(spec, stats, batch, normalizers, sums)
        return value.new_tensor(value.item())

    original = objective._balance
    objective._balance = balance


FAULT = Fault(
    number="C18",
    title="balance loss has no gradient",
    source="laekov/fastmoe #49, PR #50 (28bfe68)",
    mechanism="torch.tensor of the list of the layers' losses copies values and cuts the graph",
    trigger="any layout",
    case=make_case("c18", dp_shard=2),
    expected=Expected(where=r"balance|router", causes=(Cause.TERM_SCALE,)),
    inject=inject,
)
