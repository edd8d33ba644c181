"""Claims of a report, read from the product's JSON. No other module here knows its keys.

A finding becomes a `Claim`. Its kind comes from the operation of its explanation, from the facts of its
check, or else from the code of its cause. Its lines are all `file:line` in the JSON of the cause.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from moeverify.results.culprit import Culprit, Origin, find_lone_line

Lines = tuple[tuple[str, int], ...]


@dataclass(frozen=True)
class Claim:
    """A cause that a finding claims, or only its place if `is_location_only`.

    `kind` is one of `loader.KINDS`, or empty. `lines` are the lines of the cause, `shown` all lines in the
    finding. `callers` are those of `lines` that only call the others: they are named as the call path.
    """

    kind: str = ""
    lines: Lines = ()
    tensors: tuple[str, ...] = ()
    axes: tuple[str, ...] = ()
    is_location_only: bool = True
    shown: Lines = ()
    callers: Lines = ()


_LINE = re.compile(r'([\w./+-]+\.py)(?::|", line )(\d+)')

# Measurements and follow-up questions, which say nothing about the cause.
_UNIONS = dict.fromkeys(("all data ranks", "loss ranks"), ("dp_replicate", "dp_shard", "cp"))
_NOT_SAID = ("follow_up", "wider", "observations", "rivals")
_NOT_SAID_OF_PLACE = ("issued", "issued_in", "collectives")

_KIND_OF_OPERATION = {
    "unreduced": "reduction",
    "norm-of-slices": "reduction",
    "miscounted": "reduction",
    "moved": "elsewhere",
    "shifted": "elsewhere",
    "reordered": "elsewhere",
    "repeated-shard": "elsewhere",
    "misplaced": "layout",
    "unmoved": "state",
    "stepped": "state",
    "carried": "state",
    "own-values": "state",
    "rounded": "dtype",
    "zeroed": "edit",
}

_KIND_OF_CODE = {
    "data": "data",
    "scale": "scale",
    "term-scale": "scale",
    "share-weights": "scale",
    "padding": "edit",
    "missing-reduction": "reduction",
    "detached": "edit",
    "permutation": "elsewhere",
    "duplicate": "elsewhere",
    "missing": "layout",
    "stale": "state",
    "not-loaded": "state",
    "norm": "reduction",
    "calls": "loop",
    "optimizer": "optimizer",
    "state": "state",
    "carried-state": "state",
    "metric": "scale",
    "rounding": "dtype",
    "precision": "dtype",
    "routing": "edit",
    "replicas": "state",
    "layout": "layout",
    "collectives": "reduction",
    "nondeterminism": "race",
}

# Facts that are a cause only if they name the wrong operation.
_KIND_OF_FACTS = {
    "clip": "edit",
    "objective": "edit",
    "router": "edit",
    "router gradient": "scale",
    "cross entropy": "edit",
    "gradient sum": "reduction",
}

_ONLY_A_PLACE = ("altered", "off-upstream", "own-values")
# These codes determine the kind better than the operation does.
_CODES_THAT_LEAD = (
    "calls",
    "data",
    "layout",
    "missing",
    "not-loaded",
    "optimizer",
    "precision",
    "stale",
)
_CODES_OF_A_PLACE = ("nondeterminism", "forward", "backward", "routing", "replicas", "")


def read_claims(record: Mapping[str, Any]) -> list[Claim]:
    """Return the claims in a record of `run.py`, the leading finding first; nothing for a passed case."""
    case = record.get("case") or {}
    claims = [_read_finding(finding) for finding in order_findings(case.get("findings", []))]
    if not claims and case.get("rank_reports"):
        claims = [_read_failure(case)]
    return claims


def order_findings(findings: Sequence[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
    """Return the findings that follow from no other, in the order in which reports print them."""
    origins = [finding for finding in findings if not finding.get("follows")]

    def rank(finding: Mapping[str, Any]) -> tuple[int, bool, bool, float]:
        is_open = not (finding.get("explanation") or finding.get("code") or finding.get("cause"))
        error, bound = _number(finding["error"]), _number(finding["bound"])
        excess = error / bound if bound else float("inf")
        return finding["step"], is_open, finding is not origins[0], -excess

    return sorted(origins, key=rank)


def _number(value: Any) -> float:
    return float(value)  # "Infinity" and "NaN" too


def _read_finding(finding: Mapping[str, Any]) -> Claim:
    explanation = finding.get("explanation") or {}
    if (finding.get("culprit") or {}).get("leads"):
        return _read_culprit(finding, finding["culprit"])
    place = finding.get("place") or {}
    subject = explanation.get("subject") or {}
    facts = finding.get("facts") or {}
    said = {key: value for key, value in finding.items() if key not in _NOT_SAID}
    said["place"] = {key: value for key, value in place.items() if key not in _NOT_SAID_OF_PLACE}
    of_cause = [finding.get("cause"), explanation, facts, finding.get("lines")]
    tensors = [*subject.get("tensors", ()), subject.get("module"), subject.get("inner")]
    if not any(tensors):
        tensors = [finding.get("tensor"), place.get("module")]
    if terms := _find_terms(explanation):
        tensors = terms  # gradients that include the wrong loss term are no culprits
    if facts.get("about") in ("gathered", "dtype"):
        tensors += [facts.get("parameter"), facts.get("module"), *facts.get("parameters", ())]
    kind, is_location_only = _read_kind(finding, explanation, facts)
    is_open = not any(finding.get(key) for key in ("code", "explanation", "culprit"))
    origins = [Origin.model_validate(each) for each in finding.get("origins", ()) if is_open]
    own = find_lone_line(origins)
    lines = [] if own is None else [(own.line.file, own.line.line)]
    return Claim(
        kind=kind,
        lines=tuple(dict.fromkeys([*lines, *_find_lines(of_cause)])),
        tensors=tuple(dict.fromkeys(name for name in tensors if name)),
        axes=_list_axes(_find_axes(explanation, place, facts)),
        is_location_only=is_location_only,
        shown=tuple(
            dict.fromkeys(
                [*_find_lines(said), *_list_origins(finding.get("culprit") or {}), *_list_origins(finding)]
            )
        ),
    )


def _read_culprit(finding: Mapping[str, Any], culprit: Mapping[str, Any]) -> Claim:
    """Return the claim of a finding whose cause is the first wrong operation."""
    here, taken, right = culprit["here"], culprit.get("taken") or {}, culprit.get("right") or {}
    # For a missing operation, a first sighting, or the ends of a race, no line is wrong by itself.
    is_seen = bool(culprit["results"]) or culprit["mechanism"] in _SEEN
    # A write or collective that one device does not make belongs to a call that it does not make.
    is_written = here["operator"].endswith("_") or culprit["axes"]
    is_seen = is_seen or bool(culprit["mechanism"] == "removed" and is_written)
    brought = [*culprit["moves"], *filter(None, [culprit.get("made")])]
    # A wrong operand comes from the place where it was made or moved, not from the place of its use.
    is_of_input = culprit["mechanism"] in ("operand", "group") and bool(
        brought
    )  # a group may be made wrongly
    operations = brought if is_of_input else [] if is_seen else [here, *brought]
    own = Culprit.model_validate(culprit).lone_line
    lines = [] if own is None else [(own.line.file, own.line.line)]
    lines += [line for each in operations for line in _list_lines(each, callers=1)]
    direct = {line for each in operations for line in _list_lines(each, callers=0)}
    others = [*culprit["others"], *culprit["between"], *culprit["moves_there"], culprit.get("there") or {}]
    others += [
        here,
        *culprit["moves"],
        culprit.get("made") or {},
        taken.get("operation") or {},
        right.get("operation") or {},
    ]
    named = [
        "" if is_seen and culprit["mechanism"] not in ("total", "unreduced") else here["module"],
        # The operation whose backward pass needs the memory has the wrong gradients.
        (culprit.get("there") or {}).get("module") if culprit["mechanism"] == "overwritten" else "",
        taken.get("label"),
        right.get("label"),
        *(name.partition("/")[2] or name for name in culprit["results"]),
    ]
    # Values repaired by the change follow from the culprit; they name it only if nothing else does.
    repaired = [name.partition("/")[2] or name for name in culprit["repaired"]]
    tensors = named if any(named) else [finding.get("tensor"), *repaired]
    return Claim(
        kind=_read_kind_of_culprit(culprit, taken, right),
        lines=tuple(dict.fromkeys(lines)),
        callers=tuple(line for line in dict.fromkeys(lines) if line not in direct),
        tensors=tuple(dict.fromkeys(name for name in tensors if name)),
        axes=_list_axes(culprit["axes"]),
        is_location_only=not Culprit.model_validate(culprit).names_cause,
        shown=tuple(
            dict.fromkeys(
                [
                    *lines,
                    *(line for each in others for line in _list_lines(each, callers=4)),
                    *_list_origins(culprit),
                ]
            )
        ),
    )


_SEEN = ("total", "reduction", "group", "unreduced", "race", "overwritten", "written")
"""Mechanisms whose line is not wrong by itself."""

_KIND_OF_MECHANISM = {
    "total": "reduction",
    "share": "reduction",
    "reduction": "reduction",
    "group": "reduction",
    "unreduced": "reduction",
    "scale": "scale",
    "moved": "elsewhere",
    "created": "elsewhere",
    "race": "race",
    "overwritten": "race",
    "dtype": "dtype",
}


def _read_kind_of_culprit(
    culprit: Mapping[str, Any], taken: Mapping[str, Any], right: Mapping[str, Any]
) -> str:
    here, mechanism = culprit["here"], culprit["mechanism"]
    mechanism = "group" if mechanism == "removed" and culprit["axes"] else mechanism  # a needless collective
    mechanism = (
        "moved" if mechanism == "group" and here["operator"] == "recv" else mechanism
    )  # of another neighbor
    if mechanism in _KIND_OF_MECHANISM and (here["step"] >= 0 or mechanism == "dtype"):
        is_rate = mechanism == "scale" and here["phase"] == "step"
        is_short = mechanism == "moved" and culprit["moves_there"]  # one device computes on
        return "optimizer" if is_rate else "edit" if is_short else _KIND_OF_MECHANISM[mechanism]
    if here["step"] < 0:
        is_moved = mechanism in ("moved", "block") and not culprit["moves_there"]
        return "layout" if _is_of_axis(culprit) else "elsewhere" if is_moved else "state"
    is_stale = taken and right and (taken["step"] != right["step"] or taken["label"] == right["label"] != "")
    if is_stale or (mechanism == "removed" and taken):  # an operation that takes a value of an earlier step
        return "state"
    if taken and right and taken["label"] and right["label"] and taken["label"] != right["label"]:
        return "elsewhere"
    if any("torch." in number for pair in culprit["numbers"] for number in pair):
        return "dtype"
    return "optimizer" if here["phase"] == "step" else "edit"


def _is_of_axis(culprit: Mapping[str, Any]) -> bool:
    """Return whether a wrong mesh axis has chosen the blocks of parameters."""
    return culprit["mechanism"] == "block" and bool(culprit["numbers"][0][0])


def _list_lines(operation: Mapping[str, Any], *, callers: int) -> list[tuple[str, int]]:
    """Return the lines of an operation and of some calls around it."""
    lines = [operation.get("line"), *operation.get("callers", ())[:callers]]
    return [(line["file"], line["line"]) for line in lines if line]


def _list_origins(culprit: Mapping[str, Any]) -> list[tuple[str, int]]:
    """Return the lines from which a wrong result may come, and those that call them."""
    origins = culprit.get("origins", ())
    lines = [
        each
        for origin in origins
        for each in (origin["line"], origin.get("caller"), *origin.get("outer", ()))
    ]
    return [(line["file"], line["line"]) for line in lines if line]


def _find_terms(explanation: Mapping[str, Any]) -> list[str]:
    """Return the loss terms in which a part of a sum appears."""
    parts = [each["part"] for each in (explanation.get("operation") or {}).get("contributions", ())]
    return sorted({part["term"] for part in parts if part.get("term")})


def _read_failure(case: Mapping[str, Any]) -> Claim:
    """Return the claim of a case that ended in an error: the lines of the ranks' stacks."""
    lines = tuple(dict.fromkeys(_find_lines([case.get("reason"), case["rank_reports"]])))
    return Claim(lines=lines, shown=lines)


def _read_kind(
    finding: Mapping[str, Any], explanation: Mapping[str, Any], facts: Mapping[str, Any]
) -> tuple[str, bool]:
    code = finding.get("code") or explanation.get("cause") or ""
    operation = explanation.get("operation") or {}
    name = operation.get("kind", "")
    if not name:
        return _read_facts(code, facts)
    quantity = (explanation.get("subject") or {}).get("quantity")
    if name == "altered" and quantity == "loaded value":
        return "state", False  # a loaded number differs from the saved one
    if name in _ONLY_A_PLACE:
        return _KIND_OF_CODE.get(code, ""), True
    if name == "scaled" and code not in _CODES_THAT_LEAD:
        return _read_scaled(operation)
    kind = _KIND_OF_OPERATION.get(name, "")
    if code in _CODES_THAT_LEAD:
        kind = _KIND_OF_CODE[code]
    elif name == "zeroed" and quantity in ("initial value", "loaded value"):
        kind = "state"
    elif name == "replaced":
        kind = "elsewhere" if operation.get("by") == "tensor" else "state"
    return kind, False


def _read_facts(code: str, facts: Mapping[str, Any]) -> tuple[str, bool]:
    """Return the kind that a check's own facts imply."""
    about = facts.get("about")
    if about in _KIND_OF_FACTS:
        keys = ("factors", "is_own", "dtype")
        return _KIND_OF_FACTS[about], not any(facts.get(key) for key in keys)
    return _KIND_OF_CODE.get(code, ""), code in _CODES_OF_A_PLACE


def _read_scaled(operation: Mapping[str, Any]) -> tuple[str, bool]:
    """Return the kind of parts with a wrong factor: a missing share means a missing sum."""
    factors, parts = [], []
    for contribution in operation.get("contributions", ()):
        factors.append(contribution["factor"])
        parts.append(contribution["part"])
    if factors and all(_number(factor["value"]) == 0 for factor in factors):
        return _read_missing([part.get("tokens") or {} for part in parts]), False
    named = operation.get("ranks") or operation.get("loss_scale") or operation.get("local_means")
    return "scale", not (named or any(factor.get("equals") for factor in factors))


def _read_missing(tokens: Sequence[Mapping[str, Any]]) -> str:
    """Return the kind of missing shares: one rank's share means a sum, a micro-batch on all ranks a call."""
    ranks = {each.get("data_rank") for each in tokens}
    micro_batches = {each.get("micro_batch") for each in tokens}
    if None in micro_batches:
        return "edit" if None in ranks else "reduction"
    return "loop" if None in ranks or len(ranks) > len(micro_batches) else "reduction"


def _find_axes(*records: Any) -> set[str]:
    """Return the mesh axes that records name: in `axes`, and as sources of factors."""
    found: set[str] = set()

    def walk(value: Any, key: str) -> None:
        if isinstance(value, Mapping):
            for name, child in value.items():
                walk(child, name)
        elif isinstance(value, list | tuple):
            for child in value:
                walk(child, key)
        elif isinstance(value, str) and key in ("axes", "axis", "times", "over", "met"):
            found.add(value)

    for record in records:
        walk(record, "")
    return found


def _list_axes(names: Iterable[str]) -> tuple[str, ...]:
    """Return the mesh axes of some names, those of all ranks with other tokens one by one."""
    return tuple(sorted({axis for name in names for axis in _UNIONS.get(name, (name,))} - {""}))


def _find_lines(value: Any) -> Iterator[tuple[str, int]]:
    """Yield every `file:line` in the texts of a value."""
    if isinstance(value, str):
        for file, number in _LINE.findall(value):
            yield file, int(number)
    elif isinstance(value, Mapping):
        for child in value.values():
            yield from _find_lines(child)
    elif isinstance(value, list | tuple):
        for child in value:
            yield from _find_lines(child)
