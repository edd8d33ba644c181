"""Reading of recorded runs."""

from __future__ import annotations

import math
import mmap
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from pydantic import ValidationError
from torch import Tensor

from moeverify.errors import FormatError
from moeverify.input_file import open_input
from moeverify.json_file import name_path, read_lines, read_problem
from moeverify.parallel.regions.observer import INITIAL
from moeverify.report.numbers import format_range
from moeverify.scripts.record.lines import (
    LINES,
    REDUCES,
    VERSION,
    Drawn,
    ExecutedStep,
    Header,
    Line,
    Note,
    Options,
    Output,
    Rows,
    ScriptEnd,
    ShardRegion,
    Span,
    Values,
)
from moeverify.scripts.record.settings import DATA_FILE, RANK_FILE
from moeverify.scripts.record.tensors import make_region
from moeverify.train.calls.call import LoopCall
from moeverify.verification.compare.difference import fingerprint_bits

Key = tuple[int, str, str]  # step, kind, name
_AGAIN = "record it again"


@dataclass
class RankRecord:
    """The record of one rank; `end` is None if the rank was interrupted."""

    header: Header
    folder: Path
    data: mmap.mmap | None
    calls: list[LoopCall] = field(default_factory=list)
    values: dict[Key, Values] = field(default_factory=dict)
    options: list[Options] = field(default_factory=list)
    rows: list[Rows] = field(default_factory=list)
    drawn: list[Drawn] = field(default_factory=list)
    outputs: list[Output] = field(default_factory=list)
    executed: list[ExecutedStep] = field(default_factory=list)
    notes: list[Note] = field(default_factory=list)
    end: ScriptEnd | None = None
    _verified: set[int] = field(default_factory=set)  # ids of the lines whose hash was checked

    @property
    def rank(self) -> int:
        """Return the rank."""
        return self.header.rank

    @cached_property
    def steps(self) -> list[int]:
        """Return the complete recorded steps, i.e. those with the optimizer's update."""
        return sorted({step for step, kind, _ in self.values if kind == "update"})

    def find_reduction(self, step: int) -> str:
        """Return the file:line at which an optimizer reduces its gradients within a step; empty if none does."""
        return next((each.text for each in self.notes if each.about == REDUCES and each.step == step), "")

    def read(self, line: Values) -> Tensor | None:
        """Return the local values of a tensor, or None if its values are not stored.

        Raises: FormatError when the values do not match their hash.
        """
        if line.offset is None:
            return None
        return self._load(line, line.offset, make_region(line.where).local_shape)

    def read_output(self, line: Output) -> Tensor:
        """Return this rank's part of a module's input or output.

        Shapes: (rows, positions / stride, ...).
        Raises: FormatError when the values do not match their hash.
        """
        rows, positions, *rest = make_region(line.where).local_shape
        return self._load(line, line.offset, (rows, -(-positions // line.stride), *rest))

    def read_drawn(self, line: Drawn) -> Tensor:
        """Return a tensor of a batch, or the state of a generator.

        Raises: FormatError when the values do not match their hash.
        """
        return self._load(line, line.offset, line.shape)

    def _load(self, line: Values | Output | Drawn, offset: int, shape: tuple[int, ...]) -> Tensor:
        dtype, numel = getattr(torch, line.dtype), math.prod(shape)
        if not numel:
            local = torch.zeros(shape, dtype=dtype)
        elif self.data is None or offset + numel * dtype.itemsize > len(self.data):
            raise self._explain_damage(line, "it ends too early")
        else:
            local = torch.frombuffer(self.data, dtype=dtype, count=numel, offset=offset).reshape(shape)
        if id(line) not in self._verified:
            # Without this check, a bit flipped on disk would appear as an error of the user's layout.
            if int(fingerprint_bits(local)) != line.bits:
                raise self._explain_damage(line, "its hash is another")
            self._verified.add(id(line))
        return local

    def _explain_damage(self, line: Values | Output | Drawn, what: str) -> FormatError:
        file = self.folder / DATA_FILE.format(rank=self.rank)
        kind = line.kind if isinstance(line, Values) else line.line
        return FormatError(f"{file}: damaged at {kind} {line.name}: {what}", _AGAIN)


@dataclass
class RecordedRun:
    """The ranks of a run, in order."""

    folder: Path
    ranks: Sequence[RankRecord]

    @classmethod
    def read(cls, folder: Path) -> RecordedRun:
        """Read the run in a folder.

        Raises: FormatError when the folder has no recorded rank, or when ranks are missing.
        """
        if not folder.is_dir():
            raise FormatError(
                f"{folder} is no folder", "name one that `moeverify watch --out DIR -- COMMAND` made"
            )
        found = [_read_rank(path) for path in sorted(folder.glob(RANK_FILE.format(rank="*")))]
        ranks = sorted((rank for rank in found if rank is not None), key=lambda rank: rank.rank)
        if not ranks:
            raise FormatError(
                f"{folder} holds no recorded rank",
                "either the script has never called a model and an optimizer of torch, or it is the wrong folder",
            )
        world_size = ranks[0].header.world_size
        missing = sorted(set(range(world_size)) - {rank.rank for rank in ranks})
        if missing:
            raise FormatError(
                f"{folder} lacks the ranks {format_range(missing)} of {world_size}",
                "on several nodes, give --out a folder that all of them share",
            )
        return cls(folder, ranks)

    @property
    def world_size(self) -> int:
        """Return the number of ranks."""
        return len(self.ranks)

    @cached_property
    def steps(self) -> list[int]:
        """Return the steps that every rank has recorded completely."""
        return sorted(set.intersection(*(set(rank.steps) for rank in self.ranks)))

    @cached_property
    def num_steps(self) -> int | None:
        """Return the number of optimizer steps of the script, or None if a rank was interrupted."""
        ends = [rank.end for rank in self.ranks]
        return min((end.num_steps for end in ends if end is not None), default=None) if all(ends) else None

    @cached_property
    def names(self) -> list[str]:
        """Return the names of all parameters of optimizers, in the order of the first rank that has them."""
        return list(
            dict.fromkeys(
                name for rank in self.ranks for _, kind, name in rank.values if kind == "initial_weight"
            )
        )

    @cached_property
    def ambiguous(self) -> list[str]:
        """Return the names of plain tensors whose initial values differ between ranks: unknown parts."""
        return [name for name in self.names if not self._is_whole(name)]

    @cached_property
    def has_other_weights(self) -> bool:
        """Return whether `--weights` or `--nudge` changed the initial weights of the script."""
        lines = (line for rank in self.ranks for (step, _, _), line in rank.values.items() if step == INITIAL)
        return any(line.own and line.own != line.bits for line in lines)

    def _is_whole(self, name: str) -> bool:
        lines = [rank.values.get((INITIAL, "initial_weight", name)) for rank in self.ranks]
        plain = [line for line in lines if line is not None and not line.is_placed]
        return len({(line.where.shape, line.bits) for line in plain}) < 2

    def find(self, key: Key) -> Iterator[tuple[RankRecord, Values]]:
        """Yield each rank's record of a logical tensor, with the rank."""
        for rank in self.ranks:
            line = rank.values.get(key)
            if line is not None:
                yield rank, line

    def read_whole(self, kind: str, name: str, step: int = INITIAL) -> Tensor | None:
        """Return a logical tensor assembled from all ranks, or None if a part of it is unknown.

        If ranks have different values for one region, the first rank's values are used.
        """
        if name in self.ambiguous:
            return None
        whole: Tensor | None = None
        num_known = 0
        done: set[str] = set()
        for rank, line in self.find((step, kind, name)):
            region, local = make_region(line.where), rank.read(line)
            if local is None or region.key in done:
                continue
            done.add(region.key)
            if whole is None:
                whole = torch.zeros(region.shape, dtype=local.dtype)
            region.put(whole, local)
            num_known += region.numel
        return whole if whole is not None and num_known == whole.numel() else None


def _read_rank(path: Path) -> RankRecord | None:
    """Return the record of a rank, or None for an empty file."""
    record: RankRecord | None = None
    for number, content in read_lines(path, _AGAIN):
        if record is None and isinstance(content, dict) and content.get("version", VERSION) != VERSION:
            raise FormatError(
                f"{path} has version {content['version']}, this moeverify reads {VERSION}", _AGAIN
            )
        line = _build_line(path, number, content)
        if isinstance(line, Header):
            record = RankRecord(line, path.parent, _map(path.parent / DATA_FILE.format(rank=line.rank)))
        elif record is None:
            raise FormatError("it has no header", _AGAIN, file=str(path))
        else:
            _add(record, line)
    return record


def _build_line(path: Path, number: int, content: Any) -> Line:
    """Return a line of a recorded run.

    Raises: FormatError if it is none, or has an impossible value.
    """
    try:
        line = LINES.validate_python(content)
    except ValidationError as error:
        where, message = read_problem(error)
        wrong = f"{name_path(where)}: {message}"
    else:
        wrong = _find_problem(line) if isinstance(line, Values | Output | Drawn) else ""
        if not wrong:
            return line
    raise FormatError(f"no line of a recorded run ({wrong})", _AGAIN, file=str(path), line=number)


def _find_problem(line: Values | Output | Drawn) -> str:
    """Return the problem of a line with an impossible type, region or offset, or an empty string."""
    if line.offset is not None and not isinstance(getattr(torch, line.dtype, None), torch.dtype):
        return f"dtype: {line.dtype!r} is none of torch"
    if line.offset is not None and line.offset < 0:
        return f"offset: {line.offset}"
    if isinstance(line, Values) and line.offset is None and not line.is_absent and not line.sketch:
        return "offset: the line has neither values nor a sketch"
    if isinstance(line, Output) and (line.stride < 1 or len(line.where.dims) < 2):
        return f"stride: {line.stride}" if line.stride < 1 else "where.dims: fewer than 2"
    if isinstance(line, Drawn):
        return "" if line.shape and min(line.shape) >= 0 else f"shape: {list(line.shape)}"
    return _find_problem_of_region(line.where)


def _find_problem_of_region(where: ShardRegion) -> str:
    if any(size < 0 for size in where.shape):
        return f"where.shape: {list(where.shape)}"
    if where.flat is not None:
        fits = 0 <= where.flat.start <= where.flat.stop <= math.prod(where.shape)
        return "" if fits else "where.flat: it is outside of the tensor"
    if len(where.dims) != len(where.shape):
        return f"where.dims: {len(where.dims)} for a shape of {len(where.shape)}"
    for dim, (indices, size) in enumerate(zip(where.dims, where.shape, strict=True)):
        if isinstance(indices, Span):
            fits = 0 <= indices.start <= indices.stop <= size
        else:
            fits = all(0 <= index < size for index in indices)
        if not fits:
            return f"where.dims[{dim}]: it is outside of the tensor"
    return ""


def _add(
    record: RankRecord,
    line: LoopCall | Values | Options | Rows | Drawn | Output | ExecutedStep | Note | ScriptEnd,
) -> None:
    if isinstance(line, Values):
        record.values[line.step, line.kind, line.name] = line
    elif isinstance(line, ScriptEnd):
        record.end = line
    elif isinstance(line, LoopCall):
        record.calls.append(line)
    elif isinstance(line, Options):
        record.options.append(line)
    elif isinstance(line, Drawn):
        record.drawn.append(line)
    elif isinstance(line, Output):
        record.outputs.append(line)
    elif isinstance(line, Rows):
        record.rows.append(line)
    elif isinstance(line, ExecutedStep):
        record.executed.append(line)
    else:
        record.notes.append(line)


def _map(path: Path) -> mmap.mmap | None:
    if not path.is_file() or not path.stat().st_size:
        return None
    with open_input(path) as file:
        # Copy-on-write pages: torch warns about read-only memory.
        return mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_COPY)
