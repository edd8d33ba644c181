"""Checkpoints: a file of each rank with weights, flat moments, counters, average and loads."""

import tempfile
from pathlib import Path

import torch
import torch.distributed as dist

from hazel.comm import local
from hazel.context import global_rank
from hazel.moe import MoE


def shared_folder():
    """Make a folder that all ranks use."""
    made = [tempfile.mkdtemp(prefix="hazel-") if global_rank() == 0 else None]
    if dist.is_initialized():
        dist.broadcast_object_list(made, 0)
    return Path(made[0])


def barrier():
    if dist.is_initialized():
        dist.barrier()


def buffers_of(net):
    """Return the average and the routers' shares by name."""
    found = {f"average.{n}": b for n, b in net.average.named_buffers()} if net.average is not None else {}
    found |= {f"prior.{i}": b.mlp.prior for i, b in enumerate(net.blocks) if isinstance(b.mlp, MoE)}
    return found


def save(net, state, folder):
    adam, pc = state.adam, net.ctx
    flat = torch.cat([x.flatten() for name in sorted(adam.moments) for x in adam.moments[name]])
    if pc.on("hazel-resume-narrow"):
        flat = flat.float()  # plant: hazel-resume-narrow
    data = {
        "step": state.step,
        "count": adam.count,
        "moments": flat,
        "weights": {name: local(p).detach().clone() for name, p in net.named_parameters()},
        "buffers": {name: local(b).clone() for name, b in buffers_of(net).items()},
    }
    torch.save(data, folder / f"rank{global_rank()}.pt")
    barrier()


@torch.no_grad()
def load(net, state, folder):
    """Load what `save` has written into a new state."""
    adam, pc = state.adam, net.ctx
    file = f"rank{global_rank()}.pt"  # anchor: file
    if pc.on("hazel-resume-file"):
        file = f"rank{pc.rank('dp_replicate')}.pt"  # plant: hazel-resume-file
    data = torch.load(folder / file)
    state.step = data["step"]
    if not pc.on("hazel-resume-count"):  # plant: hazel-resume-count
        adam.count = data["count"]
    shapes = {name: local(parameter) for name, parameter, *_ in adam.groups}
    names = sorted(shapes)  # anchor: names
    if pc.on("hazel-resume-order"):
        names = list(shapes)  # plant: hazel-resume-order
    first = 0
    for name in names:
        pair = adam.state_of(name, shapes[name])
        for moment in pair:
            moment.copy_(data["moments"][first : first + moment.numel()].view_as(moment))
            first += moment.numel()
    for name, parameter in net.named_parameters():
        key = "average." + name.replace(".", "__")
        if pc.on("hazel-resume-average") and key in data["buffers"]:
            local(parameter).copy_(data["buffers"][key])  # plant: hazel-resume-average
        else:
            local(parameter).copy_(data["weights"][name])  # anchor: weights
    buffers = buffers_of(net)
    if pc.on("hazel-resume-shares"):
        buffers = {n: b for n, b in buffers.items() if n.startswith("average")}  # plant: hazel-resume-shares
    for name, buffer in buffers.items():
        local(buffer).copy_(data["buffers"][name])
    barrier()
