"""Dispatch and combine: tokens sent twice, outputs put in wrong places, sums in too few bits.

Class E. Bugs between the router's choice and the weighted sum of the outputs: index arithmetic, exchanges,
kernels.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from moeverify.faults.fault import fault
from moeverify.faults.patch import Original, Patch
from moeverify.faults.setting import make_case
from moeverify.results.benchmark import At
from moeverify.results.cause import Cause

if TYPE_CHECKING:
    from torch import Tensor, nn
    from torch.distributed import ProcessGroup
    from torch.distributed.device_mesh import DeviceMesh

    from moeverify.model.dispatcher import Dispatcher, ExpertFunction, SortedCopies


@fault(
    "E01",
    title="MoE outputs are added to the wrong tokens",
    source="pytorch/torchtitan PR #3604 (5ba439938)",
    mechanism="the global index of a token is taken as local index + rank * local tokens, whatever the rows",
    trigger="TP + EP with the positions sliced over TP, more than one row",
    case=make_case("e01", tp=2, ep=2),
    where=(At(name="*.moe*"),),
    causes=(Cause.PERMUTATION, Cause.FORWARD),
)
def e01_flat_token_offset(patch: Patch) -> None:
    """Place local token i of rank r at i + r * local tokens, which is right only for one row."""
    from moeverify.parallel import moe_tensor
    from moeverify.parallel.collectives import gather_from

    @patch.wrap(gather_from, used_by=moe_tensor)
    def gather_flat(original: Original[Tensor], x: Tensor, dim: int, group: ProcessGroup) -> Tensor:
        return original(x.flatten(0, 1), 0, group).view(x.shape[0], -1, x.shape[2])


@fault(
    "E02",
    title="tokens of different TP ranks collide",
    source="pytorch/torchtitan PR #1586 (9233d8318)",
    mechanism="the number of tokens is read after they were sharded, so the offset is 1/tp of the right one",
    trigger="EP that borrows TP (etp 1)",
    case=make_case("e02", tp=2, ep=2),
    where=(At(name="*.moe*"),),
    causes=(Cause.FORWARD,),
    notes="upstream reads the tokens at the same wrong offset too; here only the outputs are misplaced",
)
def e02_local_count_offset(patch: Patch) -> None:
    """Place each rank's outputs at 1/tp of their offset, and sum where they collide."""
    from moeverify.parallel import moe_tensor
    from moeverify.parallel.collectives import gather_from, reduce_from

    @patch.replace(gather_from, used_by=moe_tensor)
    def place_too_early(x: Tensor, dim: int, group: ProcessGroup) -> Tensor:
        shape = list(x.shape)
        shape[dim] *= group.size()
        whole = x.new_zeros(shape)
        offset = x.shape[dim] // group.size() * group.rank()
        whole.narrow(dim, offset, x.shape[dim]).copy_(x)
        return reduce_from(whole, group)


@fault(
    "E03",
    title="tokens come back from the experts in another order",
    source="NVIDIA/Megatron-LM !2824 (54d4b3ddbb)",
    mechanism="a copy to the host overwrites the view of the counts, whose transpose then walks expert, ep, tp "
    "instead of expert, tp, ep",
    trigger="tp and ep together, more than one expert a rank",
    case=make_case("e03", dp_shard=2, tp=2, ep=4),
    where=(At(name="*.moe*"),),
    causes=(Cause.FORWARD, Cause.PERMUTATION),
)
def e03_chunks_in_wrong_order(patch: Patch) -> None:
    """Restore the rows by counts with exchanged rank axes (ep, tp)."""
    from moeverify.parallel.expert import order_by_expert

    @patch.wrap(order_by_expert)
    def restore_transposed(
        original: Original[tuple[Tensor, Tensor]], arriving: Tensor, num_rows: int
    ) -> tuple[Tensor, Tensor]:
        there, _ = original(arriving, num_rows)
        exchanged = arriving.view(2, len(arriving) // 2, -1).transpose(0, 1).reshape(arriving.shape)
        return there, original(exchanged, num_rows)[1]


CAPACITY = 12  # copies of one expert on a rank


@fault(
    "E05",
    title="ranks of tp drop other tokens",
    source="deepspeedai/DeepSpeed PR #5156",
    mechanism="the capacity of the experts is not aligned over tp, so slices of one expert work on other tokens",
    trigger="tp with expert capacity",
    case=make_case("e05", tp=2),
    where=(At(name="*.moe*"),),
    causes=(Cause.FORWARD,),
    notes="the model has no capacity: one rank of tp drops where the other keeps all",
)
def e05_capacity_of_each_tp_rank(patch: Patch) -> None:
    """Zero the weights of copies beyond a capacity, which is lower on tp ranks above 0."""
    import torch

    from moeverify.parallel.moe_tensor import SlicedDispatcher

    @patch.wrap(SlicedDispatcher.__call__)
    def drop_late(
        original: Original[Tensor],
        self: SlicedDispatcher,
        x: Tensor,
        ids: Tensor,
        weights: Tensor,
        experts: ExpertFunction,
    ) -> Tensor:
        flat = ids.flatten()
        same = flat.unsqueeze(0) == flat.unsqueeze(1)
        place = torch.tril(same, diagonal=-1).sum(dim=1).view_as(ids)
        capacity = len(flat) if self.group.rank() == 0 else CAPACITY
        return original(self, x, ids, weights * (place < capacity), experts)


@fault(
    "E08",
    title="experts see every token once for each TP rank",
    source="deepspeedai/DeepSpeed PR #2074; Megatron-DeepSpeed PR #63",
    mechanism="TP ranks hold the same tokens and all send them, since duplicates are not dropped before",
    trigger="TP + EP, experts not tensor-parallel",
    case=make_case("e08", tp=2, ep=2),
    where=(At(name="*.moe.experts*"),),
    causes=(Cause.SCALE,),
)
def e08_duplicate_tokens(patch: Patch) -> None:
    """Keep the tokens of the other tp ranks before the exchange."""
    from moeverify.model.moe import MoELayer
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
            if isinstance(module, MoELayer):
                module.dispatcher = DuplicatingDispatcher(module.dispatcher, mesh.get_group())


@fault(
    "E11",
    title="experts are chosen by scores in bfloat16",
    source="ViperEkura/AstrAI PR #57",
    mechanism="the softmax is cast before top-k, and close scores become ties",
    trigger="scores that are narrower than the router",
    case=make_case("e11", dp_shard=2, data={"seq_len": 64}),
    where=(At(name="*.moe.router*"),),
    causes=(Cause.ROUTING, Cause.ROUNDING),
)
def e11_choice_in_bfloat16(patch: Patch) -> None:
    """Choose experts by scores rounded to bfloat16."""
    import torch

    from moeverify.model.router import take_best

    @patch.wrap(take_best)
    def take_rounded(
        original: Original[tuple[Tensor, Tensor]], scores: Tensor, count: int
    ) -> tuple[Tensor, Tensor]:
        return original(scores.to(torch.bfloat16).to(scores.dtype), count)


@fault(
    "E12",
    title="backward of the fused permutation is inaccurate",
    source="NVIDIA/TransformerEngine #1336",
    mechanism="gradients of a token's k copies are accumulated in bfloat16, so the error grows with k",
    trigger="fused permutation",
    case=make_case("e12", dp_shard=2, recipe={"precision": "float32"}),
    where=(At(name="layers.2.ffn_norm*"), At(name="layers.2.moe*")),
    causes=(Cause.ROUNDING,),
    precisions=("float64", "float32"),
    notes="shown in a float32 recipe; in a bfloat16 one, that of the real bug, the same accumulation stays inside "
    "the calibrated noise and is not detected",
)
def e12_permute_backward_in_bf16(patch: Patch) -> None:
    """Sum the gradients of the k copies of a token sequentially in bfloat16."""
    import torch
    from torch.autograd import Function

    from moeverify.model.dispatcher import permute

    class NarrowCopies(Function):
        """The k copies of each token; backward sums their gradients in bfloat16."""

        @staticmethod
        def forward(ctx: Any, x: Tensor, num_choices: int) -> Tensor:
            ctx.shape = (x.shape[0], num_choices, x.shape[1])
            return x.repeat_interleave(num_choices, dim=0)

        @staticmethod
        def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
            first, *others = grad.view(ctx.shape).to(torch.bfloat16).unbind(dim=1)
            total = first.clone()
            for other in others:
                total += other
            return total.to(grad.dtype), None

    @patch.wrap(permute)
    def permute_narrow(
        original: Original[SortedCopies], x: Tensor, ids: Tensor, num_experts: int
    ) -> SortedCopies:
        sorted_copies = original(x.detach(), ids, num_experts)
        copies: Tensor = NarrowCopies.apply(x, ids.shape[1])  # type: ignore[no-untyped-call]
        return sorted_copies._replace(x=copies.index_select(0, sorted_copies.order))


ADDRESSES = 2**12

"""Address range in elements: 2^31 in the real kernels, scaled down with the model."""


@fault(
    "E13",
    title="row addresses of the combine kernel overflow",
    source="pytorch/torchtitan PR #3969 (b3a13eed9)",
    mechanism="row times stride is computed in too few bits, so large buffers are read at wrapped addresses",
    trigger="EP, many routed rows",
    case=make_case("e13", dp_shard=2, ep=2),
    where=(At(name="*.moe*"),),
    causes=(Cause.FORWARD,),
    notes="the width of an address is scaled down from 31 to 12 bits; a wrapped address is taken modulo the limit",
)
def e13_wrapped_row_address(patch: Patch) -> None:
    """Compute the address of every row of the experts' outputs modulo the limit in the combine."""
    from moeverify.model.dispatcher import invert, unpermute

    @patch.wrap(unpermute)
    def wrap_addresses(original: Original[Tensor], y: Tensor, order: Tensor, weights: Tensor) -> Tensor:
        hidden = y.shape[-1]
        rows = invert(order) * hidden % ADDRESSES // hidden
        # The rows are now ordered by token and choice, so the original must not permute them.
        return original(y.index_select(0, rows), order.sort().values, weights)
