"""Experts sharded by FSDP2 against expert parallelism, ours and megablocks', on Mixtral 8x7B layers.

python benchmarks/mixtral_experts.py --ranks 2 [--rows 1 2 4] [--layers 8] [--json FILE]
python benchmarks/mixtral_experts.py --ranks 2 --rehearse     # tiny, on a CPU

For each number of rows of 4096 tokens per rank: all layouts in one launch, one after another. Then the
headline table: steps per second and peak memory against FSDP2, the share of the matrix peak, and lower
bounds.
"""

import argparse
import sys
from contextlib import suppress
from pathlib import Path

from output import print_setting, print_table

from moeverify.cases.validation.load import load_cases
from moeverify.report.bench import render_bench
from moeverify.report.console import open_console
from moeverify.report.formats.plots import make_stem
from moeverify.report.progress import LineProgress
from moeverify.verification.controller.bench import Bench

FOLDER = Path(__file__).parent / "mixtral"
BASELINE = "fsdp"
ORDER = ("fsdp", "megablocks-fsdp", "ep", "megablocks-ep")
TINY = {
    "hidden": 32,
    "num_heads": 4,
    "num_kv_heads": 2,
    "head_dim": 8,
    "vocab_size": 64,
    "ffn_hidden": 64,
    "moe.expert_hidden": 64,
}


def make_cases(options, rows):
    """Return the cases for this many rows per rank."""
    changes = {
        "layout.dp_shard": options.ranks,
        "recipe.data.batch": rows * options.ranks,
        "recipe.data.seq_len": options.seq_len,
        "recipe.model.num_layers": options.layers,
        "layout.recompute": str(options.recompute).lower(),
    }
    if options.rehearse:
        changes |= {f"recipe.model.{name}": value for name, value in TINY.items()}
        changes |= {"recipe.data.seq_len": 4, "recipe.model.num_layers": 1}
    overrides = tuple(f"{path}={value}" for path, value in changes.items())
    cases = {}
    for name in ORDER:
        degree = (f"layout.ep={options.ranks}",) if name.endswith("ep") else ()
        cases[name] = load_cases([FOLDER / f"{name}.yaml"], overrides=overrides + degree)[0]
    return [cases[name] for name in ORDER if name in options.layouts]


def print_headline(result, options, rows):
    """Print each layout's gain over the baseline."""
    found = {case.name: case for case in result.cases if case.step is not None}
    base = found.get(BASELINE)
    tokens = rows * (4 if options.rehearse else options.seq_len)
    rows = []
    for name, case in found.items():
        speed = f"{base.step.median / case.step.median:.2f} x" if base else "-"
        memory = f"{case.peak_memory / base.peak_memory:.2f} x" if base else "-"
        step, gib = f"{case.step.median * 1e3:.1f}", f"{case.peak_memory / 2**30:.1f}"
        speeds = (f"{case.flops / 1e12:.4g}", f"{100 * case.flops / case.roofline.matmul:.1f}%")
        rows.append((name, step, speed, memory, gib, *speeds))
    headers = ("layout", "ms a step", "steps/s", "memory", "GiB", "TFLOP/s", "of peak")
    print_table(headers, rows, f"{options.ranks} ranks, {tokens} tokens a rank and step:")
    alone = [
        (
            f"experts, {name}",
            f"{case.roofline.experts / 1e12:.4g} TFLOP/s",
            f"{share(case):.0f}% of the matrix peak",
        )
        for name, case in found.items()
        if case.roofline.experts is not None
    ]
    roofline = next(iter(found.values())).roofline if found else None
    rates = roofline.collectives if roofline else {}
    alone += [(kind, f"{rate / 1e9:.4g} GB/s", "bus bandwidth") for kind, rate in rates.items()]
    print_table(("alone", "rate", ""), alone)
    print()


def share(case):
    """Return the experts' percentage of the matrix peak when nothing else runs."""
    return 100 * case.roofline.experts / case.roofline.matmul


def measure(cases, options):
    """Return the measurements of the cases, on GPUs or tiny on a CPU. Progress and results go to stderr.

    `options.profile`, if set, is a folder for a trace of each case.
    """
    folder = getattr(options, "profile", None)
    profiles = (
        {}
        if folder is None
        else {case.name: folder.resolve() / make_stem(case.name, set()) for case in cases}
    )
    bench = Bench(
        cases,
        device="cpu" if options.rehearse else "auto",
        num_ranks=None,
        warmup=options.warmup,
        steps=options.steps,
        timeout=getattr(options, "timeout", None),
        profiles=profiles,
    )
    with suppress(KeyboardInterrupt):  # measurements until then are printed
        bench.run(LineProgress(open_console(sys.stderr)).on_event)
    return bench.result


def main():
    """Measure all sizes."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--rows", type=int, nargs="+", default=[1, 2, 4])
    parser.add_argument("--seq-len", type=int, default=4096)
    parser.add_argument("--layers", type=int, default=8)
    parser.add_argument("--recompute", action="store_true")
    parser.add_argument("--layouts", nargs="+", choices=ORDER, default=list(ORDER))
    parser.add_argument("--steps", type=int, default=10)
    parser.add_argument("--warmup", type=int, default=4)
    parser.add_argument("--json", type=Path, help="a folder for one file a size")
    parser.add_argument("--rehearse", action="store_true", help="tiny sizes, on a CPU")
    options = parser.parse_args()
    print_setting()
    console = open_console(sys.stdout)
    for rows in options.rows:
        result = measure(make_cases(options, rows), options)
        if result is None:
            return
        if options.json is not None:
            options.json.mkdir(parents=True, exist_ok=True)
            name = f"mixtral-{options.ranks}-ranks-{rows}-rows.json"
            (options.json / name).write_text(result.model_dump_json(indent=1))
        render_bench(result, console)
        print_headline(result, options, rows)


if __name__ == "__main__":
    main()
