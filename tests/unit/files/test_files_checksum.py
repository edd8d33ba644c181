"""Every flipped bit of a sealed line or document is found, and its line is named."""

from __future__ import annotations

import json
import random
from pathlib import Path

import pytest

from moeverify.checksum import Damaged, checksum_file, open_line, seal, seal_line, unseal

DOCUMENT = json.dumps({"name": "a", "values": list(range(40)), "inner": {"text": "x" * 40}}, indent=1)


def flip(content: bytes, at: int, bit: int) -> bytes:
    return content[:at] + bytes([content[at] ^ 1 << bit]) + content[at + 1 :]


def test_a_line_opens_as_it_was_sealed_and_no_flipped_bit_does() -> None:
    line = b'{"line":"note","text":"why, \\"crc\\" and }"}'
    sealed = seal_line(line)
    assert json.loads(sealed).keys() == {"line", "text", "crc"}
    assert open_line(sealed) == line
    for at in range(len(sealed)):
        for bit in range(8):
            with pytest.raises(Damaged):
                open_line(flip(sealed, at, bit))


def test_a_document_opens_as_it_was_sealed() -> None:
    for document in (DOCUMENT, DOCUMENT + "\n", json.dumps(json.loads(DOCUMENT))):
        sealed = seal(document)
        content = unseal(sealed.encode())
        assert content is not None
        assert json.loads(content) == json.loads(document)
        assert list(json.loads(sealed)) == [*json.loads(document), "checksum"]
        assert unseal(sealed.replace("\n", "\r\n").encode()) is not None  # as git may check it out
    assert unseal(DOCUMENT.encode()) is None


def test_the_line_of_every_flipped_bit_is_found() -> None:
    sealed = seal(DOCUMENT).encode()
    last = len(sealed.rstrip().removesuffix(b"}")) - 60  # the field `checksum` itself
    for at in range(last):
        for bit in range(8):
            with pytest.raises(Damaged) as caught:
                unseal(flip(sealed, at, bit))
            # A newline that is another byte joins two lines, and moves all that follow.
            assert caught.value.line == (None if sealed[at] == 10 else sealed.count(b"\n", 0, at) + 1)
    for at in range(last, len(sealed)):
        for bit in range(8):
            try:
                assert unseal(flip(sealed, at, bit)) is None  # its reader asks for the checksum
            except Damaged:
                continue


def test_two_damaged_lines_are_found_without_a_line() -> None:
    sealed = seal(DOCUMENT).encode()
    with pytest.raises(Damaged) as caught:
        unseal(flip(flip(sealed, 5, 0), len(sealed) // 2, 0))
    assert caught.value.line is None


def test_files_have_a_checksum_of_all_their_bytes(tmp_path: Path) -> None:
    path = tmp_path / "file"
    content = random.Random(0).randbytes(3 << 20)
    path.write_bytes(content)
    whole = checksum_file(path)
    path.write_bytes(flip(content, 2 << 20, 3))
    assert checksum_file(path) != whole
