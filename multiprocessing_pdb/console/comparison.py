"""`diff EXPR`: one expression on all ranks, equal answers together, and where tensors first differ."""

from __future__ import annotations

from collections.abc import Sequence

from multiprocessing_pdb.console.broadcast import Answer, ask, explain_silence
from multiprocessing_pdb.console.grouping import group, name_ranks, show_block
from multiprocessing_pdb.console.target import Target, read_number, read_text
from multiprocessing_pdb.wire.framing import Frame

_STATUS_SECONDS = 2.0
_PARTS = 256
_MOST_SEARCHES = 8
_MOST_ROUNDS = 8  # of 256 parts each: more elements than any tensor has


def compare(targets: Sequence[Target], expression: str, seconds: float) -> tuple[list[Answer], str]:
    """Return the answers, and the text that groups them; the largest group is what the others are held to."""
    answers = ask(targets, {"do": "evaluate", "text": expression}, seconds)
    explain_silence(answers, _STATUS_SECONDS)
    return answers, show_comparison(answers, seconds)


def show_comparison(answers: Sequence[Answer], seconds: float) -> str:
    """Return one block per different answer, then the first differing element of each group of tensors."""
    keyed = [(_read_key(answer), answer) for answer in answers]
    groups = group(keyed)
    blocks = [
        show_block(
            name_ranks([a.target for a in members]), _show(members[0], len(groups) == 1 and len(answers) > 1)
        )
        for members in groups
    ]
    tensors = [members for members in groups if read_number(_value(members[0]), "length")]
    for members in tensors[1 : _MOST_SEARCHES + 1]:
        blocks.append(_show_difference(tensors[0], members, seconds))
    return "\n".join(blocks)


def _value(answer: Answer) -> Frame:
    value = answer.frame.get("value")
    return value if isinstance(value, dict) else {}


def _read_key(answer: Answer) -> str:
    return f"failure {answer.failure}" if answer.failure else f"value {read_text(_value(answer), 'key')}"


def _show(answer: Answer, is_common: bool) -> str:
    if answer.failure:
        return f"*** {answer.failure}"
    return read_text(_value(answer), "text") + (" (equal on all)" if is_common else "")


def _show_difference(expected: Sequence[Answer], actual: Sequence[Answer], seconds: float) -> str:
    theirs = name_ranks([a.target for a in expected])
    ours = name_ranks([a.target for a in actual]) + (" differs" if len(actual) == 1 else " differ")
    forms = _value(expected[0]).get("form"), _value(actual[0]).get("form")
    if isinstance(forms[0], dict) and isinstance(forms[1], dict) and forms[0] != forms[1]:
        names = [name for name in {**forms[0], **forms[1]} if forms[0].get(name) != forms[1].get(name)]
        parts = [f"{name} {forms[1].get(name)} against {forms[0].get(name)}" for name in names]
        return f"{ours} from {theirs} in {'; '.join(parts)}"
    length = int(read_number(_value(expected[0]), "length") or 0)
    pair = (expected[0].target, actual[0].target)
    found = _find_first(pair, length, seconds)
    if isinstance(found, str):
        return f"{ours} from {theirs}; where was not found: {found}"
    elements = ask(pair, {"do": "element", "at": found}, seconds)
    values = [answer.failure or read_text(answer.frame, "element") for answer in elements]
    index = _unravel(found, _value(expected[0]).get("indices"))
    return f"{ours} from {theirs} first at {index}: {values[1]} against {values[0]}"


def _find_first(pair: tuple[Target, Target], length: int, seconds: float) -> int | str:
    """Return the place of the first differing element, or what went wrong; hashes travel, elements do not."""
    begin, end = 0, length
    for _ in range(_MOST_ROUNDS):
        answers = ask(pair, {"do": "hash", "begin": begin, "end": end, "parts": _PARTS}, seconds)
        for answer in answers:
            if answer.failure:
                return f"{name_ranks([answer.target])}: {answer.failure}"
        first, second = (answer.frame.get("hashes") for answer in answers)
        if not isinstance(first, list) or not isinstance(second, list):
            return "malformed answer"
        span = next((a for a, b in zip(first, second, strict=False) if a != b), None)
        if not isinstance(span, list) or not all(isinstance(at, int) for at in span[:2]):
            return "the values changed meanwhile"
        begin, end = int(span[0]), int(span[1])
        if end - begin == 1:
            return begin
    return "too many rounds"


def _unravel(at: int, shape: object) -> str:
    if not isinstance(shape, list) or not all(isinstance(size, int) and size > 0 for size in shape):
        return f"[{at}]"
    places = []
    for size in reversed(shape):
        places.append(at % size)
        at //= size
    return f"[{', '.join(str(place) for place in reversed(places))}]"
