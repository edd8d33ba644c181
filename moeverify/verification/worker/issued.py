"""Collectives that a rank issues inside each module, as evidence of a cause."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import cast

from moeverify.cases.axes.groups import name_ranks
from moeverify.cases.schema import Case
from moeverify.explain.fitting.inputs import Issued
from moeverify.results.collective import IssuedCollective
from moeverify.results.observation import Direction
from moeverify.results.trace import CollectiveRecord
from moeverify.train.module_taps import FORWARD, Tap
from moeverify.verification.collectives.trace import CollectiveTrace


def list_issued(case: Case, tap: Tap, trace: CollectiveTrace) -> dict[str, tuple[IssuedCollective, ...]]:
    """Return the collectives inside each module, forward pass first."""
    records = {record.number: record for record in trace.records()}
    issued: dict[str, tuple[IssuedCollective, ...]] = {}
    for (direction, module), spans in sorted(tap.spans.items(), key=lambda item: item[0][0] != FORWARD):
        numbers = (number for begin, end in spans for number in range(begin + 1, end + 1))
        inside = [records[number] for number in numbers if number in records]
        kinds = _summarize(case, cast(Direction, direction), inside)
        issued[module] = (*issued.get(module, ()), *kinds)
    return issued


def _summarize(
    case: Case, direction: Direction, records: Sequence[CollectiveRecord]
) -> Iterator[IssuedCollective]:
    """Yield one entry for each (operation, group, dtype, call site) in the records of a trace."""
    kinds: dict[tuple[str, tuple[int, ...], str, str], list[CollectiveRecord]] = {}
    for record in records:
        kinds.setdefault((record.op, record.group, record.dtype, record.site), []).append(record)
    for (op, group, dtype, site), members in kinds.items():
        shapes = dict.fromkeys(record.shape for record in members if record.num_tensors)
        yield IssuedCollective(
            direction=direction,
            op=op,
            axis=name_ranks(case, group),
            group=group,
            dtype=dtype if shapes else "",
            shapes=tuple(shapes),
            times=len(members),
            site=site,
        )


def find_issued(issued: Mapping[str, tuple[IssuedCollective, ...]], module: str) -> Issued:
    """Return the collectives inside a module, or inside its nearest ancestor that issued any."""
    around = module
    while around and not issued.get(around):
        around = around.rpartition(".")[0]
    return Issued(around, issued.get(around, ()))
