"""Arguments and options shared by several commands."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from moeverify.cli.context import is_continuous_integration, own_sections
from moeverify.cli.options import OptionGroup
from moeverify.report.formats.registry import FORMATS

if TYPE_CHECKING:
    from moeverify.cases.schema import Case
    from moeverify.cases.validation.load import LoadedCases
    from moeverify.cases.validation.sweep import Combination
    from moeverify.verification.controller.options import RunOptions


class Device(StrEnum):
    """Device of the ranks; `auto` uses CUDA if there is a GPU."""

    auto = "auto"
    cpu = "cpu"
    cuda = "cuda"


class Backend(StrEnum):
    """Collective backend for GPUs; `auto` uses NCCL if each rank has its own GPU, else gloo."""

    auto = "auto"
    gloo = "gloo"
    nccl = "nccl"


Cases = Annotated[
    list[Path] | None,
    typer.Argument(metavar="[CASE]", help="Case files; a folder means all *.yaml in it.", show_default=False),
]
Examples = Annotated[
    bool,
    typer.Option(
        "--examples", help="Take cases of moeverify itself: one of each parallelism, or those of -k."
    ),
]
Overrides = Annotated[
    list[str] | None,
    typer.Option("--set", metavar="A.B=V", help="Set a field of every case, e.g. layout.tp=2; repeatable."),
]
Pattern = Annotated[
    str | None,
    typer.Option("-k", metavar="PATTERN", help="Select by words in the names: 'fsdp and not (cp or tp)'."),
]
DeviceOption = Annotated[Device, typer.Option("--device", help="Device on which the ranks compute.")]
BackendOption = Annotated[
    Backend,
    typer.Option(
        "--backend",
        help="Backend of collectives between GPUs: NCCL if each rank has its own GPU, else gloo.",
    ),
]
CacheFolder = Annotated[
    Path | None,
    typer.Option(
        "--cache", metavar="DIR", help="Folder for full tensors of goldens; they can be made again."
    ),
]
GoldenFolder = Annotated[
    Path, typer.Option("--goldens", metavar="DIR", help="Folder with the goldens of the cases.")
]
Quiet = Annotated[bool, typer.Option("--quiet", "-q", help="Show only failures, and the last line.")]
Ranks = Annotated[
    int | None,
    typer.Option(
        "--ranks", min=1, max=1 << 20, help="Use at most this many ranks; cases that need more are skipped."
    ),
]
WorldSize = Annotated[int, typer.Option("--world-size", min=1, max=1 << 20, help="Number of ranks.")]
RanksPerNode = Annotated[
    int | None,
    typer.Option("--ranks-per-node", min=1, metavar="N", help="Size of a node, whose ranks are consecutive."),
]
Timeout = Annotated[
    float | None,
    typer.Option(
        "--timeout",
        min=1.0,
        max=1e7,
        metavar="S",
        help="Seconds that a case, or a golden, may take, without waits for a processor.",
    ),
]
Fault = Annotated[
    str | None,
    typer.Option(
        "--fault",
        metavar="PKG.MOD:FN",
        help="Inject a bug: a number of `faults list`, or a function called on each rank before the layout is built.",
    ),
]
RequireGoldens = Annotated[
    bool | None,
    typer.Option(
        "--require-goldens/--no-require-goldens",
        help="Fail when a golden is missing instead of making it. Default: on when CI=true.",
        show_default=False,
    ),
]
Escalate = Annotated[
    bool,
    typer.Option(
        "--escalate/--no-escalate",
        help="Run cases below float64 in wider precisions, too: to find causes, and bugs that rounding hides.",
    ),
]
Sketch = Annotated[
    bool,
    typer.Option(
        "--sketch", help="Record, or judge by, sketches instead of whole tensors; see docs/sketches.md."
    ),
]
Debug = Annotated[
    bool,
    typer.Option(
        "--debug",
        help="Stop ranks at a finding, in multiprocessing_pdb. `run` trains again for it; `watch` needs --guard.",
    ),
]
Seed = Annotated[int | None, typer.Option("--seed", min=0, max=2**32 - 1, help="Seed of the random numbers.")]
Keep = Annotated[
    Path | None,
    typer.Option("--keep", metavar="FILE", help="Keep each result there, and run only those without one."),
]
OutFolder = Annotated[
    Path | None,
    typer.Option("--out", metavar="DIR", help="Keep everything in this folder, for other commands."),
]
Save = Annotated[
    Path | None,
    typer.Option("--save", metavar="FILE", help="Write the result as YAML; a placement also as .json."),
]


def file_of_format(name: str) -> Any:
    """Return the option for the file, or the folder, of a format of `FORMATS`."""
    found = next(each for each in FORMATS if each.name == name)
    return typer.Option(f"--{name}", metavar="DIR" if found.is_folder else "FILE", help=found.help)


DEFAULT_GOLDENS = Path("golden")
EXAMPLES = Path(__file__).parents[1] / "examples"
_FIRST_EXAMPLES = ("ddp", "fsdp2", "tp", "cp-ring", "ep2", "pp")


@dataclass(frozen=True)
class CaseSelection(OptionGroup):
    """The selected cases, and overrides of their fields."""

    cases: Cases = None
    examples: Examples = False
    overrides: Overrides = None
    pattern: Pattern = None

    def list_paths(self) -> list[Path]:
        """Return the paths of the command line, and those of `--examples`."""
        first = [EXAMPLES / f"{name}.yaml" for name in _FIRST_EXAMPLES]
        examples = first if self.pattern is None else [EXAMPLES]
        return [*(self.cases or ()), *(examples if self.examples else ())]

    def list_words(self) -> list[str]:
        """Return the words of the command line that select the cases."""
        words = [*map(str, self.cases or ()), *(["--examples"] if self.examples else [])]
        words += [word for override in self.overrides or () for word in ("--set", override)]
        return [*words, *(["-k", self.pattern] if self.pattern is not None else [])]

    def load(self) -> list[Case]:
        """Return the selected cases.

        Raises: CaseError listing all problems of the cases.
        """
        from moeverify.cases.validation.load import load_cases

        with own_sections():
            return load_cases(self.list_paths(), overrides=tuple(self.overrides or ()), pattern=self.pattern)

    def load_sweep(self, sweeps: Sequence[str]) -> list[Combination]:
        """Return the cases for each combination of `--sweep` values; unchanged without a sweep.

        Raises: CaseError with the problems of the options, or of the first combination if none is valid.
        """
        from moeverify.cases.validation.sweep import load_sweep

        with own_sections():
            return load_sweep(
                self.list_paths(), sweeps, overrides=tuple(self.overrides or ()), pattern=self.pattern
            )

    def load_valid(self) -> LoadedCases:
        """Return the valid cases; an invalid file in a folder does not prevent the others from running.

        Raises: CaseError if an explicitly named file or an option is invalid, or if no case is left.
        """
        from moeverify.cases.validation.load import load_valid_cases

        with own_sections():
            return load_valid_cases(
                self.list_paths(), overrides=tuple(self.overrides or ()), pattern=self.pattern
            )


@dataclass(frozen=True)
class RunSettings(OptionGroup):
    """Settings of how cases run on their ranks."""

    device: DeviceOption = Device.auto
    backend: BackendOption = Backend.auto
    ranks: Ranks = None
    timeout: Timeout = None
    fault: Fault = None
    require_goldens: RequireGoldens = None
    cache: CacheFolder = None
    goldens: GoldenFolder = DEFAULT_GOLDENS

    def make_options(self, cases: list[Case], folder: Path | None) -> RunOptions:
        """Return the options for running these cases; `folder` keeps the complete run.

        Raises: CaseError, before any rank starts, if the `--fault` function does not exist.
        """
        from moeverify.verification.controller.options import RunOptions

        fault = _find_fault(cases, self.fault)
        must_have = is_continuous_integration() if self.require_goldens is None else self.require_goldens
        are_examples = bool(cases) and all(Path(case.file).parent == EXAMPLES for case in cases)
        return RunOptions(
            device=self.device.value,
            backend=self.backend.value,
            num_ranks=self.ranks,
            folder=folder,
            require_goldens=must_have and not are_examples,
            golden_folder=None if are_examples else self.goldens,
            cache_folder=self.cache,
            timeout=self.timeout,
            fault=fault,
        )


def _find_fault(cases: list[Case], fault: str | None) -> str | None:
    """Return the function of `--fault`, which may be a number of the catalogue."""
    from moeverify.cases.function import examine_function
    from moeverify.errors import CaseError
    from moeverify.verification.controller.search_path import search_path

    if fault is None:
        return None
    if ":" not in fault:
        from moeverify.faults.choice import find_target

        return find_target(fault)
    found = (examine_function(fault, search_path(case), "--fault") for case in cases)
    problems = [problem for problem in found if problem is not None]
    if problems:
        raise CaseError(problems[:1])
    return fault
