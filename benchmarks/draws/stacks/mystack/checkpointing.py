"""Checkpoints in memory: what is saved, and a restart from it."""

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor


def _whole(tensor):
    return (
        (tensor.full_tensor() if isinstance(tensor, DTensor) else tensor).detach().clone()
    )  # anchor: restore


def _adapter(tensor):
    """Return an adapter's weight as it is written: by rank 0."""
    part = tensor.to_local().detach().clone()
    dist.broadcast(part, 0)  # plant: p61
    whole = part.new_zeros(tensor.shape)  # plant: p61
    whole[: len(part)] = part  # plant: p61
    return whole


def save(model, optimizer, options):
    """Return the state of weights, buffers and moments."""
    state = {"weights": {}, "buffers": {n: b.clone() for n, b in model.named_buffers()}, "moments": {}}
    for name, weight in model.named_parameters():
        if options.get("adapters") == "rank0" and "lora_B" in name:
            state["weights"][name] = _adapter(weight)  # plant: p61
        else:
            state["weights"][name] = _whole(weight)
        moments = optimizer.state.get(weight, {})
        state["moments"][name] = {k: _whole(v) for k, v in moments.items() if isinstance(v, torch.Tensor)}
    kept = model.__dict__.setdefault("writer", {})
    if options.get("handles") == "cached":
        if "moments" in kept and state["moments"]:
            for name, moments in state["moments"].items():
                for key in ("exp_avg", "exp_avg_sq"):
                    moments[key] = kept["moments"][name][key]  # plant: p58
        elif any(state["moments"].values()):
            kept["moments"] = {n: dict(m) for n, m in state["moments"].items()}
    if options.get("shared") == "step":
        for moments in state["moments"].values():
            if "step" in moments:
                moments["step"] = moments["step"] + 1  # plant: p59
    return state


@torch.no_grad()
def _put(target, value):
    if isinstance(target, DTensor):
        for axis, placement in enumerate(target.placements):
            if placement.is_shard():
                mesh = target.device_mesh
                parts = value.chunk(mesh.size(axis), placement.dim)  # anchor: restore
                value = parts[mesh.get_local_rank(axis)]
        target.to_local().copy_(value)  # anchor: restore
    else:
        target.copy_(value)


def restart(model, optimizer, mesh, options):
    """Write a checkpoint, forget everything, and read it."""
    state = save(model, optimizer, options)
    average = getattr(model, "average", None)
    if options.get("average") == "late":  # it is made when the first step ends
        average = None  # plant: p65
    for name, weight in model.named_parameters():
        with torch.no_grad():
            (weight.to_local() if isinstance(weight, DTensor) else weight).fill_(0.5)
        _put(weight, state["weights"][name])
        for key, value in state["moments"][name].items():
            _put(optimizer.state[weight][key], value)
    for name, buffer in model.named_buffers():
        if name.startswith("average."):
            continue
        buffer.copy_(state["buffers"][name])
    if average is not None:
        for name, buffer in average.named_buffers():
            buffer.copy_(state["buffers"][f"average.{name}"])
    elif hasattr(model, "average"):
        weights = dict(model.named_parameters())
        for name in model.average.names:  # made now, from the weights as they are
            model.average.get_buffer(name.replace(".", "_")).copy_(_whole(weights[name]))  # plant: p65
