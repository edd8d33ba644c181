"""Placements side by side: `moeverify place`, DeepSeek's EPLB, the hottest experts on all ranks, and blocks.

    git clone https://github.com/deepseek-ai/EPLB
    python benchmarks/placement.py --eplb EPLB [--out docs/results/placement.md]
    python benchmarks/placement.py --eplb EPLB --recorded ep2.trace     # these traces alone

All placements of a row are for the same trace, and are measured with the same rule of how replicas share tokens.
Times are CPU time of one thread: a busy machine stretches wall time.
"""

import argparse
import importlib.util
import platform
import subprocess
import sys
import time
from datetime import date
from importlib.metadata import version
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import numpy as np
import torch
from tabulate import tabulate

from moeverify.tools.placement.cluster import Cluster
from moeverify.tools.placement.cost import bound_load, measure_cost
from moeverify.tools.placement.heuristic import mark_slots, solve
from moeverify.tools.placement.incremental import improve
from moeverify.tools.placement.load_trace import LoadTrace, sum_steps
from moeverify.tools.placement.marks import mark
from moeverify.tools.placement.placement import place_in_blocks
from moeverify.tools.placement.synthetic import KINDS, make_trace
from moeverify.tools.placement.trace_file import read_trace

SPARE = (0, 8, 16, 32, 64)
FLAT_HEADERS = (
    *("trace", "experts", "ranks", "spare", "blocks", "hottest on all", "EPLB, its count", "EPLB"),
    *("fast", "bound", "EPLB ahead", "fast ahead"),
)

LEGEND = """\
All numbers but milliseconds, percent and counts are balancedness, the mean over the largest load of a rank, summed
over layers. `fast` is what `moeverify place` does, and `bound` what no placement exceeds.
EPLB has two columns: its own count, in which two replicas of an expert on one rank get two parts of its load, and
what happens where an expert that is on a rank counts once. `fast` is compared with the better of them. `ahead` is a
placement from the first half of the steps, measured on the second. `hottest on all` is the greedy of FasterMoE, whose
shadowed experts are those with the largest load, on all ranks. vLLM and SGLang call the balancing of EPLB on one node
or, where the nodes divide the groups of experts, `EPLB hierarchical`. Milliseconds are CPU time of one thread: of the
fastest run, and of the one in the middle.""".splitlines()


def load_eplb(folder):
    """Return the module in a checkout of EPLB, and its commit."""
    spec = importlib.util.spec_from_file_location("eplb", folder / "eplb.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    git = ["git", "-C", str(folder), "rev-parse", "--short", "HEAD"]
    commit = subprocess.run(git, capture_output=True, text=True, check=False).stdout.strip()
    return module, commit or "unknown"


def run_eplb(eplb, load, cluster, num_slots, num_groups):
    """Return the marks of EPLB's placement, and its own value of the balancedness."""
    by_expert = load.by_expert
    slots, _, counts = eplb.rebalance_experts(
        torch.tensor(by_expert),
        cluster.num_ranks * num_slots,
        num_groups,
        cluster.num_nodes,
        cluster.num_ranks,
    )
    each = np.take_along_axis(by_expert / counts.numpy(), slots.numpy(), axis=1)
    loads = each.reshape(len(by_expert), cluster.num_ranks, num_slots).sum(2)
    marks = mark_slots(slots.numpy().reshape((*loads.shape, num_slots)), by_expert.shape[1])
    return marks, loads.mean(1).sum() / loads.max(1).sum()


def place_hottest_everywhere(load, cluster, num_slots):
    """Return blocks with as many of the hottest experts on all ranks as the spare slots allow."""
    by_expert = load.by_expert
    num_layers, num_experts = by_expert.shape
    number = (cluster.num_ranks * num_slots - num_experts) // max(cluster.num_ranks - 1, 1)
    marks = np.zeros((num_layers, num_experts, cluster.num_ranks), dtype=bool)
    for layer in range(num_layers):
        order = np.argsort(-by_expert[layer], kind="stable")
        hot, rest = order[:number], np.sort(order[number:])
        marks[layer, hot] = True
        if len(rest):
            blocks = mark(place_in_blocks(len(rest), cluster.num_ranks, [0]))[0]
            marks[layer, rest] = blocks
    return marks


def balancedness(marks, load, cluster):
    return measure_cost(marks, load, cluster).balancedness


def time_runs(function, runs):
    """Return the least and the median CPU milliseconds of several runs."""
    times = []
    for _ in range(runs):
        begun = time.process_time()
        function()
        times.append((time.process_time() - begun) * 1e3)
    return [min(times), sorted(times)[runs // 2]]


def list_sizes():
    """Yield experts, ranks and slots that EPLB supports: slots must divide evenly among ranks."""
    for num_experts in (64, 256):
        for num_ranks in (8, 32, 64):
            for spare in SPARE:
                if (num_experts + spare) % num_ranks == 0:
                    yield num_experts, num_ranks, spare, (num_experts + spare) // num_ranks


def split_trace(trace):
    """Return the first and the second half of the steps."""
    half = len(trace.steps) // 2
    return (
        LoadTrace(trace.header, trace.steps[:half], trace.copies[:half]),
        LoadTrace(trace.header, trace.steps[half:], trace.copies[half:]),
    )


def compare_flat(eplb, num_layers, tally):
    """Return rows of the table on one node: on the trace, and on the steps after those used for solving."""
    rows = []
    for kind in KINDS:
        for num_experts, num_ranks, spare, num_slots in list_sizes():
            cluster = Cluster(num_ranks)
            trace = make_trace(
                kind,
                seed=0,
                num_layers=num_layers,
                num_experts=num_experts,
                num_steps=8,
                copies_per_step=1 << 19,
            )
            rows.append([kind, num_experts, num_ranks, spare])
            rows[-1] += compare_one(eplb, trace, cluster, num_slots, tally)
            print(rows[-1], file=sys.stderr, flush=True)
    return rows, FLAT_HEADERS


def compare_recorded(eplb, files, tally):
    """Return rows of the same table for traces that `moeverify run --trace` has written."""
    rows = []
    for file in files:
        trace = read_trace(file)
        num_experts = trace.header.num_experts
        for num_ranks in (2, 4, 8):
            for spare in SPARE[: 3 if num_experts < 64 else None]:
                if num_ranks < num_experts and (num_experts + spare) % num_ranks == 0:
                    cluster, num_slots = Cluster(num_ranks), (num_experts + spare) // num_ranks
                    rows.append([file.stem, num_experts, num_ranks, spare])
                    rows[-1] += compare_one(eplb, trace, cluster, num_slots, tally)
    return rows, FLAT_HEADERS


def compare_one(eplb, trace, cluster, num_slots, tally):
    """Return the balancedness of all ways for one trace, ranks and slots."""
    first, second = (sum_steps(part, cluster) for part in split_trace(trace))
    load = sum_steps(trace, cluster)
    blocks = mark(place_in_blocks(trace.header.num_experts, cluster.num_ranks, trace.header.layers))
    theirs, own = run_eplb(eplb, load, cluster, num_slots, 1)
    fast = solve(load, cluster, num_slots)
    bound = bound_load(load, cluster, num_slots)
    shared, ours = balancedness(theirs, load, cluster), balancedness(fast, load, cluster)
    most = load.by_expert.sum() / cluster.num_ranks / bound.sum()
    tally.append((ours, max(own, shared), most))
    return [
        balancedness(blocks, load, cluster),
        balancedness(place_hottest_everywhere(load, cluster, num_slots), load, cluster),
        own,
        shared,
        ours,
        most,
        balancedness(run_eplb(eplb, first, cluster, num_slots, 1)[0], second, cluster),
        balancedness(solve(first, cluster, num_slots), second, cluster),
    ]


def compare_nodes(eplb, num_layers):
    """Return rows of the table on several nodes of 8 ranks."""
    rows = []
    for kind in ("zipf", "groups"):
        for num_experts, num_ranks, spare, num_slots in list_sizes():
            if num_ranks == 8 or (spare == 0 and num_ranks == 64):
                continue
            cluster = Cluster(num_ranks, num_ranks // 8)
            load = sum_steps(
                make_trace(kind, seed=0, num_layers=num_layers, num_experts=num_experts), cluster
            )
            row = [kind, num_experts, num_ranks, cluster.num_nodes, spare]
            flat = Cluster(num_ranks)
            for marks in (
                run_eplb(eplb, load, cluster, num_slots, cluster.num_nodes)[0],
                run_eplb(eplb, load, flat, num_slots, 1)[0],
                solve(load, cluster, num_slots),
            ):
                cost = measure_cost(marks, load, cluster)
                row += [cost.balancedness, f"{cost.off_node:.0%}"]
            rows.append(row)
            print(row, file=sys.stderr, flush=True)
    headers = ["trace", "experts", "ranks", "nodes", "spare", "EPLB hierarchical", "off node"]
    return rows, [*headers, "EPLB global", "off node", "fast", "off node"]


def compare_moves(num_layers):
    """Return rows of the table of sent experts: from blocks, and after the load has drifted."""
    rows = []
    for kind in ("zipf", "groups", "drifting"):
        for num_experts, num_ranks, num_slots in ((64, 8, 9), (64, 32, 4), (256, 32, 9)):
            cluster = Cluster(num_ranks)
            trace = make_trace(kind, seed=0, num_layers=num_layers, num_experts=num_experts, num_steps=8)
            first, second = (sum_steps(part, cluster) for part in split_trace(trace))
            current = mark(place_in_blocks(num_experts, num_ranks, trace.header.layers))
            if kind == "drifting":
                current = solve(first, cluster, num_slots)
            best = solve(second, cluster, num_slots)
            result = improve(current, best, second, cluster, num_slots)
            rows.append(
                [kind, num_experts, num_ranks, num_slots]
                + [balancedness(marks, second, cluster) for marks in (current, best, result.marks)]
                + [int((best & ~current).sum()), result.best_sends, result.sends]
            )
            print(rows[-1], file=sys.stderr, flush=True)
    headers = ["trace", "experts", "ranks", "slots", "in use", "best", "95 % of the gain"]
    return rows, [*headers, "sent for best", "ranks renamed", "sent for 95 %"]


def compare_times(eplb, num_layers, runs):
    """Return rows of CPU milliseconds for 256 experts on 64 ranks with 64 spare slots."""
    rows = []
    cluster = Cluster(64)
    for kind in KINDS:
        load = sum_steps(make_trace(kind, seed=0, num_layers=num_layers, num_experts=256), cluster)
        rows.append(
            [
                kind,
                *time_runs(lambda load=load: solve(load, cluster, 5), runs),
                *time_runs(lambda load=load: run_eplb(eplb, load, cluster, 5, 1), 3),
            ]
        )
    return rows, ["trace", "fast, ms", "middle", "EPLB, ms", "middle"]


def describe_tally(tally):
    """Return how often `fast` is better than EPLB on one node, and worse."""
    better = sum(ours > theirs + 1e-4 for ours, theirs, _ in tally)
    worse = sum(ours < theirs - 1e-9 for ours, theirs, _ in tally)
    possible = sum(theirs < most - 1e-4 for _, theirs, most in tally)
    return (
        f"Of {len(tally)} rows on one node, `fast` is worse than EPLB in {worse}. In {possible} EPLB is more than "
        f"0.0001 below the bound, and `fast` is better by more than 0.0001 in {better}."
    )


def main():
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--eplb", type=Path, required=True, help="a checkout of deepseek-ai/EPLB")
    parser.add_argument("--out", type=Path)
    parser.add_argument("--recorded", type=Path, nargs="+", default=(), help="traces of runs: these alone")
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--runs", type=int, default=7)
    options = parser.parse_args()
    if not (options.eplb / "eplb.py").is_file():
        parser.error(
            f"--eplb: there is no {options.eplb / 'eplb.py'}; clone https://github.com/deepseek-ai/EPLB"
        )
    torch.set_num_threads(1)
    eplb, commit = load_eplb(options.eplb)
    tally = []
    if options.recorded:
        rows, headers = compare_recorded(eplb, options.recorded, tally)
        print(tabulate(rows, headers, tablefmt="github", floatfmt=".4f"))
        print(describe_tally(tally))
        return
    sections = {
        "On one node": compare_flat(eplb, options.layers, tally),
        "On nodes of 8 ranks": compare_nodes(eplb, options.layers),
        "Experts sent": compare_moves(options.layers),
        "Time for 58 layers, 256 experts, 64 ranks, 64 spare slots": compare_times(eplb, 58, options.runs),
    }
    names = ("numpy", "scipy", "torch")
    lines = [
        "# Placement of experts",
        "",
        f"{date.today()}, Python {platform.python_version()}, {platform.machine()}, "
        + ", ".join(f"{name} {version(name)}" for name in names)
        + f", EPLB {commit}; `python benchmarks/placement.py --eplb EPLB --layers {options.layers}`.",
        "",
        *LEGEND,
        "",
        describe_tally(tally),
    ]
    for title, (rows, headers) in sections.items():
        table = tabulate(rows, headers, tablefmt="github", floatfmt=".1f" if "ms" in headers[1] else ".4f")
        lines += ["", f"## {title}", "", table]
    text = "\n".join(lines) + "\n"
    if options.out is not None:
        options.out.write_text(text)
    print(text)


if __name__ == "__main__":
    main()
