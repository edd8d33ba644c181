"""A page for each code in JSON: causes of findings, and mechanisms of culprits."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

from moeverify.cases.suggest import suggest
from moeverify.errors import CaseError, Problem
from moeverify.results.cause import Cause
from moeverify.results.culprit import Mechanism

MECHANISMS: Mapping[Mechanism, str] = {
    "number": "a number or option differs",
    "operator": "the operator differs",
    "operand": "an operand has another value",
    "total": "it uses a partial sum; one device uses the full sum",
    "share": "it adds a value to each partial sum that should be added once",
    "whole": "it uses a part of a tensor; one device uses the whole tensor",
    "removed": "one device has no such operation",
    "inserted": "one device applies another operation first",
    "returned": "a module returns its result; on one device the module returns another value",
    "value": "its results are wrong although its operands are correct",
    "scale": "its results are a multiple of the correct ones",
    "group": "its results are right with other ranks: those of another mesh axis, or another neighbor in a ring",
    "unreduced": "each rank goes on with its own result; reduced over a mesh axis, it is right",
    "created": "it makes elements that are wrong where later operations take them",
    "block": "it makes a block of a parameter that another rank of a mesh axis should have",
    "owned": "it gives a rank's part of a sum elements that other ranks add, or none that no other rank adds",
    "dtype": "it computes in a narrower dtype than one device, and rounding makes the results wrong",
    "reduction": "its results are partial sums that are never reduced",
    "moved": "its results are correct values in wrong positions",
    "shared": "its result has the memory of another tensor; on one device each has its own",
    "race": "it uses memory that a collective is still using",
    "overwritten": "it writes to memory that a backward pass still needs",
    "written": "the operation that last wrote most correct values before the first step did not write these",
    "place": "the first operation whose results differ from one device; nothing more is known",
}


_MOST_EXAMPLES = 5


def check_code(code: str) -> None:
    """Raises: CaseError if a text, which is no path of a run, is no code either."""
    codes = [*map(str, Cause), *MECHANISMS]
    if code not in codes:
        remedy = f"name the output of `moeverify run --out` or `--json`, or a code: {suggest(code, codes)}"
        raise CaseError([Problem(f"there is no run and no code `{code}`", path="RUN|CODE", remedy=remedy)])


def describe_code(code: str, list_examples: Callable[[str], Sequence[tuple[str, str]]]) -> str:
    """Return the page of a code, with known bugs as (number, title); empty if it is no code."""
    lines = []
    if code in set(Cause):
        lines.append(f"{code}: {Cause(code).description}.")
    for mechanism, meaning in MECHANISMS.items():
        if code == mechanism:
            lines.append(f"{code}, of the first wrong operation: {meaning}.")
    examples = list_examples(code) if lines else ()  # only a code is worth the import of all bugs
    if examples:
        lines += ["", "Known bugs that have it:"]
        lines += [f"  {number}  {title}" for number, title in examples[:_MOST_EXAMPLES]]
        lines += ["", f"next: moeverify faults run {examples[0][0]} injects the first"]
    return "\n".join(lines)
