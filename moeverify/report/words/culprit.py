"""The first wrong operation in words: its code, the single-device counterpart, and the proof."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from moeverify.report.numbers import format_count, format_number, format_ranks
from moeverify.results.checks import Kind
from moeverify.results.culprit import CodeLine, Culprit, Mechanism, Operation, Source

_MOST_REPAIRED = 3


_NUMBERS = (f"{Kind.LOSS}/", f"{Kind.GRADIENT_NORM}/")
"""Kinds of results that are one number."""


def describe_culprit(culprit: Culprit) -> str:
    """Return the cause as sentences: the operation, the difference, and the proof."""
    first = f"{_name_operation(culprit.here)}, on {format_ranks(culprit.ranks)}"
    if culprit.mechanism in _KNOWN and culprit.results:
        return f"{'. '.join(_DIFFERENCES[culprit.mechanism](culprit))}. First seen in the result of {first}"
    if culprit.mechanism == "returned":
        return ". ".join([*_describe_returned(culprit), _describe_proof(culprit)])
    parts = [f"first wrong operation: {first}"]
    parts[0] += _DESCRIBE_OPERANDS.get(culprit.mechanism, "; its inputs match")
    parts += _DIFFERENCES[culprit.mechanism](culprit)
    parts.append(_describe_proof(culprit))
    return ". ".join(part for part in parts if part)


def describe_culprit_place(culprit: Culprit) -> str:
    """Return module, phase and step of the operation, and its call sites."""
    here = culprit.here
    where = [f"module {here.module}"] if here.module else []
    where.append(
        f"{_PHASES.get(here.phase, here.phase)} of step {here.step}"
        if here.step >= 0
        else "before the first step"
    )
    calls = [_name_line(caller) for caller in here.callers]
    if calls:
        where.append("called from " + ", ".join(calls))
    return "; ".join(where)


def list_source(culprit: Culprit) -> list[str]:
    """Return the source lines around the operation, then around its single-device counterpart."""
    found = _show_lines("", culprit.here.line)
    there = culprit.there.line if culprit.there is not None else None
    if there is not None and (culprit.here.line is None or there.lines != culprit.here.line.lines):
        found += _show_lines("collective: " if culprit.mechanism == "race" else "one device: ", there)
    return found


_KNOWN = frozenset({"scale", "reduction", "moved"})
"""Mechanisms that describe a wrong result in terms of a single-device value."""

_PHASES = {"forward": "forward pass", "backward": "backward pass", "step": "optimizer step"}

_DESCRIBE_OPERANDS: Mapping[Mechanism, str] = {
    "operand": "; its other inputs match",
    "total": "",
    "share": "",
    "whole": "",
    "race": "",
    "written": "",
}


def _show_lines(title: str, line: CodeLine | None) -> list[str]:
    if line is None:
        return []
    return [
        f"{title}{line.file}:{number}{' >' if number == line.line else '  '} {text}"
        for number, text in line.lines
    ]


def _name_operation(operation: Operation) -> str:
    """Return expression and line of an operation; without a line its name and module."""
    if operation.operator == "unseen" and operation.line is not None:
        return f"a write that no recorded operator made, seen at {_name_line(operation.line)}"
    if operation.line is None:
        inside = f" in {operation.module}" if operation.module else ""
        return f"{operation.operator}, called by autograd{inside}"
    shown = operation.line.expression
    joint = ", for the gradient of" if operation.is_derivative else " in"
    name = f"{operation.operator}{joint} `{shown}`"
    return f"{name if shown else operation.operator}, {_name_line(operation.line)}"


def _name_first_caller(operation: Operation) -> str:
    """Return the call site of the function that contains an operation."""
    return f", called from {_name_line(operation.callers[0])}" if operation.callers else ""


def _name_line(line: CodeLine) -> str:
    return f"{line.file}:{line.line}" + (
        f" in {line.function}" if line.function and line.function[0] != "<" else ""
    )


def _name_source(source: Source | None) -> str:
    """Return the origin of a value in words."""
    if source is None:
        return "a value that one device does not have"
    if source.label:
        made = source.operation
        by = (
            f" after {made.operator} of step {made.step}" if made is not None and made.phase == "step" else ""
        )
        name = f"{source.label}{by}"
    elif source.operation is not None:
        name = f"the result of {_name_operation(source.operation)}"
        if source.operation.module:
            name += f", in {source.operation.module}"
        name += f" (step {source.step})" if source.step >= 0 else " (before the first step)"
    else:
        name = "a value"
    if source.others:
        name = f"a mix of {' and of '.join([name, *map(_name_source, source.others)])}"
    if source.zeros:
        name += f" ({source.zeros:.0%} of its elements are zero in its place)"
    if source.over:
        name = f"a part, over {' and '.join(source.over)}, of the sum that is {name}"
    return name if source.scale == 1.0 else f"{format_number(source.scale)} times {name}"


def _describe_number(culprit: Culprit) -> list[str]:
    if culprit.there is None:  # a number of another line was tried
        return [", ".join(f"Here it has {here}, and {there} repairs it" for here, there in culprit.numbers)]
    pairs = ", ".join(f"{there} and not {here}" for here, there in culprit.numbers)
    return [f"One device has {pairs}{_at_there(culprit)}" if pairs else ""]


def _at_there(culprit: Culprit) -> str:
    line = culprit.there.line if culprit.there is not None else None
    return f", {_name_line(line)}" if line is not None and line != culprit.here.line else ""


def _describe_operator(culprit: Culprit) -> list[str]:
    return [f"One device: {_name_operation(culprit.there)}" if culprit.there is not None else ""]


def _describe_operand(culprit: Culprit) -> list[str]:
    right = f"{_name_source(culprit.right)}{_at_there(culprit)}"
    which = f"Input {culprit.operand + 1}" if culprit.operand >= 0 else "An input"
    made = culprit.made
    if made is not None and made.line is not None and made.line != culprit.here.line:
        which += f", made by {_name_operation(made)}{_name_first_caller(made)},"
    lines = [f"{which} is {_name_source(culprit.taken)}. One device takes {right}"]
    if culprit.moves:
        lines.append("It comes by " + ", then ".join(map(_name_operation, culprit.moves)))
    if culprit.moves_there:
        lines.append("On one device by " + ", then ".join(map(_name_operation, culprit.moves_there)))
    if culprit.numbers:
        lines.append(
            "There one device has " + ", ".join(f"{there} and not {here}" for here, there in culprit.numbers)
        )
    return lines


def _describe_total(culprit: Culprit) -> list[str]:
    over = f" over {' and '.join(culprit.axes)}" if culprit.axes else ""
    return [
        f"It takes parts of a sum; the reduction{over} comes later or never",
        f"The input is {_name_source(culprit.taken)}",
    ]


def _describe_share(culprit: Culprit) -> list[str]:
    return [
        "It joins parts of a sum with a value that counts once: after the reduction that is there once for each part"
    ]


def _describe_whole(culprit: Culprit) -> list[str]:
    right = _name_source(culprit.right)
    return [f"It takes a part of {right}; one device takes all of it{_at_there(culprit)}"]


def _describe_removed(_: Culprit) -> list[str]:
    return ["One device does not do this: what it takes goes on unchanged"]


def _describe_inserted(culprit: Culprit) -> list[str]:
    verb = "multiplied with" if culprit.numbers and culprit.numbers[0][0] == "mul" else "added to"
    return [f"On one device, its input is {verb} {_name_source(culprit.right)} before; here it is not"]


def _describe_returned(culprit: Culprit) -> list[str]:
    module = ", ".join(culprit.results)
    return [
        f"{module} returns the result of {_name_operation(culprit.here)}, on {format_ranks(culprit.ranks)}",
        f"One device returns {_name_source(culprit.right)}",
    ]


def _describe_value(culprit: Culprit) -> list[str]:
    there = f"One device: {_name_operation(culprit.there)}" if culprit.there is not None else ""
    return [there]


def _describe_scale(culprit: Culprit) -> list[str]:
    names = f" ({' or '.join(culprit.axes)})" if culprit.axes else ""
    what = ", ".join(culprit.results) or "Its result"
    return [f"{what} is exactly {format_number(culprit.factor)}{names} times that of one device"]


def _describe_reduction(culprit: Culprit) -> list[str]:
    over = f" over {' and '.join(culprit.axes)}" if culprit.axes else ""
    return [
        f"{', '.join(culprit.results)} is not reduced{over}: the values of these ranks add up to that of one device"
    ]


def _describe_moved(culprit: Culprit) -> list[str]:
    names, source = ", ".join(culprit.results), _name_source(culprit.taken)
    if all(name.startswith(_NUMBERS) for name in culprit.results):
        return [f"{names} is {source}"]
    return [f"{names} has right values in wrong places: those of {source}"]


def _describe_race(culprit: Culprit) -> list[str]:
    other = culprit.there
    name = _name_operation(other) if other is not None else "a collective"
    return [f"It uses memory while {name} may still be using it: nothing has waited for that"]


def _describe_written(culprit: Culprit) -> list[str]:
    usual = _name_operation(culprit.made) if culprit.made is not None else "another operation"
    return [
        f"Nothing has written these values after it. Most tensors that are right were last written by {usual}"
    ]


_DIFFERENCES: Mapping[Mechanism, Callable[[Culprit], list[str]]] = {
    "number": _describe_number,
    "operator": _describe_operator,
    "operand": _describe_operand,
    "total": _describe_total,
    "share": _describe_share,
    "whole": _describe_whole,
    "removed": _describe_removed,
    "inserted": _describe_inserted,
    "returned": _describe_returned,
    "value": _describe_value,
    "scale": _describe_scale,
    "reduction": _describe_reduction,
    "race": _describe_race,
    "written": _describe_written,
    "moved": _describe_moved,
    "place": _describe_value,
}


def _describe_proof(culprit: Culprit) -> str:
    if not culprit.proved:
        lines = list(
            dict.fromkeys(_name_line(each.line) for each in culprit.between if each.line is not None)
        )
        span = f": {', '.join(lines)}" if lines else ""
        if culprit.mechanism == "value":
            return (
                "With the result of one device in its place, what follows is right. The mistake is here, or in how "
                f"its inputs are arranged{span}"
            )
        return (
            f"Only the place is known: the mistake is between right inputs and the first wrong result{span}"
        )
    if culprit.mechanism in ("race", "written"):
        return ""
    if culprit.is_local:
        return "Executed with that change, its result is what one device has"
    names = list(culprit.repaired[:_MOST_REPAIRED])
    if len(culprit.repaired) > _MOST_REPAIRED:
        names.append(format_count(len(culprit.repaired) - _MOST_REPAIRED, "more result"))
    if not names:
        return "Executed with that change, all that follows is what one device has"
    left = "" if culprit.residual is None else f" ({culprit.residual:.0e})"
    return f"Executed with that change, {', '.join(names)} {'is' if len(names) == 1 else 'are'} right{left}"
