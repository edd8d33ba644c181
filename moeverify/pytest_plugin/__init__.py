"""pytest plugin for `pytest cases/`: each case file is a test, and one launch of ranks serves all of them.

pytest loads this module in every session of an environment with moeverify, so its imports are light. A
session without cases only pays one regular expression search per `*.yaml` file below its arguments.
"""

from __future__ import annotations

import shutil
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from moeverify.pytest_plugin.recognition import is_asked_for, looks_like_case

if TYPE_CHECKING:
    from moeverify.pytest_plugin.item import CaseFile

_SHARED = pytest.StashKey[Path]()
_GOLDEN_LINES = pytest.StashKey[list[str]]()


def pytest_addoption(parser: pytest.Parser) -> None:
    """Add the command-line options for sessions with cases."""
    group = parser.getgroup("moeverify", "cases of moeverify (`*.yaml` with `recipe:` and `layout:`)")
    group.addoption(
        "--update-golden",
        action="store_true",
        help="Record or refresh the goldens of the selected cases before they run.",
    )
    group.addoption(
        "--moeverify-device",
        choices=("auto", "cpu", "cuda"),
        default="auto",
        help="Device on which the ranks compute; auto takes CUDA if there is a GPU.",
    )
    group.addoption(
        "--moeverify-timeout",
        type=float,
        metavar="S",
        help="Seconds that a case, or a golden, may take.",
    )
    group.addoption(
        "--moeverify-goldens",
        type=Path,
        metavar="DIR",
        help="Folder with the goldens of the cases. Default: golden/ in pytest's root folder.",
    )
    group.addoption(
        "--moeverify-cache",
        type=Path,
        metavar="DIR",
        help="Folder for full tensors of goldens; they can be made again.",
    )
    group.addoption(
        "--moeverify-allow-undecided",
        action="store_true",
        help="Let an undecided case pass: rounding would hide too large an error in it.",
    )
    group.addoption(
        "--moeverify-no-escalate",
        action="store_true",
        help="Do not run cases below float64 in wider precisions too, to find causes and bugs that rounding hides.",
    )


def pytest_collect_file(file_path: Path, parent: pytest.Collector) -> CaseFile | None:
    """Collect a file that looks like a case, unless pytest was started without any path to collect."""
    if file_path.suffix != ".yaml" or not is_asked_for(parent.config) or not looks_like_case(file_path):
        return None
    from moeverify.pytest_plugin.item import CaseFile

    found: CaseFile = CaseFile.from_parent(parent, path=file_path)
    return found


@pytest.hookimpl(optionalhook=True)
def pytest_configure_node(node: Any) -> None:
    """Give a pytest-xdist worker the folder shared by all workers; one worker runs the cases for all."""
    stash = node.config.stash
    if _SHARED not in stash:
        stash[_SHARED] = Path(tempfile.mkdtemp(prefix="moeverify-pytest-"))
    node.workerinput["moeverify_folder"] = str(stash[_SHARED])


@pytest.hookimpl(optionalhook=True)
def pytest_testnodedown(node: Any) -> None:
    """Collect the summary lines of a worker."""
    lines = (getattr(node, "workeroutput", None) or {}).get("moeverify_goldens", [])
    node.config.stash.setdefault(_GOLDEN_LINES, []).extend(lines)


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter, config: pytest.Config) -> None:
    """Print the status of the goldens under `--update-golden`."""
    own = config.pluginmanager.get_plugin("moeverify-session")
    lines = [*config.stash.get(_GOLDEN_LINES, []), *(own.golden_lines if own is not None else [])]
    if lines:
        terminalreporter.section("goldens")
        for line in lines:
            terminalreporter.write_line(line)


def pytest_unconfigure(config: pytest.Config) -> None:
    """Remove the folder shared by the workers."""
    if _SHARED in config.stash:
        shutil.rmtree(config.stash[_SHARED], ignore_errors=True)
