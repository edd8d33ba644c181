"""Wheels and sdists of both distributions: built and installed without the network, and used from there."""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
import tarfile
import tomllib
from email.message import Message
from email.parser import Parser
from pathlib import Path
from zipfile import ZipFile

import pytest

ROOT = Path(__file__).parents[2]
_BUILD = "import sys, setuptools.build_meta as backend; getattr(backend, sys.argv[1])(sys.argv[2])"

pytestmark = pytest.mark.slow


def run_python(*arguments: str | Path, folder: Path, path: Path | None = None) -> str:
    environment = {"PATH": "", "HOME": str(folder)} | ({"PYTHONPATH": str(path)} if path else {})
    done = subprocess.run(
        [sys.executable, *arguments], cwd=folder, env=environment, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def build(source: Path, kind: str, out: Path) -> Path:
    out.mkdir(parents=True)
    run_python("-c", _BUILD, f"build_{kind}", out, folder=source)
    (built,) = out.iterdir()
    return built


def build_both_ways(source: Path, out: Path) -> tuple[Path, Path]:
    """Return the wheel of a source tree, and the wheel of its sdist."""
    with tarfile.open(build(source, "sdist", out / "sdist")) as archive:
        archive.extraction_filter = getattr(tarfile, "data_filter", None)  # from Python 3.11.4 on
        archive.extractall(out / "unpacked")
    (unpacked,) = (out / "unpacked").iterdir()
    return build(source, "wheel", out / "wheel"), build(unpacked, "wheel", out / "wheel-of-sdist")


def list_files(wheel: Path) -> set[str]:
    with ZipFile(wheel) as archive:
        return set(archive.namelist())


def read_metadata(wheel: Path) -> Message:
    with ZipFile(wheel) as archive:
        (name,) = (each for each in archive.namelist() if each.endswith(".dist-info/METADATA"))
        return Parser().parsestr(archive.read(name).decode())


@pytest.fixture(scope="module")
def wheels(tmp_path_factory: pytest.TempPathFactory) -> dict[str, tuple[Path, Path]]:
    folder = tmp_path_factory.mktemp("source")
    ignored = shutil.ignore_patterns("__pycache__", "*.egg-info", "build")
    for name in ("moeverify", "multiprocessing_pdb", "cases"):
        shutil.copytree(ROOT / name, folder / name, symlinks=True, ignore=ignored)
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, folder)
    out = tmp_path_factory.mktemp("built")
    sources = {"moeverify": folder, "multiprocessing-pdb": folder / "multiprocessing_pdb"}
    return {name: build_both_ways(source, out / name) for name, source in sources.items()}


@pytest.mark.parametrize("name", ["moeverify", "multiprocessing-pdb"])
def test_a_sdist_has_all_that_the_wheel_needs(wheels: dict[str, tuple[Path, Path]], name: str) -> None:
    direct, from_sdist = wheels[name]
    assert list_files(direct) == list_files(from_sdist)
    found = read_metadata(direct)
    assert found["Name"] == name
    assert found["Version"] == read_metadata(wheels["moeverify"][0])["Version"]
    assert found["License-Expression"] == "Apache-2.0"
    assert "Typing :: Typed" in found.get_all("Classifier", [])
    assert found["Description-Content-Type"] == "text/markdown"


def test_the_wheel_has_every_file_of_the_package_and_all_cases(wheels: dict[str, tuple[Path, Path]]) -> None:
    packed = list_files(wheels["moeverify"][0])
    for top in ("moeverify", "multiprocessing_pdb"):
        own = {str(path.relative_to(ROOT)) for path in (ROOT / top).rglob("*.py")}
        assert own <= packed
    for path in (ROOT / "cases").rglob("*.yaml"):
        assert f"moeverify/examples/{path.relative_to(ROOT / 'cases')}" in packed


def test_an_installed_wheel_brings_its_examples(wheels: dict[str, tuple[Path, Path]], tmp_path: Path) -> None:
    options = ["install", "--quiet", "--no-deps", "--no-index", "--no-compile", "--target"]
    run_python("-m", "pip", *options, tmp_path / "site", wheels["moeverify"][0], folder=tmp_path)
    site = tmp_path / "site"
    code = "import moeverify.cli.arguments as a; print(a.EXAMPLES)"
    where = run_python("-c", code, folder=tmp_path, path=site).strip()
    assert Path(where) == site / "moeverify" / "examples"
    listed = run_python("-m", "moeverify", "check", "--examples", folder=tmp_path, path=site)
    assert "cp-ring" in listed
    assert "pp-zbv" not in listed
    chosen = run_python("-m", "moeverify", "check", "--examples", "-k", "zbv", folder=tmp_path, path=site)
    assert "pp-zbv" in chosen


def test_a_release_names_its_repository_and_has_no_link_that_leads_nowhere(tmp_path: Path) -> None:
    for name in ("pyproject.toml", "README.md"):
        shutil.copy(ROOT / name, tmp_path)
        (tmp_path / "multiprocessing_pdb").mkdir(exist_ok=True)
        shutil.copy(ROOT / "multiprocessing_pdb" / name, tmp_path / "multiprocessing_pdb")
    run_python(ROOT / ".ci" / "link", "someone/theirs", "v9.9.9", folder=tmp_path)
    for folder in (tmp_path, tmp_path / "multiprocessing_pdb"):
        project = tomllib.loads((folder / "pyproject.toml").read_text())["project"]
        assert project["urls"]["Repository"] == "https://github.com/someone/theirs"
        assert project["optional-dependencies"]
    text = (tmp_path / "README.md").read_text()
    links = re.findall(r"\]\(([^)\s]+)\)", text)
    home = "https://github.com/someone/theirs/blob/v9.9.9/"
    assert len(links) > 20
    for link in links:
        assert link.startswith(("https://", "#"))
        if link.startswith(home):
            assert (ROOT / link.removeprefix(home).partition("#")[0]).exists(), link
    assert sum(link.startswith(home) for link in links) > 20
