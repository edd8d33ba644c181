"""Experts where a placement puts them: replicas, their sums, and their exchange during training.

Class P. Any rank may hold an expert, several ranks may hold replicas, and experts may move between two
steps. Each replica has a part of the gradient. Everything that depends on the holders of an expert must
follow the placement.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from moeverify.cases.schema import Case
from moeverify.faults.fault import fault
from moeverify.faults.patch import Original, Patch
from moeverify.faults.setting import make_case
from moeverify.results.benchmark import At
from moeverify.results.cause import Cause

if TYPE_CHECKING:
    import torch.distributed as dist
    from torch import Tensor
    from torch.distributed import ProcessGroup
    from torch.optim import Optimizer

    from moeverify.parallel.holder_groups import HolderGroup, HolderGroups, Holders
    from moeverify.parallel.move_experts import Journey
    from moeverify.parallel.placed_experts import PlacedLayer
    from moeverify.tools.placement.buckets import Bucket
    from moeverify.tools.placement.placement import Placement
    from moeverify.train.program import TrainingProgram


BEFORE = ((0, 1, 2, 3, 4, 5, 6, 7), (8, 9, 10, 11, 12, 13, 14, 15))

AFTER = ((0, 8, 2, 3, 12, 5, 6, 15), (1, 9, 10, 11, 4, 13, 14, 7))

REPLICAS = ((0, 1, 2, 3, 4, 5, 6, 7, 8), (2, 7, 8, 9, 10, 11, 12, 13, 14, 15))


def make_placed_case(name: str, **options: Any) -> Case:
    """Return a case with replicas on two ranks."""
    return make_case(name, **{"dp_shard": 2, "ep": 2, "placement": REPLICAS, **options})


def make_exchange_case(name: str, after: Any = AFTER, **options: Any) -> Case:
    """Return a case of three steps in which experts move after the first. AdamW has two moments."""
    return make_case(
        name,
        **{
            "dp_shard": 2,
            "ep": 2,
            "placement": BEFORE,
            "exchange": {"1": after},
            "optimizer": "adamw",
            "recipe": {"steps": 3},
            **options,
        },
    )


def list_arrivals(journey: Journey, rank: int) -> list[tuple[int, int]]:
    """Return (row, expert) of each expert that is new on a rank after the exchange."""
    before = journey.before[rank]
    return [(row, expert) for row, expert in enumerate(journey.after[rank]) if expert not in before]


def change_moves(
    patch: Patch,
    change: Callable[[Sequence[Tensor], list[Tensor], Journey, ProcessGroup], list[Tensor]],
) -> None:
    """Replace the result of each exchange by `change(tensors before, tensors after, journey, group)`."""
    from moeverify.parallel.move_experts import move_rows

    @patch.wrap(move_rows)
    def moved(
        original: Original[list[Tensor]], tensors: Sequence[Tensor], journey: Journey, group: ProcessGroup
    ) -> list[Tensor]:
        return change(tensors, original(tensors, journey, group), journey, group)


@fault(
    "P01",
    title="replicas of an expert never sum their gradients",
    source="facebookresearch/fairseq #4220",
    mechanism="DDP skips every parameter that is marked as an expert's, also those that several ranks hold",
    trigger="more ranks than experts, or replicas of hot experts",
    case=make_placed_case("p01"),
    where=(At(name="*.moe.experts*"),),
    causes=(Cause.MISSING_REDUCTION, Cause.SHARE_WEIGHTS),
)
def p01_unreduced_replicas(patch: Patch) -> None:
    """Skip the sum of the replicas' gradients."""
    from moeverify.parallel.placed_experts import start_sum

    @patch.replace(start_sum)
    def nothing(whole: Tensor, group: HolderGroup) -> None:
        return None


@fault(
    "P02",
    title="one replica of an expert is left out of the sum of its gradient",
    source="no report known; after facebookresearch/fairseq #4220, where all are left out",
    mechanism="the list of holders is from before a replica was added: its contribution is lost",
    trigger="replicas",
    case=make_placed_case("p02"),
    where=(At(name="*.moe.experts*"),),
    causes=(Cause.SHARE_WEIGHTS,),
)
def p02_replica_left_out(patch: Patch) -> None:
    """Zero the contribution of the last of several holders."""
    import torch.distributed as dist

    from moeverify.parallel.placed_experts import start_sum

    @patch.wrap(start_sum)
    def without_last(
        original: Original[dist.Work | None], whole: Tensor, group: HolderGroup
    ) -> dist.Work | None:
        if len(group.ranks) > 1 and dist.get_rank() == group.ranks[-1]:
            whole.zero_()
        return original(whole, group)


@fault(
    "P03",
    title="expert gradients are averaged over their replicas",
    source="no report known; the divisor of NVIDIA/Megatron-LM's data-parallel groups applied to holders",
    mechanism="each group of holders averages, so experts with replicas learn more slowly than those without",
    trigger="replicas of some experts",
    case=make_placed_case("p03"),
    where=(At(name="*.moe.experts*"),),
    causes=(Cause.SCALE,),
)
def p03_mean_over_replicas(patch: Patch) -> None:
    """Divide by the number of holders as well."""
    from moeverify.parallel.placed_experts import start_sum

    @patch.wrap(start_sum)
    def averaged(original: Original[dist.Work | None], whole: Tensor, group: HolderGroup) -> dist.Work | None:
        whole /= len(group.ranks)
        return original(whole, group)


@fault(
    "P04",
    title="experts are exchanged without their moments",
    source="no report known; the optimizer's half of vllm-project/vllm #55228",
    mechanism="an exchange made for inference moves weights alone, and is used in training",
    trigger="an exchange of experts during training",
    case=make_exchange_case("p04"),
    where=(At(name="*.moe.experts*"),),
    causes=(Cause.CARRIED_STATE,),
)
def p04_moments_left_behind(patch: Patch) -> None:
    """Zero the moments of arriving experts."""

    def without_moments(
        before: Sequence[Tensor], after: list[Tensor], journey: Journey, group: ProcessGroup
    ) -> list[Tensor]:
        for moment in after[1:]:
            for row, _ in list_arrivals(journey, group.rank()):
                moment[row] = 0
        return after

    change_moves(patch, without_moments)


@fault(
    "P05",
    title="slots keep the weights of the experts that were there before an exchange",
    source="vllm-project/vllm #55228, PrimeIntellect-ai/prime-rl #3583",
    mechanism="weights are written by the initial placement while tokens are routed by the current one",
    trigger="an exchange of experts, then weights by another placement",
    case=make_exchange_case("p05"),
    where=(At(name="*.moe*"),),
    causes=(Cause.PERMUTATION, Cause.DUPLICATE, Cause.FORWARD),
)
def p05_old_names(patch: Patch) -> None:
    """Leave all rows in place, while names and routes change."""

    def stay(
        before: Sequence[Tensor], after: list[Tensor], journey: Journey, group: ProcessGroup
    ) -> list[Tensor]:
        return [tensor.clone() for tensor in before]

    change_moves(patch, stay)


@fault(
    "P06",
    title="tokens are routed by the placement from before an exchange",
    source="vllm-project/vllm #55228",
    mechanism="the map from experts to slots is cached, and an exchange moves weights without it",
    trigger="an exchange of experts that leaves the number of experts on each rank as it was",
    case=make_exchange_case("p06"),
    where=(At(name="*.moe*"),),
    causes=(Cause.FORWARD, Cause.PERMUTATION),
)
def p06_routes_of_before(patch: Patch) -> None:
    """Keep the previous routes of a layer."""
    from moeverify.parallel.expert import AllToAllDispatcher
    from moeverify.parallel.placed_experts import set_placement

    @patch.wrap(set_placement)
    def kept(
        original: Original[PlacedLayer], layer: PlacedLayer, buckets: tuple[Bucket, ...], num_experts: int
    ) -> PlacedLayer:
        dispatcher = layer.moe.dispatcher
        routes = dispatcher.routes if isinstance(dispatcher, AllToAllDispatcher) else None
        changed = original(layer, buckets, num_experts)
        if routes is not None and isinstance(changed.moe.dispatcher, AllToAllDispatcher):
            changed.moe.dispatcher.routes = routes
        return changed


@fault(
    "P07",
    title="a new replica never gets the weights of its expert",
    source="vllm-project/vllm #18343 (review of 2025-06-21)",
    mechanism="the plan of an exchange sends each expert to one new rank: the weights of its further replica stay",
    trigger="an exchange that adds replicas",
    case=make_exchange_case("p07", after=REPLICAS),
    where=(At(name="*.moe*"),),
    causes=(Cause.DUPLICATE, Cause.REPLICAS, Cause.PERMUTATION, Cause.FORWARD),
)
def p07_replica_not_sent(patch: Patch) -> None:
    """Fill the rows of new replicas with the contents of the rank's first slot."""

    def without_replicas(
        before: Sequence[Tensor], after: list[Tensor], journey: Journey, group: ProcessGroup
    ) -> list[Tensor]:
        rank = group.rank()
        for old, new in zip(before, after, strict=True):
            for row, expert in list_arrivals(journey, rank):
                stays = any(
                    expert in journey.before[other] and expert in journey.after[other]
                    for other in range(group.size())
                    if other != rank
                )
                if stays:
                    new[row] = old[0]
        return after

    change_moves(patch, without_replicas)


@fault(
    "P08",
    title="an exchange of experts never takes place",
    source="no report known",
    mechanism="the policy that starts an exchange is asked before the first trace is there, and never again",
    trigger="an exchange of experts during training",
    case=make_exchange_case("p08"),
    where=(At(name="*.moe.experts*"),),
    causes=(Cause.LAYOUT,),
)
def p08_skipped_exchange(patch: Patch) -> None:
    """Skip the exchange."""
    from moeverify.train.exchange import exchange_experts

    @patch.replace(exchange_experts)
    def nothing(program: TrainingProgram, optimizer: Optimizer, placement: Placement) -> None:
        return None


PAIRS = ((0, 1, 2, 3, 8), (0, 4, 5, 6, 7), (8, 9, 10, 11), (12, 13, 14, 15))

"""Experts 0 and 8 are on two ranks each, both including rank 0, with gradients and groups of equal size."""


@fault(
    "P09",
    title="one rank makes the groups of replicas in another order",
    source="the warning of torch.distributed.new_group: all ranks must make all groups in the same order",
    mechanism="groups are found by their number, and one rank has gone through its experts in another order",
    trigger="two experts with replicas on as many ranks, one rank among both",
    case=make_placed_case("p09", dp_shard=4, ep=4, placement=PAIRS),
    where=(At(name="*.moe.experts*"),),
    causes=(Cause.COLLECTIVES,),
)
def p09_groups_in_another_order(patch: Patch) -> None:
    """Let rank 0 use its groups of two ranks in reversed order."""
    import torch.distributed as dist

    from moeverify.parallel.holder_groups import HolderGroups

    @patch.wrap(HolderGroups.find)
    def find(original: Original[HolderGroup], self: HolderGroups, holders: Holders) -> HolderGroup:
        if dist.get_rank() != 0 or len(holders) != 2:
            return original(self, holders)
        pairs = [each for each in self.list_own() if len(each) == 2]
        return original(self, pairs[::-1][pairs.index(holders)])


@fault(
    "P10",
    title="an exchange leaves the moments in the slots of other experts",
    source="no report known; the optimizer's half of vllm-project/vllm #55228",
    mechanism="the optimizer's state belongs to a slot, and an exchange copies weights between slots",
    trigger="an exchange of experts that leaves the number of experts on each rank as it was",
    case=make_exchange_case("p10"),
    where=(At(name="*.moe.experts*"),),
    causes=(Cause.CARRIED_STATE,),
)
def p10_moments_stay_in_slots(patch: Patch) -> None:
    """Move only the weights."""

    def leave_moments(
        before: Sequence[Tensor], after: list[Tensor], journey: Journey, group: ProcessGroup
    ) -> list[Tensor]:
        return [after[0], *(moment.clone() for moment in before[1:])]

    change_moves(patch, leave_moments)
