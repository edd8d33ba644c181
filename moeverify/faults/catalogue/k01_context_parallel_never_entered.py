"""The context that splits sequences over cp is entered in another branch, so every rank runs them whole."""

from __future__ import annotations

from torch import nn
from torch.distributed import ProcessGroup

from moeverify.case.schema import ContextParallel
from moeverify.faults.fault import Expected, Fault
from moeverify.faults.setting import make_case
from moeverify.parallel import plan
from moeverify.results.cause import Cause
from moeverify.train import assemble


def inject() -> None:
    """Split no positions and replace no attention."""

    def split_positions(seq_len: int, num_ranks: int, rank: int, kind: ContextParallel) -> range:
        return range(seq_len)

    def apply_context_parallel(model: nn.Module, kind: ContextParallel, group: ProcessGroup) -> None:
        return None

    assemble.split_positions = split_positions
    plan.apply_context_parallel = apply_context_parallel


FAULT = Fault(
    number="K01",
    title="context parallelism is never applied",
    source="pytorch/torchtitan PR #1880 (92ed8b318)",
    mechanism="by its indentation the cp context is entered only with compiled autograd; else each rank runs it all",
    trigger="context parallelism",
    case=make_case("k01", preset="tiny-gpt", cp=2),
    expected=Expected(where=r"axis cp", causes=(Cause.LAYOUT,)),
    inject=inject,
    is_moe=False,
    notes="upstream showed five times the memory; the numbers are right, as the tokens are counted once a copy too",
)
