"""What a rank leaves for the judge: once a description of its tensors, then one record a sampled step. No torch."""

from __future__ import annotations

from typing import Literal

from moeverify.calls.call import Call
from moeverify.results.finding import Finding
from moeverify.results.record import Record


class TensorLine(Record):
    """A parameter of a rank: its logical name and global shape, the region that the rank has, its mesh.

    `mesh` are the global ranks of its DTensor's mesh, none for a plain tensor.
    """

    name: str
    shape: tuple[int, ...]
    region: str
    is_whole: bool
    mesh: tuple[int, ...] = ()
    eps: float = 0.0


class RankHeader(Record):
    """The first thing that a rank leaves. `data_ranks` share the global batch with it, by DDP or FSDP.

    `groups` are the mesh axis and the global ranks of each process group that it is in.
    """

    rank: int
    world_size: int
    tensors: tuple[TensorLine, ...]
    data_ranks: tuple[int, ...] = ()
    groups: tuple[tuple[str, tuple[int, ...]], ...] = ()


class ClipLine(Record):
    """A clip of torch: the norm that it returned, its limit, and the sums of squares that it found, by tensor."""

    norm: float | None
    max_norm: float | None
    squares: dict[int, float]


class GroupLine(Record):
    """The collectives of a step on one process group: how many, the most elements of one, and a hash of all.

    With `signature` (number, hash) and the first `entries`, each (signature, site), as the ledger keeps them.
    """

    name: str
    ranks: tuple[int, ...]
    axis: str = ""
    is_message: bool = False
    number: int
    hash: int
    largest: int = 0
    entries: tuple[tuple[str, str], ...] = ()


class Nonfinite(Record):
    """The first value of a rank that is not finite, and how many modules had run in the step before it."""

    what: Literal["output", "loss", "gradient", "weight"]
    module: str = ""
    order: int = 0


class StepRecord(Record):
    """A sampled step of a rank. All lists are in the order of `RankHeader.tensors`.

    `began` (first record only), `ended` and `gradients` are hashes of samples of the weights before the step, after
    it, and of the gradients that the optimizer got; 0 where there is nothing. `projections` are those of the weight's
    samples after the step on fixed random signs, `norms` their norms. `squares` are the sums of squares of the local
    gradients at the optimizer step, `before` what they were when the last backward pass was over or the clip began.
    `partial` are the tensors whose gradients are unreduced partial sums, `forgotten` those that no optimizer has.
    """

    step: int
    rank: int
    began: tuple[int, ...] = ()
    ended: tuple[int, ...] = ()
    gradients: tuple[int, ...] = ()
    projections: tuple[tuple[float, ...], ...] = ()
    norms: tuple[float, ...] = ()
    squares: tuple[float, ...] = ()
    before: tuple[float | None, ...] = ()
    partial: tuple[int, ...] = ()
    forgotten: tuple[str, ...] = ()
    clips: tuple[ClipLine, ...] = ()
    rows: tuple[tuple[int, ...], ...] = ()
    calls: tuple[Call, ...] = ()
    groups: tuple[GroupLine, ...] = ()
    nonfinite: Nonfinite | None = None
    findings: tuple[Finding, ...] = ()
