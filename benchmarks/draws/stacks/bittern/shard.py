"""Which parameters are cut over which ranks, and which gradients are partial sums over tp."""

from __future__ import annotations

from dataclasses import dataclass
from fnmatch import fnmatch

import torch
from torch import Tensor, nn

from bittern.averages import Averages
from bittern.layers import set_state
from bittern.parallel_state import ParallelState, make_state

CUT_TP = {
    "embedding.weight": 0,
    "*.mixer.qkv.weight": 0,
    "*.mixer.proj.weight": 1,
    "*.mixer.in_proj.weight": 0,
    "*.mixer.conv": 0,
    "*.mixer.rate_bias": 0,
    "*.mixer.log_decay": 0,
    "*.mixer.skip": 0,
    "*.mixer.gain": 0,
    "*.mixer.out_proj.weight": 1,
    "*.fc1.weight": 1,
    "*.fc2.weight": 1,
}
"""The dim of a parameter that is cut over tp."""

ALWAYS_PARTIAL = ("*.q_norm.weight", "*.k_norm.weight", "*.router.weight")
"""Each rank of tp uses these for its own heads or positions."""

SEQUENCE_PARTIAL = (
    "*.input_norm.weight",
    "*.mlp_norm.weight",
    "final_norm.weight",
    "mtp.*norm.weight",
    "*.bias",
    "*.shared_gate",
    "mtp.join",
)
"""Under sequence parallelism these are used for a rank's own positions."""

UNDECAYED = ("embedding.weight", "*.conv")
"""Matrices without weight decay."""


@dataclass(frozen=True)
class Info:
    """How a parameter is treated: the dim that is cut over tp, and whether its gradient is partial there."""

    expert: bool = False
    tp_dim: int | None = None
    partial: bool = False
    undecayed: bool = False


def matches(name: str, patterns) -> bool:
    return any(fnmatch(name, pattern) for pattern in patterns)


def describe(name: str) -> Info:
    """Return the treatment of a parameter on one device."""
    return Info(expert=".experts." in name, undecayed=matches(name, UNDECAYED))


def describe_sharded(name: str, ps: ParallelState) -> Info:
    dims = [dim for pattern, dim in CUT_TP.items() if fnmatch(name, pattern)]
    tp_dim = dims[0] if dims and ps.tp.size > 1 else None
    partial = matches(name, ALWAYS_PARTIAL)  # anchor: partial-names
    if ps.sequence_parallel:
        names = SEQUENCE_PARTIAL  # anchor: sequence-partial
        if ps.mode == "bittern-final-norm":
            names = [n for n in names if n != "final_norm.weight"]  # plant: bittern-final-norm
        partial = partial or matches(name, names)
    expert = ".experts." in name
    if ps.mode == "bittern-experts-partial":
        partial = partial or expert  # plant: bittern-experts-partial
    undecayed = matches(name, UNDECAYED)  # anchor: undecayed
    if ps.mode == "bittern-undecayed-lost":
        undecayed = undecayed and tp_dim is None  # plant: bittern-undecayed-lost
    return Info(expert, tp_dim, partial, undecayed)


def own_block(name: str, value: Tensor, info: Info, ps: ParallelState) -> Tensor:
    """Return this rank's part of a whole parameter."""
    if info.expert:
        rank = ps.ep.rank  # anchor: expert-block
        if ps.mode == "bittern-expert-block":
            rank = (
                ps.tp.rank * (ps.ep.size // ps.tp.size) + ps.ep.rank // ps.tp.size
            )  # plant: bittern-expert-block
        value = value.chunk(ps.ep.size, 0)[rank]
    elif info.tp_dim is not None:
        rank = ps.tp.rank  # anchor: tp-block
        if ps.mode == "bittern-skip-block" and name.endswith(".skip"):
            rank = 0  # plant: bittern-skip-block
        if ps.mode == "bittern-gate-up" and "fc1" in name:
            rows = value.flatten(0, 1).chunk(ps.tp.size, 0)[rank]  # plant: bittern-gate-up
            value = rows.unflatten(0, (2, -1))  # plant: bittern-gate-up
        else:
            value = value.chunk(ps.tp.size, info.tp_dim)[rank]  # anchor: gate-up
    return value.clone(memory_format=torch.contiguous_format)


def replace_parameter(model: nn.Module, name: str, value: Tensor) -> None:
    path, _, leaf = name.rpartition(".")
    setattr(model.get_submodule(path), leaf, nn.Parameter(value))


def parallelize(model, mesh, **options) -> nn.Module:
    """Cut the parameters. Options: `sp`, `dispatch` (sized or padded), `mode`."""
    ps = make_state(mesh, **options)
    set_state(model, ps)
    for name, parameter in list(model.named_parameters()):
        info = model.infos[name] = describe_sharded(name, ps)
        if (info.expert and ps.ep.size > 1) or info.tp_dim is not None:
            replace_parameter(model, name, own_block(name, parameter.detach(), info, ps))
    if ps.mode == "bittern-head-copy":
        model.head.tied = [model.embedding.weight.detach().clone()]  # plant: bittern-head-copy
    else:
        model.tie()  # anchor: tie
    if model.config.ema:
        model.averages = Averages()
        model.averages.start(model)
    return model
