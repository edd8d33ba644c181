"""Check that each token loss a rank shows is the cross entropy of its own logits.

The golden allows a token loss the rounding of the whole model, about 1e-2 in bfloat16. Between the head and
the loss there is only one softmax, at least in float32. The loss is therefore known to a few units of
float32 in any precision. A softmax in bfloat16, a softmax over part of the vocabulary, or the label of
another token exceed that by far. Labels are taken from the case.
`moeverify.verification.checks.data` finds ranks that read other labels.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.utils.hooks import RemovableHandle

from moeverify.cases.schema import Case
from moeverify.model.precision import widen
from moeverify.parallel.regions.local_shard import logical_name
from moeverify.parallel.regions.passes import is_in_backward
from moeverify.parallel.regions.region import Region
from moeverify.parallel.regions.unseen import unseen
from moeverify.results.cause import Cause
from moeverify.results.checks import CheckName, Kind
from moeverify.results.facts import CrossEntropyFacts
from moeverify.results.finding import CheckResult, Finding, Worst
from moeverify.results.part import Part
from moeverify.results.place import Place, Stage
from moeverify.train.data import IGNORED
from moeverify.train.program import TrainingProgram
from moeverify.train.reference_subject import ReferenceSubject
from moeverify.verification.checks.base import (
    Check,
    CheckOutcome,
    RankRun,
    Role,
    ShownTensors,
    Watch,
    rate_error,
)
from moeverify.verification.checks.data_source import ExpectedData
from moeverify.verification.checks.narrower import list_narrower, name_dtype

HEAD, LM = "lm_head", "lm"

MOST_TOKENS = 1 << 10
"""Maximum number of evenly spaced tokens recomputed per micro-batch. A wrong loss is wrong at most tokens."""

_LEAST_NUMBERS = 8  # fewer numbers may fit a narrower dtype by chance


@dataclass(frozen=True)
class Passed:
    """Sampled tokens (n) of one pass of the head.

    `tokens` are their indices, `losses` their losses in float64, and `allowed` the allowed absolute errors.
    """

    tokens: Tensor
    losses: Tensor
    allowed: Tensor


@dataclass(frozen=True)
class LossComparison:
    """Comparison of one micro-batch of `step`.

    `actual` are the losses (n) in float64. `ratio` (n) is each error divided by the allowed error. `fits`
    maps each narrower dtype's name to whether that dtype represents all losses exactly.
    """

    step: int
    passed: Passed
    actual: Tensor
    ratio: Tensor
    fits: Mapping[str, Tensor]


@dataclass(frozen=True)
class MicroBatchErrors:
    """One micro-batch of a step on one rank. `worst` is its largest error, divided by the allowed error.

    `dtypes` are the narrower dtypes that represent all of its losses exactly, narrowest first.
    """

    step: int
    worst: float
    expected: float
    actual: float
    allowed: float
    num_wrong: int
    num_tokens: int
    dtypes: tuple[str, ...]


class CrossEntropyWatch(Watch[list[MicroBatchErrors]]):
    """Recomputes losses of sampled tokens after each call of the head, and compares the shown losses."""

    def __init__(self, case: Case, program: TrainingProgram, rank: int) -> None:
        self._rank = rank
        self._expected = ExpectedData(case)
        self._step = -1
        self._num_passes = 0
        self._passed: list[Passed] = []
        self._compared: list[LossComparison] = []
        self._handles: list[RemovableHandle] = [
            module.register_forward_hook(unseen(self._see))
            for name, module in program.model.named_modules()
            if logical_name(name).rpartition(".")[2] == HEAD
        ]

    def begin_step(self, step: int) -> None:
        """Restart the count of passes at 0; see `Watch`."""
        self._step, self._num_passes, self._passed = step, 0, []

    def observe(self, step: int, kind: str, name: str, local: Tensor | None, region: Region) -> None:
        """Compare the losses of a micro-batch with the pass they came from; see `Watch`."""
        if kind != Kind.TOKEN_LOSS or local is None or not self._passed:
            return
        passed = self._passed.pop(0)
        self._compared.append(compare(step, passed, local.detach().reshape(-1)[passed.tokens]))

    def close(self) -> None:
        """Remove the hooks; see `Watch`."""
        for handle in self._handles:
            handle.remove()
        self._handles = []

    def report(self) -> list[MicroBatchErrors]:
        """Return the rows of all steps; see `Watch`."""
        return [_read(each) for each in self._compared]

    @torch.no_grad()
    def _see(self, module: nn.Module, inputs: Any, logits: Any) -> None:
        if self._step < 0 or torch.compiler.is_compiling() or is_in_backward():
            return
        cut = self._expected.cut(self._rank, self._num_passes)
        self._num_passes += 1
        # Logits sharded over the vocabulary would need a gather.
        if isinstance(logits, DTensor) or not isinstance(logits, Tensor):
            return
        labels = self._expected.make_labels(self._step, cut, logits.device)
        if labels.shape != logits.shape[:-1]:
            return
        stride = -(-labels.numel() // MOST_TOKENS)
        tokens = torch.arange(0, labels.numel(), stride, device=logits.device)
        self._passed.append(
            compute(logits.detach().flatten(0, -2)[tokens], labels.reshape(-1)[tokens], tokens)
        )


def compute(logits: Tensor, labels: Tensor, tokens: Tensor) -> Passed:
    """Return the cross entropy of some tokens in float64.

    Shapes: logits (n, V), labels and tokens (n) int64.
    """
    # The softmax is in float32 or wider, whatever the dtype of the logits.
    unit = 0.5 * torch.finfo(widen(logits.dtype)).eps
    wide, counts = logits.to(torch.float64), labels != IGNORED
    sizes = wide.logsumexp(dim=-1)
    # `gather` refuses negative indices, such as IGNORED; the next line drops these losses.
    of_label = wide.gather(1, labels.clamp(min=0).unsqueeze(1)).squeeze(1)
    losses = torch.where(counts, sizes - of_label, 0.0)
    # The softmax subtracts the largest logit, then sums V exponentials of numbers within the range of the
    # logits. A relative error of this sum is an absolute error of its logarithm. The float64 reference is
    # rounded as well.
    top = wide.abs().amax(dim=-1)
    allowed = 2.0 * unit * (8.0 + 4.0 * math.sqrt(wide.shape[-1]) + 4.0 * top + 2.0 * sizes.abs())
    return Passed(tokens, losses, allowed)


def compare(step: int, passed: Passed, shown: Tensor) -> LossComparison:
    """Return the differences between shown losses (n) of some tokens and the recomputed ones."""
    actual = shown.to(torch.float64)
    ratio = (actual - passed.losses).abs() / passed.allowed
    # Non-finite logits have findings of their own, so they are skipped here.
    ratio = torch.where(passed.losses.isfinite(), ratio, 0.0)
    fits = {
        name_dtype(dtype): (shown.to(dtype).to(shown.dtype) == shown).all()
        for dtype in list_narrower(shown.dtype)
    }
    return LossComparison(step, passed, actual, ratio, fits)


def _read(compared: LossComparison) -> MicroBatchErrors:
    """Return the row of a micro-batch. Synchronizes with the device."""
    ratio, passed = compared.ratio, compared.passed
    place = int(ratio.nan_to_num(torch.inf).argmax())
    # Zeros, such as losses of padding, fit every dtype.
    is_enough = int((compared.actual != 0.0).sum()) >= _LEAST_NUMBERS
    return MicroBatchErrors(
        step=compared.step,
        worst=float(ratio[place]),
        expected=float(passed.losses[place]),
        actual=float(compared.actual[place]),
        allowed=float(passed.allowed[place]),
        num_wrong=int((~(ratio <= 1.0)).sum()),
        num_tokens=len(ratio),
        dtypes=tuple(name for name, fits in compared.fits.items() if is_enough and bool(fits)),
    )


class CrossEntropy(Check[list[MicroBatchErrors]]):
    """Loss of each token on every rank, for the reference model only: a user's model defines its own loss."""

    name = CheckName.CROSS_ENTROPY
    role = Role.ORIGIN
    sees_inside = True

    def watch(self, run: RankRun, program: TrainingProgram) -> Watch[list[MicroBatchErrors]] | None:
        """Return a watch that recomputes the losses; None for a user's model; see `Check`."""
        if not isinstance(program.subject, ReferenceSubject):
            return None
        return CrossEntropyWatch(run.case, program, torch.distributed.get_rank())

    def judge(self, shown: ShownTensors, reports: Sequence[list[MicroBatchErrors]]) -> CheckOutcome | None:
        """Return whether each token loss follows from its logits, up to rounding; see `Check`."""
        return judge_rows(shown, reports) if any(reports) else None


def judge_rows(shown: ShownTensors, reports: Sequence[Sequence[MicroBatchErrors]]) -> CheckOutcome:
    """Return the verdict, with one finding per wrong step."""
    by_step: dict[int, list[tuple[int, MicroBatchErrors]]] = {}
    for rank, rows in enumerate(reports):
        for row in rows:
            by_step.setdefault(row.step, []).append((rank, row))
    findings = [
        _make_finding(shown, step, rows)
        for step, rows in sorted(by_step.items())
        if not all(row.worst <= 1.0 for _, row in rows)
    ]
    worst = max((row for rows in by_step.values() for _, row in rows), key=lambda row: rate_error(row.worst))
    scale, is_known = abs(worst.expected) or 1.0, math.isfinite(worst.expected)
    result = CheckResult(
        name=CheckName.CROSS_ENTROPY,
        verdict="mismatch" if findings else "pass",
        tensors=len(by_step),
        worst=Worst(
            tensor=LM,
            error=rate_error(abs(worst.actual - worst.expected) / scale),
            bound=worst.allowed / scale,
            step=worst.step,
        )
        if is_known
        else None,
    )
    return CheckOutcome(result, tuple(findings))


def _make_finding(shown: ShownTensors, step: int, rows: Sequence[tuple[int, MicroBatchErrors]]) -> Finding:
    rank, row = max(rows, key=lambda each: rate_error(each[1].worst))
    wrong = [(each, other) for each, other in rows if not other.worst <= 1.0]
    ranks = tuple(sorted({each for each, _ in wrong}))
    common = [name for name in row.dtypes if all(name in other.dtypes for _, other in wrong)]
    scale = abs(row.expected) or 1.0
    return shown.make_finding(
        CheckName.CROSS_ENTROPY,
        (step, Kind.TOKEN_LOSS, LM),
        ranks,
        rank=rank,
        error=rate_error(abs(row.actual - row.expected) / scale),
        bound=row.allowed / scale,
        expected=row.expected,
        actual=row.actual,
        code=Cause.ROUNDING if common else Cause.FORWARD,
        facts=CrossEntropyFacts(
            num_wrong=sum(other.num_wrong for _, other in rows),
            num_tokens=sum(other.num_tokens for _, other in rows),
            dtype=common[0] if common else "",
        ),
        place=Place(ranks=ranks, stage=Stage.LOSS, parts=(Part(term=LM),)),
    )


CHECKS = (CrossEntropy(),)
