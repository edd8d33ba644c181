"""Other people's stacks: their own parallel code on tiny models, verified as anyone would, from case files alone.

    python benchmarks/stacks.py [--families qwen3_moe,...] [--modes tp,fsdp,...] [--reports FOLDER] [--out PAGE]

Runs the cases of examples/stacks, and a sweep over families of transformers under its tensor, expert and data
parallelism. Every case is a recipe and one line of layout; none has code. Needs transformers and accelerate.
"""

import argparse
import datetime
import importlib.metadata
import json
import platform
import re
import shlex
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
EXAMPLES = ROOT / "examples" / "stacks"

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
FAMILIES = {
    "llama": {},
    "qwen3": {"head_dim": 8},
    "olmo2": {},
    "phi3": {},
    "gemma3_text": {"head_dim": 8, "sliding_window": 4},
    "apertus": {},
    "mixtral": LOCAL_EXPERTS,
    "olmoe": {"num_experts": 8, "num_experts_per_tok": 2, "intermediate_size": 16},
    "qwen2_moe": EXPERTS | {"shared_expert_intermediate_size": 16},
    "qwen3_moe": EXPERTS | {"head_dim": 8},
    "phimoe": LOCAL_EXPERTS,
    "gpt_oss": LOCAL_EXPERTS | {"head_dim": 8, "sliding_window": 4},
    "granitemoe": LOCAL_EXPERTS,
    "glm4_moe": {
        "n_routed_experts": 8,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 16,
        "head_dim": 8,
        "first_k_dense_replace": 1,
    },
    "ernie4_5_moe": {
        "moe_num_experts": 8,
        "moe_k": 2,
        "moe_intermediate_size": 16,
        "moe_layer_start_index": 1,
    },
    "minimax_m2": LOCAL_EXPERTS | {"head_dim": 8},
}
DENSE = {"llama", "qwen3", "olmo2", "phi3", "gemma3_text", "apertus"}
MODES = {
    "tp": {"tp": 2},
    "tp-ep": {"tp": 2, "arguments": {"ep_size": 2}},
    "fsdp": {"dp_shard": 2},
    "tp-accumulation": {"tp": 2, "micro_batches": 2},
}
TP_NORMS = "q_norm and k_norm are summed over tp again in each micro-batch"
FOUND = "../../examples/found/"
# (family, mode) -> (the reason, its page, the parameters whose gradients it makes wrong in the first step): what
# differs in the newest release that was tried.
KNOWN = {
    **{
        (family, "tp-accumulation"): (TP_NORMS, f"{FOUND}transformers-tp-gradient-accumulation", "_norm")
        for family in ("qwen3", "qwen3_moe", "gemma3_text", "apertus")
    },
    **{
        ("apertus", mode): (
            "the activation's parameters",
            f"{FOUND}transformers-tp-apertus-activation",
            "act_fn|_norm",
        )
        for mode in ("tp", "tp-accumulation")
    },
}


def write_cases(folder, families, modes):
    """Write a recipe for each family and a case for each family and mode."""
    (folder / "recipes").mkdir(parents=True)
    for family in families:
        recipe = {
            "model": {
                "factory": "moeverify.stacks.transformers:make",
                "arguments": {"model_type": family} | COMMON | FAMILIES[family],
                "vocab_size": COMMON["vocab_size"],
            },
            "data": {"batch": 8, "seq_len": 10, "min_valid": 0.5},
            "optimizer": {"name": "adamw", "lr": 0.01, "weight_decay": 0.1, "clip_norm": 0.1},
        }
        (folder / "recipes" / f"{family}.yaml").write_text(json.dumps(recipe))
        for mode in modes:
            if mode == "tp-ep" and family in DENSE:
                continue
            layout = MODES[mode] | {"parallelize": "moeverify.stacks.transformers:parallelize"}
            case = {"name": f"{family}--{mode}", "recipe": family, "layout": layout}
            (folder / f"{family}--{mode}.yaml").write_text(json.dumps(case | {"checks": {"timeout": 300.0}}))


def run_cases(paths, scratch, report):
    """Run cases in one launch unless their `report` is there; return what it says of them."""
    if report.exists():
        return json.loads(report.read_text())["cases"]
    command = [
        sys.executable,
        "-m",
        "moeverify",
        "run",
        *map(str, sorted(paths)),
        "--device",
        "cpu",
        "--json",
        str(report),
    ]
    command += ["--cache", str(scratch / "cache"), "--goldens", str(scratch / "goldens"), "--quiet"]
    subprocess.run(command, cwd=ROOT, stdout=subprocess.DEVNULL, check=False)
    return json.loads(report.read_text())["cases"]


def count_tensors(case):
    """Return how many logical tensors the checks of a case have compared."""
    return sum(check["tensors"] for check in case["checks"])


def describe(case, known):
    """Return the verdict of a case as a cell: with the cause where it differs, and whether that is known."""
    if case["verdict"] in ("pass", "error"):
        reason = f": {case['reason'].splitlines()[0][:90]}" if case["verdict"] == "error" else ""
        fixed = " (declared as a bug: fixed in this release?)" if known and case["verdict"] == "pass" else ""
        return f"{case['verdict']}{reason}{fixed}"
    finding = case["findings"][0]
    cause = finding.get("cause") or finding["check"]
    first = [each["tensor"] for each in case["findings"] if (each["check"], each["step"]) == ("gradient", 0)]
    if known and first and all(re.search(known[2], tensor) for tensor in first):
        return f"[known bug]({known[1]}): {known[0]}"
    return f"**{cause}** in `{finding['tensor']}`"


def describe_declared(path):
    """Return what a case file declares to differ, and why, as it stands there."""
    match = re.search(r'because: "(.*)"', path.read_text())
    return f", with a difference that it declares: {match[1]}" if match else ""


def make_page(command, examples, sweep, modes):
    """Return the page as Markdown."""
    names = ("torch", "transformers", "accelerate")
    versions = ", ".join(f"{name} {importlib.metadata.version(name)}" for name in names)
    lines = [
        "# Other people's stacks",
        "",
        "Their own parallel code on tiny models, verified from case files alone: no case of this page has a line of",
        "code. Two steps of AdamW with a clip that binds, float64, 2 ranks on CPUs (gloo); `tp-accumulation` has 2",
        "micro-batches. `make stacks` makes this page.",
        "",
        f"`{command}`, {datetime.datetime.now(datetime.UTC).date()}, python {platform.python_version()}, {versions}",
        "",
        "## Ready-made adapters",
        "",
        "| case | lines of case file | tensors | seconds | verdict |",
        "|---|---|---|---|---|",
    ]
    for case in examples:
        num_lines = len(Path(ROOT / case["file"]).read_text().splitlines())
        verdict = describe(case, None) + describe_declared(Path(ROOT / case["file"]))
        lines.append(
            f"| {case['name']} | {num_lines} | {count_tensors(case)} | {case['seconds']:.1f} | {verdict} |"
        )
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
    options = parser.parse_args()
    modes = options.modes.split(",")
    chosen = ["--families", options.families, "--modes", options.modes]
    command = shlex.join(["python", "benchmarks/stacks.py", *chosen])
    with tempfile.TemporaryDirectory() as name:
        scratch = Path(name)
        reports = options.reports or scratch
        reports.mkdir(parents=True, exist_ok=True)
        examples = run_cases(EXAMPLES.glob("*/*.yaml"), scratch, reports / "examples.json")
        families, sweep = options.families.split(","), []
        write_cases(scratch / "sweep", families, modes)
        for family in families:
            paths = (scratch / "sweep").glob(f"{family}--*.yaml")
            sweep += run_cases(paths, scratch, reports / f"{family}.json")
            # After each family: the page is there although a later one may be broken off.
            options.out.write_text(make_page(command, examples, sweep, modes))


if __name__ == "__main__":
    main()
