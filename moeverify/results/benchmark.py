"""Where the first finding of a fault may point, as plain data without torch.

All faults of the catalogue say so, and a list of them is there at once: what a finding is made of is imported by
whoever has one.
"""

from __future__ import annotations

from fnmatch import fnmatchcase
from typing import TYPE_CHECKING, Literal

from moeverify.results.place import Place, Stage
from moeverify.results.record import Record

if TYPE_CHECKING:
    from moeverify.results.finding import Finding


class At(Record):
    """A place at which the first finding of a fault may point: everything that is given must hold of it.

    `name` is a pattern, as of files, for the finding's tensor or for the module that the explanation is about.
    `axis` is a mesh axis (or another source) that explains it, `term` a loss term, `stage` a part of the step.
    `share` says of which ranks or micro-batches shares of the batch are weighted incorrectly.
    """

    name: str = ""
    axis: str = ""
    term: str = ""
    stage: Stage | None = None
    share: Literal["", "data_rank", "context_rank", "micro_batch"] = ""

    def matches(self, finding: Finding) -> bool:
        """Return whether a finding points there."""
        place = finding.place if finding.place is not None else Place()
        parts = place.parts
        module = finding.explanation.subject.module if finding.explanation is not None else ""
        names = (finding.tensor, module)
        terms = {part.term for part in parts} | _list_losses(finding)
        shares = [part.tokens for part in parts if part.tokens is not None]
        return (
            (not self.name or any(fnmatchcase(name, self.name) for name in names))
            and (not self.axis or self.axis in place.axes)
            and (not self.term or self.term in terms)
            and (self.stage is None or self.stage is place.stage)
            and (not self.share or any(getattr(tokens, self.share) is not None for tokens in shares))
        )


def _list_losses(finding: Finding) -> set[str]:
    """Return the losses that an explanation is about, or whose gradient."""
    from moeverify.results.explanation import Quantity

    explanation = finding.explanation
    if explanation is None or explanation.subject.quantity not in (Quantity.LOSS, Quantity.MODULE_GRADIENT):
        return set()
    return set(explanation.subject.tensors)
