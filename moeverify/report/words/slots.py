"""Words for tensors that have values of other ones: which ones, and where these stand in a flat buffer."""

from __future__ import annotations

from collections.abc import Mapping

from moeverify.report.numbers import format_ranks
from moeverify.report.words.part import name_tokens
from moeverify.report.words.subject import Phrase, name_subject
from moeverify.results.explanation import Explanation
from moeverify.results.slots import Displaced, FlatOrder, Flattening, Piece

_ORDERS: Mapping[FlatOrder, str] = {
    "registered": "the order of the model",
    "reversed": "the reverse order of the model",
    "by-name": "the order of their names",
    "smallest-first": "the order of their sizes",
    "largest-first": "the order of their sizes, the largest first",
}


def describe_displaced(operation: Displaced, explanation: Explanation) -> str:
    """Return of which other tensors the values are, and how they came to stand there."""
    subject = name_subject(explanation.subject)
    where = f", on {format_ranks(operation.ranks)} alone" if operation.ranks else ""
    if operation.tokens is None:
        return f"{subject} {_describe_values(operation, subject)}{where}"
    # What one rank brings to a sum is there in the place of what belongs there, or beside it.
    part = Phrase(f"the part of {name_tokens(operation.tokens)} in {subject}")
    besides = ", besides its own" if operation.added else ""
    return f"{part} {_describe_values(operation, part)}{besides}{where}"


def _describe_values(operation: Displaced, subject: Phrase) -> str:
    have, be, stand = subject.pick("has", "have"), subject.be, subject.pick("stands", "stand")
    if operation.source and operation.exchanged:
        return f"{be} exchanged with that of {operation.source}"
    if operation.source:
        return f"{be} that of {operation.source}"
    if operation.offset:
        way = "early" if operation.offset > 0 else "late"
        places = f"{stand} {abs(operation.offset)} elements too {way} in a flat buffer of all parameters"
        return f"{places}, so that values of others are in {subject.pick('its', 'their')} place"
    if operation.flattening is not None:
        return f"{have} the values of others: {_describe_flattening(operation.flattening)}"
    listed = ", then ".join(map(_name_piece, operation.pieces))
    num_more = operation.num_pieces - len(operation.pieces)
    more = f", and {num_more} more" if num_more else ""
    others = "the values of others" + (", one behind the other" if operation.num_pieces > 1 else "")
    return f"{have} {others}: {listed}{more}"


def _describe_flattening(way: Flattening) -> str:
    """Return how a flat buffer is written, and how it is cut."""
    which = ""
    if way.family:
        which = f"all but {way.family} parameters" if way.is_outside else f"{way.family} parameters"
    buffer = f"a flat buffer of {which}" if which else "a flat buffer"
    written, read = f"in {_ORDERS[way.written]}", f"in {_ORDERS[way.read]}"
    if way.written == way.read:
        number = max(way.filled_written, way.filled_read)
        one, other = ("written", "cut") if way.filled_written > 1 else ("cut", "written")
        filled = f"with each filled up to a multiple of {number} elements"
        return f"{buffer} {written} is {one} {filled}, and {other} without"
    return f"{buffer} is written {written}, and cut {read}"


def _name_piece(piece: Piece) -> str:
    if not piece.tensor:
        return f"{piece.count} zeros"
    last = piece.start + piece.count - 1
    elements = f"element {piece.start}" if piece.count == 1 else f"elements {piece.start}-{last}"
    return f"{elements} of {piece.tensor}"
