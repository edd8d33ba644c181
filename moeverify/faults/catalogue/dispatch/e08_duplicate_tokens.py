"""Every tp rank sends all tokens to the experts, which therefore see each of them tp times."""

from __future__ import annotations

from moeverify.faults.fault import Expected, Fault
from moeverify.faults.patch import Original, Patch
from moeverify.faults.setting import make_case
from moeverify.results.benchmark import At
from moeverify.results.cause import Cause


def inject(patch: Patch) -> None:
    """Keep the tokens of the other tp ranks before the exchange."""
    from torch import Tensor, nn
    from torch.distributed import ProcessGroup
    from torch.distributed.device_mesh import DeviceMesh

    from moeverify.model.dispatcher import Dispatcher, ExpertFunction
    from moeverify.model.moe import MoE
    from moeverify.parallel.collectives import gather_from, split_to
    from moeverify.parallel.moe_tensor import apply_token_slices

    class DuplicatingDispatcher:
        """Sends the tokens of the whole group from each of its ranks, and keeps the local outputs."""

        def __init__(self, inner: Dispatcher, group: ProcessGroup) -> None:
            self.inner = inner
            self.group = group

        def __call__(self, x: Tensor, ids: Tensor, weights: Tensor, experts: ExpertFunction) -> Tensor:
            all_x, all_ids, all_weights = (gather_from(part, 0, self.group) for part in (x, ids, weights))
            return split_to(self.inner(all_x, all_ids, all_weights, experts), 0, self.group)

    @patch.wrap(apply_token_slices)
    def send_all(
        original: Original[None], model: nn.Module, mesh: DeviceMesh, *, sequence_parallel: bool
    ) -> None:
        original(model, mesh, sequence_parallel=sequence_parallel)
        for module in model.modules():
            if isinstance(module, MoE):
                module.dispatcher = DuplicatingDispatcher(module.dispatcher, mesh.get_group())


FAULT = Fault(
    number="E08",
    title="experts see every token once for each TP rank",
    source="deepspeedai/DeepSpeed PR #2074; Megatron-DeepSpeed PR #63",
    mechanism="TP ranks hold the same tokens and all send them, since duplicates are not dropped before",
    trigger="TP + EP, experts not tensor-parallel",
    case=make_case("e08", tp=2, ep=2),
    expected=Expected(where=(At(name="*.moe.experts*"),), causes=(Cause.SCALE,)),
    inject=inject,
)
