"""User code that `watch` records, written as JSON and read again."""

from __future__ import annotations

import runpy
from pathlib import Path

from moeverify.scripts.compare.code import _join_steps, _list_sources
from moeverify.scripts.record.executed import CodeRecorder, checksum_source
from moeverify.scripts.record.lines import LINES, Header
from moeverify.scripts.record.read import RankRecord


def record(path: Path) -> RankRecord:
    """Return the record of a rank whose code of one step was written as JSON and read again."""
    recorder = CodeRecorder()
    try:
        runpy.run_path(str(path))
        line = LINES.validate_json(recorder.end_step(0).model_dump_json())
    finally:
        recorder.follow(False)
    header = Header(rank=0, world_size=1, first=0, last=0)
    return RankRecord(header, path.parent, None, executed=[line])  # type: ignore[list-item]


def test_recorded_values_are_those_that_were_executed(tmp_path: Path) -> None:
    path = tmp_path / "values.py"
    path.write_text(
        "pair = (1, {'b', 'a'}, {'rate': 0.5}, None)\n"
        "api_key = '0123'\n"
        "login = {'user': 'me', 'token': '0123'}\n"
        "keys = 4\n"
        "text = 'abc'\n"
    )
    checksum_source.cache_clear()
    kept = record(path)
    executed = _join_steps(kept, {str(path)})
    values = {name: made for (*_, name), made in executed.names[0].items()}
    nested = (4, (1, (2, ("a", "b")), (1, ((2, ("rate", 0.5)),)), None))
    del values["return"]  # of the module
    assert values == {"pair": [nested], "keys": [4], "text": ["abc"]}
    assert executed.lines[0] == {(str(path), line) for line in range(1, 6)}


def test_a_file_that_has_changed_since_does_not_count(tmp_path: Path) -> None:
    path = tmp_path / "changed.py"
    path.write_text("size = 3\n")
    checksum_source.cache_clear()
    kept = record(path)
    assert str(path) in _list_sources([kept, kept])
    path.write_text("size = 4\n")
    checksum_source.cache_clear()
    assert str(path) not in _list_sources([kept, kept])
