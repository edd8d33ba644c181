"""Data parallelism: what divides the rows of the batch, and replicates or shards what other axes have left whole.

Each implementation is a file here, called as `layout.data_parallel` calls it: when it can be chosen, and how it is
applied. The mechanisms are beside this package, in `ddp.py`, `fsdp1.py` and `fsdp2.py`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from moeverify.case.choice import Implementation, Modules
from moeverify.case.rule import blame, reading
from moeverify.case.schema import Case, Layout
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
    """Over which ranks a model is made data-parallel, more than one of which see other tokens.

    `shard_mesh` is (fsdp), or (dp_replicate, fsdp) where there are replicas; `expert_mesh` is the same of the sparse
    view, or (edp), for experts that are sharded over ep or etp, and None where experts are like other parameters.
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
    """Whether parameters are shards without saying so, so that norms must be summed over their ranks."""

    def apply(
        self,
        model: Transformer,
        ranks: DataRanks,
        fill: Callable[[nn.Module], None],
        compute: torch.dtype | None,
    ) -> tuple[nn.Module, Accumulate]:
        """Return the reference model, which is on the meta device, data-parallel and with its values filled in.

        With it comes the context of a micro-batch, which is told whether it is the last. `compute` is the dtype of
        the arithmetic where it is not that of the parameters. Collective: all ranks.
        """
        raise NotImplementedError

    def wrap(self, model: nn.Module, ranks: DataRanks, compute: torch.dtype | None) -> nn.Module:
        """Return a model of any make, whose parameters have their values, as one data-parallel unit.

        Gradients are averaged over the ranks of the loss. Collective: all ranks.
        """
        raise NotImplementedError

    def complete_experts(
        self, experts: Sequence[Tensor], mesh: DeviceMesh, num_loss_ranks: int
    ) -> list[Reduction]:
        """Return what is left to be done for the gradients of experts whose copies or shards are on `mesh`."""
        return []


DATA_PARALLEL: Modules[DataParallelKind] = Modules("layout.data_parallel", __name__)


@reading(
    *(f"layout.{name}" for name in ("pp", "pipeline_schedule", "virtual_stages")),
    *(f"layout.{name}" for name in ("data_parallel", "dp_replicate", "dp_shard", "cp")),
)
def stages_by_hand(case: Case) -> Iterator[Problem]:
    """Schedules run stages by hand, which the wrappers of DDP and FSDP1 do not see."""
    layout = case.layout
    if layout.pp == 1 or layout.data_ranks * layout.cp == 1:
        return
    if not DATA_PARALLEL.find(layout.data_parallel).runs_in_pipelines:
        message = f"{layout.data_parallel} together with pp is not supported"
        yield blame("layout.data_parallel", message, "write `data_parallel: fsdp2`")


DATA_RULES = (stages_by_hand,)
