"""Records of a rank for the judge: a description of its tensors, then one per sampled step. No torch."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Literal

from moeverify.results.finding import Finding
from moeverify.results.record import Record
from moeverify.scripts.record.lines import Options
from moeverify.train.calls.call import LoopCall


class TensorLine(Record):
    """A parameter of a rank: its logical name and global shape, the rank's region, and its mesh.

    `mesh` has the global ranks of a DTensor's mesh and is empty for a plain tensor. `eps` is the dtype's
    machine epsilon. `is_varied` means that its initial values are not all equal. `site` is the file:line that
    calls its module, and `num_positions` the size of the module's first output divided by its last dim.
    """

    name: str
    shape: tuple[int, ...]
    region: str
    is_whole: bool
    mesh: tuple[int, ...] = ()
    eps: float = 0.0
    is_varied: bool = True
    site: str = ""
    num_positions: int = 0


class RankHeader(Record):
    """The first record of a rank. `data_ranks` share the global batch with it by DDP or FSDP.

    `groups` has the mesh axis and global ranks of each of the rank's process groups. `num_positions` counts
    those of the first batch, such as its tokens.
    """

    rank: int
    world_size: int
    tensors: tuple[TensorLine, ...]
    data_ranks: tuple[int, ...] = ()
    num_positions: int = 0
    groups: tuple[tuple[str, tuple[int, ...]], ...] = ()


class ClipLine(Record):
    """A clip of torch: returned norm, limit, and sum of squares of each tensor before the clip."""

    norm: float | None
    max_norm: float | None
    squares: dict[int, float]


class GroupLine(Record):
    """The collectives of a step on one process group: their number, largest element count, and combined hash.

    A step begins after the previous optimizer step. `num_before` of the collectives were issued before the
    step's first backward pass, and `largest_sum` is the largest element count of a reduction. `entries` has the
    first ones as (signature, call site) from the ledger.
    """

    name: str
    ranks: tuple[int, ...]
    axis: str = ""
    is_message: bool = False
    number: int
    num_before: int = 0
    hash: int
    largest: int = 0
    largest_sum: int = 0
    entries: tuple[tuple[str, str], ...] = ()


class SumLine(Record):
    """A reduction over `ranks` in a forward pass: its call site, and positions and hash of its operand."""

    ranks: tuple[int, ...]
    site: str
    hash: int
    num_positions: int = 0


class PassHashes(Record):
    """A forward pass: hashes of the first row of the batch, and of the state of each random generator."""

    number: int
    row: int
    states: tuple[int, ...]


class Nonfinite(Record):
    """The first nonfinite value of a rank, and the number of module outputs before it in the step."""

    what: Literal["output", "loss", "gradient", "weight"]
    module: str = ""
    order: int = 0


class StepRecord(Record):
    """A sampled step of a rank. Lists of tensors are in the order of `RankHeader.tensors`.

    - `began` (first record only), `ended`: hashes of samples of the weights before and after the step; 0 if
      missing.
    - `gradients`: hashes of samples of the gradients that the optimizer got; 0 if missing.
    - `projections`, `norms`: projections of the weight samples after the step on random signs, and their
      norms.
    - `squares`: sums of squares of the local gradients at the optimizer step.
    - `before`: the same at the end of the last backward pass or before the clip.
    - `partial`: numbers of the tensors whose gradients have other placements, such as unreduced partial sums.
    - `forgotten`: names of the parameters that no optimizer has; `is_replaced` if optimizers hold an old copy
      of them, `is_idle` if none has ever got a gradient, and `is_known_kind` if all of them are recomputed.
    - `losses`: values at which backward passes began.
    - `exchanged`: ranks of the groups on which a forward pass issued collectives of activations.
    - `sums`: reductions in forward passes.
    - `passes`: forward passes since the last record, whether or not their steps were sampled.
    - `is_traced`: whether `groups` has all collectives between two optimizer steps.
    - `num_backward`: backward passes of the run until the end of the step, whether or not it was sampled.
    - `takes_any`: whether the rank received messages from any sender.
    - `data_site`: file:line that drew the batch.
    - `stepped`: hashes of the weights at the end of the optimizer's step, as `ended`.
    - `options`: those of the optimizers' parameter groups.
    - `outputs`: names of modules and the largest magnitudes of their outputs, in order of the calls.
    - `unjudged`: things of this step that no rule could judge, with the reason.
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
    is_idle: bool = False
    is_replaced: bool = False
    is_known_kind: bool = True
    clips: tuple[ClipLine, ...] = ()
    rows: tuple[tuple[int, ...], ...] = ()
    losses: tuple[float, ...] = ()
    calls: tuple[LoopCall, ...] = ()
    groups: tuple[GroupLine, ...] = ()
    exchanged: tuple[tuple[int, ...], ...] = ()
    sums: tuple[SumLine, ...] = ()
    passes: tuple[PassHashes, ...] = ()
    num_backward: int = 0
    is_traced: bool = True
    takes_any: bool = False
    data_site: str = ""
    stepped: tuple[int, ...] = ()
    options: tuple[Options, ...] = ()
    outputs: tuple[tuple[str, float], ...] = ()
    unjudged: tuple[str, ...] = ()
    nonfinite: Nonfinite | None = None
    findings: tuple[Finding, ...] = ()

    @property
    def written(self) -> frozenset[int]:
        """Return the numbers of the tensors that something else than the optimizer's step has changed."""
        both = enumerate(zip(self.stepped, self.ended, strict=False))
        return frozenset(number for number, (one, two) in both if 0 != one != two)


def exchange_activations(ranks: Iterable[int], records: Mapping[int, StepRecord]) -> bool:
    """Return whether some of these ranks exchange more than a few numbers in a forward pass, or messages.

    True if the collectives of a rank are not known.
    """
    members = set(ranks)
    for rank in members & records.keys():
        record = records[rank]
        if not record.is_traced:
            return True
        messages = (group.ranks for group in record.groups if group.is_message)
        if any(len(members.intersection(group)) > 1 for group in (*record.exchanged, *messages)):
            return True
    return False
