"""Cases with users' own models, all run in one launch of two ranks."""

from __future__ import annotations

from pathlib import Path

import pytest
from foreign_cases import EXAMPLES, Outcomes, run_files

PROGRAMS = Path(__file__).parent / "programs"


SMALL = "factory: 'own_models:make', vocab_size: 32"
MOE = "factory: 'my_moe.model:make', loss: 'my_moe.model:loss', vocab_size: 80"
GPT = "factory: 'my_gpt.model:make', vocab_size: 96"
FSDP = "dp_shard: 2"
WIDE = "in_float32: ['layers.*.norm', 'layers.*.router']"

# Each: (model, layout, further checks). The recipe is the same otherwise.
CASES: dict[str, tuple[str, ...]] = {
    "plain": (SMALL, FSDP),
    "fsdp1": (
        f"{SMALL}, loss: 'own_models:sum_unless_fsdp2'",
        "dp_shard: 2, data_parallel: fsdp1, micro_batches: 2",
    ),
    "settings": (SMALL, f"{FSDP}, parallelize: 'own_models:shard_and_change_settings'"),
    "loss-sum": (f"{SMALL}, loss: 'own_models:sum_tokens'", FSDP),
    "loss-each": (f"{SMALL}, loss: 'own_models:each_token'", FSDP),
    "loss-mean": (f"{SMALL}, loss: 'own_models:mean_tokens'", FSDP),
    "loss-terms": (
        f"{SMALL}, loss: 'own_models:name_terms'",
        f"{FSDP}, parallelize: 'own_models:shard_and_count'",
    ),
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
    "group-factory": ("factory: 'own_models:make_in_group', vocab_size: 32", FSDP),
    "group-factory-wrong": (
        "factory: 'own_models:make_in_group', vocab_size: 32",
        f"{FSDP}, parallelize: 'own_models:halve_at_the_end'",
    ),
    "own-expert": (
        "factory: 'own_models:Experts', vocab_size: 32",
        "tp: 2, parallelize: 'own_models:keep_one_expert'",
    ),
    "rounded-expert": (
        "factory: 'own_models:RoundedExperts', vocab_size: 32",
        "tp: 2, parallelize: 'own_models:keep_one_rounded_expert'",
    ),
    "unused": (SMALL, "tp: 2, parallelize: 'own_models:forget_to_shard'"),
    "unused-declared": (SMALL, "tp: 2, parallelize: 'own_models:forget_to_shard'", "allow_replicated: [tp]"),
    "not-reduced": (SMALL, f"{FSDP}, parallelize: 'own_models:forget_to_reduce'"),
    "no-gradients": (SMALL, f"{FSDP}, parallelize: 'own_models:keep_own_gradients'"),
    "engine": (SMALL, f"{FSDP}, parallelize: 'own_models:main_gradients'"),
    "reference": ("preset: tiny-mixtral-8x7b", f"{FSDP}, parallelize: 'own_models:shard_blocks'"),
    "moe-by-sender": (MOE, f"{FSDP}, parallelize: 'own_moes:by_sender'"),
    "moe-not-put-back": (MOE, f"{FSDP}, parallelize: 'own_moes:not_put_back'"),
    "moe-dropped": (MOE, f"{FSDP}, parallelize: 'own_moes:dropped'"),
    "moe-summed": (MOE, f"{FSDP}, micro_batches: 2, parallelize: 'my_moe.wrong:parallelize'"),
    "gpt-wrong": (GPT, "tp: 2, loss_parallel: true, parallelize: 'my_gpt.wrong:parallelize'"),
    "moe-rounded": (MOE, f"{FSDP}, parallelize: 'own_moes:rounded'"),
    "reference-forgotten": ("preset: tiny-gpt", f"{FSDP}, parallelize: 'own_models:forget_to_shard'"),
}
# The first wrong operation is searched for these alone: hypotheses and checks name the others.
SEARCHED = ("not-reduced", "moe-by-sender", "moe-not-put-back", "moe-dropped", "moe-rounded")


@pytest.fixture(scope="session")
def own(tmp_path_factory: pytest.TempPathFactory) -> Outcomes:
    """Return the outcomes of `CASES`. Their files are beside the programs that they name."""
    folder = tmp_path_factory.mktemp("own")
    for program in PROGRAMS.glob("*.py"):
        (folder / program.name).write_text(program.read_text())
    for name in ("my_gpt", "my_moe"):
        (folder / name).symlink_to(EXAMPLES / name)
    for name, (model, layout, *more) in CASES.items():
        checks = ", ".join(["repeat: never", "timeout: 60.0", *more])
        (folder / f"{name}.yaml").write_text(
            f"recipe:\n  name: {name}\n  model: {{{model}}}\n  data: {{batch: 4, seq_len: 8, min_valid: 0.5}}\n"
            f"  optimizer: {{name: sgd, lr: 0.1, clip_norm: 0.1}}\nlayout: {{{layout}}}\nchecks: {{{checks}}}\n"
        )
    files = {name: folder / f"{name}.yaml" for name in CASES}
    found = run_files([files[name] for name in CASES if name not in SEARCHED], folder, explain_seconds=0.0)
    searched = run_files([files[name] for name in SEARCHED], folder)
    return Outcomes({**found.results, **searched.results}, found.num_launches)


# Each a layout of a model in `mixed_models`, parallelized in mixed precision.
MIXED = {
    "sequence": "tp: 2, parallelize: 'mixed_models:divide_sequence'",
    "built-in": "dp_shard: 2",
    "right": f"{FSDP}, parallelize: 'mixed_models:right'",
    "micro-batches": f"{FSDP}, micro_batches: 2, parallelize: 'mixed_models:right'",
    "wide-norms": f"{FSDP}, parallelize: 'mixed_models:wide_norms', {WIDE}",
    "wide-undeclared": f"{FSDP}, parallelize: 'mixed_models:wide_norms'",
    "narrow-declared": f"{FSDP}, parallelize: 'mixed_models:right', {WIDE}",
    "autocast": f"{FSDP}, parallelize: 'mixed_models:autocast', in_float32: ['layers.*.norm', embed]",
    "compiled": f"{FSDP}, parallelize: 'mixed_models:compiled'",
    "compiled-without": f"{FSDP}, parallelize: 'mixed_models:compiled_without'",
    "forgotten": f"{FSDP}, parallelize: 'mixed_models:forgotten'",
    "experts-without": f"{FSDP}, parallelize: 'mixed_models:experts_without'",
    "narrow-reduction": f"{FSDP}, parallelize: 'mixed_models:narrow_reduction'",
    "narrow-reduction-of-one": f"{FSDP}, parallelize: 'mixed_models:narrow_reduction_of_one'",
    "narrow-storage": f"{FSDP}, parallelize: 'mixed_models:narrow_storage'",
}


@pytest.fixture(scope="session")
def mixed(tmp_path_factory: pytest.TempPathFactory) -> Outcomes:
    """Return the outcomes of `MIXED`."""
    folder = tmp_path_factory.mktemp("mixed")
    (folder / "mixed_models.py").write_text((PROGRAMS / "mixed_models.py").read_text())
    for name, layout in MIXED.items():
        model = "Sequence" if name == "sequence" else "Mixture"
        (folder / f"{name}.yaml").write_text(
            f"recipe:\n  name: {model}\n  model: {{factory: 'mixed_models:{model}', vocab_size: 32}}\n"
            "  data: {batch: 8, seq_len: 8, min_valid: 0.5}\n  precision: mixed\n"
            f"  optimizer: {{name: sgd, lr: 0.1}}\nlayout: {{{layout}}}\nchecks: {{timeout: 60.0, repeat: never}}\n"
        )
    return run_files([folder], folder)
