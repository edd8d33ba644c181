"""Make what README and docs show of this version: outputs of commands, and tables of options and keys.

    python benchmarks/samples.py                  # all of them; needs megablocks, and ten minutes on two cores
    python benchmarks/samples.py commands json    # some of them
    python benchmarks/samples.py --check          # write nothing, and exit with 1 where one is another by now

A page shows a sample between `<!-- sample: NAME -->` and `<!-- end of sample -->`; this script makes it.
Numbers, times and memory addresses differ between machines, so tests compare outputs by their `outline`.
"""

from __future__ import annotations

import argparse
import collections
import functools
import itertools
import os
import re
import shlex
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from types import EllipsisType
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
BLOCK = re.compile(r"^<!-- sample: ([\w-]+) -->\n(.*?)^<!-- end of sample -->$", re.DOTALL | re.MULTILINE)

PYTHON = [sys.executable]
WIDTH = 128  # of a line in a block: a table of cases is not truncated
MOST_WORDS = 12
DEEPEST_KEYS = 2
MANY = 2  # commands that share an option which is described once
COLUMNS = ["Option", "Meaning"]

Pattern = str | EllipsisType


# ---- Outputs of commands


@functools.cache
def run(line: str, folder: Path = ROOT) -> str:
    """Return the output of a command line in a log, or its error. In it `runs/` is a temporary folder.

    Progress goes to stderr and depends on the time that a command takes.
    """
    words = shlex.split(line.replace("runs/", f"{scratch()}/"))
    own = [*PYTHON, "-m", *words]
    variables = {key: value for key, value in os.environ.items() if key not in ("CI", "COLUMNS")}
    path = os.pathsep.join(filter(None, [str(ROOT), variables.get("PYTHONPATH", "")]))
    variables |= {"PYTHONPATH": path, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(own, capture_output=True, text=True, cwd=folder, env=variables, check=False)
    told = (
        (done.stdout or done.stderr)
        .replace(f"{folder}/", "")
        .replace(str(scratch()), "runs")
        .replace(f"{ROOT}/", "")
    )
    return re.sub(r"\S*/(?:site|dist)-packages/", "", told)


@functools.cache
def scratch() -> Path:
    """Return a folder that exists as long as this process."""
    folder = tempfile.TemporaryDirectory(prefix="samples-")
    _KEPT.append(folder)
    return Path(folder.name)


_KEPT: list[tempfile.TemporaryDirectory[str]] = []


def pick(output: str, *patterns: Pattern) -> list[str]:
    """Return the lines that begin with one of the patterns, in the order of the output.

    `...` between two patterns marks omitted lines, and is shown.
    """
    lines, picked, cut_before = output.splitlines(), [], set()
    for number, pattern in enumerate(patterns):
        if pattern is ...:
            cut_before.add(patterns[number + 1])
    for line in lines:
        found = next((p for p in patterns if isinstance(p, str) and re.match(p, line)), None)
        if found is not None:
            if found in cut_before:
                picked.append("...")
                cut_before.remove(found)
            picked.append(line)
    missing = [p for p in patterns if isinstance(p, str) and not any(re.match(p, line) for line in lines)]
    if missing:
        raise SystemExit(f"the output has no line like {missing}:\n{output}")
    return picked


def cut(output: str, first: str, last: str) -> list[str]:
    """Return the lines from one that begins with `first` to the next that begins with `last`."""
    lines = output.splitlines()
    begin = next((n for n, line in enumerate(lines) if re.match(first, line)), None)
    if begin is None:
        raise SystemExit(f"the output has no line like {first}:\n{output}")
    end = next((n for n in range(begin, len(lines)) if re.match(last, lines[n])), len(lines) - 1)
    return lines[begin : end + 1]


def block(lines: list[str], command: str = "") -> str:
    """Return a code block, with the command above the output; long lines are truncated."""
    while lines and not lines[-1].strip():
        lines = lines[:-1]
    short = [line if len(line) <= WIDTH else f"{line[: WIDTH - 4]} ..." for line in lines]
    return "\n".join(["```", *([f"$ {command}"] if command else []), *short, "```"])


LAST = r"  and \d+ more finding|  fault "
EXPLAINED = (
    "finding ",
    r"  \w",
    " +relative fit residual",
    ...,
    " +in .*: reduce_scatter_tensor over efsdp",
)


def verify() -> str:
    """Return the suite, with some of its rows."""
    cases = " ".join(str(path.relative_to(ROOT)) for path in sorted((ROOT / "cases").glob("*.yaml")))
    shown = ("cp-torch", "ddp-ep2", "fp32-ep", "fsdp-tp-ep", "fsdp2-ep2", "hsdp-cp-ep", "megablocks-ep2")
    rows = [rf"{name} " for name in (*shown, "pp-zbv")]
    return block(
        pick(run(f"moeverify run {cases}"), "case ", "---", *rows, ..., r"(pass|mismatch|error)  \d")
    )


def failing() -> str:
    """Return the command whose output and evidence the pages show; it runs once."""
    return "moeverify run cases/fsdp2-ep2.yaml --fault A05 --out runs/a05"


def failure() -> str:
    """Return a fault of the catalogue, with its finding."""
    command = failing()
    return block(cut(run(command), "fsdp2-ep2  MISMATCH", LAST), command)


def explain() -> str:
    """Return the evidence of that finding."""
    first = failing()
    run(first)
    second = "moeverify explain runs/a05 1"
    return block([f"$ {second}", *pick(run(second), *EXPLAINED)], first)


def own_models() -> str:
    """Return the examples with users' own models."""
    command = "moeverify run examples/my_gpt --goldens examples/golden"
    return block(pick(run(command), "case ", "---", "my-"), command)


def own_gpt_wrong() -> str:
    """Return the example of head norms whose gradients are not summed over tp."""
    command = "moeverify run examples/my_gpt/tp.yaml --set layout.parallelize=my_gpt.wrong:parallelize"
    return block(cut(run(command), "my-gpt-tp  MISMATCH", LAST), command)


def precision() -> str:
    """Return the example of a mixed-precision policy that covers only a part of the model."""
    command = "moeverify run cases/mixed-fsdp2.yaml --fault M05"
    return block(cut(run(command), "  precision: ", "$"), command)


@functools.cache
def own_fault_folder() -> Path:
    """Return a folder with the file that the page on diagnosis shows, and the cases."""
    text = (ROOT / "docs" / "diagnosis.md").read_text()
    found = re.search(r"^```python\n(# own_faults\.py\n.*?)^```", text, re.DOTALL | re.MULTILINE)
    if found is None:
        raise SystemExit("docs/diagnosis.md shows no own_faults.py")
    folder = scratch() / "own"
    folder.mkdir()
    (folder / "own_faults.py").write_text(found[1])
    for name in ("cases", "golden"):
        (folder / name).symlink_to(ROOT / name)
    return folder


def own_fault() -> str:
    """Return the example of a fault that a reader wrote."""
    command = "moeverify run cases/tp-sequence-parallel.yaml --fault own_faults:forget_norms"
    return block(cut(run(command, own_fault_folder()), "  gradient: ", LAST), command)


# ---- Tables, from the code alone


def table(rows: list[list[str]], headers: list[str]) -> str:
    """Return a Markdown table with escaped cells."""
    escaped = [[cell.replace("|", r"\|") for cell in row] for row in rows]
    lines = [f"| {' | '.join(cells)} |" for cells in (headers, *escaped)]  # a padded page is twice as large
    return "\n".join([lines[0], "|---" * len(headers) + "|", *lines[1:]])


def commands() -> str:
    """Return every command with its arguments and options from `--help`; shared ones are described once."""
    import typer

    from moeverify.cli import build_app

    listed = list(_list_commands(typer.main.get_command(build_app()), "moeverify"))
    rows = {name: _describe_all(command) for name, command in listed}
    count = collections.Counter(tuple(row) for own in rows.values() for row in own)
    shared = {row for row, times in count.items() if times >= MANY and times == _most(count, row[0])}
    listed_once = [list(row) for row in count if row in shared]
    parts = [
        "### Shared options",
        "A command lists those that it takes; `A` to `B` are all rows from A to B.",
        table(listed_once, COLUMNS),
    ]
    for name, command in listed:
        usage = " ".join(
            f"{parameter.metavar.removesuffix('...')}..." if parameter.nargs == -1 else str(parameter.metavar)
            for parameter in command.params
            if not parameter.opts[0].startswith("-")
        )
        parts.append(f"### `{f'{name} {usage}'.strip()}`\n\n{' '.join(command.help.split())}")
        own = [row for row in rows[name] if tuple(row) not in shared]
        if own:
            parts.append(table(own, COLUMNS))
        others = [row in rows[name] for row in listed_once]
        if any(others):
            parts.append(f"Shared: {', '.join(_join_ranges(listed_once, others))}.")
    return "\n\n".join(parts)


def _join_ranges(listed: list[list[str]], taken: list[bool]) -> Iterator[str]:
    """Yield the options that a command takes of a list, three or more in a row as the first `to` the last."""
    names = [f"`{re.split('[` ]', row[0])[1]}`" for row in listed]
    for is_taken, group in itertools.groupby(zip(names, taken, strict=True), key=lambda pair: pair[1]):
        found = [name for name, _ in group]
        if is_taken:
            yield from found if len(found) < 3 else [f"{found[0]} to {found[-1]}"]


def _most(count: collections.Counter[tuple[str, ...]], spelled: str) -> int:
    """Return how many commands share the most common meaning of an option."""
    return max(times for row, times in count.items() if row[0] == spelled)


def _describe_all(command: Any) -> list[list[str]]:
    return [_describe(parameter) for parameter in command.params if parameter.name != "help"]


def _list_commands(group: Any, prefix: str) -> Iterator[tuple[str, Any]]:
    for name, command in group.commands.items():
        if hasattr(command, "commands"):
            yield from _list_commands(command, f"{prefix} {name}")
        else:
            yield f"{prefix} {name}", command


def _describe(parameter: Any) -> list[str]:
    """Return the syntax of a parameter, and its meaning."""
    default = parameter.default
    is_option = parameter.opts[0].startswith("-")
    if not is_option:
        spelled = f"`{parameter.metavar}`"
    else:
        names = [*parameter.opts, *parameter.secondary_opts]
        value = "" if parameter.is_flag else f" {_name_value(parameter)}"
        spelled = ", ".join(f"`{name}{value}`" for name in names)
    meaning = " ".join((parameter.help or "").split())
    if parameter.required and is_option:
        meaning += " Required."
    elif default not in (None, False, (), "") and not parameter.is_flag:
        meaning += f" Default: `{getattr(default, 'value', default)}`."
    return [spelled, meaning.strip()]


def _name_value(parameter: Any) -> str:
    """Return the placeholder of an option's value: its choices, its own word, or its kind."""
    if parameter.metavar:
        return str(parameter.metavar)
    kind = parameter.type_descriptor.annotation
    return "|".join(member.value for member in kind) if hasattr(kind, "__members__") else "N"


def floors() -> str:
    """Return the packages from the highest floor to the lowest, described by their docstrings."""
    sys.path.insert(0, str(ROOT / "tests" / "arch"))
    from house import FLOORS

    rows = []
    for name, floor in sorted(FLOORS.items(), key=lambda each: (-each[1], each[0])):
        path = ROOT / "moeverify" / name.replace(".", "/") / "__init__.py"
        if path.exists() and name != ".":
            [sentence] = re.findall(r'\A"""(.+?)(?:"""|\n\n|$)', path.read_text(), re.DOTALL)[:1]
            rows.append([str(floor), f"`moeverify/{name.replace('.', '/')}`", " ".join(sentence.split())])
    return table(rows, ["Floor", "Package", "What is there"])


def json_keys() -> str:
    """Return the keys of `--json` from the models of results. Deeper ones are in `moeverify schema --results`."""
    from moeverify.results.run import RunResult

    return block(list(_list_keys(RunResult, 0)))


def _list_keys(model: Any, depth: int) -> Iterator[str]:
    for name, field in model.model_fields.items():
        inner = _find_models(field.annotation)
        many = "[]" if inner and "tuple[" in str(field.annotation) else ""
        is_shown = len(inner) == 1 and depth < DEEPEST_KEYS
        kind = (
            ""
            if is_shown or not inner
            else f"    one of {len(inner)} kinds"
            if inner[1:]
            else f"    {inner[0].__name__}"
        )
        yield f"{' ' * depth}{field.serialization_alias or name}{many}{kind}"
        if is_shown:
            yield from _list_keys(inner[0], depth + 1)


def _find_models(annotation: Any) -> list[Any]:
    """Return the models that a field may hold, alone, optionally or in a tuple."""
    if hasattr(annotation, "model_fields"):
        return [annotation]
    return [model for inner in getattr(annotation, "__args__", ()) for model in _find_models(inner)]


def comm_uneven() -> str:
    """Return the example of an uneven exchange with its backward."""
    file = "examples/collectives/uneven.yaml"
    command = f"moeverify comm all_to_all --world-size 4 --splits {file} --backward"
    return block(run(f"{command} --device cpu").splitlines(), command)


def route() -> str:
    """Return the example of one batch through a MoE layer."""
    command = "moeverify route cases/ddp-ep2.yaml"
    return block(run(f"{command} --device cpu").splitlines(), command)


def bound() -> str:
    """Return the sources of one gradient's bound in bfloat16."""
    case = "moeverify run examples/my_moe/ep.yaml --set recipe.precision=bfloat16 --no-escalate"
    run(f"{case} --goldens examples/golden --device cpu --out runs/my-moe")
    command = "moeverify explain runs/my-moe --bound 'gradient: norms.0'"
    return block([f"$ {case} --out runs/my-moe", f"$ {command}", *run(command).splitlines()])


TABLES: dict[str, Callable[[], str]] = {"commands": commands, "floors": floors, "json": json_keys}
OUTPUTS: dict[str, Callable[[], str]] = {
    "verify": verify,
    "failure": failure,
    "explain": explain,
    "own-models": own_models,
    "own-gpt-wrong": own_gpt_wrong,
    "precision": precision,
    "own-fault": own_fault,
    "comm-uneven": comm_uneven,
    "route": route,
    "bound": bound,
}


# ---- Pages


def shown() -> dict[str, tuple[Path, str]]:
    """Return each sample that the pages show, with its page."""
    return {
        name: (page, text.strip("\n")) for page in PAGES for name, text in BLOCK.findall(page.read_text())
    }


def outline(sample: str) -> list[str]:
    """Return the machine-independent part of an output: the first words of each line, without numbers.

    Only the first words, since the numbers decide where a long line is cut. The rows of passed cases omit
    the tensor that uses most of its bound: rounding decides which one that is.
    """
    text = re.sub(r"( / \S+) .* ([\d.]+ +pass)$", r"\1 \2", sample, flags=re.MULTILINE)
    text = re.sub(r"\b(\d+ h )?\d+ min\b( \d+ s\b)?", "1 s", text)  # a slow machine takes minutes
    text = re.sub(r"[-+]?\d[\d.,]*(e[-+]?\d+)?", "#", text)
    return [" ".join(re.sub(r"-{3,}", " ", line).split()[:MOST_WORDS]) for line in text.splitlines()]


def replace(page: Path, name: str, sample: str) -> None:
    """Write a sample into its page."""

    def fill(found: re.Match[str]) -> str:
        if found[1] != name:
            return found[0]
        return f"<!-- sample: {name} -->\n{sample}\n<!-- end of sample -->"

    page.write_text(BLOCK.sub(fill, page.read_text()))


def main() -> None:
    """Make samples, and write or compare them."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("names", nargs="*", metavar="NAME", help="which samples; all if left out")
    parser.add_argument(
        "--check", action="store_true", help="write nothing; exit with 1 where one has changed"
    )
    options = parser.parse_args()
    makers = TABLES | OUTPUTS
    unknown = [name for name in options.names if name not in makers]
    if unknown:
        parser.error(f"no sample is called {', '.join(unknown)}; there are {', '.join(makers)}")
    changed = []
    for name, (page, before) in shown().items():
        if options.names and name not in options.names:
            continue
        sample = makers[name]()
        alike = sample == before if name in TABLES else outline(sample) == outline(before)
        print(f"{'same   ' if alike else 'changed'} {name:22} {page.relative_to(ROOT)}", flush=True)
        changed += [] if alike else [name]
        if not options.check:
            replace(page, name, sample)
    sys.exit(1 if changed and options.check else 0)


if __name__ == "__main__":
    main()
