"""Unused goldens: those that no case below their parent folder can name."""

from __future__ import annotations

from pathlib import Path

from moeverify.verification.controller.golden import find_unused

CASE = "recipe: {{name: {}, model: {{preset: tiny-gpt}}}}\n"


def write(path: Path, text: str = "") -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)
    return path


def test_cases_of_other_folders_count_however_deep(tmp_path: Path) -> None:
    for name in ("here", "beside", "deep", "hidden", "installed", "nobody"):
        write(tmp_path / "golden" / f"{name}.cpu.json")
    write(tmp_path / "here.yaml", CASE.format("here"))
    write(tmp_path / "cases" / "a.yaml", CASE.format("beside"))
    write(tmp_path / "examples" / "my_model" / "a.yaml", CASE.format("deep"))
    write(tmp_path / "examples" / "my_model" / "recipes" / "deep.yaml", "seed: 1\n")
    write(tmp_path / ".cache" / "a.yaml", CASE.format("hidden"))
    write(tmp_path / "environment" / "pyvenv.cfg")
    write(tmp_path / "environment" / "a.yaml", CASE.format("installed"))
    write(tmp_path / "cases" / "broken.yaml", "recipe: [\n")
    rows = find_unused([], tmp_path / "golden")
    assert [Path(row.name).name for row in rows] == [
        "hidden.cpu.json",
        "installed.cpu.json",
        "nobody.cpu.json",
    ]
