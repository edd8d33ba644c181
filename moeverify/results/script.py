"""What a comparison of two recorded scripts finds besides tensors, as data. No torch."""

from __future__ import annotations

from enum import StrEnum
from typing import Literal

from moeverify.results.record import Record


class ScriptCheck(StrEnum):
    """The checks of `moeverify compare` that a case has not; they come before those of tensors."""

    BATCH = "batch"  # the rows that the model was called with
    PARAMETERS = "optimizer parameters"  # which parameters an optimizer has
    OPTIONS = "optimizer options"  # learning rate, weight decay, ...
    CALLS = "order of calls"  # of zero_grad, forward, backward, clip, step, scheduler


class BatchFacts(Record):
    """Rows of the global batch that no rank saw (`num_missing` of `num_rows`), and rows that should not be there.

    `num_other` of these are not in the batch, and were seen by `ranks`; `num_repeated` are in it, and were seen more
    often, by `ranks` where there are no others. `repeated` are ranks that saw exactly the same rows.
    """

    about: Literal["batch"] = "batch"
    num_rows: int
    num_missing: int
    num_other: int
    num_repeated: int
    ranks: tuple[int, ...] = ()
    repeated: tuple[int, ...] = ()


class MemberFacts(Record):
    """A parameter that only one of the runs has in an optimizer, or one whose place in the model is not known."""

    about: Literal["member"] = "member"
    which: Literal["missing", "unexpected", "unplaced"]
    others: tuple[str, ...] = ()


class OptionFacts(Record):
    """An option of the optimizer that differs, and of how many parameters."""

    about: Literal["option"] = "option"
    option: str
    num_parameters: int


class CallRule(StrEnum):
    """A rule that the calls of a training loop break."""

    DISCARDED = "discarded"  # zero_grad between two backward passes of one optimizer step
    KEPT = "kept"  # no zero_grad since the optimizer step before: old gradients are added to
    EMPTIED = "emptied"  # zero_grad between the last backward pass and the optimizer step
    EARLY_CLIP = "early-clip"  # a backward pass after the clip
    INNER_SCHEDULER = "inner-scheduler"  # a scheduler step between two backward passes of one optimizer step
    SCHEDULER = "scheduler"  # another number of scheduler steps than the other run
    CLIP = "clip"  # clipping in one run only


class CallFacts(Record):
    """A call that is out of order: how often and where, in words `backward x 4` of both runs where these differ."""

    about: Literal["call"] = "call"
    rule: CallRule
    site: str = ""
    expected: int = 0
    actual: int = 0
    norm: float = 0.0


class NormFacts(Record):
    """What a wrong gradient norm is made of, tested on the gradients that are there.

    `times` is how often the squares of `num_tensors` tensors are in it: those that every rank has whole
    (`replicated`), or those of which a rank has a part (`sharded`). `leaves_out` says that each rank counts its own
    part of the sharded ones alone. `residual` is how far the norm is from that, relatively.
    """

    about: Literal["norm"] = "norm"
    part: Literal["replicated", "sharded", "local", "unknown"]
    times: float = 1.0
    num_tensors: int = 0
    residual: float = 0.0
    ratio: float = 1.0
