"""Recording of every operator of one optimizer step of a script, in files beside the rank's record."""

from __future__ import annotations

import gzip
import hashlib
import math
import mmap
import zlib
from collections.abc import Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path

import torch
from torch import Tensor, nn

from moeverify.checksum import checksum_file
from moeverify.errors import FormatError
from moeverify.explain.operator_lists import Listed, list_operators
from moeverify.explain.record import Recorder
from moeverify.input_file import open_input
from moeverify.json_file import JsonFile
from moeverify.parallel.regions.local_shard import LocalShard
from moeverify.report.files import write_atomically
from moeverify.report.numbers import format_range
from moeverify.report.operator_file import check_list
from moeverify.results.operator_table import OperatorList
from moeverify.results.record import NumRanks, Rank, Record

VERSION = 2
LIST_FILE = "rank{rank}.operators.json.gz"
VALUES_FILE = "rank{rank}.operators.bin"
_AGAIN = "record it with `moeverify watch --operators STEP`"


class RankOperators(Record):
    """The operators of a step on one rank.

    `taken` is the field of `Listed`. `offsets` has, for each operator, the offset of each result's values
    in the values file, or None if they are not stored. Units: bytes. `checksum` belongs to the values file.
    """

    version: int
    rank: Rank
    world_size: NumRanks
    step: int
    checksum: int
    operators: OperatorList
    taken: tuple[tuple[tuple[int, int], ...], ...]
    offsets: tuple[tuple[int | None, ...], ...]


class StepOperators:
    """A recorder of the operators of one step, from its first forward pass to the end of the optimizer step.

    Values of tensors larger than `limit` bytes are not stored.
    """

    def __init__(self, step: int, limit: int) -> None:
        self.step, self.limit = step, limit
        self._recorder: Recorder | None = None
        self._entered = ExitStack()
        self._is_over = False

    def begin(self, step: int, model: nn.Module, shards: Iterable[LocalShard]) -> None:
        """Begin recording if this is the step and recording has not begun yet."""
        if step != self.step or self._recorder is not None or self._is_over:
            return
        recorder = Recorder()
        recorder.name_modules(model)
        recorder.name_tensors((shard.name, shard.tensor) for shard in shards)
        recorder.begin_step(step)
        self._entered.enter_context(recorder.recording(hooks_optimizers=False))
        self._recorder = recorder

    @contextmanager
    def unseen(self) -> Iterator[None]:
        """Record nothing while the context is open."""
        if self._recorder is None:
            yield
            return
        with self._recorder.paused():
            yield

    def end(self, folder: Path, rank: int, world_size: int) -> None:
        """Stop, and write the recorded operators.

        Raises: OSError when writing fails.
        """
        recorder = self._recorder
        self.stop()
        if recorder is not None:
            _write(list_operators(recorder.program, self.step), self, folder, rank, world_size)

    def stop(self) -> None:
        """Stop without writing anything."""
        self._is_over = True
        self._recorder = None
        self._entered.close()


def _write(listed: Listed, step: StepOperators, folder: Path, rank: int, world_size: int) -> None:
    places: dict[bytes, int] = {}
    with (folder / VALUES_FILE.format(rank=rank)).open("xb") as file:
        offsets = []
        for results in listed.data:
            found: list[int | None] = []
            for data in results:
                if data is None or data.numel() * data.element_size() > step.limit:
                    found.append(None)
                    continue
                content = data.contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()
                key = hashlib.blake2b(content, digest_size=16).digest()
                if key not in places:  # many operators return the result of another one
                    places[key] = file.tell()
                    file.write(content)
                found.append(places[key])
            offsets.append(tuple(found))
    kept = RankOperators(
        version=VERSION,
        checksum=checksum_file(folder / VALUES_FILE.format(rank=rank)),
        rank=rank,
        world_size=world_size,
        step=step.step,
        operators=listed.operators,
        taken=tuple(tuple(each) for each in listed.taken),
        offsets=tuple(offsets),
    )
    content = kept.model_dump_json(exclude_defaults=True).encode()
    write_atomically(folder / LIST_FILE.format(rank=rank), gzip.compress(content, 6, mtime=0))


def read_operators(folder: Path) -> tuple[int, list[Listed]]:
    """Return the recorded step of a run and the operators of all ranks.

    Raises: FormatError when operators or ranks are missing, when ranks have different steps, or when a file
    is damaged.
    """
    if not folder.is_dir():
        raise FormatError(
            f"{folder} is no folder", "name one that `moeverify watch --out DIR --operators STEP` made"
        )
    found = sorted(
        (_read(path) for path in folder.glob(LIST_FILE.format(rank="*"))), key=lambda each: each.rank
    )
    if not found:
        raise FormatError(f"{folder} has no operators", _AGAIN)
    missing = sorted(set(range(found[0].world_size)) - {each.rank for each in found})
    if missing:
        ranks = format_range(missing)
        raise FormatError(
            f"{folder} lacks the operators of the ranks {ranks} of {found[0].world_size}", _AGAIN
        )
    steps = sorted({each.step for each in found})
    if len(steps) > 1:
        raise FormatError(f"{folder}: step: ranks have recorded the steps {steps}", _AGAIN)
    return steps[0], [_load(folder, each) for each in found]


def _read(path: Path) -> RankOperators:
    file = JsonFile.read(path, _AGAIN)
    if file.get_object().get("version") != VERSION:
        file.refuse(f"this moeverify reads {VERSION}", "version")
    kept = file.build(RankOperators)
    sizes = [len(op.results) for op in kept.operators.operators]
    problem = check_list("operators", kept.operators)
    if [len(each) for each in kept.offsets] != sizes:
        problem = problem or "offsets: not as many as there are results"
    if len(kept.taken) != len(sizes) or not all(
        0 <= op < len(sizes) and 0 <= result < sizes[op] for each in kept.taken for op, result in each
    ):
        problem = problem or "taken: no such result"
    if problem:
        raise FormatError(f"{path}: {problem}", _AGAIN)
    return kept


def _load(folder: Path, kept: RankOperators) -> Listed:
    """Return the operators of a rank with their values."""
    path = folder / VALUES_FILE.format(rank=kept.rank)
    values = _map(path)
    if values is not None and zlib.crc32(values) != kept.checksum:
        raise FormatError(f"{path}: damaged: its checksum is not that of the list", _AGAIN)
    data: list[Sequence[Tensor | None]] = []
    for place, (op, offsets) in enumerate(zip(kept.operators.operators, kept.offsets, strict=True)):
        found: list[Tensor | None] = []
        for result, offset in zip(op.results, offsets, strict=True):
            dtype, count = getattr(torch, result.dtype, None), math.prod(result.shape)
            if offset is None or not isinstance(dtype, torch.dtype):
                found.append(None)
            elif not count:
                found.append(torch.zeros(result.shape, dtype=dtype))
            elif values is None or not 0 <= offset <= len(values) - count * dtype.itemsize:
                raise FormatError(f"{path}: damaged at operator {place}: it ends too early", _AGAIN)
            else:
                # Copy the bytes: an offset need not be a multiple of the element size.
                raw = bytearray(values[offset : offset + count * dtype.itemsize])
                found.append(torch.frombuffer(raw, dtype=dtype).reshape(result.shape))
        data.append(found)
    return Listed(kept.operators, data, kept.taken)


def _map(path: Path) -> mmap.mmap | None:
    if not path.is_file() or not path.stat().st_size:
        return None
    with open_input(path) as file:
        return mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
