"""`--sweep a.b=v,w`: each case once per combination of the values of some fields."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from moeverify.cases.override import label_values
from moeverify.cases.schema import Case
from moeverify.cases.validation.load import load_cases
from moeverify.errors import CaseError, Problem

OPTION = "--sweep"
_MOST_COMBINATIONS = 1000


@dataclass(frozen=True)
class Combination:
    """One value per field, and the cases with these values; `refused` is the reason if there are none."""

    values: dict[str, str]
    cases: tuple[Case, ...] = ()
    refused: str = ""

    @property
    def label(self) -> str:
        """Return the suffix that the names of the cases get."""
        return label_values(self.values)


def load_sweep(
    paths: Sequence[Path],
    sweeps: Sequence[str],
    *,
    overrides: Sequence[str] = (),
    pattern: str | None = None,
) -> list[Combination]:
    """Return the cases for each combination of values, with the last field changing fastest.

    The names of the cases contain the values. `sweeps` are texts such as `layout.ep=1,2`. A combination
    that a case does not allow, such as more ranks than experts, is refused; the others are kept. Without
    sweeps there is one combination without values.

    Raises: CaseError when a text is not `path=value,value`, or with the problems of the first combination
        when every combination is refused.
    """
    fields = _parse(sweeps)
    combinations, errors = [], []
    for chosen in itertools.product(*fields.values()):
        values = dict(zip(fields, chosen, strict=True))
        settings = [f"{path}={value}" for path, value in values.items()]
        try:
            cases = load_cases(paths, overrides=[*overrides, *settings], pattern=pattern)
        except CaseError as error:
            errors.append(error)
            combinations.append(Combination(values, refused=str(error)))
            continue
        label = Combination(values).label
        named = tuple(case.model_copy(update={"name": f"{case.name} {label}".rstrip()}) for case in cases)
        combinations.append(Combination(values, named))
    if len(errors) == len(combinations):
        raise errors[0]
    return combinations


def _split(text: str) -> list[str]:
    """Return the values between commas outside lists: `[1,2],[2,1]` are two values."""
    depth, values = 0, [""]
    for character in text:
        depth += (character in "[{") - (character in "]}")
        if character == "," and depth == 0:
            values.append("")
        else:
            values[-1] += character
    return [value.strip() for value in values]


def _parse(sweeps: Sequence[str]) -> dict[str, list[str]]:
    fields: dict[str, list[str]] = {}
    problems = []
    for text in sweeps:
        path, equals, values = (part.strip() for part in text.partition("="))
        found = _split(values)
        if not equals or not path or not all(found):
            remedy = "write for example `layout.ep=1,2`"
            problems.append(Problem(f"expected `path=value,value`, got `{text}`", path=OPTION, remedy=remedy))
        elif path in fields:
            remedy = "write all its values in one"
            problems.append(Problem(f"`{path}` is swept twice", path=OPTION, remedy=remedy))
        else:
            fields[path] = list(dict.fromkeys(found))
    number = 1
    for values_of_field in fields.values():
        number *= len(values_of_field)
    if number > _MOST_COMBINATIONS:
        message = f"{number} combinations are more than the {_MOST_COMBINATIONS} that one sweep measures"
        problems.append(Problem(message, path=OPTION, remedy="leave values out"))
    if problems:
        raise CaseError(problems)
    return fields
