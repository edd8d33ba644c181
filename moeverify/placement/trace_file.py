"""The file of a load trace: appended to while a run goes on, and readable after a crash.

One line of JSON (`TraceHeader` and the version of the format), then a record for each step: 28 bytes of head
(magic, bytes of an integer, step, length of the body, CRC-32 of the body, CRC-32 of the head), then the body, zlib
over unsigned little-endian integers (L, E, R). Whatever a crash leaves of the last record is cut off by the next
writer. A step that is recorded again, because a run went back to a checkpoint, replaces what was recorded before.

An array that numpy saved (`.npy`) is read as well: (L, E), (T, L, E) or (T, L, E, R).
"""

from __future__ import annotations

import json
import os
import struct
import tokenize
import zlib
from collections.abc import Iterator
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import BinaryIO

import numpy as np
import numpy.typing as npt

from moeverify.errors import CaseError, FormatError, Problem
from moeverify.input_file import open_input
from moeverify.placement.load_trace import LoadTrace, TraceHeader

_FORMAT = "moeverify load trace"
_VERSION = 1
_MAGIC = b"step"
_HEAD = struct.Struct("<4sIQII")  # magic, bytes of an integer, step, length of the body, CRC-32 of the body
_HEAD_SUM = struct.Struct("<I")  # a damaged length must not pass for a record that a crash cut short
_LONGEST_HEADER = 1 << 20
_NUMPY_MAGIC = b"\x93NUMPY"
_REMEDY = (
    "write one with TraceWriter, or save an array of token copies (steps, layers, experts) with numpy.save"
)


@dataclass(frozen=True)
class _Record:
    """Where the body of one step is in the file."""

    step: int
    item_bytes: int
    start: int
    length: int


class TraceWriter:
    """Appends the steps of a run to the file of its trace; a context manager.

    An existing file of the same header is continued. Every step is handed to the operating system at once, so
    that a process that dies loses no step that `append` has returned for.

    Example::

        with TraceWriter(Path("load.trace"), TraceHeader(layers=(1, 2), num_experts=8)) as writer:
            writer.append(0, copies)

    Raises: CaseError when the file is a trace of something else; FormatError when it is damaged; OSError.
    """

    def __init__(self, path: Path, header: TraceHeader) -> None:
        self._header = header
        is_new = not path.exists() or path.stat().st_size == 0
        self._file: BinaryIO = path.open("w+b" if is_new else "r+b")
        try:
            if is_new:
                self._file.write(_encode_header(header))
                self._file.flush()
            else:
                self._continue(path)
        except BaseException:
            self._file.close()
            raise

    def _continue(self, path: Path) -> None:
        """Go to the end of the last complete record, and cut off what is behind it."""
        found = _read_header(self._file, path)
        problems = list(compare_headers(self._header, found, file=str(path)))
        if problems:
            raise CaseError(problems)
        records = list(_find_records(self._file, path))
        end = records[-1].start + records[-1].length if records else self._file_start(path)
        self._file.seek(end)
        self._file.truncate()

    def _file_start(self, path: Path) -> int:
        self._file.seek(0)
        _read_header(self._file, path)
        return self._file.tell()

    def append(self, step: int, copies: npt.NDArray[np.integer]) -> None:
        """Record the token copies (L, E, R) of one step.

        Raises: ValueError when the shape is not that of the header, or a count is negative; OSError.
        """
        if copies.shape != self._header.shape:
            raise ValueError(f"expected token copies of shape {self._header.shape}, got {copies.shape}")
        if copies.size and copies.min() < 0:
            raise ValueError("token copies cannot be negative")
        kind = np.min_scalar_type(int(copies.max(initial=0)))
        # Level 1 takes a third of the time of the default, and counts shrink nearly as much.
        body = zlib.compress(np.ascontiguousarray(copies, dtype=kind.newbyteorder("<")).tobytes(), 1)
        head = _HEAD.pack(_MAGIC, kind.itemsize, step, len(body), zlib.crc32(body))
        # One write call: a record is there as a whole, or as a beginning that readers know for one.
        self._file.write(head + _HEAD_SUM.pack(zlib.crc32(head)) + body)
        self._file.flush()

    def close(self) -> None:
        """Write everything to the disk and close the file."""
        if not self._file.closed:
            self._file.flush()
            os.fsync(self._file.fileno())
            self._file.close()

    def __enter__(self) -> TraceWriter:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def read_trace(path: Path, *, last: int | None = None) -> LoadTrace:
    """Return the trace in a file, or its `last` steps.

    Raises: CaseError when there is no such file or nothing in it; FormatError when it is no trace or damaged.
    """
    try:
        with open_input(path) as file:
            if file.read(len(_NUMPY_MAGIC)) == _NUMPY_MAGIC:
                trace = _read_array(path)
                return trace if last is None else trace.take_last(last)
            file.seek(0)
            return _read_records(file, path, last)
    except FileNotFoundError:
        raise CaseError([Problem("there is no such file", str(path), remedy=_REMEDY)]) from None
    except OSError as error:
        reason = error.strerror or str(error)
        raise CaseError([Problem(f"this file cannot be read: {reason}", str(path))]) from None


def compare_headers(expected: TraceHeader, actual: TraceHeader, *, file: str) -> Iterator[Problem]:
    """Yield in what a trace is one of another model, or of other ranks."""
    for name in ("model", "layers", "num_experts", "num_sources", "top_k"):
        wanted, found = getattr(expected, name), getattr(actual, name)
        if wanted != found:
            yield Problem(
                f"this trace is of another run: it has {found!r}, expected {wanted!r}",
                file,
                path=name,
                remedy="write to a new file",
            )


def _read_records(file: BinaryIO, path: Path, last: int | None) -> LoadTrace:
    header = _read_header(file, path)
    records = {record.step: record for record in _find_records(file, path)}
    end = max((record.start + record.length for record in records.values()), default=None)
    if end is None:
        raise CaseError([Problem("this trace holds no step", str(path), remedy="let the run finish a step")])
    lost = path.stat().st_size - end
    steps = sorted(records)[-last:] if last is not None else sorted(records)
    widest = max(records[step].item_bytes for step in steps)
    copies = np.empty((len(steps), *header.shape), dtype=f"<u{widest}")
    for position, step in enumerate(steps):
        copies[position] = _read_body(file, records[step], header, path)
    return LoadTrace(header, tuple(steps), copies, lost)


def _encode_header(header: TraceHeader) -> bytes:
    return json.dumps({"format": _FORMAT, "version": _VERSION, **asdict(header)}).encode() + b"\n"


def _read_header(file: BinaryIO, path: Path) -> TraceHeader:
    """Return the header; the file is then at its first record."""
    line = file.readline(_LONGEST_HEADER)
    try:
        content = json.loads(line)
    except (ValueError, RecursionError):
        content = None
    if not isinstance(content, dict) or content.get("format") != _FORMAT:
        raise FormatError(f"{path}: this is no load trace; {_REMEDY}")
    if content.get("version") != _VERSION:
        raise FormatError(
            f"{path}: this trace has version {content.get('version')}, expected {_VERSION}; record it again"
        )
    try:
        values = {each.name: content[each.name] for each in fields(TraceHeader)}
        return TraceHeader(**{**values, "layers": tuple(values["layers"])})
    except (KeyError, TypeError, ValueError, CaseError) as error:
        raise FormatError(f"{path}:1: the header of this trace is damaged: {error}") from None


def _find_records(file: BinaryIO, path: Path) -> Iterator[_Record]:
    """Yield the complete records from here on; a last one that is cut short ends them.

    Raises: FormatError when a record is damaged that others follow.
    """
    size = os.fstat(file.fileno()).st_size
    start = file.tell()
    while (body_start := start + _HEAD.size + _HEAD_SUM.size) <= size:
        file.seek(start)
        head = file.read(_HEAD.size)
        magic, item_bytes, step, length, checksum = _HEAD.unpack(head)
        if magic != _MAGIC or _HEAD_SUM.pack(zlib.crc32(head)) != file.read(_HEAD_SUM.size):
            file.seek(start)
            if file.read().strip(b"\0"):
                raise FormatError(f"{path}: this trace is damaged at byte {start}; record it again")
            return  # zeros: the disk had made room for a record, and the machine went down
        end = body_start + length
        if end > size:
            return
        if zlib.crc32(file.read(length)) != checksum:
            if end < size:
                raise FormatError(
                    f"{path}: step {step} of this trace is damaged (byte {start}); record it again"
                )
            return
        yield _Record(step, item_bytes, body_start, length)
        start = end


def _read_body(
    file: BinaryIO, record: _Record, header: TraceHeader, path: Path
) -> npt.NDArray[np.unsignedinteger]:
    file.seek(record.start)
    try:
        raw = zlib.decompress(file.read(record.length))
        return np.frombuffer(raw, dtype=f"<u{record.item_bytes}").reshape(header.shape)
    except (zlib.error, ValueError, TypeError) as error:
        raise FormatError(f"{path}: step {record.step} of this trace is damaged: {error}") from None


def _read_array(path: Path) -> LoadTrace:
    """Return the trace in an array that numpy has saved."""
    try:
        # Mapped: a damaged shape is compared with the size of the file before there is memory for it.
        array = np.array(np.load(path, mmap_mode="r", allow_pickle=False))
    except (ValueError, EOFError, SyntaxError, TypeError, OverflowError, tokenize.TokenError) as error:
        raise FormatError(f"{path}: this array cannot be read: {error}") from None
    if array.ndim == 2:
        array = array[None]
    if array.ndim == 3:
        array = array[..., None]
    problems = []
    if array.ndim != 4 or 0 in array.shape:
        problems.append(
            Problem(
                f"expected an array (layers, experts), (steps, layers, experts) or "
                f"(steps, layers, experts, sources), got shape {array.shape}",
                str(path),
            )
        )
    if array.dtype.kind not in "uif":
        problems.append(Problem(f"expected numbers of tokens, got dtype {array.dtype}", str(path)))
    elif not np.isfinite(array).all() or (array < 0).any():
        problems.append(Problem("numbers of tokens must be finite and not negative", str(path)))
    if problems:
        raise CaseError(problems)
    num_steps, num_layers, num_experts, num_sources = array.shape
    header = TraceHeader(tuple(range(num_layers)), num_experts, num_sources)
    return LoadTrace(header, tuple(range(num_steps)), array)
