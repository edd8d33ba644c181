"""Checkpoints: state that is not saved, not loaded, or loaded into another place.

Class O. A fault of this class has two cases, one that saves and one that loads, often under another layout.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from moeverify.faults.fault import fault
from moeverify.faults.patch import Original, Patch
from moeverify.faults.setting import make_saved_case
from moeverify.results.benchmark import At
from moeverify.results.cause import Cause

if TYPE_CHECKING:
    from torch import Tensor

    from moeverify.parallel.regions.local_shard import LocalShard
    from moeverify.parallel.regions.region import Region
    from moeverify.tools.checkpoint.writer import HeldBox


def load_into_copies(patch: Patch, is_lost: Callable[[int, HeldBox], bool]) -> None:
    """Load the parts for which `is_lost(number, part)` is true into copies of their tensors."""
    from moeverify.tools.checkpoint import load
    from moeverify.tools.checkpoint.save import list_parts

    @patch.wrap(list_parts, used_by=load)
    def list_copies(
        original: Original[tuple[list[HeldBox], dict[str, Tensor]]], tensors: Sequence[LocalShard]
    ) -> tuple[list[HeldBox], dict[str, Tensor]]:
        parts, state = original(tensors)
        for number, part in enumerate(parts):
            if is_lost(number, part):
                state[str(number)] = state[str(number)].clone()
        return parts, state


@fault(
    "O01",
    title="the moments of experts are not loaded",
    source="NVIDIA/Megatron-LM issue #761 (1505db4c)",
    mechanism="of the two optimizers, dense and expert, the second gets the state that the first has read: its "
    "own state never arrives",
    trigger="expert parallelism, which has two optimizers",
    saver=make_saved_case("o01", dp_shard=2, ep=2),
    case=make_saved_case("o01", dp_shard=2, ep=2),
    where=(At(name="optimizer/*.moe.experts*"),),
    causes=(Cause.NOT_LOADED,),
)
def o01_expert_optimizer_not_loaded(patch: Patch) -> None:
    """Load the moments of experts into tensors that do not belong to the optimizer."""
    load_into_copies(
        patch, lambda number, part: part.key.startswith("optimizer/") and ".experts." in part.key
    )


_BUCKET, _ALIGNMENT = 8192, 64  # elements


@fault(
    "O02",
    title="moments are read shifted after the first bucket",
    source="NVIDIA/Megatron-LM PR #5077 (32a03b77c5)",
    mechanism="the padding at the end of a bucket is left out of the file and counted in the offsets: later "
    "values are read too far along, and the end is filled up with zeros",
    trigger="flat shards in more than one bucket",
    saver=make_saved_case("o02", dp_shard=2, data_parallel="fsdp1"),
    case=make_saved_case("o02", dp_shard=2, data_parallel="fsdp1"),
    where=(At(name="optimizer/*"),),
    causes=(Cause.PERMUTATION,),
    is_moe=False,
)
def o02_padded_buckets(patch: Patch) -> None:
    """Read each moment of a rank's flat shards too far along, by the padding of the buckets before it."""
    import torch

    from moeverify.train.state import TrainingState

    def read_shifted(moments: Sequence[Tensor]) -> None:
        file = torch.cat(list(moments))
        place = filled = padding = 0
        for moment in moments:
            found = file[place + padding : place + padding + moment.numel()]
            moment.zero_()
            moment[: found.numel()] = found
            place += moment.numel()
            filled += moment.numel()
            if filled > _BUCKET:
                padding += -filled % _ALIGNMENT
                filled = 0

    @patch.wrap(TrainingState.restore)
    def restore_shifted(original: Original[None], self: TrainingState, facts: Mapping[str, Any]) -> None:
        original(self, facts)
        for key in ("exp_avg", "exp_avg_sq"):
            read_shifted([self.optimizer.state[shard.tensor][key].view(-1) for shard in self.program.shards])


@fault(
    "O03",
    title="weights are not sent to the other ranks after a load",
    source="NVIDIA/Megatron-LM PR #6920",
    mechanism="each rank loads the parameters that it owns, and the loop that sends them to the others runs "
    "over an empty list",
    trigger="an optimizer whose parameters are shared out by layer",
    saver=make_saved_case("o03", dp_replicate=2, data_parallel="ddp"),
    case=make_saved_case("o03", dp_replicate=2, data_parallel="ddp"),
    where=(At(name="weight/*"),),
    causes=(Cause.NOT_LOADED,),
    is_moe=False,
)
def o03_weights_not_sent_after_load(patch: Patch) -> None:
    """Load only every n-th weight on each of n ranks."""
    import torch.distributed as dist

    load_into_copies(
        patch,
        lambda number, part: (
            part.key.startswith("weight/") and number % dist.get_world_size() != dist.get_rank()
        ),
    )


@fault(
    "O05",
    title="experts of different ranks are saved as replicas of each other",
    source="pytorch/torchtitan PR #2227 (8ff9e42a3)",
    mechanism="the placement of expert tensors says Replicate over ep: of different experts, those of one "
    "rank are saved for all",
    trigger="expert parallelism",
    saver=make_saved_case("o05", dp_shard=2, ep=2),
    case=make_saved_case("o05"),
    where=(At(name="weight/*.moe.experts*"),),
    causes=(Cause.DUPLICATE, Cause.PERMUTATION),
)
def o05_experts_saved_as_replicas(patch: Patch) -> None:
    """Claim all experts on each rank, with the values of its own experts."""
    from moeverify.tools.checkpoint import save
    from moeverify.tools.checkpoint.hyperrect import Hyperrect
    from moeverify.tools.checkpoint.writer import HeldBox

    @patch.wrap(save.list_parts, used_by=save)
    def claim_all_experts(
        original: Original[tuple[list[HeldBox], dict[str, Tensor]]], tensors: Sequence[LocalShard]
    ) -> tuple[list[HeldBox], dict[str, Tensor]]:
        parts, state = original(tensors)
        for number, part in list(enumerate(parts)):
            if not part.key.startswith("weight/") or ".experts." not in part.key:
                continue
            size = part.box.shape[0]
            for start in range(0, part.shape[0], size):
                if start != part.box.offset[0]:
                    box = Hyperrect((start, *part.box.offset[1:]), part.box.shape)
                    state[str(len(parts))] = state[str(number)]
                    parts.append(HeldBox(part.key, part.shape, box))
        return parts, state


_OURS, _THEIRS = "layers.1.moe.experts.up", "layers.1.moe.experts.w3"


@fault(
    "O07",
    title="a renamed expert weight is silently not loaded",
    source="pytorch/torchtitan PR #3626 (2816b97c2); NVIDIA/Megatron-LM issue #5844",
    mechanism="the name of an expert weight differs between the one who saves and the one who loads, and "
    "the load is not strict",
    trigger="a conversion of names, strict=False",
    saver=make_saved_case("o07", dp_shard=2, ep=2),
    case=make_saved_case("o07", dp_shard=2, ep=2),
    where=(At(name="weight/layers.1.moe.experts.up*"),),
    causes=(Cause.NOT_LOADED,),
)
def o07_renamed_experts_skipped(patch: Patch) -> None:
    """Save a weight under another name, and load only the weights that match."""
    from moeverify.tools.checkpoint import load, save

    def rename(part: HeldBox) -> HeldBox:
        return part._replace(key=f"weight/{_THEIRS}") if part.key == f"weight/{_OURS}" else part

    @patch.wrap(save.list_parts, used_by=save)
    def list_renamed(
        original: Original[tuple[list[HeldBox], dict[str, Tensor]]], tensors: Sequence[LocalShard]
    ) -> tuple[list[HeldBox], dict[str, Tensor]]:
        parts, state = original(tensors)
        return [rename(part) for part in parts], state

    @patch.wrap(save.list_parts, used_by=load)
    def list_known(
        original: Original[tuple[list[HeldBox], dict[str, Tensor]]], tensors: Sequence[LocalShard]
    ) -> tuple[list[HeldBox], dict[str, Tensor]]:
        return original([shard for shard in tensors if shard.name != f"weight/{_OURS}"])

    patch.replace(load.find_misfits)(lambda folder, manifest, tensors: iter(()))
    patch.replace(load.refuse)(lambda folder, superfluous: None)


@fault(
    "O09",
    title="rows are permuted where FSDP2 shards a dim that TP has sharded",
    source="pytorch/pytorch issue #129206, PR #130760; pytorch/torchtitan PR #1483",
    mechanism="the order of nested shards is not in the placement: the outer axis is taken to cut first",
    trigger="FSDP2 over tensor parallelism, on one dim",
    saver=make_saved_case("o09", dp_shard=2, tp=2),
    case=make_saved_case("o09"),
    where=(At(name="weight/*"),),
    causes=(Cause.PERMUTATION,),
    is_moe=False,
)
def o09_nested_shards_in_wrong_order(patch: Patch) -> None:
    """Treat strided shards as plain ones when weights are saved."""
    from torch.distributed.tensor import DTensor
    from torch.distributed.tensor.placement_types import Shard, _StridedShard

    from moeverify.parallel.regions.placement import shard_region
    from moeverify.tools.checkpoint import save

    def misread(shard: LocalShard) -> Region:
        tensor = shard.tensor
        if not isinstance(tensor, DTensor) or tensor.device_mesh.get_coordinate() is None:
            return shard.region
        placements = [
            Shard(placement.dim) if isinstance(placement, _StridedShard) else placement
            for placement in tensor.placements
        ]
        mesh = tensor.device_mesh
        return shard_region(tuple(tensor.shape), tuple(mesh.shape), mesh.get_coordinate() or (), placements)

    @patch.wrap(save.list_parts, used_by=save)
    def list_misread(
        original: Original[tuple[list[HeldBox], dict[str, Tensor]]], tensors: Sequence[LocalShard]
    ) -> tuple[list[HeldBox], dict[str, Tensor]]:
        return original([replace(shard, region=misread(shard)) for shard in tensors])


@fault(
    "O10",
    title="the halves of a gate are interleaved after a load",
    source="NVIDIA/Megatron-LM issue #2769, PR #5714",
    mechanism="the load puts a fused gate into the order that tensor-parallel ranks need, on a weight that "
    "is sharded over the data ranks",
    trigger="FSDP2, gated units",
    saver=make_saved_case("o10", dp_shard=2),
    case=make_saved_case("o10", dp_shard=2),
    where=(At(name="weight/*.gate_proj*"),),
    causes=(Cause.PERMUTATION,),
    is_moe=False,
)
def o10_swizzled_gate(patch: Patch) -> None:
    """Reorder the rows of dense gates after the load."""
    import torch

    from moeverify.train.state import TrainingState

    @patch.wrap(TrainingState.restore)
    def reorder_gates(original: Original[None], self: TrainingState, facts: Mapping[str, Any]) -> None:
        original(self, facts)
        for shard in self.program.shards:
            if shard.name.endswith("mlp.gate_proj.weight"):
                local = shard.local()
                local.copy_(torch.cat([local[0::2], local[1::2]]))


@fault(
    "O11",
    title="moments are silently dropped",
    source="areal-project/AReaL PR #1468",
    mechanism="the optimizer has no state yet when its state is loaded: there is no place to load into, and "
    "nobody asks",
    trigger="a load into a fresh optimizer",
    saver=make_saved_case("o11", dp_shard=2),
    case=make_saved_case("o11", dp_shard=2),
    where=(At(name="optimizer/*"),),
    causes=(Cause.NOT_LOADED,),
    is_moe=False,
)
def o11_moments_dropped(patch: Patch) -> None:
    """Load into a fresh optimizer, and ignore the state that it has no tensors for."""
    from moeverify.tools.checkpoint.load import refuse
    from moeverify.train.state import TrainingState

    patch.replace(TrainingState.materialize)(lambda self: None)
    patch.replace(refuse)(lambda folder, superfluous: None)


@fault(
    "O13",
    title="the options of parameter groups are matched by position",
    source="NVIDIA/Megatron-LM !3394 (9a45638758)",
    mechanism="ranks have different groups, one of them empty and left out, and groups are matched one "
    "after the other: the wrong ones get decay and rate",
    trigger="groups that differ between the one who saves and the one who loads",
    saver=make_saved_case("o13", dp_shard=2),
    case=make_saved_case("o13", tp=2),
    where=(At(name="*weight_decay"),),
    causes=(Cause.STATE,),
    is_moe=False,
)
def o13_groups_by_position(patch: Patch) -> None:
    """Assign the saved options to the groups in order."""
    from moeverify.train.state import TrainingState

    @patch.replace(TrainingState.restore_groups)
    def restore_by_position(self: TrainingState, by_name: Mapping[str, Mapping[str, Any]]) -> None:
        saved: list[Mapping[str, Any]] = []
        for options in by_name.values():
            if options not in saved:
                saved.append(options)
        for number, group in enumerate(self.optimizer.param_groups):
            options = saved[min(number, len(saved) - 1)]
            group.update({key: options[key] for key in ("lr", "weight_decay", "initial_lr")})


@fault(
    "O15",
    title="the schedule goes on from the rate of the save",
    source="pytorch/pytorch issue #140900; pytorch/torchtitan PR #4168",
    mechanism="the loaded state has no initial_lr, and a fresh scheduler uses the present rate instead",
    trigger="a rate that falls",
    saver=make_saved_case("o15", dp_shard=2),
    case=make_saved_case("o15", dp_shard=2),
    where=(At(name="*initial_lr"), At(name="*scheduled lr*")),
    causes=(Cause.STATE,),
    is_moe=False,
)
def o15_initial_rate_lost(patch: Patch) -> None:
    """Delete the initial rate, so that the schedule starts from the current one."""
    from moeverify.train.state import TrainingState

    @patch.wrap(TrainingState.restore_groups)
    def lose_initial_rate(
        original: Original[None], self: TrainingState, by_name: Mapping[str, Mapping[str, Any]]
    ) -> None:
        original(self, by_name)
        for group in self.optimizer.param_groups:
            del group["initial_lr"]
            group.setdefault("initial_lr", group["lr"])


@fault(
    "O16",
    title="the data begins again after a load",
    source="pytorch/torchtitan PR #3008; PrimeIntellect-ai/prime-rl PR #3332",
    mechanism="the position in the data is in the checkpoint, and the loader is started anew behind it",
    trigger="any load",
    saver=make_saved_case("o16", dp_shard=2),
    case=make_saved_case("o16", dp_shard=2),
    where=(At(name="data position*"),),
    causes=(Cause.NOT_LOADED,),
    is_moe=False,
)
def o16_data_begins_again(patch: Patch) -> None:
    """Set the position to the first batch after everything else is restored."""
    from moeverify.train.state import TrainingState

    @patch.wrap(TrainingState.restore)
    def begin_again(original: Original[None], self: TrainingState, facts: Mapping[str, Any]) -> None:
        original(self, facts)
        self.position = 0


@fault(
    "O18",
    title="the moments of experts are saved under one name by all ranks",
    source="NVIDIA-NeMo/Automodel PR #3250 (3e795abac)",
    mechanism="the part of the optimizer that belongs to experts has one file name on all ep ranks, and the "
    "last one to write wins",
    trigger="expert parallelism",
    saver=make_saved_case("o18", dp_shard=2, ep=2),
    case=make_saved_case("o18", dp_shard=2, ep=2),
    where=(At(name="optimizer/*.moe.experts*"),),
    causes=(Cause.DUPLICATE,),
    notes="status of the report: title only",
)
def o18_expert_moments_overwritten(patch: Patch) -> None:
    """Save the moments of the last rank's experts under all experts."""
    import torch.distributed as dist

    from moeverify.tools.checkpoint import save
    from moeverify.tools.checkpoint.hyperrect import Hyperrect

    @patch.wrap(save.list_parts, used_by=save)
    def let_last_rank_write(
        original: Original[tuple[list[HeldBox], dict[str, Tensor]]], tensors: Sequence[LocalShard]
    ) -> tuple[list[HeldBox], dict[str, Tensor]]:
        parts, state = original(tensors)
        kept: list[HeldBox] = []
        values: dict[str, Tensor] = {}
        for number, part in enumerate(parts):
            boxes = [part.box]
            if part.key.startswith("optimizer/") and ".experts." in part.key and part.shape:
                last = dist.get_rank() == dist.get_world_size() - 1
                starts = range(0, part.shape[0], part.box.shape[0]) if last else ()
                boxes = [Hyperrect((start, *part.box.offset[1:]), part.box.shape) for start in starts]
            for box in boxes:
                values[str(len(kept))] = state[str(number)]
                kept.append(part._replace(box=box))
        return kept, values
