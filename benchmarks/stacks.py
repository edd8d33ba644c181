"""Other people's stacks: their own parallel code on tiny models, verified as anyone would, from case files alone.

    python benchmarks/stacks.py [--families qwen3_moe,...] [--modes tp,fsdp,...] [--reports FOLDER] [--out PAGE]

Runs the cases of examples/stacks, a sweep over families of transformers under its tensor, expert and data
parallelism, and older releases of transformers. Every case is a recipe and one line of layout; none has code.
Frameworks and releases go into virtual environments of their own, which are made where they are missing.
"""

import argparse
import datetime
import json
import os
import platform
import re
import shlex
import subprocess
import sysconfig
import tempfile
import time
import venv
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
EXAMPLES = ROOT / "examples" / "stacks"
FOUND = "../../examples/found/"  # seen from the page

# The distribution whose parallel code the cases of each folder verify.
FRAMEWORKS = {
    "transformers": "transformers",
    "torch_native": "torch",
    "accelerate": "accelerate",
    "lightning": "lightning",
    "deepspeed": "deepspeed",
    "torchtitan": "torchtitan",
    "megatron": "megatron-core",
}
# What each environment has that the one which runs this may lack, or has in another release.
RELEASES = ("5.17.0", "5.20.0", "5.23.0")
ENVIRONMENTS = {
    "frameworks": ("deepspeed==0.19.8", "lightning==2.6.6", "megatron-core==0.16.1", "torchtitan==0.3.0"),
    **{f"transformers-{release}": (f"transformers=={release}", "accelerate==1.15.0") for release in RELEASES},
}
NEWEST = f"transformers-{RELEASES[-1]}"

# Fields that all configurations share, and those of each family beside them.
COMMON = {
    "vocab_size": 96,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "pad_token_id": 0,
}
EXPERTS = {"num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 16}
LOCAL_EXPERTS = {"num_local_experts": 8, "num_experts_per_tok": 2, "intermediate_size": 16}
MLA = {
    "q_lora_rank": 16,
    "kv_lora_rank": 16,
    "qk_rope_head_dim": 8,
    "qk_nope_head_dim": 8,
    "v_head_dim": 8,
    "num_key_value_heads": 4,
}
FULL_ATTENTION = {"layer_types": ["full_attention", "full_attention"]}
HEAD = {"head_dim": 8}
WINDOW = {"sliding_window": 4}
DENSE = {
    "llama": {},
    "qwen3": HEAD,
    "olmo2": {},
    "phi3": {},
    "gemma3_text": HEAD | WINDOW,
    "apertus": {},
    "olmo3": {},
    "gemma2": HEAD | WINDOW,
    "mistral": HEAD,
    "qwen2": {},
    "granite": {},
    "smollm3": {},
    "cohere2": WINDOW,
    "starcoder2": {},
    "glm4": HEAD,
    "ministral": HEAD,
    "helium": HEAD,
    "seed_oss": HEAD | {"attention_dropout": 0.0, "residual_dropout": 0.0},
    "arcee": {},
    "exaone4": HEAD | WINDOW,
    "hunyuan_v1_dense": HEAD,
    "ernie4_5": HEAD,
    "nemotron": {},
    "nanochat": {},
    "youtu": MLA,
    "vaultgemma": HEAD | WINDOW,
}
ROUTED = {
    "n_routed_experts": 8,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 16,
    "first_k_dense_replace": 1,
}
SHARED = {"shared_expert_intermediate_size": 16}
MIXTURES = {
    "mixtral": LOCAL_EXPERTS,
    "olmoe": {"num_experts": 8, "num_experts_per_tok": 2, "intermediate_size": 16},
    "qwen2_moe": EXPERTS | SHARED,
    "qwen3_moe": EXPERTS | HEAD,
    "phimoe": LOCAL_EXPERTS | {"router_jitter_noise": 0.0},
    "gpt_oss": LOCAL_EXPERTS | HEAD | WINDOW,
    "granitemoe": LOCAL_EXPERTS,
    "glm4_moe": ROUTED | HEAD,
    "ernie4_5_moe": {
        "moe_num_experts": 8,
        "moe_k": 2,
        "moe_intermediate_size": 16,
        "moe_layer_start_index": 1,
    },
    "minimax_m2": LOCAL_EXPERTS | HEAD,
    "deepseek_v3": ROUTED | MLA | {"n_group": 2, "topk_group": 1},
    "deepseek_v2": ROUTED | MLA | {"n_group": 2, "topk_group": 1, "topk_method": "greedy"},
    "hunyuan_v1_moe": {"num_experts": 8, "moe_topk": 2, "intermediate_size": 16} | HEAD,
    "flex_olmo": {"num_experts": 8, "num_experts_per_tok": 2, "intermediate_size": 16},
    "granitemoeshared": LOCAL_EXPERTS | {"shared_intermediate_size": 16},
    "minimax": LOCAL_EXPERTS | HEAD | FULL_ATTENTION,
    "qwen3_next": EXPERTS | HEAD | SHARED | FULL_ATTENTION,
    "afmoe": EXPERTS | HEAD | WINDOW | {"num_dense_layers": 1},
    "lfm2_moe": EXPERTS | FULL_ATTENTION | {"num_dense_layers": 1},
    "exaone_moe": EXPERTS | HEAD | WINDOW | {"first_k_dense_replace": 1},
    "glm4_moe_lite": ROUTED | MLA,
    "mimo_v2_flash": ROUTED | HEAD | {"v_head_dim": 8},
    "cohere2_moe": {"num_experts": 8, "num_experts_per_tok": 2, "intermediate_size": 16} | WINDOW,
    "laguna": EXPERTS | HEAD,
    "solar_open": ROUTED | HEAD,
    "hy_v3": EXPERTS | HEAD,
    "mellum": EXPERTS | HEAD,
}
FAMILIES = DENSE | MIXTURES
# Layout, implementation of the experts, precision. torch's grouped_mm has no float64; FSDP with expert parallelism
# is verified in float32, since torch 2.13.0 divides expert gradients twice in float64 (examples/found).
MODES = {
    "tp": ({"tp": 2}, "eager", "float64"),
    "tp-accumulation": ({"tp": 2, "micro_batches": 2}, "eager", "float64"),
    "tp-ep": ({"tp": 2, "arguments": {"ep_size": 2}}, "eager", "float64"),
    "tp-ep-batched_mm": ({"tp": 2, "arguments": {"ep_size": 2}}, "batched_mm", "float64"),
    "tp-ep-grouped_mm": ({"tp": 2, "arguments": {"ep_size": 2}}, "grouped_mm", "float32"),
    "tp-ep-all_reduce": (
        {"tp": 2, "arguments": {"ep_size": 2, "ep_implementation": "all_reduce"}},
        "eager",
        "float64",
    ),
    "fsdp": ({"dp_shard": 2}, "eager", "float64"),
    "fsdp-accumulation": ({"dp_shard": 2, "micro_batches": 2}, "eager", "float64"),
    "fsdp-ep": ({"dp_shard": 2, "arguments": {"ep_size": 2}}, "eager", "float32"),
    "fsdp-ep-grouped_mm": ({"dp_shard": 2, "arguments": {"ep_size": 2}}, "grouped_mm", "float32"),
    "fsdp-tp": ({"dp_shard": 2, "tp": 2}, "eager", "float64"),
    "fsdp-tp-ep": ({"dp_shard": 2, "tp": 2, "arguments": {"ep_size": 4}}, "eager", "float32"),
}
# Layouts of OLMoE that each release is tried with: releases before 5.21 have a flag for expert parallelism, and take
# it without a size, which divides nothing.
RELEASE_MODES = {
    "flag": {"tp": 2, "arguments": {"enable_expert_parallel": True}},
    "flag-without-size": {"tp": 2, "arguments": {"enable_expert_parallel": True, "tp_size": None}},
}
# Families that keep some parameters in float32, which FSDP2 takes beside others of float32 only.
FLOAT32_UNDER_FSDP = ("ernie4_5_moe", "hunyuan_v1_moe")
# Families whose plan has the style `replicated_with_grad_allreduce`.
SUMMED_AGAIN = (
    "qwen3",
    "gemma3_text",
    "apertus",
    "exaone4",
    "qwen3_moe",
    "qwen3_next",
    "exaone_moe",
    "laguna",
    "hy_v3",
    "mellum",
)


@dataclass(frozen=True)
class KnownBug:
    """What differs in `release`: `page` is its folder in examples/found.

    `wrong` is in the names of the gradients of the first step that differ, or in the error that a rank raises.
    """

    release: str
    reason: str
    page: str
    wrong: str


NORMS = KnownBug(
    release="transformers 5.23.0",
    reason="q_norm and k_norm are summed over tp again in each micro-batch",
    page="transformers-tp-gradient-accumulation",
    wrong="_norm",
)
ACTIVATION = KnownBug(
    release="transformers 5.23.0",
    reason="the activation's parameters",
    page="transformers-tp-apertus-activation",
    wrong="act_fn|_norm",
)
OTHER_RANKS = KnownBug(
    release="transformers 5.23.0",
    reason="eager experts refuse what other ranks' experts take",
    page="transformers-gpt-oss-experts-of-other-ranks",
    wrong="Class values must be smaller than num_classes",
)
# By family and mode, in the newest release that was tried.
KNOWN = {(family, "tp-accumulation"): NORMS for family in SUMMED_AGAIN}
KNOWN |= {("apertus", mode): ACTIVATION for mode in ("tp", "tp-accumulation", "fsdp-tp")}
KNOWN |= {("gpt_oss", "tp-ep-all_reduce"): OTHER_RANKS}


def write_case(folder, family, mode):
    """Write the case of a family and mode, with its recipe, and return its path."""
    layout, experts, precision = (
        MODES[mode] if mode in MODES else (RELEASE_MODES[mode], "batched_mm", "float64")
    )
    if family in FLOAT32_UNDER_FSDP and "dp_shard" in layout:
        precision = "float32"
    name = f"{family}-{experts}-{precision}"
    arguments = {"model_type": family} | COMMON | FAMILIES[family]
    recipe = {
        "model": {
            "factory": "moeverify.stacks.transformers:make",
            "arguments": arguments | ({"experts": experts} if family in MIXTURES else {}),
            "vocab_size": COMMON["vocab_size"],
        },
        "data": {"batch": 8, "seq_len": 10, "min_valid": 0.5},
        "optimizer": {"name": "adamw", "lr": 0.01, "weight_decay": 0.1, "clip_norm": 0.1},
        "steps": 1,
        "precision": precision,
    }
    (folder / "recipes").mkdir(parents=True, exist_ok=True)
    (folder / "recipes" / f"{name}.yaml").write_text(json.dumps(recipe))
    parallelize = {"parallelize": "moeverify.stacks.transformers:parallelize"}
    case = {"name": f"{family}--{mode}", "recipe": name, "layout": layout | parallelize}
    path = folder / f"{family}--{mode}.yaml"
    path.write_text(json.dumps(case | {"checks": {"timeout": 300.0, "repeat": "never"}}))
    return path


def make_environment(folder):
    """Make the virtual environment of that name in `ENVIRONMENTS`, unless it is there, and return its interpreter.

    Packages that it does not install, torch above all, are those of the environment that runs this.
    """
    python, own = folder / "bin" / "python", ENVIRONMENTS[folder.name]
    installed = folder / "installed.txt"
    if installed.exists() and installed.read_text().split() == list(own):
        return python
    print(f"making {folder}", flush=True)
    venv.create(folder, clear=True, symlinks=True)
    libraries = Path(sysconfig.get_path("purelib", vars={"base": str(folder)}))
    (libraries / "shared.pth").write_text(sysconfig.get_path("purelib") + "\n")
    names = [requirement.partition("==")[0] for requirement in own]
    pinned = (ROOT / "constraints.txt").read_text().splitlines()
    constraints = folder / "constraints.txt"
    constraints.write_text("\n".join(line for line in pinned if line.partition("==")[0] not in names))
    command = [str(python), "-m", "pip", "install", "--quiet", "--disable-pip-version-check"]
    command += ["-c", str(constraints), "torch", *own]
    # DeepSpeed would build its operations for devices that need not be here.
    subprocess.run(command, check=True, env=os.environ | {"DS_BUILD_OPS": "0"})
    # Written last: an environment that was broken off is made again.
    installed.write_text("\n".join(own))
    return python


def list_versions(python):
    """Return the versions of the frameworks that an interpreter finds, by the name of their distribution."""
    names = ("torch", *dict.fromkeys(FRAMEWORKS.values()))
    program = (
        "import importlib.metadata as m, json, sys\n"
        "found = {d.name for d in m.distributions()}\n"
        "print(json.dumps({name: m.version(name) for name in sys.argv[1:] if name in found}))"
    )
    printed = subprocess.run([python, "-c", program, *names], capture_output=True, text=True, check=True)
    return json.loads(printed.stdout)


def run_cases(paths, python, scratch, reports):
    """Run those cases in one launch that have no report yet, keep one report a case, and return all of them."""
    kept = {path: reports / f"{path.parent.name}--{path.stem}.json" for path in sorted(paths)}
    missing = [path for path, report in kept.items() if not report.exists()]
    if missing:
        together = scratch / "together.json"
        together.unlink(missing_ok=True)
        command = [str(python), "-m", "moeverify", "run", *map(str, missing), "--device", "cpu"]
        command += ["--json", str(together), "--quiet"]
        command += ["--cache", str(scratch / "cache"), "--goldens", str(scratch / "goldens")]
        started = time.monotonic()
        paths_of_modules = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))
        environment = os.environ | {"PYTHONPATH": paths_of_modules}
        subprocess.run(command, cwd=ROOT, stdout=subprocess.DEVNULL, env=environment, check=False)
        print(
            f"{len(missing)} cases of {paths[0].parent.name}: {time.monotonic() - started:.0f} s", flush=True
        )
        versions = list_versions(python)
        # Files of two folders may have one name.
        by_file = {
            (ROOT / case["file"]).resolve(): case for case in json.loads(together.read_text())["cases"]
        }
        for path in missing:
            kept[path].write_text(json.dumps(by_file[path.resolve()] | {"versions": versions}))
    return [json.loads(report.read_text()) for report in kept.values()]


def run_examples(environments, scratch, reports):
    """Run the example cases, one launch for each framework, whose changes to torch then stay its own."""
    reported = []
    for folder in sorted(path for path in EXAMPLES.iterdir() if path.is_dir()):
        own = any(line.startswith(f"{FRAMEWORKS[folder.name]}==") for line in ENVIRONMENTS["frameworks"])
        python = make_environment(environments / ("frameworks" if own else NEWEST))
        reported += run_cases(sorted(folder.glob("*.yaml")), python, scratch, reports)
    return reported


def run_releases(environments, scratch, reports):
    """Verify each release of transformers with the layouts of `RELEASE_MODES`, and return reports by release."""
    reported = {}
    for release in RELEASES:
        python = make_environment(environments / f"transformers-{release}")
        paths = [write_case(scratch / f"release-{release}", "olmoe", mode) for mode in RELEASE_MODES]
        reported[release] = run_cases(paths, python, scratch, reports)
    return reported


def describe_releases(releases):
    """Return the table of the releases as lines of Markdown."""
    lines = [
        "",
        "## Releases of transformers",
        "",
        "OLMoE with `batched_mm`, 2 ranks, two ways to ask for experts.",
    ]
    lines += ["", f"| release | {' | '.join(RELEASE_MODES)} |", "|---" * (len(RELEASE_MODES) + 1) + "|"]
    for release, cases in releases.items():
        cells = {case["name"].partition("--")[2]: describe(case, None) for case in cases}
        lines.append(f"| {release} | {' | '.join(cells[mode] for mode in RELEASE_MODES)} |")
    return lines


def count_tensors(case):
    """Return how many logical tensors the checks of a case have compared."""
    return sum(check["tensors"] for check in case["checks"])


def describe(case, known):
    """Return the verdict of a case as a cell: with the cause where it differs, and whether that is known."""
    if case["verdict"] == "pass":
        return "pass" + (f" (declared as a bug of {known.release}: fixed?)" if known else "")
    if case["verdict"] == "error":
        reason = case["reason"].splitlines()[0]
        seen, told = [reason], f"error: {reason[:90]}"
    else:
        finding = case["findings"][0]
        found = case["findings"]
        seen = [each["tensor"] for each in found if (each["check"], each["step"]) == ("gradient", 0)]
        told = f"**{finding.get('cause') or finding['check']}** in `{finding['tensor']}`"
    if known and seen and all(re.search(known.wrong, each) for each in seen):
        return f"[known bug of {known.release}]({FOUND}{known.page}): {known.reason}"
    return told


def describe_declared(path):
    """Return what a case file declares to differ, and why, as it stands there."""
    match = re.search(r'because: "(.*)"', path.read_text())
    return f", with a difference that it declares: {match[1]}" if match else ""


def collect_versions(cases):
    """Return the versions of the frameworks that cases ran with."""
    return {name: version for case in cases for name, version in case["versions"].items()}


def make_page(command, examples, sweep, modes, releases):
    """Return the page as Markdown."""
    versions = ", ".join(f"{name} {version}" for name, version in collect_versions(examples).items())
    lines = [
        "# Other people's stacks",
        "",
        "Their own parallel code on tiny models, verified from case files alone: no case of this page has a line",
        "of code; those of torchtitan and of DeepSpeed's experts name the tiny models beside them. AdamW with a clip",
        "that binds, on CPUs (gloo), two steps in the examples, one in the sweep. `accumulation` is 2 micro-batches;",
        "experts are `eager` where a mode names no other implementation. Everything is in float64 but DeepSpeed and",
        "Megatron, which have float32, and modes with `grouped_mm` or with FSDP and expert parallelism.",
        "`make stacks` makes this page.",
        "",
        f"`{command}`, {datetime.datetime.now(datetime.UTC).date()}, python {platform.python_version()}, {versions}",
        "",
        "## Ready-made adapters",
        "",
        "| case | release | lines of case file | tensors | seconds | verdict |",
        "|---|---|---|---|---|---|",
    ]
    for case in examples:
        num_lines = len(Path(ROOT / case["file"]).read_text().splitlines())
        verdict = describe(case, None) + describe_declared(Path(ROOT / case["file"]))
        framework = FRAMEWORKS[Path(case["file"]).parent.name]
        release = f"{framework} {case['versions'][framework]}"
        cells = (case["name"], release, num_lines, count_tensors(case), f"{case['seconds']:.1f}", verdict)
        lines.append(f"| {' | '.join(map(str, cells))} |")
    lines += ["", "## Families of transformers", "", f"| family | {' | '.join(modes)} |"]
    lines.append("|---" * (len(modes) + 1) + "|")
    by_name = {case["name"]: case for case in sweep}
    for family in dict.fromkeys(case["name"].partition("--")[0] for case in sweep):
        cells = []
        for mode in modes:
            case = by_name.get(f"{family}--{mode}")
            cells.append("" if case is None else describe(case, KNOWN.get((family, mode))))
        lines.append(f"| {family} | {' | '.join(cells)} |")
    passed = sum(case["verdict"] == "pass" for case in sweep)
    total = sum(map(count_tensors, sweep))
    lines += ["", f"{passed} of {len(sweep)} combinations pass; {total} tensors were compared."]
    lines += describe_releases(releases)
    return "\n".join(lines) + "\n"


def main():
    """Run everything and write the page."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--out", type=Path, default=ROOT / "docs" / "results" / "stacks.md")
    parser.add_argument("--families", default=",".join(FAMILIES))
    parser.add_argument("--modes", default=",".join(MODES))
    parser.add_argument(
        "--reports", type=Path, help="folder that keeps every report: what is there is not run again"
    )
    parser.add_argument(
        "--environments",
        type=Path,
        default=ROOT / ".venv-stacks",
        help="folder of the virtual environments (default: .venv-stacks)",
    )
    parser.add_argument("--together", type=int, default=18, help="families in one launch")
    options = parser.parse_args()
    modes = options.modes.split(",")
    given = {"--families": options.families, "--modes": options.modes}
    chosen = [word for pair in given.items() if pair[1] != parser.get_default(pair[0][2:]) for word in pair]
    command = shlex.join(["python", "benchmarks/stacks.py", *chosen])
    with tempfile.TemporaryDirectory() as name:
        scratch = Path(name)
        reports = options.reports or scratch
        reports.mkdir(parents=True, exist_ok=True)
        environments = options.environments.resolve()
        releases = run_releases(environments, scratch, reports)
        examples = run_examples(environments, scratch, reports)
        families, sweep = [family for family in options.families.split(",") if family], []
        python = make_environment(environments / NEWEST)
        for first in range(0, len(families), options.together):
            some = families[first : first + options.together]
            cases = [
                write_case(scratch / "sweep", family, mode)
                for family in some
                for mode in modes
                if family in MIXTURES or "ep" not in mode
            ]
            sweep += run_cases(cases, python, scratch, reports)
        options.out.write_text(make_page(command, examples, sweep, modes, releases))


if __name__ == "__main__":
    main()
