"""Places at which the first finding of a fault may point, as plain data without torch.

Every fault of the catalogue declares such places, and `moeverify` lists the catalogue at start-up. This
module therefore imports the classes of findings only for type checking or when a finding exists.
"""

from __future__ import annotations

from fnmatch import fnmatchcase
from typing import TYPE_CHECKING, Literal

from moeverify.results.place import Place, Stage
from moeverify.results.record import Record

if TYPE_CHECKING:
    from moeverify.results.finding import Finding


class At(Record):
    """A place at which the first finding of a fault may point.

    A finding matches if it satisfies every field that is given. `name` is a file-name pattern (`fnmatch`)
    for the tensor of the finding, or for the module or function of its explanation or culprit. `axis` is a
    mesh axis, or another source, that explains the finding. `term` is a loss term. `stage` is a part of the
    training step. `share` is the kind of batch share with a wrong weight.
    """

    name: str = ""
    axis: str = ""
    term: str = ""
    stage: Stage | None = None
    share: Literal["", "data_rank", "context_rank", "micro_batch"] = ""

    def matches(self, finding: Finding) -> bool:
        """Return whether the finding points at this place."""
        place = finding.place if finding.place is not None else Place()
        parts = place.parts
        module = finding.explanation.subject.module if finding.explanation is not None else ""
        here = finding.culprit.here if finding.culprit is not None else None
        function = here.line.function if here is not None and here.line is not None else ""
        names = (finding.tensor, module, here.module if here is not None else "", function)
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
    """Return the losses that the explanation names, also when it is about a gradient of these losses."""
    from moeverify.results.explanation import Quantity

    explanation = finding.explanation
    if explanation is None or explanation.subject.quantity not in (Quantity.LOSS, Quantity.MODULE_GRADIENT):
        return set()
    return set(explanation.subject.tensors)
