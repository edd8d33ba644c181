"""From the parameters of one device to those of a rank, and the reduction of gradients."""

import torch
import torch.distributed as dist
from torch import nn

from linden.topo import all_sum, make_topo

CUT = {
    "table": {"tp": 0},
    "wq": {"tp": 0},
    "wk": {"tp": 0},
    "wv": {"tp": 0},
    "sink": {"tp": 0},
    "wo": {"tp": 0},
    "d_gate": {"tp": 1},
    "d_up": {"tp": 1},
    "d_down": {"tp": 0},
    "s_gate": {"tp": 1},
    "s_up": {"tp": 1},
    "s_down": {"tp": 0},
    "e_gate": {"ep": 0, "tp": 2},
    "e_up": {"ep": 0, "tp": 2},
    "e_down": {"ep": 0, "tp": 1},
}
"""The dim of a leaf that is cut over an axis."""

PARTIAL = ("q_gain", "k_gain", "head_bias")
"""Leaves that are whole on each rank of `tp`, which uses them for its own heads or rows."""


def leaf_of(name):
    """Return the name of a parameter without its block."""
    head, _, rest = name.partition("_")
    return rest if head[:1] == "b" and head[1:].isdigit() else name


def is_expert(name):
    return leaf_of(name).startswith("e_")


def cuts_of(name, topo):
    """Return (axis, dim) for each axis over which a parameter is cut."""
    return [(getattr(topo, axis), dim) for axis, dim in CUT.get(leaf_of(name), {}).items()]


def slice_of(name, value, topo):
    """Return this rank's block of a whole parameter."""
    for axis, dim in cuts_of(name, topo):
        rank = axis.rank  # anchor: slice-rank
        if topo.on("linden-sink-slice") and name.endswith("sink"):
            rank = 0  # plant: linden-sink-slice
        if topo.on("linden-values-turned") and name.endswith("wv"):
            rank = (axis.rank + 1) % axis.size  # plant: linden-values-turned
        if topo.on("linden-down-block") and name.endswith("e_down") and axis is topo.ep:
            rank = topo.tp.rank  # plant: linden-down-block
        value = value.chunk(axis.size, dim)[rank]
    return value.clone(memory_format=torch.contiguous_format)


def parallelize(net, mesh, *, trial="", zero=False):
    """Return the net of this rank, and the function that completes its gradients.

    The step with `zero` completes gradients by itself.
    """
    topo = net.topo = make_topo(mesh, trial)
    for name, parameter in list(net.named_parameters()):
        if any(axis.size > 1 for axis, _ in cuts_of(name, topo)):
            setattr(net, name, nn.Parameter(slice_of(name, parameter.detach(), topo)))
    if net.sizes.ema:
        start_ema(net)
    if zero:
        return net
    reducer = Reducer(net)

    def finish():
        add_partial(net)
        reducer()

    return net, finish


def start_ema(net):
    for name, parameter in net.named_parameters():
        net.register_buffer(f"ema_{name}", parameter.detach().clone())


@torch.no_grad()
def add_partial(net):
    """Add up gradients of leaves that ranks of `tp` used on different heads or rows."""
    topo = net.topo
    partial = PARTIAL  # anchor: partial
    if topo.on("linden-partial-keys"):
        partial = ("q_gain", "head_bias")  # plant: linden-partial-keys
    if topo.on("linden-partial-sinks"):
        partial = (*PARTIAL, "sink")  # plant: linden-partial-sinks
    for name, parameter in net.named_parameters():
        if leaf_of(name) in partial:
            all_sum(parameter.grad, topo.tp)


class Reducer:
    """Sums gradients over ranks with other tokens, in two flat buffers."""

    def __init__(self, net):
        self.net = net

    def members(self):
        """Return (parameters, axis) for the dense ones and the experts."""
        net, topo = self.net, self.net.topo
        named = list(net.named_parameters())
        axis = topo.copies  # anchor: expert-axis
        if topo.on("linden-expert-axis"):
            axis = topo.data  # plant: linden-expert-axis
        return [
            ([p for n, p in named if not is_expert(n)], topo.data),
            ([p for n, p in named if is_expert(n)], axis),
        ]

    @torch.no_grad()
    def __call__(self):
        flights = []
        for parameters, axis in self.members():
            if axis.size == 1 or not parameters:
                continue
            flat = torch.cat([p.grad.flatten() for p in parameters])
            flights.append((parameters, flat, dist.all_reduce(flat, group=axis.pg, async_op=True)))
        for parameters, flat, work in flights:
            work.wait()
            put_back(parameters, flat)


def put_back(parameters, flat):
    sizes = [p.numel() for p in parameters]
    for parameter, part in zip(parameters, flat.split(sizes)):
        parameter.grad.copy_(part.view_as(parameter))
