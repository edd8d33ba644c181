"""Search for the first difference of two tensors, by hashes of 256 parts and then of parts of a part."""

from __future__ import annotations

from collections.abc import Sequence

from multiprocessing_pdb.console.broadcast import ask
from multiprocessing_pdb.console.grouping import name_ranks
from multiprocessing_pdb.console.target import Target, read_number, read_text
from multiprocessing_pdb.wire.framing import Frame

_PARTS = 256
_MOST_ROUNDS = 8  # of 256 parts each: enough for any tensor

Pair = tuple[Sequence[Target], Sequence[Target]]


def show_tensor_difference(ranks: Pair, values: tuple[Frame, Frame], path: str, seconds: float) -> str:
    """Return how the second ranks' tensor differs from the first ranks': in form, or the first element.

    `values` are the descriptions of the tensor by both groups. `path` is its path in the evaluated value.
    """
    expected, actual = values
    theirs = name_ranks(ranks[0])
    ours = name_ranks(ranks[1]) + (" differs" if len(ranks[1]) == 1 else " differ")
    forms = expected.get("form"), actual.get("form")
    if isinstance(forms[0], dict) and isinstance(forms[1], dict) and forms[0] != forms[1]:
        names = [name for name in {**forms[0], **forms[1]} if forms[0].get(name) != forms[1].get(name)]
        parts = [f"{name} {forms[1].get(name)} against {forms[0].get(name)}" for name in names]
        return f"{ours} from {theirs} in {'; '.join(parts)}"
    if expected.get("local") != actual.get("local"):
        return f"{ours} from {theirs} in local shape {actual.get('local')} against {expected.get('local')}"
    pair = (ranks[0][0], ranks[1][0])
    found = _find_first(pair, path, int(read_number(expected, "length") or 0), seconds)
    if isinstance(found, str):
        return f"{ours} from {theirs}; where was not found: {found}"
    elements = ask(pair, {"do": "element", "at": found, "path": path}, seconds)
    shown = [answer.failure or read_text(answer.frame, "element") for answer in elements]
    return f"{ours} from {theirs} first at {_locate(found, expected)}: {shown[1]} against {shown[0]}"


def _find_first(pair: tuple[Target, Target], path: str, length: int, seconds: float) -> int | str:
    """Return the index of the first differing element, or an error message. Transfers only hashes."""
    begin, end = 0, length
    for _ in range(_MOST_ROUNDS):
        request = {"do": "hash", "begin": begin, "end": end, "parts": _PARTS, "path": path}
        answers = ask(pair, request, seconds)
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


def _locate(at: int, value: Frame) -> str:
    """Return the index of an element: in the whole tensor for a shard, if the rank knows its offset."""
    index = _unravel(at, value.get("local"))
    shard = value.get("shard")
    offset = shard.get("offset") if isinstance(shard, dict) else None
    if (
        not isinstance(offset, list)
        or len(offset) != len(index)
        or not all(isinstance(n, int) for n in offset)
    ):
        return str(index)
    return str([place + begin for place, begin in zip(index, offset, strict=True)])


def _unravel(at: int, shape: object) -> list[int]:
    if not isinstance(shape, list) or not all(isinstance(size, int) and size > 0 for size in shape):
        return [at]
    places = []
    for size in reversed(shape):
        places.append(at % size)
        at //= size
    return places[::-1]
