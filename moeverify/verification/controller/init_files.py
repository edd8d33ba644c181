"""The files that `moeverify init` writes: their texts, and the mark by which an edited file is left alone."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from io import StringIO
from pathlib import Path
from typing import Any, Literal

from ruamel.yaml import YAML
from ruamel.yaml.comments import CommentedMap

from moeverify.input_file import read_input
from moeverify.report.files import write_atomically
from moeverify.results.factory import POSITIONS, ROWS, TriedModel

State = Literal["written", "updated", "unchanged", "edited"]

_MARK = re.compile(r"# Written by moeverify init ([0-9a-f]{16})\. .*\n")


AXES = ("dp_replicate", "dp_shard", "tp", "cp")
_COMMENTS = {
    "dp_replicate": "2 ranks with different rows and a copy of all parameters",
    "dp_shard": "2 ranks with different rows and a shard of all parameters",
    "tp": "2 ranks that share the work inside each layer",
    "cp": "2 ranks with different positions of each row",
    "data_parallel": "the wrapper of torch",
    "parallelize": "called as parallelize(model, mesh)",
    "arguments": "each rank has half of the experts",
}


@dataclass(frozen=True)
class Candidate:
    """A layout to try; `meaning` is a line for the reader."""

    name: str
    meaning: str
    layout: Mapping[str, Any]


def list_folders(root: Path, folder: Path) -> list[Path]:
    """Return the folders of the files that `list_files` yields."""
    return [root / folder / "recipes", root / "tests", root / ".github" / "workflows"]


def mark(text: str) -> str:
    """Return a text below a first line with its hash."""
    return f"# Written by moeverify init {_hash(text)}. Once edited, it is not overwritten.\n{text}"


def is_edited(text: str) -> bool:
    """Return whether a text is not as `mark` made it."""
    found = _MARK.match(text)
    return found is None or _hash(text[found.end() :]) != found[1]


def write_marked(path: Path, text: str) -> State:
    """Write a marked text, unless an edited file or a file of another author is there.

    Raises: OSError when reading or writing fails.
    """
    before = read_input(path).decode(errors="replace") if path.exists() else None
    if before is not None and is_edited(before):
        return "edited"
    if before == text:
        return "unchanged"
    write_atomically(path, text)
    return "written" if before is None else "updated"


def _hash(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def name_recipe(model: TriedModel) -> str:
    """Return the name of a model's class in the style of files: `qwen3-moe-for-causal-lm`."""
    words = model.title.replace("MoE", "Moe")
    return re.sub(r"(?<=[a-z0-9])(?=[A-Z][A-Za-z])|_", "-", words).lower()


def write_recipe(model: TriedModel) -> str:
    """Return the text of the smallest recipe of a model, marked."""
    made: dict[str, Any] = {"factory": model.factory}
    made |= {"arguments": model.arguments} if model.arguments else {}
    made |= {"loss": model.loss} if model.loss else {}
    fields: dict[str, Any] = {
        "model": {**made, "vocab_size": model.vocab_size},
        "data": {"batch": ROWS, "seq_len": POSITIONS, "min_valid": model.min_valid},
        "optimizer": {"name": "adamw", "lr": 0.01, "clip_norm": 1.0},
    }
    shrunk = [
        f"# {name}: {before} in your model, {after} here\n" for name, (before, after) in model.changes.items()
    ]
    return mark("".join(shrunk) + dump_yaml({**fields, "steps": 2}))


def write_case(recipe: str, candidate: Candidate) -> str:
    """Return the text of a case, marked, with a comment on each field of its layout."""
    lines = [f"# {candidate.meaning}\n", f"recipe: {recipe}\n", "layout:\n"]
    for name, value in candidate.layout.items():
        lines.append(f"  {dump_yaml({name: value}).strip()}  # {_COMMENTS[name]}\n")
    return mark("".join(lines))


def dump_yaml(fields: Mapping[str, Any]) -> str:
    """Return YAML whose top level is in block style, with inner mappings on one line if they are flat."""
    yaml = YAML()
    yaml.width = 10_000
    yaml.default_flow_style = None
    block = CommentedMap(fields)
    block.fa.set_block_style()
    out = StringIO()
    yaml.dump(block, out)
    return out.getvalue()


TEST = '''"""One test a case of `{folder}`. All of them share one launch of ranks."""

from __future__ import annotations

from pathlib import Path

import moeverify
import pytest

CASES = Path(__file__).resolve().parents[1] / "{folder}"


@pytest.fixture(scope="module")
def verified() -> dict[str, moeverify.Verification]:
    return moeverify.verify_cases(CASES)


@pytest.mark.parametrize("name", sorted(path.stem for path in CASES.glob("*.yaml")))
def test_layout(verified: dict[str, moeverify.Verification], name: str) -> None:
    assert verified[name].ok, str(verified[name])
'''

WORKFLOW = """name: moeverify
on: [push, pull_request]
jobs:
  verify:
    runs-on: ubuntu-latest
    steps:
      - uses: actions/checkout@v4
      - uses: actions/setup-python@v5
        with: {{python-version: "3.12"}}
      - run: pip install moeverify{requirements}
      - run: moeverify run {folder} --no-require-goldens --out moeverify-run --html moeverify-run/report.html
      - if: always()
        uses: actions/upload-artifact@v4
        with: {{name: moeverify, path: moeverify-run, if-no-files-found: ignore}}
"""


def list_files(
    root: Path, folder: str, model: TriedModel, candidates: Sequence[Candidate]
) -> Iterator[tuple[Path, str]]:
    """Yield each file with its text: the recipe, the cases, a test and a workflow."""
    recipe = name_recipe(model)
    yield Path(folder, "recipes", f"{recipe}.yaml"), write_recipe(model)
    for each in candidates:
        yield Path(folder, f"{recipe}-{each.name}.yaml"), write_case(recipe, each)
    yield Path("tests", "test_layouts.py"), mark(TEST.format(folder=folder))
    requirements = " -r requirements.txt" if (root / "requirements.txt").is_file() else ""
    requirements += " ." if any((root / name).is_file() for name in ("pyproject.toml", "setup.py")) else ""
    workflow = WORKFLOW.format(folder=folder, requirements=requirements)
    yield Path(".github", "workflows", "moeverify.yml"), mark(workflow)


def write_files(root: Path, files: Iterable[tuple[Path, str]]) -> Iterator[tuple[Path, State]]:
    """Write each file below `root`, and yield its path and state.

    Raises: OSError when reading or writing fails.
    """
    for path, text in files:
        yield path, write_marked(root / path, text)
