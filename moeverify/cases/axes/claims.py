"""Claims of a layout about the tensors that each axis divides; the check `sharding` verifies them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase

from moeverify.cases.axes.axis import Part
from moeverify.cases.axes.mesh import MeshPlan
from moeverify.cases.axes.registry import AXES
from moeverify.cases.schema import Case
from moeverify.results.checks import Kind

EXPERTS = ".experts."
"""Substring of the names of all expert parameters."""


@dataclass(frozen=True)
class Claim:
    """The claim that tensors of a kind, or of one part of the model, are divided over groups of ranks.

    Every module that matches a pattern of `modules` contains some of these tensors. With `once`, each of
    these modules is on a single rank of a group.
    """

    kind: str
    groups: Sequence[Sequence[int]]
    part: Part = "all"
    modules: Sequence[str] = ()
    once: bool = False

    def find_module(self, name: str) -> str | None:
        """Return the module that contains a tensor and matches a pattern of `modules`, or None."""
        parts = name.split(".")
        around = (".".join(parts[:count]) for count in range(1, len(parts)))
        return next((each for each in around if any(_fits(each, pattern) for pattern in self.modules)), None)

    def covers(self, key: tuple[int, str, str]) -> bool:
        """Return whether the claim applies to a tensor with the key (step, kind, name)."""
        _, kind, name = key
        return kind == self.kind and (self.part == "all" or (EXPERTS in name) == (self.part == "experts"))


def _fits(module: str, pattern: str) -> bool:
    """Return whether a module name matches a pattern, in which `*` is one component."""
    parts, wanted = module.split("."), pattern.split(".")
    return len(parts) == len(wanted) and all(map(fnmatchcase, parts, wanted))


def axis_claims(case: Case, plan: MeshPlan) -> Mapping[str, Claim]:
    """Return, for each axis of more than one rank, the tensors that it divides and its groups of ranks."""
    claims: dict[str, Claim] = {}
    for axis in AXES:
        divided = axis.divides
        if divided is None or not axis.views(case.layout) or not divided.applies(case):
            continue
        if divided.kind == Kind.TOKEN_LOSS and not _shows_token_losses(case):
            continue
        if divided.kind == Kind.INITIAL_WEIGHT and case.layout.parallelize is not None:
            continue  # a user's own code may divide parameters in any way
        view = plan.view_of(axis.name)
        if view.axes[axis.name] > 1:
            groups = view.groups(axis.name)
            claims[axis.name] = Claim(divided.kind, groups, divided.part, divided.modules, divided.once)
    return claims


def _shows_token_losses(case: Case) -> bool:
    """Return whether the run exposes the loss of each token; a user's own step does not."""
    return case.recipe.step is None and case.recipe.model.gives_token_losses
