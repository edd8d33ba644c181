"""Differences between two recorded scripts other than tensors, as data. No torch."""

from __future__ import annotations

from enum import StrEnum
from typing import Literal

from moeverify.results.record import Record


class ScriptCheck(StrEnum):
    """The checks of `moeverify compare` that a case does not have; they come before the tensor checks."""

    BATCH = "batch"  # the rows of the model's inputs
    PARAMETERS = "optimizer parameters"  # the parameters of each optimizer
    OPTIONS = "optimizer options"  # learning rate, weight decay, ...
    COPIES = "copies"  # different parts of the model on different ranks start with different values
    CALLS = "order of calls"  # of zero_grad, forward, backward, clip, step, scheduler


class CopyFacts(Record):
    """Different parts of the model that start with equal values on several ranks.

    - `shards`: the ranks hold different parts of each tensor.
    - `siblings`: tensors `names` of the last rank and `others` of the first, with names that differ in
      numbers only.
    - `sums`: the ranks add equal operands in a forward pass, at `site`, and hold equal tensors.
    """

    about: Literal["copies"] = "copies"
    kind: Literal["shards", "siblings", "sums"]
    names: tuple[str, ...]
    others: tuple[str, ...] = ()
    num_ranks: int = 2
    site: str = ""


class BatchFacts(Record):
    """Rows of the global batch that no rank saw (`num_missing` of `num_rows`), and unexpected rows.

    `num_other` unexpected rows are not in the batch; `ranks` saw them. `num_repeated` rows are in the batch
    but were seen too often; if there are no other rows, `ranks` saw these. `repeated` are ranks that saw
    exactly the same rows.
    """

    about: Literal["batch"] = "batch"
    num_rows: int
    num_missing: int
    num_other: int
    num_repeated: int
    ranks: tuple[int, ...] = ()
    repeated: tuple[int, ...] = ()


class MemberFacts(Record):
    """A parameter that only one run has in an optimizer, or whose position in the model is unknown.

    `replaced` parameters have no optimizer, and those of the optimizer get no gradients. `idle` ones have an
    optimizer and get no gradients. Only the modules of `detached` ones are called.
    """

    about: Literal["member"] = "member"
    which: Literal["missing", "replaced", "idle", "detached", "unexpected", "unplaced"]
    others: tuple[str, ...] = ()


class OptionFacts(Record):
    """An optimizer option that differs, and the number of affected parameters.

    `site` and `expected_site` are the lines that set it in both runs.
    """

    about: Literal["option"] = "option"
    option: str
    num_parameters: int
    site: str = ""
    expected_site: str = ""


class CallRule(StrEnum):
    """A rule that the calls of a training loop break."""

    DISCARDED = "discarded"  # zero_grad between two backward passes of one optimizer step
    KEPT = "kept"  # no zero_grad since the previous optimizer step, so gradients accumulate on old ones
    EMPTIED = "emptied"  # zero_grad between the last backward pass and the optimizer step
    EARLY_CLIP = "early-clip"  # a backward pass after the clip
    LATE_CLIP = "late-clip"  # a clip after the optimizer step
    SCALED_CLIP = "scaled-clip"  # a clip before the gradient scaler has unscaled the gradients
    SCALED_STEP = "scaled-step"  # an optimizer step on gradients that no gradient scaler has unscaled
    NEW_OPTIMIZER = "new-optimizer"  # another optimizer without the state of the one before, in each step
    EVAL = "eval"  # all forward passes of a step in evaluation mode
    SAME_EPOCH = "same-epoch"  # a sampler that shuffles begins twice with the same epoch number
    INNER_SCHEDULER = "inner-scheduler"  # a scheduler step between two backward passes of one optimizer step
    SKIPPED_STEP = "skipped-step"  # optimizer steps on some ranks only
    SCHEDULER = "scheduler"  # a number of scheduler steps that differs from the other run
    CLIP = "clip"  # clipping in one run only


class CallFacts(Record):
    """A call out of order: its counts in both runs, its site, and the norm of the affected gradients.

    For `scaled-clip` and `scaled-step`, `norm` is the loss scale. For `eval`, `expected` is the number of
    dropout modules, and for `same-epoch` that of the epoch. For `skipped-step`, the counts are backward
    passes of two ranks.
    """

    about: Literal["call"] = "call"
    rule: CallRule
    site: str = ""
    expected: int = 0
    actual: int = 0
    norm: float = 0.0


class NormFacts(Record):
    """The composition of a wrong gradient norm, tested on the available gradients.

    `times` is the multiple with which the norm counts the squares of `num_tensors` tensors: tensors that
    every rank holds completely (`replicated`), or tensors that are `sharded`. With `local`, each rank
    counts only its own shards. `residual` is the relative distance of the norm from this explanation.
    `ratio` is the norm relative to the other run.
    """

    about: Literal["norm"] = "norm"
    part: Literal["replicated", "sharded", "local", "unknown"]
    times: float = 1.0
    num_tensors: int = 0
    residual: float = 0.0
    ratio: float = 1.0
