"""Routing: wrong combine weights, and gradients of routing and of the tokens that are not summed over ranks.

Class B. A replicated parameter that sees a slice of the tokens or of the experts has a partial gradient on
each rank. Without the sum, replicas diverge. The loss of the first step is right unless the weights
themselves are wrong.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
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

    from moeverify.model.dispatcher import ExpertFunction
    from moeverify.model.router import Routing
    from moeverify.model.transformer import Transformer
    from moeverify.parallel.expert import MakeDispatcher


def leave_unreduced(patch: Patch, choose: Callable[[nn.Module], Iterable[Tensor]]) -> None:
    """Remove `choose(module)` of each module from the MoE parameters whose gradients are summed over tp."""
    from moeverify.parallel.moe_tensor import partial_parameters

    @patch.wrap(partial_parameters)
    def without_chosen(original: Original[list[Tensor]], model: nn.Module, *, tokens: bool) -> list[Tensor]:
        chosen = {id(parameter) for module in model.modules() for parameter in choose(module)}
        return [parameter for parameter in original(model, tokens=tokens) if id(parameter) not in chosen]


@fault(
    "B01",
    title="the router's gradient is never summed over tp",
    source="pytorch/torchtitan issue #2387, PR #2416 (de329200b), PR #2388",
    mechanism="the router's output becomes a local tensor whose partial gradient is labelled as replicated",
    trigger="tp with expert parallelism that borrows it",
    case=make_case("b01", tp=2, ep=2),
    where=(At(name="*.moe.router*"),),
    causes=(Cause.MISSING_REDUCTION,),
)
def b01_unreduced_router(patch: Patch) -> None:
    """Remove all router parameters from those whose gradients are summed over tp."""
    from moeverify.model.router import Router

    leave_unreduced(patch, lambda module: list(module.parameters()) if isinstance(module, Router) else [])


@fault(
    "B02",
    title="everything below the routed experts gets one rank's share of their gradient",
    source="pytorch/torchtitan issue #1805, PR #1878 (3ff755178)",
    mechanism="the experts' input is replicated and their weights are shards of tp, so the gradient of the "
    "input is a partial sum that nobody adds up",
    trigger="tp without expert parallelism",
    case=make_case("b02", tp=2),
    where=(At(name="*.moe*"), At(axis="tp")),
    causes=(Cause.MISSING_REDUCTION,),
)
def b02_partial_expert_inputs(patch: Patch) -> None:
    """Skip the gradient sum for the tokens of sliced experts, but not for the combine weights."""
    from moeverify.parallel.collectives import copy_to, reduce_from
    from moeverify.parallel.moe_tensor import SlicedDispatcher

    @patch.replace(SlicedDispatcher.__call__)
    def dispatch(
        self: SlicedDispatcher, x: Tensor, ids: Tensor, weights: Tensor, experts: ExpertFunction
    ) -> Tensor:
        return reduce_from(self.inner(x, ids, copy_to(weights, self.group), experts), self.group)


@fault(
    "B03",
    title="gradients below tensor-parallel experts lose their reduction",
    source="pytorch/torchtitan PR #4054 (ecae62f15)",
    mechanism="input gradients of the experts default to Replicate, so each rank keeps its own share of the sum",
    trigger="tp without expert parallelism",
    case=make_case("b03", tp=2),
    where=(At(name="*.moe*"), At(axis="tp")),
    causes=(Cause.MISSING_REDUCTION,),
    notes="upstream's routers were off most; everything below an MoE block loses the same partial sums",
)
def b03_unreduced_expert_inputs(patch: Patch) -> None:
    """Skip the gradient sum for the tokens and combine weights of sliced experts."""
    from moeverify.parallel.collectives import reduce_from
    from moeverify.parallel.moe_tensor import SlicedDispatcher

    @patch.replace(SlicedDispatcher.__call__)
    def dispatch(
        self: SlicedDispatcher, x: Tensor, ids: Tensor, weights: Tensor, experts: ExpertFunction
    ) -> Tensor:
        return reduce_from(self.inner(x, ids, weights, experts), self.group)


@fault(
    "B04",
    title="the router's weight lacks the mark of sequence parallelism",
    source="NVIDIA/Megatron-LM issue #599, PR #619",
    mechanism="parameters without the attribute are left out of the all-reduce over tp that sequence slices need",
    trigger="tp with sequence parallelism and experts",
    case=make_case("b04", tp=2, ep=2, sequence_parallel=True),
    where=(At(name="*.moe.router.weight"),),
    causes=(Cause.MISSING_REDUCTION,),
)
def b04_router_without_sequence_mark(patch: Patch) -> None:
    """Remove router weights from the parameters whose gradients are summed over tp."""
    from moeverify.model.router import Router

    leave_unreduced(patch, lambda module: [module.weight] if isinstance(module, Router) else [])


@fault(
    "B05",
    title="the router gets no gradient from the language model's loss",
    source="NVIDIA-NeMo/Automodel PR #2995, second item",
    mechanism="routing probabilities pass through dist.all_gather, which has no backward",
    trigger="expert parallelism; total where the auxiliary losses are off",
    case=make_case("b05", dp_shard=2, ep=2, moe={"balance_coef": 0.0, "z_coef": 0.0}),
    where=(At(name="*.moe.router*"),),
    causes=(Cause.DETACHED,),
)
def b05_detached_combine_weights(patch: Patch) -> None:
    """Send the combine weights through an all-gather that autograd does not record."""
    import torch
    import torch.distributed as dist

    from moeverify.parallel.expert import AllToAllDispatcher

    @patch.wrap(AllToAllDispatcher.__call__)
    def dispatch(
        original: Original[Tensor],
        self: AllToAllDispatcher,
        x: Tensor,
        ids: Tensor,
        weights: Tensor,
        experts: ExpertFunction,
    ) -> Tensor:
        gathered = [torch.empty_like(weights) for _ in range(self.group.size())]
        dist.all_gather(gathered, weights.contiguous(), group=self.group)
        return original(self, x, ids, gathered[self.group.rank()], experts)


@fault(
    "B06",
    title="each token gets the gradient of the experts on its own rank only",
    source="NVIDIA-NeMo/Automodel PR #1260",
    mechanism="the backward of a gathered DTensor assumes replicated gradients, and slices where it should "
    "reduce-scatter",
    trigger="experts on gathered tokens",
    case=make_case("b06", dp_shard=4, etp=2, ep=2),
    where=(At(name="*.moe*"), At(axis="etp")),
    causes=(Cause.MISSING_REDUCTION,),
    notes="upstream gathers over ep; here the ranks that gather hold slices of the same experts",
)
def b06_sliced_gather_backward(patch: Patch) -> None:
    """Gather tokens and combine weights with a backward that returns the local slice of the gradient."""
    from moeverify.parallel import moe_tensor
    from moeverify.parallel.collectives import all_gather_sum, gather_from

    @patch.replace(all_gather_sum, used_by=moe_tensor)
    def gather_without_sum(x: Tensor, dim: int, group: ProcessGroup) -> Tensor:
        return gather_from(x, dim, group)


@fault(
    "B07",
    title="the gradient of the routing weights misses the other ranks' experts",
    source="huggingface/transformers PR #48205, second item",
    mechanism="all ranks route all tokens, each gets score gradients from its own experts only, nothing sums them",
    trigger="experts divided over ranks that hold the same tokens",
    case=make_case("b07", tp=2),
    where=(At(name="*.moe.router*"), At(axis="tp")),
    causes=(Cause.MISSING_REDUCTION,),
    notes="upstream each of these ranks holds some whole experts, here a slice of every expert",
)
def b07_unreduced_router_scores(patch: Patch) -> None:
    """Skip the gradient sum for the combine weights of sliced experts, but not for the tokens."""
    from moeverify.parallel.collectives import copy_to, reduce_from
    from moeverify.parallel.moe_tensor import SlicedDispatcher

    @patch.replace(SlicedDispatcher.__call__)
    def dispatch(
        self: SlicedDispatcher, x: Tensor, ids: Tensor, weights: Tensor, experts: ExpertFunction
    ) -> Tensor:
        return reduce_from(self.inner(copy_to(x, self.group), ids, weights, experts), self.group)


TOP_K = 3  # of the case's model


@fault(
    "B08",
    title="the router's gradient lacks the experts of other ranks",
    source="huggingface/transformers issue #48687",
    mechanism="one of two kernels computes the gradient of the scores from the experts on its own rank",
    trigger="experts on gathered tokens",
    case=make_case("b08", dp_shard=4, etp=2, ep=2),
    where=(At(name="*.moe*"), At(axis="etp")),
    causes=(Cause.MISSING_REDUCTION,),
)
def b08_router_gradient_of_own_experts(patch: Patch) -> None:
    """Gather the combine weights with a backward that returns the local slice of the gradient."""
    from moeverify.parallel import moe_tensor
    from moeverify.parallel.collectives import all_gather_sum, gather_from

    @patch.wrap(all_gather_sum, used_by=moe_tensor)
    def gather_weights_without_sum(
        original: Original[Tensor], x: Tensor, dim: int, group: ProcessGroup
    ) -> Tensor:
        is_weights = x.is_floating_point() and x.shape[-1] == TOP_K
        return gather_from(x, dim, group) if is_weights else original(x, dim, group)


@fault(
    "B09",
    title="the router's weights are never updated",
    source="deepspeedai/DeepSpeed issue #4482",
    mechanism="gradient hooks of the gates do not fire, so their gradients never reach the sharded optimizer",
    trigger="sharded gradients with expert parallelism",
    case=make_case("b09", dp_shard=2, ep=2),
    where=(At(name="*.moe.router*"),),
    causes=(Cause.DETACHED,),
    notes="open upstream; seen there under ZeRO-2",
)
def b09_skipped_router_gradient(patch: Patch) -> None:
    """Remove router gradients before the reduction that passes gradients to the optimizer."""
    from torch.distributed.fsdp._fully_shard._fsdp_param_group import FSDPParamGroup

    from moeverify.model.router import Router

    @patch.wrap(FSDPParamGroup.post_backward)
    def post_backward(original: Original[None], self: FSDPParamGroup, *unused: Any) -> None:
        for parameter in self.fsdp_params:
            if isinstance(parameter._module_info.module, Router):
                parameter.unsharded_param.grad = None
        original(self, *unused)


@fault(
    "B10",
    title="the gradient of the shared expert's gate is not summed over tp",
    source="alibaba/Pai-Megatron-Patch issue #397",
    mechanism="a replicated linear layer on a sequence shard is missing from the list of tp reductions",
    trigger="tp with sequence parallelism and a gated shared expert",
    case=make_case("b10", tp=2, ep=2, sequence_parallel=True),
    where=(At(name="*.moe.shared_gate*"),),
    causes=(Cause.MISSING_REDUCTION,),
)
def b10_unreduced_shared_gate(patch: Patch) -> None:
    """Remove shared gates from the parameters whose gradients are summed over tp."""
    from moeverify.model.moe import MoELayer

    leave_unreduced(
        patch,
        lambda module: (
            [module.shared_gate.weight]
            if isinstance(module, MoELayer) and module.shared_gate is not None
            else []
        ),
    )


@fault(
    "B11",
    title="the router gets no gradient from the language model's loss where top_k is 1",
    source="NVIDIA/Megatron-LM issue #894",
    mechanism="softmax after top-k with one chosen expert is the constant 1",
    trigger="top_k 1",
    case=make_case("b11", preset="stress-tied", dp_shard=2),
    where=(At(name="*.moe.router*"),),
    causes=(Cause.FORWARD,),
)
def b11_softmax_of_one_expert(patch: Patch) -> None:
    """Divide the weights of the chosen experts by their sum, which gives 1 for a single expert."""
    from moeverify.model.router import Router

    @patch.replace(Router.weigh)
    def normalize(self: Router, chosen_scores: Tensor) -> Tensor:
        return chosen_scores / chosen_scores.sum(dim=-1, keepdim=True)


@fault(
    "B12",
    title="with top_k 1 combine weights are normalized over the tokens of a rank",
    source="databricks/megablocks PR #87",
    mechanism="max() drops the dim of the choices, so the norm over the last dim runs over tokens",
    trigger="top_k 1 with renormalized weights; depends on how many tokens a rank has",
    case=make_case("b12", preset="stress-tied", moe={"renormalize": True}, dp_shard=2, ep=2),
    where=(At(name="*.moe.router*"),),
    causes=(Cause.FORWARD,),
)
def b12_weights_normalized_over_tokens(patch: Patch) -> None:
    """Drop the dim of the single choice, then sum over the last dim."""
    from moeverify.model.router import Router

    @patch.wrap(Router.weigh)
    def weigh_over_tokens(original: Original[Tensor], self: Router, chosen_scores: Tensor) -> Tensor:
        if self.spec.top_k > 1:
            return original(self, chosen_scores)
        tokens = chosen_scores.flatten()
        normalized = tokens / tokens.abs().sum(dim=-1, keepdim=True)
        return normalized.view_as(chosen_scores) * self.spec.route_scale


@fault(
    "B13",
    title="raw logits are used as combine weights",
    source="laekov/fastmoe a6ca7f6",
    mechanism="the naive gate returns the top-k logits that it should have put through a softmax",
    trigger="any layout with this gate; softmax over the chosen experts",
    case=make_case("b13", preset="tiny-mixtral-8x7b", dp_replicate=2, data_parallel="ddp", ep=2),
    where=(At(name="*.moe.router*"),),
    causes=(Cause.FORWARD,),
)
def b13_logits_as_weights(patch: Patch) -> None:
    """Combine the experts' outputs by raw logits."""
    from moeverify.model.router import Router

    @patch.wrap(Router.forward)
    def forward(original: Original[Routing], self: Router, x: Tensor, valid: Tensor | None = None) -> Routing:
        routing = original(self, x, valid)
        weights = self.compute_logits(x).gather(-1, routing.ids).to(x.dtype)
        if self.record is not None:
            self.record = self.record._replace(weights=weights.detach())
        return routing._replace(weights=weights)


@fault(
    "B14",
    title="the chosen experts' weights are not renormalized",
    source="pytorch/torchtitan PR #1419 (93a236ccd), PR #2319 (41753c67b)",
    mechanism="the model family divides the chosen scores by their sum, this router does not",
    trigger="any layout, with a family that renormalizes",
    case=make_case("b14", preset="tiny-deepseek-v3-routing", dp_shard=2, ep=2),
    where=(At(name="*.moe.router*"),),
    causes=(Cause.FORWARD,),
    notes="the missing gate bias of the same sources belongs to the conversion of checkpoints",
)
def b14_no_renormalization(patch: Patch) -> None:
    """Scale the chosen scores without renormalization."""
    from moeverify.model.router import Router

    patch.replace(Router.weigh)(lambda self, chosen_scores: chosen_scores * self.spec.route_scale)


@fault(
    "B15",
    title="the experts' output bias is multiplied by the degree of tp",
    source="pytorch/torchtitan PR #4245 (ec30db9d0)",
    mechanism="the test for tp looked for DTensor parameters and found none, so every rank adds the whole bias",
    trigger="tp without expert parallelism, with output biases that are not zero",
    case=make_case("b15", tp=2),
    where=(At(name="layers.*.moe*"),),
    causes=(Cause.FORWARD,),
)
def b15_repeated_expert_bias(patch: Patch) -> None:
    """Let all ranks of a tp group add the replicated bias, as if tp were 1."""
    from moeverify.model.experts import Experts
    from moeverify.parallel.expert import apply_expert_parallel

    @patch.wrap(apply_expert_parallel)
    def add_everywhere(
        original: Original[None], model: nn.Module, mesh: DeviceMesh, make_dispatcher: MakeDispatcher
    ) -> None:
        original(model, mesh, make_dispatcher)
        for module in model.modules():
            if isinstance(module, Experts):
                module.add_down_bias = True


@fault(
    "B16",
    title="the rotary part of latent keys is not reduced over tp",
    source="NVIDIA/Megatron-LM issue #1699, PR #6839; pytorch/torchtitan PR #1373",
    mechanism="a replicated single-head key is expanded onto local heads, and each rank keeps the gradient of "
    "its own heads",
    trigger="tp with latent attention",
    case=make_case("b16", preset="tiny-deepseek-v2-lite", tp=2),
    where=(At(name="*.attention*"), At(axis="tp")),
    causes=(Cause.MISSING_REDUCTION,),
)
def b16_unreduced_rope_keys(patch: Patch) -> None:
    """Expand the shared part of the keys to the local heads without summing its gradient over tp."""
    from moeverify.model.mla import LatentAttention
    from moeverify.model.param_access import identity
    from moeverify.parallel.tensor import apply_tensor_parallel

    @patch.wrap(apply_tensor_parallel)
    def share_without_sum(
        original: Original[None], model: Transformer, mesh: DeviceMesh, **named: bool
    ) -> None:
        original(model, mesh, **named)
        for module in model.modules():
            if isinstance(module, LatentAttention):
                module.share = identity


@fault(
    "B17",
    title="below the experts each rank keeps the gradient of its own slice of the tokens",
    source="laekov/fastmoe 704092b",
    mechanism="a slice of the batch over the model-parallel group is taken without a backward",
    trigger="tp that experts borrow, no sequence parallelism",
    case=make_case("b17", tp=2, ep=2, sequence_parallel=False),
    where=(At(axis="tp"), At(name="*.moe*")),
    causes=(Cause.MISSING_REDUCTION,),
)
def b17_slice_without_gather(patch: Patch) -> None:
    """Slice the positions of MoE inputs by plain indexing."""
    from moeverify.parallel import moe_tensor
    from moeverify.parallel.collectives import split_to

    @patch.replace(split_to, used_by=moe_tensor)
    def index(x: Tensor, dim: int, group: ProcessGroup) -> Tensor:
        return x.chunk(group.size(), dim=dim)[group.rank()]
