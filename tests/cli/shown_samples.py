"""The outputs that README and docs show, as `benchmarks/samples.py` makes them."""

from __future__ import annotations

import importlib.util
import re
import sys
from pathlib import Path
from types import ModuleType

ROOT = Path(__file__).parents[2]


def _load_samples() -> ModuleType:
    spec = importlib.util.spec_from_file_location("samples", ROOT / "benchmarks" / "samples.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules["samples"] = module
    spec.loader.exec_module(module)
    return module


samples = _load_samples()
SHOWN = samples.shown()
RUN = samples.run


# The search for the first wrong operation takes half a minute in this run, and adds one line to what is shown. The
# words of that line have tests of their own, and the other samples of a mismatch show what a search finds.
_UNSEARCHED = "--fault A05"
_RESIDUAL = " +relative fit residual"
_FOUND = re.compile(rf"^( +evidence +)gradient/\S+ is exactly .*\n(?={_RESIDUAL})", re.MULTILINE)


def run_quickly(line: str, folder: Path = ROOT) -> str:
    """Run a command without the table of operators, which no sample shows and which takes 20 s."""
    quick = re.sub(r"--out (\S+)", r"--json \1/result.json", line)
    return str(RUN(f"{quick} --explain-seconds 0" if _UNSEARCHED in line else quick, folder))


def assert_shown(name: str, made: str) -> None:
    """Compare a sample that was made with the one that its page shows."""
    page, text = SHOWN[name]
    if _UNSEARCHED in text:
        text, number = _FOUND.subn(r"\1", text)
        text = re.sub(r"(evidence +) +relative fit", r"\1relative fit", text)
        assert number == 1, f"{page.name} shows no line of the search"
    assert samples.outline(made) == samples.outline(text), f"`make samples` writes {page.name} anew"


def leave_out_searched(patterns: tuple[object, ...]) -> tuple[object, ...]:
    """Return the patterns of a sample without the one of a line that follows a line of the search."""
    return tuple(each for each in patterns if each != _RESIDUAL)
