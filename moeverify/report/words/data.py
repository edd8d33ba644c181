"""Sentences about data that ranks read instead of their own batch. Importing it extends `describe_facts`."""

from __future__ import annotations

from moeverify.report.numbers import format_count, format_ranks
from moeverify.report.words.check import Words
from moeverify.report.words.guard import describe_facts
from moeverify.results.data import BatchField, DataFacts, Misread, MisreadOnRank, ReadSource, SourceKind
from moeverify.results.finding import Finding

__all__ = ["describe_facts"]

MOST_POSITIONS = 4  # largest number of positions to list
_MASKS = (BatchField.MASK, BatchField.LOSS_MASK)


@describe_facts.register
def _(facts: DataFacts, finding: Finding) -> Words:
    head = facts.read[0]
    source, first = _strip(head.misread.source), head.misread.micro_batch
    alike = [each for each in facts.read if _strip(each.misread.source) == source]
    ranks = {each.rank for each in alike if each.misread.micro_batch == first}
    numbers = {each.misread.micro_batch for each in alike}
    everywhere = len(facts.read) == len(alike) and len(numbers) == head.misread.num_micro_batches
    what = "rows" if head.misread.batch is BatchField.TOKENS and BatchField.LABELS in facts.also else None
    verb = "reads" if len(ranks) == 1 else "read"
    cause = f"{format_ranks(ranks)} {verb} {_describe_source(head, what)}{_describe_when(head.misread, everywhere)}"
    lines = [_describe_misread(each) for each in facts.read]
    if facts.num_more:
        lines.append(f"and {facts.num_more} more micro-batches, counted on every rank")
    if facts.also:
        lines.append(f"the same applies to the {' and '.join(each.value for each in facts.also)}")
    return Words(cause, "", tuple(lines))


def _strip(source: ReadSource) -> ReadSource:
    """Return the source without rows if they may differ between micro-batches with the same mistake."""
    return source.model_copy(update={"rows": ()}) if source.kind is SourceKind.ORDER else source


def _describe_when(misread: Misread, everywhere: bool) -> str:
    if everywhere or misread.source.kind is SourceKind.UNREAD or misread.num_micro_batches == 1:
        return f" in step {misread.step}"
    return f" in micro-batch {misread.micro_batch} of step {misread.step}"


def _describe_misread(read: MisreadOnRank) -> str:
    misread = read.misread
    where = f"rank {read.rank}, step {misread.step}, micro-batch {misread.micro_batch}"
    differ = f"{misread.num_wrong} of {misread.num_elements} {misread.batch.value} differ"
    if misread.batch in _MASKS:
        differ = f"the {misread.batch.value} differs at {misread.num_wrong} of {misread.num_elements} tokens"
    return f"{where}: {_describe_source(read, None)}; {differ}"


def _describe_source(read: MisreadOnRank, noun: str | None) -> str:
    """Return the data that were read, such as `the tokens of step 0`."""
    misread, source = read.misread, read.misread.source
    what = noun or misread.batch.value
    article = "a " if misread.batch in _MASKS else ""
    rows = ", ".join(map(str, source.rows))
    of_step = "" if source.step is None else f" of step {source.step}"
    texts = {
        SourceKind.SHARE: f"the {what} of {_describe_share(misread)}",
        SourceKind.ORDER: f"the {what} {'' if noun else 'of its rows '}in another order",
        SourceKind.ROWS: f"{'' if noun else f'the {what} of '}rows {rows} of the global batch{of_step}",
        SourceKind.SHIFT: f"{article}{what} shifted by {format_count(source.shift, 'position')}",
        SourceKind.LOCAL: "positions that count from 0 on each rank",
        SourceKind.NEXT: "its own next tokens as labels, where other tokens follow in the row",
        SourceKind.WITHOUT: f"a {what} that leaves out {_describe_left_out(source)}",
        SourceKind.LABEL: f"a {what} that leaves out every token with the label {source.label}",
        SourceKind.ALL: f"a {what} that leaves nothing out",
        SourceKind.UNREAD: f"no {what} of micro-batch {misread.micro_batch}",
        SourceKind.UNKNOWN: f"{article}{what} that this run does not contain",
    }
    if source.kind is SourceKind.UNKNOWN and not article and 2 * misread.num_wrong <= misread.num_elements:
        return f"wrong values for {misread.num_wrong} of {misread.num_elements} {what}"
    return texts[source.kind]


def _describe_left_out(source: ReadSource) -> str:
    """Return the positions that a mask leaves out, such as `position 7 of every row`."""
    first = ", ".join(map(str, source.positions[:MOST_POSITIONS]))
    more = ", ..." if len(source.positions) > MOST_POSITIONS else ""
    noun = "position" if len(source.positions) == 1 else "positions"
    return f"{noun} {first}{more} of every row"


def _describe_share(misread: Misread) -> str:
    source = misread.source
    named = (("micro-batch", source.micro_batch), ("rank", source.rank), ("step", source.step))
    text = ", ".join(f"{name} {number}" for name, number in named if number is not None)
    is_own = source.rank is None and source.step is None and source.micro_batch is not None
    return f"{text} again" if is_own and (source.micro_batch or 0) < misread.micro_batch else text
