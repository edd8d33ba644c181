"""Conversion to the names of a hub: the gate and up projections are one matrix there."""

import torch


@torch.no_grad()
def export(model):
    """Return the weights under the names of the hub."""
    weights = {}
    for name, parameter in model.named_parameters():
        weights[name] = parameter.detach().clone()
    for name in [name for name in weights if ".w1" in name]:
        gate, up = weights.pop(name), weights.pop(name.replace(".w1", ".w3"))
        weights[name.replace(".w1", ".gate_up")] = torch.cat([gate, up], dim=-2)
    return weights


@torch.no_grad()
def restore(model, weights, ps):
    """Load weights of the hub."""
    own = dict(model.named_parameters())
    for name, value in weights.items():
        if ".gate_up" not in name:
            own[name].copy_(value)
            continue
        if ps.using("plover-gate-order"):
            up, gate = value.chunk(2, dim=-2)  # plant: plover-gate-order
        else:
            gate, up = value.chunk(2, dim=-2)
        own[name.replace(".gate_up", ".w1")].copy_(gate)
        own[name.replace(".gate_up", ".w3")].copy_(up)
