"""The reader of all JSON: bounded in size, depth, numbers and text, with the file, line and field of a problem."""

from __future__ import annotations

import gzip
import json
import math
import re
import zlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from io import BytesIO
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, NoReturn, TypeVar

from moeverify.checksum import Damaged, open_line, unseal
from moeverify.errors import FormatError
from moeverify.input_file import MOST_BYTES, open_input, read_input

if TYPE_CHECKING:
    from pydantic import BaseModel, ValidationError

    M = TypeVar("M", bound=BaseModel)

Step = str | int
"""A part of the path of a value: the key in an object, or the index in a list."""

MOST_DEEP = 100
MOST_LINE = 1 << 28
"""Bytes of one line of JSON."""

MOST_TEXT = 1 << 22
"""Characters of one text; our own writers cut longer messages."""

_LEAST, _MOST = -(1 << 63), (1 << 64) - 1  # of signed and of unsigned integers of 64 bits
_GZIP = b"\x1f\x8b"
_SPACE = re.compile(r"[ \t\r\n]*")


class BeyondLimit(json.JSONDecodeError):
    """JSON that is valid, and exceeds a limit."""


class Excess(NamedTuple):
    """A value that exceeds a limit: its path, and the message."""

    path: tuple[Step, ...]
    message: str


def parse_json(text: str | bytes, *, finite: bool = True) -> Any:
    """Return the value of a JSON text within all limits. With `finite`, NaN and infinities are refused.

    Raises: json.JSONDecodeError, with the position of the problem; UnicodeDecodeError.
    """
    doc = text if isinstance(text, str) else text.decode("utf-8")
    content = _load(doc)
    excess = find_excess(content, finite=finite)
    if excess is not None:
        message = f"{name_path(excess.path)}: {excess.message}" if excess.path else excess.message
        raise BeyondLimit(message, doc, _find_position(doc, excess.path))
    return content


def _load(doc: str) -> Any:
    def build_object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        content = dict(pairs)
        if len(content) < len(pairs):  # one value would hide the other
            keys = [key for key, _ in pairs]
            twice = next(key for key in keys if keys.count(key) > 1)
            raise json.JSONDecodeError(f"the key {twice!r:.80} is there twice", doc, _find_last(doc, twice))
        return content

    try:
        return json.loads(doc, object_pairs_hook=build_object)
    except json.JSONDecodeError:
        raise
    except RecursionError:
        raise BeyondLimit("nested too deeply", doc, 0) from None
    except ValueError:  # `int` refuses numbers of thousands of digits
        found = re.search(r"\d{4000}", doc)
        at = 0 if found is None else found.start()
        raise BeyondLimit("a number has too many digits", doc, at) from None


def _find_last(doc: str, key: str) -> int:
    return max(0, doc.rfind(json.dumps(key, ensure_ascii=False)))


def find_excess(content: Any, *, finite: bool = True) -> Excess | None:
    """Return a value that exceeds a limit: too deep, beyond 64 bits, not finite, or too long a text."""
    left: list[tuple[Any, tuple[Step, ...]]] = [(content, ())] if _is_suspect(content, finite) else []
    while left:
        value, path = left.pop()
        if isinstance(value, dict | list):
            if len(path) >= MOST_DEEP:
                return Excess(path, f"nested too deeply: more than {MOST_DEEP} levels")
            items = value.items() if isinstance(value, dict) else enumerate(value)
            left += [(item, (*path, key)) for key, item in items if _is_suspect(item, finite)]
        else:
            return Excess(path, _describe_excess(value))
    return None


def _is_suspect(value: Any, finite: bool) -> bool:
    """Return whether a value is a container, or exceeds a limit."""
    if isinstance(value, int):
        return not _LEAST <= value <= _MOST
    if isinstance(value, float):
        return finite and not math.isfinite(value)
    return len(value) > MOST_TEXT if isinstance(value, str) else value is not None


def _describe_excess(value: Any) -> str:
    if isinstance(value, str):
        return f"a text of {len(value)} characters, and at most {MOST_TEXT} are read"
    if isinstance(value, float):
        return f"{value} is not a finite number"
    return f"{str(value)[:30]} is beyond 64 bits"


def name_path(path: Sequence[Step]) -> str:
    """Return a path as dotted text: `cases.0.name`."""
    return ".".join(map(str, path))


def find_line(text: str, path: Sequence[Step]) -> int:
    """Return the line, from 1, of the value at a path in a JSON text, or of its nearest ancestor that exists."""
    return text.count("\n", 0, _find_position(text, path)) + 1


def _find_position(text: str, path: Sequence[Step]) -> int:
    """Return the position of the value at a path, or of its nearest ancestor that exists."""
    decoder = json.JSONDecoder()
    at = _skip(text, 0)
    for step in path:
        found = _enter(decoder, text, at, step)
        if found is None:
            break
        at = found
    return at


def _enter(decoder: json.JSONDecoder, text: str, at: int, step: Step) -> int | None:
    """Return the position of one value inside the object or list that begins at a position."""
    is_object = text[at : at + 1] == "{"
    if not is_object and text[at : at + 1] != "[":
        return None
    at, number = _skip(text, at + 1), 0
    while at < len(text) and text[at] not in "]}":
        key: Step = number
        if is_object:
            key, at = decoder.raw_decode(text, at)
            at = _skip(text, _skip(text, at) + 1)
        if key == step:
            return at
        _, at = decoder.raw_decode(text, at)
        at = _skip(text, at)
        at = _skip(text, at + 1) if text[at : at + 1] == "," else at
        number += 1
    return None


def _skip(text: str, at: int) -> int:
    found = _SPACE.match(text, at)
    return at if found is None else found.end()


def read_problem(error: ValidationError) -> tuple[tuple[Step, ...], str]:
    """Return the path of the first invalid field, and the validation message."""
    first = error.errors(include_url=False, include_input=False)[0]
    return first["loc"], first["msg"]


@dataclass(frozen=True)
class JsonFile:
    """A JSON file, possibly gzipped, within all limits. `remedy` ends the text of every error about it.

    A file with a checksum (`moeverify.checksum.seal`) is verified; `is_sealed` says whether it had one.
    """

    path: Path
    remedy: str
    content: Any = field(repr=False)
    is_sealed: bool
    _text: str = field(repr=False)

    @classmethod
    def read(cls, path: Path, remedy: str, *, most: int = MOST_BYTES, finite: bool = True) -> JsonFile:
        """Return the file at a path; `finite` is that of `parse_json`.

        Raises: FormatError if it is missing, not a regular file, too large, damaged or not JSON.
        """
        try:
            raw = read_input(path, most)
            raw = _unzip(raw, most) if raw.startswith(_GZIP) else raw
        except FileNotFoundError:
            raise FormatError("there is no such file", remedy, file=str(path)) from None
        except (gzip.BadGzipFile, EOFError, zlib.error) as error:
            raise FormatError(f"damaged: {error}", remedy, file=str(path)) from error
        except OSError as error:
            raise FormatError(f"cannot be read: {error.strerror or error}", remedy, file=str(path)) from error
        damage: Damaged | None = None
        try:
            content = unseal(raw)
        except Damaged as error:
            content, damage = None, error
            if error.line is not None:
                raise FormatError(str(error), remedy, file=str(path), line=error.line) from None
        text = _decode(raw if content is None else content, path, remedy)
        try:
            value = parse_json(text, finite=finite)
        except json.JSONDecodeError as error:
            message = f"not valid JSON, or it was cut off ({error.msg})"
            if isinstance(error, BeyondLimit) or not text.strip():
                message = error.msg if text.strip() else "the file is empty"
            raise FormatError(message, remedy, file=str(path), line=error.lineno) from None
        if damage is not None:
            raise FormatError(str(damage), remedy, file=str(path))
        return cls(path, remedy, value, content is not None, text)

    def refuse(self, message: str, *path: Step) -> NoReturn:
        """Raise a FormatError about the value at `path`, with its line."""
        line = find_line(self._text, path) if path else None
        raise FormatError(message, self.remedy, file=str(self.path), line=line, path=name_path(path))

    def require_seal(self) -> None:
        """Raise a FormatError if the file has no checksum."""
        if not self.is_sealed:
            last = self._text.rstrip().count("\n")
            raise FormatError("damaged: the checksum is missing", self.remedy, file=str(self.path), line=last)

    def get_object(self) -> dict[str, Any]:
        """Return the content, a JSON object.

        Raises: FormatError if it is anything else.
        """
        if not isinstance(self.content, dict):
            self.refuse("expected a JSON object")
        return self.content

    def build(self, model: type[M], *path: Step, **changes: Any) -> M:
        """Return the record of the value at `path`, with `changes` of its fields.

        Raises: FormatError with the line of the first wrong field.
        """
        from pydantic import ValidationError

        content = self.content
        for step in path:
            content = content[step]
        if not isinstance(content, dict):
            self.refuse("expected a JSON object", *path)
        content = {**content, **changes}
        try:
            if model.model_config.get("strict"):  # only from JSON does it accept a list as a tuple
                return model.model_validate_json(json.dumps(content))
            return model.model_validate(content)
        except ValidationError as error:
            where, message = read_problem(error)
            more = error.error_count() - 1
            self.refuse(message + (f", and {more} more wrong fields" if more else ""), *path, *where)


def _unzip(raw: bytes, most: int) -> bytes:
    with gzip.GzipFile(fileobj=BytesIO(raw)) as file:
        content = file.read(most + 1)
    if len(content) > most:
        raise OSError(f"larger than {most >> 20} MiB")
    return content


def _decode(raw: bytes, path: Path, remedy: str) -> str:
    try:
        return raw.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        line = raw.count(b"\n", 0, error.start) + 1
        message = f"the file is not text (byte 0x{raw[error.start]:02x} is not UTF-8)"
        raise FormatError(message, remedy, file=str(path), line=line) from None


def read_lines(path: Path, remedy: str) -> Iterator[tuple[int, Any]]:
    """Yield the number and the value of each line of sealed JSON (`moeverify.checksum.seal_line`).

    An incomplete last line, as an interrupted writer leaves it, is left out.

    Raises: FormatError with the line, if the file cannot be read or a line is damaged.
    """
    try:
        with open_input(path) as file:
            number = 0
            while line := file.readline(MOST_LINE):
                number += 1
                if not line.endswith(b"\n") and len(line) < MOST_LINE and _is_cut_off(line):
                    return
                yield number, parse_json(open_line(line.removesuffix(b"\n")))
    except FileNotFoundError:
        raise FormatError("there is no such file", remedy, file=str(path)) from None
    except OSError as error:
        raise FormatError(f"cannot be read: {error.strerror or error}", remedy, file=str(path)) from error
    except Damaged as error:
        raise FormatError(str(error), remedy, file=str(path), line=number) from None
    except ValueError as error:
        reason = error.msg if isinstance(error, json.JSONDecodeError) else "it is not text"
        raise FormatError(f"not a line of JSON ({reason})", remedy, file=str(path), line=number) from None


def _is_cut_off(line: bytes) -> bool:
    """Return whether a last line without a newline lacks its checksum; otherwise the newline is damaged."""
    for whole in (line, line[:-1]):
        try:
            open_line(whole)
        except Damaged:
            continue
        return False
    return True
