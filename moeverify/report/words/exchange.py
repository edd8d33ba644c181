"""Steps of token copies on their way to the experts and back that are otherwise, in words."""

from __future__ import annotations

from collections.abc import Mapping

_ROWS: Mapping[str, str] = {
    "sent": "the token copies that a rank sends to the experts",
    "arrived": "the token copies that come in at a rank with experts",
    "sorted": "the token copies that experts are given, sorted by expert",
    "computed": "what the experts put out, sorted by expert",
    "unsorted": "the outputs that a rank with experts sends back",
    "returned": "the outputs that come back to a rank",
}
_MIXED: Mapping[str, str] = {
    "rolled": "with {rows} off by {number} rows",
    "reversed": "with {rows} in reverse order",
    "modulo": "with {rows} read at row numbers modulo {number}",
    "ranks-reversed": "with {rows} by rank in reverse order",
    "ranks-rolled": "with {rows} by rank beginning with another rank",
    "transposed": "with {rows} by rank in turn, as if two axes of ranks were exchanged",
}
_ORDERS: Mapping[str, str] = {
    "there": "with token copies that come in",
    "back": "with outputs",
    "there-and-back": "with token copies, and then with their outputs,",
}
_ORDERED: Mapping[tuple[str, str], str] = {
    ("there", "skipped"): "{what} not sorted by expert",
    ("back", "skipped"): "{what} not sorted by rank again",
    ("there-and-back", "skipped"): "{what} not sorted by expert",
    ("there", "inverse"): "{what} sorted by the inverse of the order of experts",
    ("back", "inverse"): "{what} sorted by expert once more and not by rank again",
    ("there-and-back", "addresses"): "{what} sorted from rows that are off by {number}",
    ("there", "blocks"): "{what} sorted by expert in blocks that begin {late}",
    ("back", "blocks"): "{what} sorted by rank again in blocks that begin {late}",
    ("there-and-back", "blocks"): "{what} sorted in blocks that begin {late}",
}
_COUNTS: Mapping[str, str] = {
    "ranks-reversed": "{what} sorted by counts of the ranks in reverse order",
    "ranks-rolled": "{what} sorted by counts of the ranks beginning with another rank",
    "transposed": "{what} sorted by counts of the ranks in turn, as if two axes of ranks were exchanged",
    "experts-reversed": "{what} sorted by counts of the experts in reverse order",
    "experts-rolled": "{what} sorted by counts of the experts that are off by one expert",
    "exchanged": "{what} sorted by counts whose rows and columns, ranks and experts, are exchanged",
}
_OTHERS: Mapping[tuple[str, str], str] = {
    ("counts", "reversed"): "with the experts' counts of rows in reverse order",
    ("counts", "rolled"): "with the experts' counts of rows off by one expert",
    ("counts", "late"): "with each expert's rows beginning one row too late",
    ("counts", "early"): "with each expert's rows beginning one row too early",
    ("counts", "by-rank"): "with the rows that come from each rank for the rows of each expert",
    (
        "counts",
        "starts",
    ): "with the rows of each expert ending where they should begin",
    ("counts", "running"): "with running sums of the experts' counts of rows for the counts",
    ("counts", "equal"): "with equal counts of rows for all experts of a rank",
    ("counts", "first-rank"): "with the counts of rows of the first rank's experts on all ranks",
    (
        "counts",
        "sent-first",
    ): "with counts of the rows that a rank sends to the first experts, not of those that come in",
    ("counts", "own-alone"): "with the counts of the rows alone that a rank sends to its own experts",
    ("counts", "as-next"): "with the next expert's count of rows for each rank's expert {number}",
    (
        "counts",
        "as-before",
    ): "with the count of rows of the expert before for each rank's expert {number}",
    ("counts", "one-more"): "with one row more counted for each rank's expert {number}",
    ("counts", "one-less"): "with one row less counted for each rank's expert {number}",
    ("counts", "none"): "with no rows counted for each rank's expert {number}",
    (
        "counts",
        "padded",
    ): "with counts of rows that are rounded up to multiples of {number}, and no rows added",
    ("counts", "floored"): "with counts of rows that are rounded down to multiples of {number}",
    (
        "counts",
        "at-most",
    ): "with counts of rows that are {number} at most, and no rows left out",
    ("counts", "of-rank"): "with the counts of rows of the rank {number} further on",
    ("counts", "from-rank"): "with the counts of the rows alone that rank {number} sends",
    ("counts", "merged"): "with the rows of each rank's expert {number} counted as those of the next expert",
    ("copies", "unsorted"): "with token copies that are sent without having been sorted by expert",
    ("copies", "inverse"): "with token copies that are sorted by the inverse of the order of experts",
    (
        "copies",
        "by-remainder",
    ): "with the copy's number modulo that of tokens, not divided by top_k, for its token",
    ("restored", "order"): "with outputs sorted by expert once more and not back into the order of tokens",
    ("restored", "skipped"): "with outputs by expert that are taken for outputs in the order of tokens",
}


def describe_step(part: str, way: str, number: str) -> str:
    """Return what is otherwise in a step of the exchange; nothing for what is no such step."""
    kind = way.partition("-")[0] if way.startswith("transposed") else way
    if part in _ROWS:
        return _MIXED[kind].format(rows=_ROWS[part], number=number)
    if part in _ORDERS:
        text = _ORDERED.get((part, way)) or _COUNTS[kind]
        late = f"{number.removeprefix('-')} row too {'early' if number.startswith('-') else 'late'}"
        return text.format(what=_ORDERS[part], number=number, late=late)
    return _OTHERS.get((part, way), "").format(number=number)
