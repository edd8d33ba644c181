"""Check that the ranks together hold every element of every logical tensor of the golden exactly once."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from moeverify.results.checks import CheckName
from moeverify.results.facts import CoverageFacts
from moeverify.results.finding import Finding
from moeverify.verification.checks.base import Check, CheckOutcome, Role, ShownTensors, make_outcome
from moeverify.verification.compare.assembled import Key


class Coverage(Check[Any]):
    """Sizes of distinct regions against the tensor's size, and shown names against the golden's names."""

    name = CheckName.COVERAGE
    role = Role.ORIGIN

    def judge(self, shown: ShownTensors, reports: Sequence[Any]) -> CheckOutcome:
        """Return the verdict, with a finding for each tensor with missing or repeated elements."""
        findings: list[Finding] = []
        for key, tensor in shown.tensors.items():
            num_held = int(sum(entry.difference.count for _, entry in tensor.distinct.values()))
            num_elements = math.prod(tensor.shards[0][1].shape)
            if num_held != num_elements:
                facts = CoverageFacts(num_held=num_held, num_elements=num_elements)
                findings.append(_make_finding(key, 1.0 - num_held / num_elements, facts))
        for step, names in shown.golden_names.items():
            for kind, name in sorted(names):
                if (step, kind, name) not in shown.tensors:
                    findings.append(_make_finding((step, kind, name), 1.0, CoverageFacts(num_held=0)))
        return make_outcome(self.name, findings, len(shown.tensors))


def _make_finding(key: Key, missing: float, facts: CoverageFacts) -> Finding:
    step, kind, name = key
    return Finding(
        check=CheckName.COVERAGE,
        kind=kind,
        tensor=name,
        step=step,
        rank=0,
        error=missing,
        bound=0.0,
        facts=facts,
    )


CHECKS = (Coverage(),)
