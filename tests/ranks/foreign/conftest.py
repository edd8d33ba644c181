"""Cases with models of users' own, all run in one launch of two ranks."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import pytest

from moeverify.case.load import load_cases
from moeverify.compare.result import CaseResult, Event, Finding
from moeverify.suite.options import RunOptions
from moeverify.suite.run import run_cases

PROGRAMS = Path(__file__).parent / "programs"
EXAMPLES = Path(__file__).parents[3] / "examples"


@dataclasses.dataclass(frozen=True)
class Outcomes:
    """What came of each case, by name."""

    results: Mapping[str, CaseResult]
    num_launches: int

    def find(self, case: str, check: str, step: int = 0) -> dict[str, Finding]:
        """Return the findings of one check at one step, by tensor."""
        findings = self.results[case].findings
        return {
            finding.tensor: finding for finding in findings if (finding.check, finding.step) == (check, step)
        }


@pytest.fixture
def verify(tmp_path: Path) -> Callable[..., Outcomes]:
    """Return a function that runs an example, `folder/name`, with overrides."""

    def do(example: str, *overrides: str) -> Outcomes:
        return _run([EXAMPLES / f"{example}.yaml"], tmp_path, *overrides)

    return do


def _run(files: Sequence[Path], folder: Path, *overrides: str) -> Outcomes:
    cases = load_cases(files, overrides=overrides)
    options = RunOptions(device="cpu", golden_folder=folder / "golden", cache_folder=folder / "cache")
    result = run_cases(cases, options, _ignore)
    assert result is not None
    return Outcomes({case.name: case for case in result.cases}, result.launches)


def _ignore(event: Event) -> None:
    pass


SMALL = "factory: 'own_models:make', vocab_size: 32"
FSDP = "dp_shard: 2"

# Each: (model, layout). The recipe is the same otherwise.
CASES = {
    "plain": (SMALL, FSDP),
    "fsdp1": (
        f"{SMALL}, loss: 'own_models:sum_unless_fsdp2'",
        "dp_shard: 2, data_parallel: fsdp1, micro_batches: 2",
    ),
    "loss-sum": (f"{SMALL}, loss: 'own_models:sum_tokens'", FSDP),
    "loss-each": (f"{SMALL}, loss: 'own_models:each_token'", FSDP),
    "loss-mean": (f"{SMALL}, loss: 'own_models:mean_tokens'", FSDP),
    "dropout": (f"{SMALL}, arguments: {{dropout: 0.1}}", FSDP),
    "no-module": ("factory: 'own_modules:make', vocab_size: 32", FSDP),
    "no-function": ("factory: 'own_models:mak', vocab_size: 32", FSDP),
    "no-callable": ("factory: 'own_models:number', vocab_size: 32", FSDP),
    "no-model": ("factory: 'own_models:make_nothing', vocab_size: 32", FSDP),
    "failing": ("factory: 'own_models:make_failing', vocab_size: 32", FSDP),
    "narrow": ("factory: 'own_models:Narrow', vocab_size: 32", FSDP),
    "broken-import": ("factory: 'broken_import:make', vocab_size: 32", FSDP),
    "no-parallelize": (SMALL, f"{FSDP}, parallelize: 'own_models:shard'"),
    "finish": (SMALL, f"{FSDP}, parallelize: 'own_models:halve_at_the_end'"),
    "nothing": (SMALL, f"{FSDP}, parallelize: 'own_models:return_nothing'"),
    "reference": ("preset: tiny-mixtral-8x7b", f"{FSDP}, parallelize: 'own_models:shard_blocks'"),
    "reference-forgotten": ("preset: tiny-gpt", f"{FSDP}, parallelize: 'own_models:forget_to_shard'"),
}


@pytest.fixture(scope="session")
def own(tmp_path_factory: pytest.TempPathFactory) -> Outcomes:
    """Return the outcomes of `CASES`, whose files stand beside the programs that they name."""
    folder = tmp_path_factory.mktemp("own")
    for program in PROGRAMS.glob("*.py"):
        (folder / program.name).write_text(program.read_text())
    for name, (model, layout) in CASES.items():
        (folder / f"{name}.yaml").write_text(
            f"recipe:\n  name: {name}\n  model: {{{model}}}\n  data: {{batch: 4, seq_len: 8, min_valid: 0.5}}\n"
            f"  optimizer: {{name: sgd, lr: 0.1}}\nlayout: {{{layout}}}\nchecks: {{repeat: never, timeout: 60.0}}\n"
        )
    return _run([folder], folder)


@pytest.fixture(scope="session")
def examples(tmp_path_factory: pytest.TempPathFactory) -> Outcomes:
    """Return the outcomes of the examples that need two ranks."""
    files = [EXAMPLES / "my_gpt" / f"{name}.yaml" for name in ("ddp", "fsdp2", "tp")]
    return _run([*files, EXAMPLES / "my_moe" / "ep.yaml"], tmp_path_factory.mktemp("examples"))
