"""Lines of source as links to an editor."""

from __future__ import annotations

from pathlib import Path

import pytest

from moeverify.report.page import link_lines


def write_source(folder: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Write an empty source file into a new folder, below the current one from now on."""
    folder.mkdir()
    file = folder / "layers.py"
    file.write_text("")
    monkeypatch.chdir(folder.parent)
    return file


def test_lines_of_existing_files_are_links_and_texts_are_escaped(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = write_source(tmp_path / "my net", monkeypatch)
    found = link_lines(
        "layers.py:3 > a <b>, nowhere.py:4, moeverify/errors.py:1", str(file.with_name("case.yaml"))
    )
    assert found.count("<a ") == 2
    assert (
        f'<a href="vscode://file{tmp_path}/my%20net/layers.py:3">layers.py:3</a> &gt; a &lt;b&gt;, nowhere.py:4'
        in found
    )


def test_a_link_shows_the_path_below_the_current_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = write_source(tmp_path / "net", monkeypatch)
    found = link_lines(f"rank 2 is at {file}:9 in sleep", "cases/case.yaml")
    assert found == f'rank 2 is at <a href="vscode://file{file}:9">net/layers.py:9</a> in sleep'
