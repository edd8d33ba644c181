"""From a network on one device to one on a mesh, with the kinds of parallelism that the mesh has axes for."""

from __future__ import annotations

from functools import partial

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    PrepareModuleInput,
    PrepareModuleOutput,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)

from rowan.buckets import Buckets
from rowan.experts import MoE
from rowan.mixers import GatedDelta
from rowan.net import Block, Net, project_by
from rowan.topology import Topology
from rowan.wire import local


def apply(net: Net, mesh: DeviceMesh, *, quirk: str = "", chunk: int = 4, remat: bool = False):
    """Return the network for a mesh, and the function that completes its gradients."""
    topology = net.topology = Topology(mesh, quirk, chunk, remat)
    table = net.embed.weight.detach().chunk(topology.size("tp"))[topology.rank("tp")].clone()
    if topology.size("tp") > 1:
        divide_tensors(net, mesh["tp"], topology)
    if topology.odd("rowan-tie-lost"):
        net.logits = partial(project_by, nn.Parameter(table))  # plant: rowan-tie-lost
    divide_experts(net, topology)
    if topology.odd("rowan-taps-drawn"):
        redraw_taps(net, topology)
    if topology.odd("rowan-average-alias"):
        alias_average(net)
    net.buckets = (make_buckets(net, topology),)
    return net, net.buckets[0].finish


def replace(module: nn.Module, name: str, mesh: DeviceMesh, *placements) -> None:
    old = getattr(module, name)
    setattr(module, name, nn.Parameter(distribute_tensor(old.detach(), mesh, list(placements))))


def first_block(module: nn.Module, name: str, mesh: DeviceMesh) -> None:
    old = getattr(module, name).detach()
    part = old[: len(old) // mesh.size()].clone()  # plant: rowan-taps-first
    setattr(module, name, nn.Parameter(DTensor.from_local(part, mesh, [Shard(0)], run_check=False)))


def divide_tensors(net: Net, tp: DeviceMesh, topology: Topology) -> None:
    """Heads, hidden units and the vocabulary over `tp`; positions between them."""
    sequence = partial(SequenceParallel, use_local_output=True)
    whole = {
        "embed": RowwiseParallel(input_layouts=Replicate(), output_layouts=Shard(1)),
        "final": sequence(),
    }
    parallelize_module(net, tp, whole)
    for name in list(net.tail):
        replace(net.tail, name, tp, Replicate())
    for block in net.blocks:
        parallelize_module(block, tp, block_plan(block, topology))
        mixer = block.mixer
        if isinstance(mixer, GatedDelta):
            for name in list(mixer.taps):
                if topology.odd("rowan-taps-first"):
                    first_block(mixer.taps, name, tp)
                else:
                    replace(mixer.taps, name, tp, Shard(0))  # anchor: taps-shard
            replace(mixer, "log_rate", tp, Shard(0))
            replace(mixer, "step_bias", tp, Shard(0))
            replace(mixer, "scale", tp, Replicate())
        else:
            replace(mixer, "query_scale", tp, Replicate())
            replace(mixer, "key_scale", tp, Replicate())


def block_plan(block: Block, topology: Topology) -> dict:
    columns = [
        name for name, child in block.mixer.named_children() if isinstance(child, nn.Linear) and name != "out"
    ]
    plan = {
        "norm_mix": SequenceParallel(use_local_output=True),
        "norm_feed": SequenceParallel(use_local_output=True),
        "mixer": PrepareModuleInput(
            input_layouts=(Shard(1), None), desired_input_layouts=(Replicate(), None), use_local_output=True
        ),
        **{f"mixer.{name}": ColwiseParallel() for name in columns},
        "mixer.out": RowwiseParallel(output_layouts=Shard(1)),
        "feed": PrepareModuleInput(
            input_layouts=(Shard(1),), desired_input_layouts=(Replicate(),), use_local_output=True
        ),
    }
    if topology.odd("rowan-same-dim"):
        plan["norm_mix"] = SequenceParallel(sequence_dim=0, use_local_output=True)
    if topology.odd("rowan-norm-plan"):
        del plan["norm_feed"]  # plant: rowan-norm-plan
    if isinstance(block.feed, MoE):
        layout = (
            Replicate() if topology.odd("rowan-shared-summed") else Partial()
        )  # plant: rowan-shared-summed
        plan |= {
            "feed.shared.gate": ColwiseParallel(),
            "feed.shared.up": ColwiseParallel(),
            "feed.shared.down": RowwiseParallel(output_layouts=layout),
        }
        return plan
    return plan | {
        "feed.gate": ColwiseParallel(),
        "feed.up": ColwiseParallel(),
        "feed.down": RowwiseParallel(output_layouts=Shard(1)),
    }


def moe_output(block: Block, tp: DeviceMesh) -> None:
    """Sum the parts of a mixture, and keep this rank's positions."""
    style = PrepareModuleOutput(
        output_layouts=Partial(), desired_output_layouts=Shard(1), use_local_output=True
    )
    parallelize_module(block.feed, tp, style)


def divide_experts(net: Net, topology: Topology) -> None:
    """Whole experts over `dp_shard`, and their hidden units over `tp`."""
    spread = "dp_replicate" if topology.odd("rowan-experts-axis") else "dp_shard"  # plant: rowan-experts-axis
    axes = [axis for axis in (spread, "tp") if topology.size(axis) > 1]
    for block in net.blocks:
        if not isinstance(block.feed, MoE) or not axes:
            continue
        mesh = topology.mesh[axes[0]] if len(axes) == 1 else topology.mesh[tuple(axes)]
        for name, hidden in (("w_in", 3), ("w_out", 1)):
            cut = {spread: Shard(0), "tp": Shard(hidden)}
            replace(block.feed.experts, name, mesh, *[cut[axis] for axis in axes])
        if "tp" in axes:
            moe_output(block, topology.mesh["tp"])


def redraw_taps(net: Net, topology: Topology) -> None:
    """Draw the weights that the checkpoint lacks."""
    generator = torch.Generator().manual_seed(7 + torch.distributed.get_rank())  # plant: rowan-taps-drawn
    for module in net.modules():
        if isinstance(module, GatedDelta):
            for taps in module.taps.values():
                taps.data.copy_(torch.randn(taps.shape, generator=generator) * taps.shape[-1] ** -0.5)


def alias_average(net: Net) -> None:
    """Put the averages where the weights are, for a conversion that saves memory."""
    for name, weight in net.named_parameters():
        key = name.replace(".", "_")
        if key in net.average._buffers:
            net.average._buffers[key] = local(weight).detach()  # plant: rowan-average-alias


def make_buckets(net: Net, topology: Topology) -> Buckets:
    """Sums over the ranks that read different tokens; an expert has seen those of all ranks of `dp_shard`."""
    copies = topology.group("dp_replicate", "cp")

    def group_of(name: str):
        if ".experts." not in name or topology.odd("rowan-expert-sum"):  # plant: rowan-expert-sum
            return topology.tokens
        return copies  # anchor: copies

    named = list(net.named_parameters())  # anchor: named
    if topology.odd("rowan-tail-unlisted"):
        named = [
            (n, p) for m, module in net.named_children() if m != "tail" for n, p in module.named_parameters(m)
        ]  # plant: rowan-tail-unlisted
    if topology.odd("rowan-same-twice"):
        named += [("head.weight", net.embed.weight)]
    return Buckets(named, group_of, topology)
