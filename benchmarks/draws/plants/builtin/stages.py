"""Pipelines."""

from __future__ import annotations

from typing import Any

from moeverify.faults.patch import Patch


def p22(patch: Patch) -> None:
    """The last stage is not in the group that sums the gradient of a tied embedding."""
    from moeverify.parallel import plan
    from moeverify.parallel.regions.placement import local_part

    @patch.wrap(plan.sum_tied)
    def sum_tied(original: Any, shards: Any, meshes: Any) -> None:
        copies = [shard.tensor for shard in shards if shard.name == plan.TIED]
        own = [local_part(copy.grad).clone() for copy in copies]
        original(shards, meshes)
        if meshes.ends is not None and meshes.ends.rank() == meshes.ends.size() - 1:
            for copy, gradient in zip(copies, own, strict=True):
                local_part(copy.grad).copy_(gradient)  # plant: p22-builtin


def p23(patch: Patch) -> None:
    """A stage has as many layers as the uneven split says, from the offset of the even split."""
    from moeverify.cases.axes.stages import split_layers
    from moeverify.parallel import pipeline

    @patch.wrap(split_layers, used_by=pipeline)
    def split(original: Any, layout: Any, num_layers: int) -> Any:
        sizes = [len(stage) for stage in original(layout, num_layers)]
        even = num_layers // len(sizes)
        return [
            range(i * even, min(num_layers, i * even + size)) for i, size in enumerate(sizes)
        ]  # plant: p23-builtin


def p34(patch: Patch) -> None:
    """The buffer of an asynchronous send is reused at once."""
    from torch.distributed.pipelining import schedules

    @patch.wrap(schedules._batch_p2p)
    def batch(original: Any, ops: Any, desc: Any = None) -> Any:
        works = original(ops, desc)
        for op in ops:
            if op.op.__name__ == "isend" and op.tensor.is_floating_point() and op.tensor.dim() > 1:
                op.tensor.data.zero_()  # plant: p34-builtin
        return works


def pytorch_139404(patch: Patch) -> None:
    """A stage sends back the gradient of another micro-batch."""
    from torch.distributed.pipelining.stage import _PipelineStageBase

    @patch.wrap(_PipelineStageBase.get_bwd_send_ops)
    def send(original: Any, self: Any, bwd_chunk_id: int) -> Any:
        kept = self.__dict__.setdefault("_last_sent", {})
        own = self.bwd_cache.get(bwd_chunk_id)
        if own is not None:
            kept[bwd_chunk_id] = own
            if bwd_chunk_id - 1 in kept:
                self.bwd_cache[bwd_chunk_id] = kept[bwd_chunk_id - 1]  # plant: pytorch-139404
        return original(self, bwd_chunk_id)
