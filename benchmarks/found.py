"""Run the reproductions of bugs in examples/found again, and put their outputs into the reports.

`python benchmarks/found.py [--checkouts DIR] [NAME...]`: a reproduction that reads the sources of a project
takes them from DIR/PROJECT, a checkout that exists already; without one it is left out, as is one whose packages
are not installed. Each report.md keeps the output of its reproduce.py in a block of `text`.
"""

import argparse
import re
import subprocess
import sys
from pathlib import Path

FOUND = Path(__file__).parent.parent / "examples" / "found"
LIMIT = 600  # seconds
MOST_LINES = 5  # of an output in a report
BLOCK = re.compile(r"```text\n.*?```", re.DOTALL)
CHECKOUT = re.compile(r"a checkout of (\S+/([\w-]+))")
# A framework's own lines on stdout: messages of loggers, and progress.
NOISE = re.compile(r"\[|.*(Warning|unavailable)|$")
STATES = {0: "not there any more", 1: "still there"}


def main() -> int:
    """Run the named reproductions, or all, and return 1 if one could not say whether its bug is there."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--checkouts", type=Path, metavar="DIR", help="folder with checkouts of projects")
    parser.add_argument("names", nargs="*", metavar="NAME", help="folders in examples/found (default: all)")
    arguments = parser.parse_args()
    folders = [FOUND / name for name in arguments.names] or sorted(FOUND.iterdir())
    states = [_reproduce(folder, arguments.checkouts) for folder in folders if folder.is_dir()]
    return int("failed" in states)


def _reproduce(folder: Path, checkouts: Path | None) -> str:
    """Run one reproduction, write its output into its report, and return what became of the bug."""
    command = [sys.executable, "-W", "ignore", "reproduce.py"]
    if needs := CHECKOUT.search((folder / "reproduce.py").read_text()):
        source = checkouts / needs[2] if checkouts else None
        if source is None or not source.is_dir():
            return _say(folder, f"left out: needs --checkouts with https://github.com/{needs[1]} in it")
        command.append(str(source.resolve()))
    try:
        ran = subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=LIMIT, check=False)
    except subprocess.TimeoutExpired:
        return _say(folder, "failed", f"no end in {LIMIT} s")
    if missing := re.search(r"ModuleNotFoundError: No module named '([\w.]+)'", ran.stderr):
        return _say(folder, f"left out: {missing[1]} is not installed")
    if ran.returncode not in STATES or "Traceback" in ran.stderr:
        return _say(folder, "failed", ran.stderr[-2000:])
    report = folder / "report.md"
    lines = [line[:150] for line in _sort_lines(ran.stdout)]
    hidden = len(lines) - MOST_LINES
    said = "\n".join([*lines[:MOST_LINES], *([f"({hidden} more lines)"] if hidden > 0 else [])])
    report.write_text(BLOCK.sub(lambda _: f"```text\n{said}\n```", report.read_text(), count=1))
    return _say(folder, STATES[ran.returncode])


def _sort_lines(output: str) -> list[str]:
    """Return the lines of a reproduction in an order that does not depend on which rank was first."""
    first, *others = [line for line in output.splitlines() if not NOISE.match(line)]
    return (
        [first, *sorted(others)]
        if any(" rank" in line or " stage" in line for line in others)
        else [first, *others]
    )


def _say(folder: Path, state: str, *details: str) -> str:
    """Print the state of a bug, with details on other lines."""
    print(f"{folder.name}: {state}", *details, sep="\n", flush=True)
    return state


if __name__ == "__main__":
    sys.exit(main())
