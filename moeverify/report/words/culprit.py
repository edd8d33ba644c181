"""The first wrong operation in words: its code, the single-device counterpart, and the proof."""

from __future__ import annotations

import textwrap
from collections.abc import Callable, Mapping, Sequence

from moeverify.report.numbers import format_count, format_number, format_ranks
from moeverify.report.words.origin import describe_lone_line, name_line
from moeverify.results.checks import Kind
from moeverify.results.culprit import CodeLine, Culprit, Mechanism, Operation, SourceValue

Row = tuple[str, str]
"""A label and a text."""

_MOST_REPAIRED = 3
_MOST_CALLERS = 3
_MOST_LINES = 6

_NUMBERS = (f"{Kind.LOSS}/", f"{Kind.GRADIENT_NORM}/")
"""Kinds of results that are one number."""

_CAUSE, _HERE, _THERE, _PROOF = "cause", "here", "reference", "proof"
_VIA = "via"
"""Label of the operations between a value of the row above and its use."""
_LINES = "lines"
"""Label of the lines from right inputs to the first wrong result, if only the place is known."""


def list_culprit(culprit: Culprit) -> list[Row]:
    """Return the cause as labelled rows: the operation, both sides, how values came there, and the proof."""
    operation = f"{name_operation(culprit.here)}, {format_ranks(culprit.ranks)}"
    rows = _DIFFERENCES[culprit.mechanism](culprit)
    between = [(_LINES, ", ".join(lines))] if (lines := _list_between(culprit)) else []
    if culprit.lone_line is not None:
        return [
            (_CAUSE, describe_lone_line(culprit.lone_line, is_proved=culprit.own_line is not None)),
            ("enters", operation),
            *(("result" if label == _CAUSE else label, text) for label, text in rows),
            (_PROOF, _describe_proof(culprit)),
            *between,
        ]
    if culprit.mechanism in _KNOWN and culprit.results:
        return [*rows, ("seen in", operation)]
    if culprit.mechanism == "total" and culprit.results:
        names = f"{_name_first(culprit.results)} not reduced{_name_over(culprit)}"
        headline = f"{names}: {operation}, takes each rank's part"
    elif culprit.mechanism == "returned":
        headline = f"{', '.join(culprit.results)} returns another value than on one device"
        rows = [(_HERE, operation), *rows]
    else:
        headline = _describe_first(culprit, operation)
    proof = _describe_proof(culprit)
    rows += [(_PROOF, proof)] if proof else []
    return [(_CAUSE, headline), *rows, *between]


def _describe_first(culprit: Culprit, operation: str) -> str:
    """Return the headline of the first wrong operation, or of the first wrong value that a right line takes."""
    is_doubtful = culprit.mechanism == "place" and culprit.taken is not None
    about = "one input may be wrong" if is_doubtful else _ABOUT.get(culprit.mechanism, "its inputs match")
    if culprit.mechanism == "block":
        return f"wrong block of a parameter: made by {operation}"
    if culprit.mechanism == "group" and culprit.made is not None:
        return (
            f"wrong process group: made by {name_operation(culprit.made)}{_name_first_caller(culprit.made)}"
        )
    if culprit.names_cause or culprit.is_measured or not culprit.proved:
        return f"first wrong operation: {operation}; {about}"
    if culprit.mechanism == "created":
        return f"first wrong elements: made by {operation}"
    shared = "one device executes this line too"
    if (value := _TAKEN.get(culprit.mechanism)) is None:
        return f"first wrong operation: {operation}; {about}, and {shared}"
    reason = f"{shared}, so " if culprit.is_line_shared else ""
    return f"first wrong {value}: in {operation}; {reason}the mistake is where the {value} is made"


def _list_between(culprit: Culprit) -> list[str]:
    """Return the lines from right inputs to the first wrong result, if only the place is known."""
    lines = [each.line for each in culprit.between if each.line is not None]
    return list(dict.fromkeys(map(name_line, lines)))


def describe_culprit(culprit: Culprit) -> str:
    """Return the cause in one line, without the operations and lines in between."""
    parts = [
        text if label in (_CAUSE, _PROOF) else f"{label}: {text}"
        for label, text in list_culprit(culprit)
        if label not in (_VIA, _LINES)
    ]
    return ". ".join(part if number == 0 else part[0].upper() + part[1:] for number, part in enumerate(parts))


def describe_passage(culprit: Culprit) -> str:
    """Return the cause in one line, with its call sites and the lines from right values to it."""
    text = describe_culprit(culprit)
    if culprit.here.callers:
        text += f". Called from {', '.join(map(name_line, culprit.here.callers[:_MOST_CALLERS]))}"
    if lines := _list_between(culprit):
        text += f". Lines from right values to it: {', '.join(lines[-_MOST_LINES:])}"
    return text


def describe_culprit_place(culprit: Culprit) -> str:
    """Return module, phase and step of the operation, and its call sites."""
    here = culprit.here
    where = [f"module {here.module}"] if here.module else []
    # Without autograd and outside modules, it may also be a hook, an optimizer or a loader.
    part = "" if here.phase == "forward" and not here.module else f"{_PHASES.get(here.phase, here.phase)} of "
    where.append(f"{part}step {here.step}" if here.step >= 0 else "before the first step")
    calls = [name_line(caller) for caller in here.callers]
    if calls:
        where.append("called from " + ", ".join(calls))
    return "; ".join(where)


def list_source(culprit: Culprit) -> list[str]:
    """Return source lines: around the operation, the producer of its wrong input, and its counterpart.

    Where only the place of the mistake is known, the lines around the call of the function are there, too.
    """
    caller = culprit.here.callers[0] if culprit.mechanism == "place" and culprit.here.callers else None
    made = culprit.made if culprit.mechanism in ("operand", "share", "scale") else None
    there = culprit.there
    own = culprit.lone_line
    sites = [
        ("", None if own is None else own.line),
        ("" if own is None else "enters: ", culprit.here.line),
        ("caller: ", caller),
        ("input: ", None if made is None else made.line),
        (
            _OTHERS.get(culprit.mechanism, "reference: "),
            None if there is None else there.line,
        ),
    ]
    shown: dict[tuple[tuple[int, str], ...], list[str]] = {}
    for title, line in sites:
        if line is not None:
            shown.setdefault(line.lines, _show_lines(title, line))
    return [line for lines in shown.values() for line in lines]


_KNOWN = frozenset({"scale", "reduction", "moved", "shared"})
"""Mechanisms that describe a wrong result in terms of a single-device value."""

_PHASES = {"forward": "forward pass", "backward": "backward pass", "step": "optimizer step"}

_ABOUT: Mapping[Mechanism, str] = {
    "operand": "one input is wrong",
    "total": "it uses parts of a sum",
    "share": "it adds a whole value to a part of a sum",
    "whole": "it uses a part of a tensor",
    "removed": "one device does not do this",
    "owned": "its zeros are in the wrong places",
    "group": "it communicates with the wrong ranks",
    "unreduced": "its result is not reduced",
    "inserted": "an operation before it is missing",
    "race": "a collective may still use its memory",
    "overwritten": "a backward pass still needs the memory that it writes to",
    "written": "its values are from before the first step",
}
"""State of the inputs in the headline, for mechanisms where not all of them match."""

_OTHERS: Mapping[Mechanism, str] = {"race": "collective: ", "overwritten": "needs it: "}
"""Title of the lines of the other operation, for mechanisms where it is not one device's counterpart."""

_TAKEN: Mapping[Mechanism, str] = {
    "operand": "input",
    "whole": "input",
    "number": "number",
    "created": "elements",
}
"""Mechanisms of a value that an operation takes, and its name."""


def _show_lines(title: str, line: CodeLine) -> list[str]:
    texts = textwrap.dedent("\n".join(text for _, text in line.lines)).split("\n")
    return [
        f"{title}{line.file}:{number}{' >' if number == line.line else '  '} {text}"
        for (number, _), text in zip(line.lines, texts, strict=False)  # no lines give one empty text
    ]


def name_operation(operation: Operation) -> str:
    """Return expression, operator and line of an operation; without a line its operator and module."""
    if operation.operator == "unseen" and operation.line is not None:
        return f"a write that no recorded operator made, seen at {name_line(operation.line)}"
    if operation.line is None:
        inside = f" in {operation.module}" if operation.module else ""
        return f"{operation.operator}, called by autograd{inside}"
    shown, operator = operation.line.expression, operation.operator.strip("_")
    name = f"`{shown}`" if shown else operation.operator
    if shown and f"{operator}(" not in shown:
        name += f" ({operation.operator})"
    return f"{'gradient of ' if operation.is_derivative else ''}{name}, {name_line(operation.line)}"


def _name_first_caller(operation: Operation) -> str:
    """Return the call site of the function that contains an operation."""
    return f", called from {name_line(operation.callers[0])}" if operation.callers else ""


def _name_source(source: SourceValue | None) -> str:
    """Return the origin of a value in words."""
    if source is None:
        return "a value without a counterpart on one device"
    if source.label:
        made = source.operation
        by = (
            f" after {made.operator} of step {made.step}" if made is not None and made.phase == "step" else ""
        )
        name = f"{source.label}{by}"
    elif source.operation is not None:
        name = (
            f"the {'' if source.operation.is_derivative else 'result of '}{name_operation(source.operation)}"
        )
        if source.operation.module:
            name += f", module {source.operation.module}"
        name += f", step {source.step}" if source.step >= 0 else ", before the first step"
    else:
        name = "a value"
    if source.others:
        name = f"a mix of {'; and of '.join([name, *map(_name_source, source.others)])}"
    if source.rows:
        name = f"{_name_rows(source.rows)} of {name}"
    if source.zeros:
        name += f" ({source.zeros:.0%} of its elements are zero instead)"
    if source.over:
        name = f"a part, over {' and '.join(source.over)}, of the sum {name}"
    return name if source.scale == 1.0 else f"{format_number(source.scale)} times {name}"


def _describe_number(culprit: Culprit) -> list[Row]:
    if culprit.there is None:  # a number of another line was tried
        return [(_HERE, ", ".join(f"with {here}; {there} repairs it" for here, there in culprit.numbers))]
    if not culprit.numbers:
        return []
    mine, theirs = (", ".join(numbers) for numbers in zip(*culprit.numbers, strict=True))
    return [(_HERE, f"with {mine}"), (_THERE, f"with {theirs}{_at_there(culprit)}")]


def _at_there(culprit: Culprit) -> str:
    line = culprit.there.line if culprit.there is not None else None
    return f", {name_line(line)}" if line is not None and line != culprit.here.line else ""


def _describe_counterpart(culprit: Culprit) -> list[Row]:
    return [(_THERE, name_operation(culprit.there))] if culprit.there is not None else []


def _describe_place(culprit: Culprit) -> list[Row]:
    if culprit.taken is None:
        return _describe_counterpart(culprit)
    return [(_HERE, f"{_name_operand(culprit)} {_name_source(culprit.taken)}")]


def _name_operand(culprit: Culprit) -> str:
    return f"input {culprit.operand + 1} is" if culprit.operand >= 0 else "an input is"


def _describe_operand(culprit: Culprit) -> list[Row]:
    which = _name_operand(culprit)
    mine = f"{which} {_name_source(culprit.taken)}"
    made = culprit.made
    is_named = culprit.taken is not None and culprit.taken.operation == made
    if made is not None and made.line is not None and made.line != culprit.here.line and not is_named:
        mine += f"; made by {name_operation(made)}{_name_first_caller(made)}"
    right = _name_source(culprit.right)
    right += at if (at := _at_there(culprit)) not in right else ""
    rows = [(_HERE, mine), *_list_path(culprit.moves), (_THERE, f"{which} {right}")]
    rows += _list_path(culprit.moves_there)
    if culprit.numbers:
        pairs = ", ".join(f"{there} instead of {here}" for here, there in culprit.numbers)
        rows.append((_VIA, f"with {pairs}"))
    return rows


def _list_path(moves: tuple[Operation, ...]) -> list[Row]:
    return [(_VIA, ", then ".join(map(name_operation, moves)))] if moves else []


def _name_over(culprit: Culprit) -> str:
    """Return the mesh axes of a culprit as ` over tp and dp`, or an empty string."""
    return f" over {' and '.join(culprit.axes)}" if culprit.axes else ""


def _describe_total(culprit: Culprit) -> list[Row]:
    taken, over = _name_source(culprit.taken), _name_over(culprit)
    return [(_HERE, f"its input is {taken}; the reduction{over} comes later or never")]


def _describe_share(culprit: Culprit) -> list[Row]:
    follows = f"the reduction{_name_over(culprit)} that follows counts it once for each part"
    return [(_HERE, f"{_name_operand(culprit)} whole{_name_made(culprit)}; {follows}")]


def _name_made(culprit: Culprit) -> str:
    """Return the operation that made a value as `, made by ...`, or an empty string."""
    return f", made by {name_operation(culprit.made)}" if culprit.made is not None else ""


def _describe_whole(culprit: Culprit) -> list[Row]:
    right = _name_source(culprit.right)
    return [(_HERE, f"a part of {right}"), (_THERE, f"all of it{_at_there(culprit)}")]


def _describe_removed(culprit: Culprit) -> list[Row]:
    rows = [(_HERE, f"the ranks' parts add up wrongly: {_describe_sums(culprit)}")] if culprit.sums else []
    rows += [(_HERE, f"it takes {_name_source(culprit.taken)}, an earlier one")] if culprit.taken else []
    over, names = _name_over(culprit), _name_first(culprit.results) if culprit.results else "a value"
    verb = f"writes {names}, reduced" if culprit.here.operator == "copy_" else "communicates"
    rows += [(_HERE, f"{verb}{over}")] if over else []
    return [*rows, (_THERE, "the value that it takes goes on unchanged")]


def _describe_inserted(culprit: Culprit) -> list[Row]:
    verb = "multiplied with" if culprit.numbers and culprit.numbers[0][0] == "mul" else "added to"
    return [(_THERE, f"its input is first {verb} {_name_source(culprit.right)}")]


def _describe_returned(culprit: Culprit) -> list[Row]:
    return [(_THERE, _name_source(culprit.right))]


def _describe_group(culprit: Culprit) -> list[Row]:
    ((mine, right),) = culprit.numbers
    if culprit.here.operator == "recv":
        ring = " and ".join(culprit.axes)
        return [(_HERE, f"received from {mine} in {ring}; right is the message from {right}")]
    if culprit.made is None:
        return [(_HERE, f"over {mine}; its result is right over {right}")]
    used = f"over {mine}, first used in {name_operation(culprit.here)}"
    return [(_HERE, f"{used}; all results of the group are right over {right}")]


def _describe_unreduced(culprit: Culprit) -> list[Row]:
    ((name, axis),) = culprit.numbers
    terms = f", for {_name_first(culprit.results)}" if culprit.results else ""
    return [(_HERE, f"each rank goes on with its own result; the {name} over {axis} is right{terms}")]


def _describe_created(culprit: Culprit) -> list[Row]:
    ((mine, right),) = culprit.numbers
    return [(_HERE, f"elements {mine}; the right ones are {right}"), *_describe_counterpart(culprit)]


def _describe_block(culprit: Culprit) -> list[Row]:
    (mine, right), (held, wanted) = culprit.numbers
    name = _name_first(culprit.results)
    by = f" by its coordinate on {mine}" if mine else ""
    return [
        (_HERE, f"rank {culprit.ranks[0]} has {held} of {name}{by}; {wanted} by its coordinate on {right}")
    ]


def _name_first(names: Sequence[str]) -> str:
    name, *others = names
    return name + (f" and {format_count(len(others), 'more tensor')}" if others else "")


def _describe_owned(culprit: Culprit) -> list[Row]:
    ((rank, extra),) = culprit.numbers
    if rank == "no rank":
        return [(_HERE, f"{extra} of a sum over the ranks are zero in all parts: one rank should add them")]
    return [(_HERE, f"of the part that {rank} adds to a sum, {extra} should be zero: other ranks add them")]


def _describe_dtype(culprit: Culprit) -> list[Row]:
    return [(_HERE, f"in {culprit.rounds_to}"), (_THERE, "float64")]


def _describe_scale(culprit: Culprit) -> list[Row]:
    names = f" ({' or '.join(culprit.axes)})" if culprit.axes else ""
    # Three digits may round a measured factor to 1.
    number = f"{culprit.factor:.7g}" if culprit.is_measured else f"exactly {format_number(culprit.factor)}"
    factor = f"is {number}{names} times that of one device"
    if culprit.results:
        return [(_CAUSE, f"{', '.join(culprit.results)} {factor}")]
    whole = [(_HERE, f"each rank adds the whole value{_name_made(culprit)}")] if culprit.made else []
    return [(_HERE, f"its result {factor}"), *whole]


def _describe_reduction(culprit: Culprit) -> list[Row]:
    names = ", ".join(culprit.results)
    if culprit.sums:
        return [
            (
                _CAUSE,
                f"{names} is a wrong sum of the ranks' parts, which are right: {_describe_sums(culprit)}",
            )
        ]
    over = _name_over(culprit)
    return [(_CAUSE, f"{names} is not reduced{over}: the values of these ranks add up to that of one device")]


def _describe_sums(culprit: Culprit) -> str:
    """Return the wrong parts of a sum, together for the same ranks and rows."""
    found: dict[str, list[str]] = {}
    for each in culprit.sums:
        where = format_ranks(each.ranks) + (f", {_name_rows(each.rows)}" if each.rows else "")
        how = "without" if each.weight == 0.0 else "with"
        how += f" {format_number(each.weight)} times" if each.weight not in (0.0, 1.0) else ""
        source = f" for {_name_rows(each.source_rows)}" if each.source_rows else ""
        found.setdefault(where, []).append(f"{how} the part of rank {each.source}{source}")
    return "; ".join(f"{where}: {', '.join(parts)}" for where, parts in found.items())


def _name_rows(rows: Sequence[int]) -> str:
    return f"{'row' if len(rows) == 1 else 'rows'} {', '.join(map(str, rows))}"


def _describe_moved(culprit: Culprit) -> list[Row]:
    names, source = ", ".join(culprit.results), _name_source(culprit.taken)
    if all(name.startswith(_NUMBERS) for name in culprit.results):
        return [(_CAUSE, f"{names} is {source}")]
    if culprit.moves_there:
        later = ", then ".join(map(name_operation, culprit.moves_there))
        if culprit.moves_there[0].operator.strip("_") == "add":
            return [(_CAUSE, f"{names} is only {source}"), (_THERE, f"adds another part to it: {later}")]
        return [(_CAUSE, f"{names} is {source}"), (_THERE, f"followed by {later}")]
    if culprit.copy_of:
        return [(_CAUSE, f"{names} is a copy of {culprit.copy_of}: it has the values of {source}")]
    return [(_CAUSE, f"{names} has the values of {source}, up to their places")]


def _describe_shared(culprit: Culprit) -> list[Row]:
    names = ", ".join(culprit.results)
    return [(_CAUSE, f"{names} has the memory of {culprit.copy_of}; on one device each has its own")]


def _describe_race(culprit: Culprit) -> list[Row]:
    other = culprit.there
    name = name_operation(other) if other is not None else "a collective"
    return [(_HERE, f"{name} may still use this memory: nothing has waited for it")]


def _describe_overwritten(culprit: Culprit) -> list[Row]:
    needed = name_operation(culprit.there) if culprit.there is not None else "an operation"
    return [(_HERE, f"the backward pass of {needed} takes the values that are written here")]


def _describe_written(culprit: Culprit) -> list[Row]:
    usual = name_operation(culprit.made) if culprit.made is not None else "another operation"
    return [(_HERE, f"nothing wrote these values later. {usual} wrote most of the tensors that are right")]


_DIFFERENCES: Mapping[Mechanism, Callable[[Culprit], list[Row]]] = {
    "number": _describe_number,
    "operator": _describe_counterpart,
    "operand": _describe_operand,
    "total": _describe_total,
    "share": _describe_share,
    "whole": _describe_whole,
    "removed": _describe_removed,
    "inserted": _describe_inserted,
    "returned": _describe_returned,
    "value": _describe_counterpart,
    "scale": _describe_scale,
    "group": _describe_group,
    "unreduced": _describe_unreduced,
    "created": _describe_created,
    "block": _describe_block,
    "owned": _describe_owned,
    "dtype": _describe_dtype,
    "reduction": _describe_reduction,
    "race": _describe_race,
    "overwritten": _describe_overwritten,
    "written": _describe_written,
    "moved": _describe_moved,
    "shared": _describe_shared,
    "place": _describe_place,
}


def _describe_proof(culprit: Culprit) -> str:
    if culprit.mechanism in ("race", "overwritten", "written"):
        return ""
    if not culprit.proved and culprit.mechanism == "value":
        return (
            "with one device's result instead, all later results are right: the bug is here, or in how the inputs "
            "are arranged"
        )
    if not culprit.proved:
        return "only the place is known: the mistake is between right inputs and the first wrong result"
    is_of_value = culprit.own_line is not None or not culprit.names_cause
    taken = _TAKEN.get(culprit.mechanism) if is_of_value else None
    change = "that change" if taken is None else f"the right {taken}"
    if culprit.is_local:
        return f"executed with {change}, its result equals that of one device"
    names = list(culprit.repaired[:_MOST_REPAIRED])
    if len(culprit.repaired) > _MOST_REPAIRED:
        names.append(format_count(len(culprit.repaired) - _MOST_REPAIRED, "more result"))
    if not names:
        return f"executed with {change}, the next results equal one device"
    left = "" if culprit.residual is None else f" ({culprit.residual:.0e})"
    verb = "equals" if len(names) == 1 else "equal"
    return f"executed with {change}, {', '.join(names)} {verb} one device{left}"
