"""Few tokens per rank and many micro-batches: speed of FSDP2 and expert parallelism, change by change.

python benchmarks/small_batches.py --ranks 2 [--tokens 512] [--micro-batches 16] [--json FILE]
python benchmarks/small_batches.py --ranks 2 --rehearse     # tiny, on a CPU

Layers of Mixtral 8x7B at their true size. All variants run in one launch, one after another: FSDP2 with
sharded experts, experts spread over the ranks, and the latter with cumulative changes.
"""

import argparse
import sys
from pathlib import Path

from mixtral_experts import FOLDER, TINY, measure
from output import print_setting, print_table

from moeverify.cases.validation.load import load_cases
from moeverify.report.bench import render_bench
from moeverify.report.console import open_console

BASELINE = "fsdp"
# Each row: the file of the case, and the changes in its layout.
VARIANTS = {
    BASELINE: ("fsdp", {}),
    "fsdp, reshard after step": ("fsdp", {"reshard": "step"}),
    "ep": ("ep", {}),
    "ep, reshard after step": ("ep", {"reshard": "step"}),
    "ep, and compiled with sizes": ("ep", {"reshard": "step", "compile": "parts"}),
    "ep, and padded": ("ep", {"reshard": "step", "dispatch": "padded"}),
    "ep, and compiled": ("ep", {"reshard": "step", "dispatch": "padded", "compile": "parts"}),
    "ep, and graphs": (
        "ep",
        {"reshard": "step", "dispatch": "padded", "compile": "parts", "graphs": "micro_batch"},
    ),
    "ep, graphs and joined": (
        "ep",
        {
            "reshard": "step",
            "dispatch": "padded",
            "compile": "parts",
            "graphs": "micro_batch",
            "joined_micro_batches": 4,
        },
    ),
    "ep, graphs without compile": (
        "ep",
        {"reshard": "step", "dispatch": "padded", "graphs": "micro_batch"},
    ),
    "fsdp, compiled": ("fsdp", {"compile": "parts"}),
    "megablocks-ep": ("megablocks-ep", {}),
}


def make_case(name, options):
    """Return the case of a variant under its name."""
    file, layout = VARIANTS[name]
    rows = options.micro_batches * options.ranks
    changes = {
        "layout.dp_shard": options.ranks,
        "layout.micro_batches": options.micro_batches,
        "recipe.data.batch": rows,
        "recipe.data.seq_len": options.tokens,
        "recipe.model.num_layers": options.layers,
    } | {f"layout.{field}": value for field, value in layout.items()}
    if file.endswith("ep"):
        changes["layout.ep"] = options.ranks
    if options.rehearse:
        changes |= {f"recipe.model.{field}": value for field, value in TINY.items()}
        changes |= {"recipe.data.seq_len": 16}
    overrides = tuple(f"{path}={value}" for path, value in changes.items())
    return load_cases([FOLDER / f"{file}.yaml"], overrides=overrides)[0].model_copy(update={"name": name})


def print_headline(result, options):
    """Print each variant beside the baseline: time, memory, and GPU work per micro-batch."""
    found = {case.name: case for case in result.cases if case.step is not None}
    base = found.get(BASELINE)
    num_each, layers = options.micro_batches, options.layers
    rows = []
    for name, case in found.items():
        step = case.step.median
        speed = f"{base.step.median / step:.2f} x" if base else "-"
        memory = f"{case.peak_memory / base.peak_memory:.2f} x" if base else "-"
        rows.append(
            (name, f"{step * 1e3:.0f}", f"{step * 1e3 / num_each:.1f}", speed, memory, *count(case, layers))
        )
    headers = (
        "layout",
        "ms a step",
        "ms each",
        "steps/s",
        "memory",
        "operations",
        "waits",
        "launches",
        "busy ms",
    )
    print_table(headers, rows, f"{options.ranks} ranks, {num_each} micro-batches, {layers} layers:")
    print(
        "Each: a micro-batch, as are waits and busy time; operations and launches are of a layer of it.\n"
        "Launches, waits and busy time of a GPU are from a profile of a whole step, its update included."
    )


def count(case, layers):
    """Return the dispatched operators and the GPU work, as far as they are known."""
    each, counted, work = case.micro_batches, case.in_micro_batches, case.device
    operations = "-" if counted is None else f"{counted.kernels / each / layers:.0f}"
    waits = work or counted
    return (
        operations,
        "-" if waits is None else f"{waits.waits / each:.1f}",
        "-" if work is None else f"{work.launches / each / layers:.0f}",
        "-" if work is None else f"{1e3 * work.busy / each:.1f}",
    )


def main():
    """Measure the variants."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--tokens", type=int, default=512, help="tokens of a rank and micro-batch")
    parser.add_argument("--micro-batches", type=int, default=16)
    parser.add_argument("--layers", type=int, default=8)
    parser.add_argument("--variants", nargs="+", choices=list(VARIANTS), default=list(VARIANTS))
    parser.add_argument("--steps", type=int, default=5)
    parser.add_argument("--warmup", type=int, default=3)
    parser.add_argument("--timeout", type=float, help="seconds for each variant")
    parser.add_argument("--json", type=Path, help="a file for all that was measured")
    parser.add_argument(
        "--profile", type=Path, help="a folder for traces of a step, and what its kernels are for"
    )
    parser.add_argument("--rehearse", action="store_true", help="tiny sizes, on a CPU")
    options = parser.parse_args()
    print_setting()
    if options.rehearse:  # megablocks' kernels would take minutes in the interpreter
        options.variants = [name for name in options.variants if not name.startswith("megablocks")]
    result = measure([make_case(name, options) for name in options.variants], options)
    if result is None:
        return
    if options.json is not None:
        options.json.write_text(result.model_dump_json(indent=1))
    render_bench(result, open_console(sys.stdout))
    print_headline(result, options)


if __name__ == "__main__":
    main()
