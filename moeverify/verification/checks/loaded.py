"""Check of a loaded state against the saved one: every value, and every bit."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from moeverify.results.checks import CheckName, Kind
from moeverify.results.facts import BitFacts
from moeverify.results.finding import Finding
from moeverify.verification.checks.base import CheckOutcome, ComparedTensors, RankLoad, ShownTensors
from moeverify.verification.checks.golden_tensors import GoldenTensors
from moeverify.verification.compare.difference import fingerprint_bits


class LoadedState(GoldenTensors):
    """Comparison of everything that a checkpoint restores with the state of the saving layout.

    A report lists the names of a rank's tensors whose bits or dtype differ from the saved ones.
    """

    def __init__(self) -> None:
        super().__init__(CheckName.LOADED, (Kind.LOADED,), exact=True)

    def inspect(self, load: RankLoad) -> list[str]:
        """Return the names of tensors with different bits on this rank; see `Check`."""
        step = load.case.checkpoint.after - 1
        return [
            name
            for name, local, region in load.tensors
            if (saved := load.saved.read(step, Kind.LOADED, name, region)) is not None
            and region.numel
            and not _has_same_bits(saved, local)
        ]

    def judge(self, shown: ComparedTensors, reports: Sequence[list[str]]) -> CheckOutcome | None:
        """Return the verdict on all values, with findings for equal values of different bits; see `Check`."""
        assert isinstance(shown, ShownTensors)  # a load is part of a case
        outcome = super().judge(shown, reports)
        if outcome is None:
            return None
        known = {finding.tensor for finding in outcome.findings}
        first_rank: dict[str, int] = {}
        for rank, names in enumerate(reports):
            for name in names:
                first_rank.setdefault(name, rank)
        added = [
            Finding(
                check=self.name,
                kind=Kind.LOADED,
                tensor=name,
                step=shown.case.checkpoint.after - 1,
                rank=rank,
                error=0.0,
                bound=0.0,
                facts=BitFacts(),
            )
            for name, rank in first_rank.items()
            if name not in known
        ]
        verdict = "mismatch" if added else outcome.result.verdict
        result = outcome.result.model_copy(update={"verdict": verdict})
        return CheckOutcome(result, (*outcome.findings, *added))


def _has_same_bits(saved: Tensor, local: Tensor) -> bool:
    actual = local.cpu().reshape(saved.shape)
    return saved.dtype == actual.dtype and bool(fingerprint_bits(saved) == fingerprint_bits(actual))


CHECKS = (LoadedState(),)
