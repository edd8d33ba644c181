"""Comparison of the optimizers' parameters and options."""

from __future__ import annotations

from collections.abc import Iterator

from moeverify.results.finding import Finding
from moeverify.results.script import MemberFacts, OptionFacts, ScriptCheck
from moeverify.scripts.compare.places import Places
from moeverify.scripts.record.read import RecordedRun

_SAME = 1e-6  # learning rates are computed in Python's float64; some optimizers store them in float32


def find_other_parameters(expected: RecordedRun, places: Places) -> Iterator[Finding]:
    """Yield a finding for parameters that only one run gives to an optimizer, and for unplaced ones."""
    placed = {each.name for each in places.known.values()}
    unplaced = sorted({name for _, name in places.unknown})
    missing = [name for name in expected.names if name not in placed and name not in unplaced]
    if missing:
        yield _name(missing, MemberFacts(which="missing", others=tuple(missing[1:])))
    unknown = [name for name in unplaced if name not in expected.names]
    if unknown:
        yield _name(unknown, MemberFacts(which="unexpected", others=tuple(unknown[1:])))
    lost = [name for name in unplaced if name in expected.names]
    if lost:
        yield _name(lost, MemberFacts(which="unplaced", others=tuple(lost[1:])))


def _name(names: list[str], facts: MemberFacts) -> Finding:
    return Finding(
        check=ScriptCheck.PARAMETERS,
        tensor=names[0],
        step=-1,
        rank=0,
        error=float(len(names)),
        bound=0.0,
        facts=facts,
    )


def find_other_options(
    expected: RecordedRun, actual: RecordedRun, places: Places, steps: list[int]
) -> Iterator[Finding]:
    """Yield a finding for each differing option, at the first step where it differs."""
    done: set[str] = set()
    for step in steps:
        wanted = _options_of(expected, 0, step)
        for rank in actual.ranks:
            found = {
                places.known[rank.rank, name].name: options
                for name, options in _options_of(actual, rank.rank, step).items()
                if (rank.rank, name) in places.known
            }
            for option in sorted({key for options in found.values() for key in options} - done):
                differing = [
                    name
                    for name in found
                    if option in found[name]
                    and option in wanted.get(name, {})
                    and not _is_same(wanted[name][option], found[name][option])
                ]
                if differing:
                    done.add(option)
                    facts = OptionFacts(
                        option=option,
                        num_parameters=len(differing),
                        site=_find_site(actual, rank.rank, step, option),
                        expected_site=_find_site(expected, 0, step, option),
                    )
                    first = differing[0]
                    yield _make_finding(step, rank.rank, facts, wanted[first][option], found[first][option])


def _options_of(run: RecordedRun, rank: int, step: int) -> dict[str, dict[str, float]]:
    """Return the options of each parameter of a rank at a step."""
    return {
        name: group.options for group in run.ranks[rank].options if group.step == step for name in group.names
    }


def _find_site(run: RecordedRun, rank: int, step: int, option: str) -> str:
    """Return the line that set an option, if all parameter groups have the same."""
    name = option.partition("[")[0]
    sites = {group.sites.get(name, "") for group in run.ranks[rank].options if group.step == step}
    return sites.pop() if len(sites) == 1 else ""


def _make_finding(step: int, rank: int, facts: OptionFacts, expected: float, actual: float) -> Finding:
    return Finding(
        check=ScriptCheck.OPTIONS,
        tensor=facts.option,
        step=step,
        rank=rank,
        error=abs(actual - expected) / abs(expected) if expected else float("inf"),
        bound=_SAME,
        scale=actual / expected if expected else None,
        expected=expected,
        actual=actual,
        facts=facts,
    )


def _is_same(first: float, second: float) -> bool:
    return abs(first - second) <= _SAME * max(abs(first), abs(second))
