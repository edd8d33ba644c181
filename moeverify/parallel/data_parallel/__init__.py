"""Data parallelism: the rows of the batch are split over ranks.

Parameters that other axes have left whole are replicated or sharded.

Each implementation is a module of this package with the name of its `layout.data_parallel` option. It
defines its rules and how it is applied. The mechanisms are next to this package, in `ddp.py`, `fsdp1.py`
and `fsdp2.py`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from moeverify.cases.choice import Implementation, Modules
from moeverify.cases.rule import blame, reading
from moeverify.cases.schema import Case, Layout
from moeverify.errors import Problem

if TYPE_CHECKING:
    import torch
    from torch import Tensor, nn
    from torch.distributed.device_mesh import DeviceMesh

    from moeverify.model.transformer import Transformer
    from moeverify.parallel.ddp import Accumulate
    from moeverify.parallel.gradients import Reduction
    from moeverify.parallel.meshes import Meshes


@dataclass(frozen=True)
class DataRanks:
    """The meshes over which a model becomes data-parallel.

    More than one of these ranks processes different tokens. `shard_mesh` is (fsdp), or (dp_replicate, fsdp)
    with replicas. `expert_mesh` is the mesh for experts that are sharded over ep or etp: (efsdp),
    (dp_replicate, efsdp) or (edp) of the sparse view. It is None where experts are handled like other
    parameters.
    """

    layout: Layout
    meshes: Meshes
    shard_mesh: DeviceMesh
    expert_mesh: DeviceMesh | None
    device: torch.device


class DataParallelKind(Implementation):
    """One implementation of data parallelism."""

    takes_mixed_precision = False
    runs_in_pipelines = False
    keeps_flat_shards = False
    """Whether parameters are shards but plain tensors, so that norms must be summed over their ranks."""

    def apply(
        self,
        model: Transformer,
        ranks: DataRanks,
        fill: Callable[[nn.Module], None],
        compute: torch.dtype | None,
    ) -> tuple[nn.Module, Accumulate]:
        """Return the reference model under data parallelism, with its values filled in.

        `model` is on the meta device; `fill` writes its values. `compute` is the dtype of the arithmetic if
        it differs from the parameters' dtype. The second result returns the context of a micro-batch; its
        argument says whether the micro-batch is the last of the step. Collective: all ranks.
        """
        raise NotImplementedError

    def wrap(self, model: nn.Module, ranks: DataRanks, compute: torch.dtype | None) -> nn.Module:
        """Return any model, whose parameters already have values, as one data-parallel unit.

        Gradients are averaged over the ranks of the loss. Collective: all ranks.
        """
        raise NotImplementedError

    def complete_experts(
        self, experts: Sequence[Tensor], mesh: DeviceMesh, num_loss_ranks: int
    ) -> list[Reduction]:
        """Return the reductions still needed for the gradients of experts.

        `mesh` holds the copies or shards of each of these experts.
        """
        return []


DATA_PARALLEL: Modules[DataParallelKind] = Modules("layout.data_parallel", __name__)


@reading(
    *(f"layout.{name}" for name in ("pp", "pipeline_schedule", "virtual_stages")),
    *(f"layout.{name}" for name in ("data_parallel", "dp_replicate", "dp_shard", "cp")),
)
def stages_by_hand(case: Case) -> Iterator[Problem]:
    """Pipeline schedules call stages directly, which bypasses the wrappers of DDP and FSDP1."""
    layout = case.layout
    if layout.pp == 1 or layout.data_ranks * layout.cp == 1:
        return
    if not DATA_PARALLEL.find(layout.data_parallel).runs_in_pipelines:
        message = f"{layout.data_parallel} together with pp is not supported"
        yield blame("layout.data_parallel", message, "write `data_parallel: fsdp2`")


DATA_RULES = (stages_by_hand,)
