"""Files of JSON and lines of JSON: read within limits, or refused with file, line, field and remedy."""

from __future__ import annotations

import gzip
import json
import os
from pathlib import Path
from typing import Any

import pytest
from pydantic import BaseModel, ConfigDict

from moeverify.checksum import seal, seal_line
from moeverify.errors import FormatError
from moeverify.json_file import MOST_DEEP, MOST_TEXT, JsonFile, parse_json, read_lines


class Inner(BaseModel):
    sizes: tuple[int, ...]


class Outer(BaseModel):
    model_config = ConfigDict(strict=True)

    inner: Inner


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ('{"a": NaN}', "a: nan is not a finite number"),
        ('{"a": [1, {"b": -1e999}]}', r"a\.1\.b: -inf is not a finite number"),
        ('{"a": 18446744073709551616}', "a: 18446744073709551616 is beyond 64 bits"),
        ('{"a": ' + "9" * 5000 + "}", "too many digits"),
        ("[" * (MOST_DEEP + 1) + "]" * (MOST_DEEP + 1), "nested too deeply"),
        ("[" * 200_000, "nested too deeply"),
        (json.dumps({"a": "x" * (MOST_TEXT + 1)}), "a: a text of"),
        ('{"a": {"b": 1, "b": 2}}', "the key 'b' is there twice"),
        ('{"a": ', "Expecting value"),
    ],
    ids=range(9),
)
def test_json_beyond_a_limit_is_refused(text: str, message: str) -> None:
    with pytest.raises(json.JSONDecodeError, match=message):
        parse_json(text)


def test_json_within_all_limits_is_read() -> None:
    content = {"a": [-(2**63), 2**64 - 1, 1.5e308, True, None, "x" * 1000], "b": {"c": []}}
    assert parse_json(json.dumps(content)) == content
    assert parse_json("[NaN]", finite=False)[0] != 0


def read(path: Path, content: str | bytes) -> JsonFile:
    path.write_bytes(content.encode() if isinstance(content, str) else content)
    return JsonFile.read(path, "make it again", most=10_000)


@pytest.mark.parametrize(
    ("content", "place", "message"),
    [
        (b"", ":1", "empty"),
        (b'{\n"a":\n\xff}', ":3", "byte 0xff is not UTF-8"),
        ('{\n"a": 1,\n"b": NaN}', ":3", "b: nan is not a finite number"),
        ('{\n"a": 1,\n', ":3", "cut off"),
        ("x" * 20_000, "", "larger than"),
        (gzip.compress(b" " * 20_000), "", "larger than"),
        (gzip.compress(b"{}")[:-4], "", "damaged"),
        (seal(json.dumps({"a": 1, "b": 2}, indent=1)).replace("1", "7", 1), ":2", "damaged"),
    ],
    ids=range(8),
)
def test_a_file_that_cannot_be_read_is_named(
    tmp_path: Path, content: str | bytes, place: str, message: str
) -> None:
    with pytest.raises(FormatError) as caught:
        read(tmp_path / "a.json", content)
    assert str(caught.value).startswith(f"{tmp_path / 'a.json'}{place}")
    assert message in str(caught.value)
    assert str(caught.value).endswith("; make it again")


def test_what_is_no_file_is_refused(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    for name, message in (("none", "there is no such file"), ("pipe", "named pipe"), ("a\0b", "null byte")):
        with pytest.raises(FormatError, match=message):
            JsonFile.read(tmp_path / name, "")


def test_a_wrong_field_has_its_line(tmp_path: Path) -> None:
    good = read(tmp_path / "a.json", '{"inner": {"sizes": [1, 2]}}')
    assert good.build(Outer).inner.sizes == (1, 2)
    assert good.build(Inner, "inner").sizes == (1, 2)
    for text, place in (
        ('{"x": ["}", {}],\n "inner": {\n"sizes":\n[1,\n"a, b"]}}', ":5: inner.sizes.1: "),
        ('{"x": 1,\n"inner":\n3}', ":3: inner: "),
        ('{\n"x": 1}', ":1: inner: "),  # of the object that lacks it
    ):
        with pytest.raises(FormatError) as caught:
            read(tmp_path / "a.json", text).build(Outer)
        assert str(caught.value).startswith(f"{tmp_path / 'a.json'}{place}")


LINES = [{"n": 1}, {"n": 2}, {"n": 3}]
SEALED = [seal_line(json.dumps(line).encode()) for line in LINES]


@pytest.mark.parametrize(
    ("content", "expected"),
    [
        (b"\n".join([*SEALED, b""]), LINES),
        (b"\n".join(SEALED), LINES),  # only the newline is missing
        (b"\n".join([*SEALED[:2], SEALED[2][:-3]]), LINES[:2]),
        (b"", []),
    ],
)
def test_lines_are_read_up_to_an_incomplete_one(tmp_path: Path, content: bytes, expected: Any) -> None:
    path = tmp_path / "lines"
    path.write_bytes(content)
    assert [value for _, value in read_lines(path, "")] == expected


def test_every_flipped_bit_of_a_line_is_found(tmp_path: Path) -> None:
    path, content = tmp_path / "lines", b"\n".join([*SEALED, b""])
    for at in range(len(content)):
        for bit in range(8):
            path.write_bytes(content[:at] + bytes([content[at] ^ 1 << bit]) + content[at + 1 :])
            line = content.count(b"\n", 0, at) + 1
            with pytest.raises(FormatError, match=rf"lines:{line}: damaged.*; record it again"):
                list(read_lines(path, "record it again"))
