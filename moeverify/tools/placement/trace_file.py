"""The file of a load trace: appended during a run, and readable after a crash.

The file starts with one sealed line of JSON: `TraceHeader` and the format version. Each step is one record. Its
28-byte head has the magic, bytes per integer, step, body length, CRC-32 of the body and CRC-32 of the head.
Its body is zlib-compressed unsigned little-endian integers (L, E, R).

The next writer truncates an incomplete last record left by a crash. A step recorded again, after a run went
back to a checkpoint, replaces the earlier record.

Arrays saved by numpy (`.npy`) are read as well: (L, E), (T, L, E) or (T, L, E, R).
"""

from __future__ import annotations

import json
import math
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

from moeverify.checksum import open_line, seal_line
from moeverify.errors import CaseError, FormatError, Problem
from moeverify.input_file import open_input
from moeverify.json_file import parse_json
from moeverify.tools.placement.load_trace import LoadTrace, TraceHeader

_FORMAT = "moeverify load trace"
# The header of a trace of version 1 has no checksum; such a trace is read and continued too.
_VERSION = 2

_MAGIC = b"step"
_HEAD = struct.Struct("<4sIQII")  # magic, bytes per integer, step, length of the body, CRC-32 of the body
_HEAD_SUM = struct.Struct("<I")  # a damaged length must not look like a record cut short by a crash
_LONGEST_HEADER = 1 << 20
_MOST_BYTES = 1 << 32  # in memory, as float64
_MOST_COPIES = 1e15  # token copies of one expert in one step; sums of them are exact
_ITEM_BYTES = (1, 2, 4, 8)
_NUMPY_MAGIC = b"\x93NUMPY"
_REMEDY = (
    "write one with TraceWriter, or save an array of token copies (steps, layers, experts) with numpy.save"
)


@dataclass(frozen=True)
class _Record:
    """Location of the body of one step in the file."""

    step: int
    item_bytes: int
    start: int
    length: int


class TraceWriter:
    """Writer that appends the steps of a run to a trace file; a context manager.

    An existing file with the same header is continued. Every step is passed to the operating system at
    once, so a dying process loses no step for which `append` has returned.

    Example::

        with TraceWriter(Path("load.trace"), TraceHeader(layers=(1, 2), num_experts=8)) as writer:
            writer.append(0, copies)

    Raises: CaseError when the file is a trace of another run; FormatError when it is damaged; OSError.
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
        """Go to the end of the last complete record and truncate the rest."""
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

        Raises: ValueError when the shape does not match the header or a count is negative; OSError.
        """
        if copies.shape != self._header.shape:
            raise ValueError(f"expected token copies of shape {self._header.shape}, got {copies.shape}")
        if copies.size and copies.min() < 0:
            raise ValueError("token copies cannot be negative")
        kind = np.min_scalar_type(int(copies.max(initial=0)))
        # Level 1 takes a third of the time of the default level and compresses counts nearly as well.
        body = zlib.compress(np.ascontiguousarray(copies, dtype=kind.newbyteorder("<")).tobytes(), 1)
        head = _HEAD.pack(_MAGIC, kind.itemsize, step, len(body), zlib.crc32(body))
        # A single write call: the file has the whole record, or a prefix that readers recognize.
        self._file.write(head + _HEAD_SUM.pack(zlib.crc32(head)) + body)
        self._file.flush()

    def close(self) -> None:
        """Write everything to disk and close the file."""
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

    Raises: CaseError when the file does not exist or has no step; FormatError when it is no trace or
    damaged.
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
        raise CaseError([Problem(f"this file cannot be read: {reason}", str(path), remedy=_REMEDY)]) from None


def compare_headers(expected: TraceHeader, actual: TraceHeader, *, file: str) -> Iterator[Problem]:
    """Yield the differences that show that a trace is from another model or other ranks."""
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
    _check_size((len(steps), *header.shape), widest, path)
    copies = np.empty((len(steps), *header.shape), dtype=f"<u{widest}")
    for position, step in enumerate(steps):
        copies[position] = _read_body(file, records[step], header, path)
    return LoadTrace(header, tuple(steps), copies, lost)


def _check_size(shape: tuple[int, ...], item_bytes: int, path: Path) -> None:
    """Check that an array fits into memory.

    Raises: CaseError.
    """
    num_bytes = math.prod(shape) * max(item_bytes, 8)
    if num_bytes > _MOST_BYTES:
        gigabytes = f"{num_bytes / 1e9:.3g} GB, and at most {_MOST_BYTES / 1e9:.3g} are read"
        message = f"an array of shape {shape} takes {gigabytes}"
        raise CaseError([Problem(message, str(path), remedy="use --last for fewer steps")])


def _encode_header(header: TraceHeader) -> bytes:
    text = json.dumps({"format": _FORMAT, "version": _VERSION, **asdict(header)})
    return seal_line(text.encode()) + b"\n"


def _read_header(file: BinaryIO, path: Path) -> TraceHeader:
    """Return the header and leave the file at its first record."""
    line = file.readline(_LONGEST_HEADER)
    try:
        content = parse_json(line)
    except ValueError:
        content = None
    if not isinstance(content, dict) or content.get("format") != _FORMAT:
        raise FormatError(f"{path}: this is no load trace; {_REMEDY}")
    if content.get("version") not in (1, _VERSION):
        raise FormatError(
            f"{path}: this trace has version {content.get('version')}, expected {_VERSION}; record it again"
        )
    try:
        if content["version"] == _VERSION or "crc" in content:
            open_line(line.removesuffix(b"\n"))
        values = {each.name: content[each.name] for each in fields(TraceHeader)}
        layers, model = tuple(values.pop("layers")), values.pop("model")
        if not isinstance(model, str) or any(
            type(number) is not int for number in (*layers, *values.values())
        ):
            raise TypeError("expected integers, and the name of a model")
        return TraceHeader(layers=layers, model=model, **values)
    except (KeyError, TypeError, ValueError, CaseError) as error:
        raise FormatError(f"{path}:1: the header of this trace is damaged: {error}") from None


def _find_records(file: BinaryIO, path: Path) -> Iterator[_Record]:
    """Yield the complete records from here on, without an incomplete last one.

    Raises: FormatError when a damaged record is followed by others.
    """
    size = os.fstat(file.fileno()).st_size
    start = file.tell()
    while (body_start := start + _HEAD.size + _HEAD_SUM.size) <= size:
        file.seek(start)
        head = file.read(_HEAD.size)
        magic, item_bytes, step, length, checksum = _HEAD.unpack(head)
        is_head = magic == _MAGIC and item_bytes in _ITEM_BYTES
        if not is_head or _HEAD_SUM.pack(zlib.crc32(head)) != file.read(_HEAD_SUM.size):
            file.seek(start)
            if file.read().strip(b"\0"):
                raise FormatError(f"{path}: this trace is damaged at byte {start}; record it again")
            return  # zeros: the disk allocated space for a record before the machine failed
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
        num_bytes = math.prod(header.shape) * record.item_bytes
        # Bounded: a few bytes may decompress to gigabytes.
        raw = zlib.decompressobj().decompress(file.read(record.length), num_bytes + 1)
        return np.frombuffer(raw, dtype=f"<u{record.item_bytes}").reshape(header.shape)
    except (zlib.error, ValueError, TypeError) as error:
        raise FormatError(f"{path}: step {record.step} of this trace is damaged: {error}") from None


def _read_array(path: Path) -> LoadTrace:
    """Return the trace in an array saved by numpy."""
    try:
        # Mapped: a damaged shape is checked against the file size before memory is allocated.
        array = np.load(path, mmap_mode="r", allow_pickle=False)
        _check_size(array.shape, array.dtype.itemsize, path)
        array = np.array(array)
    except (ValueError, EOFError, SyntaxError, TypeError, OverflowError, tokenize.TokenError) as error:
        raise FormatError(f"{path}: this array is damaged ({error}); save it again with numpy.save") from None
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
    elif array.size and not (array.min() >= 0 and array.max() <= _MOST_COPIES):  # NaN is neither
        problems.append(Problem(f"numbers of tokens must be from 0 to {_MOST_COPIES:.0e}", str(path)))
    if problems:
        raise CaseError(problems)
    num_steps, num_layers, num_experts, num_sources = array.shape
    header = TraceHeader(tuple(range(num_layers)), num_experts, num_sources)
    return LoadTrace(header, tuple(range(num_steps)), array)
