"""Architecture rules, checked by parsing: each check yields violations as `file:line: message`."""

from __future__ import annotations

import ast
import re
import statistics
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path

# A package imports from lower floors only; `.` is the package `moeverify` itself.
FLOORS: Mapping[str, int] = {
    "__main__": 10,
    ".": 9,
    "cli": 9,
    "scripts.startup": 9,
    "pytest_plugin": 9,
    "verification.controller": 8,
    "verification.worker": 8,
    "scripts.compare": 8,
    "scripts.guard": 8,
    "tools.bench": 7,
    "verification.golden_run": 7,
    "explain.fitting": 7,
    "explain": 5,
    "scripts.record": 7,
    "verification.checks": 6,
    "verification.launch": 6,
    "cases.validation": 5,
    "faults": 5,
    "stacks": 7,
    "verification.collectives": 5,
    "train": 4,
    "tools.checkpoint": 4,
    "tools.weights": 3,
    "train.calls": 3,
    "parallel": 3,
    "verification.golden": 3,
    "verification.compare": 3,
    "model": 2,
    "parallel.regions": 2,
    "cases.axes": 2,
    "verification.jobs": 2,
    "report": 2,
    "tools.placement": 1,
    "cases": 0,
    "results": -1,
    # Folders without code of their own.
    "verification": -4,
    "scripts": -4,
    "tools": -4,
    # The lowest floors: these import no package of this project, but each other.
    "dtype_names": -2,
    "seams": -2,
    "hashing": -2,
    "stale_folders": -2,
    "json_file": -2,
    "checksum": -3,
    "gc_pause": -3,
    "triton_support": -3,
    "input_file": -3,
    "errors": -3,
    "multiprocessing_pdb": -4,
}

# Words that a reader has to read twice: CONTRIBUTING says what to write in their place. Comments may say "what".
_PHRASES = "|".join(
    (
        r"\b(?:is|are|was|were) told\b",
        r"\bby right\b",
        r"\botherwise than\b",
        r"\bstands? for\b",
        r"\bmakes? of\b",
        r"\bin the place of\b",
    )
)
_AVOIDED = re.compile(rf"""(?<!["'`{{])\bwhat\b(?!["'`])|{_PHRASES}""", re.IGNORECASE)
_AVOIDED_IN_COMMENTS = re.compile(rf"(?:^ *|  )# (?=.*(?:{_PHRASES}))", re.IGNORECASE)
_QUOTED = ("moeverify.cli",)  # its docstring is the sentence that introduces the project
MOST_WORDS = 42

# The process that a user starts. These modules, and everything that they import, must not need torch.
WITHOUT_TORCH = (
    "cli",
    "pytest_plugin",
    "verification.controller",
    "verification.jobs",
    "report",
    "results",
    "cases",
    "cases.axes",
    "cases.validation",
    "tools.placement",
    "train.calls.call",
    "train.calls.rules",
    "explain.fitting.order",
    "scripts.record.command",
    "scripts.record.lines",
    "scripts.record.norm_parts",
    "scripts.record.settings",
    "scripts.guard.command",
    "scripts.guard.exchange",
    "scripts.guard.judge",
    "scripts.guard.lines",
    "scripts.guard.settings",
)

# Modules that may read the environment: commands, process launchers, and descriptions of the machine.
READS_ENVIRONMENT = (
    "cli",
    "pytest_plugin",
    "verification.launch",
    "verification.controller.machine",
    "scripts.record.command",
    "scripts.startup",
    "stacks.environment",  # restores the variables that frameworks write
)

# Modules that read files directly: those that only this project writes, and the readers of each format. All others
# use `input_file`, `json_file` and `cases.document`, which have the limits on files of users.
READS_FILES = (
    "cli.skill",
    "explain.packed",
    "faults",
    "json_file",
    "pytest_plugin",
    "report.formats.trace",
    "report.page",
    "scripts.guard",
    "scripts.record.command",
    "scripts.record.draw",  # a module that is being imported
    "tools.bench",
    "tools.placement.trace_file",
    "tools.weights.dcp",
    "verification.collectives",
    "verification.controller.finished",
    "verification.controller.init",
    "verification.controller.machine",
    "verification.launch",
    "verification.worker",
)

BAD_NAMES = {"utils", "util", "common", "helpers", "helper", "misc"}
MOST_FILE_LINES = 500
MEDIAN_FILE_LINES = 150
MOST_FUNCTION_LINES = 59


@dataclass(frozen=True)
class Import:
    """One import of a project module or of torch. `lazy` imports do not run when the module is imported."""

    target: str
    line: int
    lazy: bool


@dataclass(frozen=True)
class Source:
    """One Python file: its display path and its dotted name."""

    path: str
    name: str
    text: str
    is_package: bool

    @cached_property
    def tree(self) -> ast.Module:
        return ast.parse(self.text)

    @property
    def package(self) -> str:
        """Return the package of the file, as `FLOORS` names it."""
        root, _, rest = self.name.partition(".")
        if root != "moeverify":
            return root
        parts = rest.split(".")
        prefixes = [".".join(parts[:number]) for number in range(len(parts), 0, -1)]
        return next((each for each in prefixes if each in FLOORS), parts[0]) if rest else "."


@dataclass(frozen=True)
class House:
    """All Python files of the packages below a folder, by dotted name."""

    sources: Mapping[str, Source] = field(repr=False)
    others: Mapping[str, bytes] = field(repr=False)

    @classmethod
    def read(cls, root: Path) -> House:
        sources: dict[str, Source] = {}
        others: dict[str, bytes] = {}
        for top in ("moeverify", "multiprocessing_pdb"):
            for path in sorted((root / top).rglob("*")):
                shown = str(path.relative_to(root))
                if path.suffix == ".py":
                    name = ".".join(path.relative_to(root).with_suffix("").parts).removesuffix(".__init__")
                    sources[name] = Source(shown, name, path.read_text(), path.name == "__init__.py")
                elif path.is_file() and "__pycache__" not in path.parts:
                    others[shown] = path.read_bytes()
        return cls(sources, others)

    @cached_property
    def imports(self) -> dict[str, list[Import]]:
        """Return each file's imports of the project and of torch, also lazy, type-only and by-name ones."""
        return {name: self._list_imports(source) for name, source in self.sources.items()}

    def _list_imports(self, source: Source) -> list[Import]:
        found = list(self._find(source, source.tree.body, lazy=False))
        by_name = "import_module" in source.text or "__import__" in source.text
        for node in ast.walk(source.tree) if by_name else ():
            if _calls(node, "import_module") or _calls(node, "__import__"):
                first = node.args[0] if isinstance(node, ast.Call) and node.args else None
                if isinstance(first, ast.Constant) and str(first.value) in self.sources:
                    found.append(Import(str(first.value), node.lineno, lazy=True))
        return found

    def _find(self, source: Source, body: list[ast.stmt], *, lazy: bool) -> Iterator[Import]:
        for node in body:
            if isinstance(node, ast.Import):
                for alias in node.names:
                    yield from self._keep(alias.name, node.lineno, lazy)
            elif isinstance(node, ast.ImportFrom):
                base = _absolute(node, source)
                for alias in node.names:
                    inner = f"{base}.{alias.name}"
                    yield from self._keep(inner if inner in self.sources else base, node.lineno, lazy)
            else:
                later = (
                    lazy or isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) or _is_for_types(node)
                )
                inner_body = [child for child in _statements(node) if child is not node]
                yield from self._find(source, inner_body, lazy=later)

    def _keep(self, target: str, line: int, lazy: bool) -> Iterator[Import]:
        if target in self.sources or target.partition(".")[0] in (
            "moeverify",
            "multiprocessing_pdb",
            "torch",
        ):
            yield Import(target, line, lazy)


def _statements(node: ast.stmt) -> list[ast.stmt]:
    """Return the statements directly inside a compound statement."""
    return [
        child
        for name in ("body", "orelse", "finalbody", "handlers", "cases")
        for part in getattr(node, name, [])
        for child in (part.body if not isinstance(part, ast.stmt) else [part])
    ]


def _is_for_types(node: ast.stmt) -> bool:
    return isinstance(node, ast.If) and "TYPE_CHECKING" in ast.dump(node.test)


def _absolute(node: ast.ImportFrom, source: Source) -> str:
    if not node.level:
        return node.module or ""
    parts = source.name.split(".")
    parts = parts[: len(parts) - node.level + (1 if source.is_package else 0)]
    return ".".join([*parts, *([node.module] if node.module else [])])


def _calls(node: ast.AST, name: str) -> bool:
    if not isinstance(node, ast.Call):
        return False
    called = node.func
    return (called.attr if isinstance(called, ast.Attribute) else getattr(called, "id", "")) == name


def _is_in(name: str, parts: tuple[str, ...]) -> bool:
    own = name.partition(".")[2]
    return any(own == part or own.startswith(f"{part}.") for part in parts)


def check_floors(house: House) -> Iterator[str]:
    """Yield imports that do not point to a lower floor, and packages without a floor."""
    for source in house.sources.values():
        floor = FLOORS.get(source.package)
        if floor is None:
            yield f"{source.path}:1: the floor of `{source.package}` is not in FLOORS"
            continue
        for found in house.imports[source.name]:
            target = house.sources.get(found.target)
            if target is None:
                if not found.target.startswith("torch"):
                    yield f"{source.path}:{found.line}: `{found.target}` does not exist"
                continue
            below = FLOORS.get(target.package, 99)
            if target.package != source.package and below >= floor:
                yield (
                    f"{source.path}:{found.line}: `{source.package}` (floor {floor}) imports "
                    f"`{found.target}` (floor {below})"
                )


def check_circles(house: House) -> Iterator[str]:
    """Yield import cycles between modules, whether or not the imports are lazy."""
    graph = {
        name: sorted({i.target for i in house.imports[name] if i.target in house.sources} - {name})
        for name, source in house.sources.items()
    }
    done: set[str] = set()
    told: set[frozenset[str]] = set()

    def walk(name: str, trail: list[str]) -> Iterator[str]:
        if name in trail:
            circle = trail[trail.index(name) :]
            if frozenset(circle) not in told:
                told.add(frozenset(circle))
                yield f"{house.sources[name].path}:1: circle {' -> '.join([*circle, name])}"
        elif name not in done:
            for target in graph[name]:
                yield from walk(target, [*trail, name])
            done.add(name)

    for name in graph:
        yield from walk(name, [])


def check_torch(house: House) -> Iterator[str]:
    """Yield how a torch-free module reaches torch, on import or later."""
    known: dict[str, list[str]] = {}
    for name, source in house.sources.items():
        if not _is_in(name, WITHOUT_TORCH):
            continue
        for found in house.imports[name]:
            if found.lazy and found.target.partition(".")[0] == "torch":
                yield f"{source.path}:{found.line}: imports torch"
        trail = _find_torch(house, name, known)
        if trail:
            yield f"{source.path}:1: reaches torch by {' -> '.join(trail)}"


def _find_torch(house: House, name: str, known: dict[str, list[str]]) -> list[str]:
    """Return the modules through which an import reaches torch. Importing a module imports its parents."""
    if name in known:
        return known[name]
    known[name] = []
    targets = [found.target for found in house.imports[name] if not found.lazy]
    parents = [parent for target in [name, *targets] for parent in _list_parents(target)]
    for target in [*targets, *parents]:
        if target.partition(".")[0] == "torch":
            known[name] = [name, target]
        elif target in house.sources and _find_torch(house, target, known):
            known[name] = [name, *known[target]]
        if known[name]:
            break
    return known[name]


def _list_parents(name: str) -> list[str]:
    parts = name.split(".")
    return [".".join(parts[:number]) for number in range(1, len(parts))]


def check_print(house: House) -> Iterator[str]:
    """Yield calls of `print`: output goes through the console of `report/` or of the debugger."""
    for source in house.sources.values():
        if source.package == "multiprocessing_pdb":
            continue
        for node in ast.walk(source.tree):
            if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == "print":
                yield f"{source.path}:{node.lineno}: print"


def check_environment(house: House) -> Iterator[str]:
    """Yield reads of the environment in functions whose result must depend on their arguments alone."""
    for name, source in house.sources.items():
        if source.package == "multiprocessing_pdb" or _is_in(name, READS_ENVIRONMENT):
            continue
        for node in ast.walk(source.tree):
            named = node.attr if isinstance(node, ast.Attribute) else ""
            imported = [alias.name for alias in node.names] if isinstance(node, ast.ImportFrom) else []
            words = {"environ", "environb", "getenv"}
            if named in words or words & set(imported):
                yield f"{source.path}:{getattr(node, 'lineno', 1)}: reads the environment"


def check_readers(house: House) -> Iterator[str]:
    """Yield reads of files without limits on size, depth, numbers and text."""
    for name, source in house.sources.items():
        if source.package == "multiprocessing_pdb" or _is_in(name, READS_FILES):
            continue
        for node in ast.walk(source.tree):
            func = node.func if isinstance(node, ast.Call) else None
            if not isinstance(func, ast.Attribute):
                continue
            owner = func.value.id if isinstance(func.value, ast.Name) else ""
            parses = func.attr in ("load", "loads") and owner in ("json", "np", "pickle", "torch")
            if parses or func.attr in ("read_text", "read_bytes"):
                yield f"{source.path}:{func.lineno}: reads a file past `input_file` and `json_file`"


def check_names(house: House) -> Iterator[str]:
    """Yield meaningless names of modules and packages, and names of public classes that two modules share."""
    for name, source in house.sources.items():
        for part in name.split("."):
            if part in BAD_NAMES:
                yield f"{source.path}:1: `{part}` says nothing about what is inside"
    classes: dict[tuple[str, str], str] = {}
    for source in house.sources.values():
        for node in source.tree.body:
            if isinstance(node, ast.ClassDef) and not node.name.startswith("_"):
                other = classes.setdefault((source.path.partition("/")[0], node.name), source.path)
                if other != source.path:
                    yield f"{source.path}:{node.lineno}: {other} has a class `{node.name}` too"


def check_sizes(house: House) -> Iterator[str]:
    """Yield files and functions that are too long, and a median that is too high."""
    lengths = []
    for source in house.sources.values():
        lines = source.text.count("\n")
        lengths.append(lines)
        if lines > MOST_FILE_LINES:
            yield f"{source.path}:1: {lines} lines, at most {MOST_FILE_LINES}"
        for node in ast.walk(source.tree):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                size = (node.end_lineno or node.lineno) - node.lineno + 1
                if size > MOST_FUNCTION_LINES:
                    yield (
                        f"{source.path}:{node.lineno}: `{node.name}` has {size} lines, "
                        f"at most {MOST_FUNCTION_LINES}"
                    )
    if lengths and statistics.median(lengths) > MEDIAN_FILE_LINES:
        yield f"median of the files: {statistics.median(lengths):g} lines, at most {MEDIAN_FILE_LINES}"


def check_characters(house: House) -> Iterator[str]:
    """Yield lines that are not ASCII."""
    files = {source.path: source.text.encode() for source in house.sources.values()} | dict(house.others)
    for path, content in files.items():
        for number, line in enumerate(content.split(b"\n"), 1):
            found = re.search(rb"[^\x00-\x7f]", line)
            if found:
                yield f"{path}:{number}: not ASCII"


def check_prose(house: House) -> Iterator[str]:
    """Yield docstrings and comments with words of the list, and docstrings with a sentence that is too long.

    Tables and lists are left out.
    """
    for source in house.sources.values():
        for number, text in enumerate(source.text.splitlines(), 1):
            if _AVOIDED_IN_COMMENTS.search(text):
                yield f"{source.path}:{number}: {text.strip()}"
        for line, text in _list_docstrings(source.tree):
            plain = [each for each in text.splitlines() if not each.strip().startswith(("|", "-"))]
            prose = " ".join(" ".join(plain).split())
            found = _AVOIDED.search(prose)
            if found and source.name not in _QUOTED:
                yield f"{source.path}:{line}: `{found.group()}`"
            for sentence in re.split(r"(?<=[.:;])\s", prose):
                if len(sentence.split()) > MOST_WORDS:
                    yield f"{source.path}:{line}: a sentence of {len(sentence.split())} words, at most {MOST_WORDS}"


def _list_docstrings(tree: ast.Module) -> Iterator[tuple[int, str]]:
    """Yield the line and text of docstrings, and of strings under fields and constants."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            for each in node.body:
                value = each.value if isinstance(each, ast.Expr) else None
                if isinstance(value, ast.Constant) and isinstance(value.value, str):
                    yield each.lineno, value.value


RULES = {
    "floors": check_floors,
    "circles": check_circles,
    "torch": check_torch,
    "print": check_print,
    "environment": check_environment,
    "readers": check_readers,
    "names": check_names,
    "sizes": check_sizes,
    "characters": check_characters,
    "prose": check_prose,
}
