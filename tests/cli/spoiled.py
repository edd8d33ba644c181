"""Randomly corrupted files, and a check of the command's response.

The corruption is reproducible. MOEVERIFY_TEST_BAD_INPUTS=2000 asks for that many new inputs of each kind.
"""

from __future__ import annotations

import json
import os
import random
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from ruamel.yaml import YAML
from typer.testing import Result

from moeverify.checksum import seal, seal_line

ASKED = os.environ.get("MOEVERIFY_TEST_BAD_INPUTS")
COUNT = int(ASKED or 20)
PATIENCE = 60  # seconds for one input on a busy machine

NASTY_VALUES: tuple[Any, ...] = (
    *(None, True, -1, 0, 1, 2**31, 2**63, 10**30, 1.5, -0.0, 1e308, float("nan"), float("inf")),
    *("", "x", "x" * 300, "../../etc", "/", "\x00", "\x1b[31m", "\u202e", "\ud7ff", "os:system"),
    *([], [1], [[]], {}, {"": 1}, {"a": {"b": []}}),
)
NASTY_TEXT = (
    *(b"\x00", b"\xff\xfe", b"\xef\xbb\xbf", b"\t", b"'", b'"', b"\r\n", b": ", b"|\n"),
    *(b"[" * 60, b"{" * 3000, b"- " * 200, b"&a ", b"*a", b"<<: *a\n", b"---\n", b"%YAML 9\n"),
    *(b"!!python/object/apply:os.system ['true']\n", b"9" * 5000, b"1e999", b"NaN"),
)


class Hang(BaseException):
    """Processing one input exceeded the time limit."""


def make_random(kind: str) -> random.Random:
    return random.Random(os.urandom(8) if ASKED else kind)


def spoil_bytes(content: bytes, dice: random.Random) -> bytes:
    """Return the bytes with some flipped, cut, repeated or replaced by bytes that often break readers."""
    found = bytearray(content)
    for _ in range(dice.choice((1, 1, 1, 2, 5))):
        at, length = dice.randrange(len(found) + 1), dice.choice((1, 4, 30, 1000))
        how = dice.randrange(6)
        if how == 0 and at < len(found):
            found[at] ^= 1 << dice.randrange(8)
        elif how == 1:
            del found[at:]
        elif how == 2:
            del found[at : at + length]
        elif how == 3:
            found[at:at] = found[at : at + length] * dice.choice((1, 3))
        elif how == 4:
            found[at:at] = dice.choice(NASTY_TEXT)
        else:
            found[at : at + length] = dice.randbytes(length)
    return bytes(found)


def spoil_tree(tree: Any, dice: random.Random) -> Any:
    """Return the data with one value or key replaced, removed or moved."""
    places: list[tuple[Any, Any]] = []

    def walk(node: Any) -> None:
        for key in list(node) if isinstance(node, dict) else range(len(node)):
            places.append((node, key))
            if isinstance(node[key], dict | list):
                walk(node[key])

    tree = json.loads(json.dumps(tree))
    walk(tree)
    for _ in range(dice.choice((1, 1, 2, 4))):
        node, key = dice.choice(places)
        if isinstance(node, dict) and key not in node:
            continue
        how = dice.randrange(5)
        if how <= 2 or not isinstance(node, dict):
            node[key] = dice.choice(NASTY_VALUES)
        elif how == 3:
            del node[key]
        else:
            node[dice.choice(("", "x", "name", "base", key.upper()))] = node.pop(key)
    return tree


def spoil_json(content: bytes, dice: random.Random, *, seals: bool = True) -> bytes:
    """Return JSON with changed values, or text that is no longer valid JSON.

    With `seals`, the changed values get a new checksum in place of an old one, so that readers see them.
    """
    if dice.random() < 0.4:
        return spoil_bytes(content, dice)
    tree = spoil_tree(json.loads(content), dice)
    if seals and isinstance(tree, dict):
        if tree.pop("crc", None) is not None:
            return seal_line(json.dumps(tree).encode())
        if tree.pop("checksum", None) is not None:
            return seal(json.dumps(tree)).encode()
    return json.dumps(tree).encode()


def spoil_yaml(content: bytes, dice: random.Random) -> bytes:
    """Return YAML with changed values, or text that is no longer valid YAML."""
    if dice.random() < 0.4:
        return spoil_bytes(content, dice)
    tree = YAML(typ="safe", pure=True).load(content.decode())
    return json.dumps(spoil_tree(tree, dice)).encode()  # JSON is YAML too


@contextmanager
def impatience() -> Iterator[None]:
    """Raise `Hang` when the body of the context takes too long."""

    def stop(number: int, frame: object) -> None:
        raise Hang

    before = signal.signal(signal.SIGALRM, stop)
    signal.alarm(PATIENCE)
    try:
        yield
    finally:
        signal.alarm(0)
        signal.signal(signal.SIGALRM, before)


def spoil_lines(content: bytes, dice: random.Random) -> bytes:
    """Return JSON lines in which one line has changed values or is no longer valid JSON."""
    if dice.random() < 0.2:
        return spoil_bytes(content, dice)
    lines = content.split(b"\n")
    at = dice.randrange(len(lines) - 1)
    lines[at] = spoil_json(lines[at], dice)
    return b"\n".join(lines)


def judge(done: Result, codes: tuple[int, ...]) -> str:
    """Return the problem in how a command ended, or nothing when it refused or accepted the input well."""
    told = done.stdout + done.stderr
    if done.exit_code not in codes:
        return f"exit code {done.exit_code}: {done.exception!r} {told[-800:]}"
    if "Traceback" in told or "fault of moeverify" in told:
        return told[-800:]
    return "" if done.exit_code < 2 or done.stderr.strip() else "no word on why"
