"""Rank 0's work for many ranks: receive their comparisons, judge them, and write the report.

python benchmarks/many_ranks.py [--ranks 16 64 256] [--layers 3 6]

The golden is a real one. Ranks are simulated one after another in this process: each compares its shards of
all logical tensors (dim 0 over half of the ranks, each part on two of them), as a rank of a job does, and
pickles its entries as for sending. The right run has the golden's values. In the wrong one, the gradients
of one layer's experts are doubled on every rank. The network and the second run of the cause search are not
simulated. The last table has the seconds per 1000 shards relative to those of the fewest: 1 is linear
growth.
"""

import argparse
import gc
import itertools
import pickle
import resource
import tempfile
import time
from pathlib import Path

from output import print_setting, print_table

WRONG = "layers.1.moe.experts.up"


def make_golden(case, folder):
    """Return the golden of one device, computed here, and its tensors as (step, kind, name, shape)."""
    import torch

    from moeverify.results.checks import UNCOMPARED_KINDS
    from moeverify.train.assemble import assemble_single
    from moeverify.train.loop import train
    from moeverify.verification.golden.store import GoldenWriter, StoredGolden

    with GoldenWriter(folder) as writer:
        train(case.recipe, assemble_single(case.recipe, torch.device("cpu"), compute="float64"), writer)
        writer.finish({}, {})
    golden = StoredGolden(folder)
    tensors = []
    for step in range(-1, case.recipe.steps):
        for key in golden.keys(step):
            kind, _, name = key.partition("/")
            if kind not in UNCOMPARED_KINDS:
                tensors.append((step, kind, name, tuple(golden.whole(step, key).shape)))
    return golden, tensors


def compare_rank(golden, tensors, rank, num_ranks, is_wrong):
    """Return the pickled entries of a rank, which holds one of `num_ranks / 2` parts of each tensor."""
    from moeverify.parallel.regions.region import Region
    from moeverify.verification.compare.comparison import Comparison

    comparison, num_parts = Comparison(golden), num_ranks // 2
    for step, kind, name, shape in tensors:
        dims = [range(size) for size in shape]
        if shape and shape[0] >= num_parts:
            bounds = [shape[0] * part // num_parts for part in range(num_parts + 1)]
            dims[0] = range(bounds[rank // 2], bounds[rank // 2 + 1])
        region = Region.box(shape, dims)
        local = golden.read(step, kind, name, region)
        if is_wrong and (kind, name) == ("gradient", WRONG):
            local = 2 * local
        comparison.observe(step, kind, name, local, region)
    return pickle.dumps(list(comparison.entries()))


def measure(case, golden, tensors, num_ranks, is_wrong, folder):
    """Return the figures of rank 0 for this many ranks: sizes in MiB, times in seconds."""
    from moeverify.gc_pause import uncollected
    from moeverify.report.formats.json import write
    from moeverify.results.run import CaseResult, RunResult
    from moeverify.verification.checks.base import ShownTensors
    from moeverify.verification.checks.registry import KIND_ORDER, choose_checks
    from moeverify.verification.compare.assembled import assemble
    from moeverify.verification.worker.verify import judge_all, list_names, make_bounds

    arrived = [compare_rank(golden, tensors, rank, num_ranks, is_wrong) for rank in range(num_ranks)]
    gc.collect()
    times = [time.process_time()]
    with uncollected():  # as they are gathered
        by_rank = [pickle.loads(entries) for entries in arrived]
    times.append(time.process_time())
    shown = ShownTensors(
        case=case,
        coordinates={rank: {"dp_shard": rank} for rank in range(num_ranks)},
        tensors=assemble(by_rank, KIND_ORDER),
        bounds=make_bounds(case, golden),
        golden_names=list_names(case, golden, range(-1, case.recipe.steps)),
    )
    times.append(time.process_time())
    judgement = judge_all(choose_checks(), shown, [{} for _ in range(num_ranks)])
    times.append(time.process_time())
    verdict = "mismatch" if judgement.findings else "pass"
    result = CaseResult(
        name=case.name,
        file="",
        verdict=verdict,
        ranks=num_ranks,
        seconds=0.0,
        layout="",
        checks=judgement.checks,
        findings=judgement.findings,
    )
    path = folder / "result.json"
    write(RunResult(verdict=verdict, environment={}, started="", seconds=0.0, cases=(result,)), path)
    times.append(time.process_time())
    parts = [after - before for before, after in itertools.pairwise(times)]
    shards = sum(map(len, by_rank))
    return verdict, shards, sum(map(len, arrived)) / 2**20, parts, path.stat().st_size / 2**20


def main():
    """Measure every number of ranks, with a right run and a wrong one."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--ranks", type=int, nargs="+", default=[16, 64, 256])
    parser.add_argument("--layers", type=int, nargs="+", default=[3, 6])
    options = parser.parse_args()
    print_setting()

    from moeverify.faults.setting import make_case

    rows, growth, fewest = [], [], {}
    for layers in options.layers:
        case = make_case("many-ranks", model={"num_layers": layers})
        with tempfile.TemporaryDirectory() as folder:
            golden, tensors = make_golden(case, Path(folder) / "golden")
            for ranks in options.ranks:
                for is_wrong in (False, True):
                    found = measure(case, golden, tensors, ranks, is_wrong, Path(folder))
                    verdict, shards, size, parts, written = found
                    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**10
                    seconds = (f"{part:.2f}" for part in parts)
                    row = (f"{len(tensors)} x {ranks}, {verdict}", shards, f"{size:.1f}", *seconds)
                    rows.append((*row, f"{written:.2f}", f"{peak:.0f}"))
                    each = [part / shards for part in parts]
                    base = fewest.setdefault(verdict, each)
                    growth.append((row[0], *(f"{a / b:.2f}" for a, b in zip(each, base, strict=True))))
    times = ("take in", "assemble", "judge", "write")
    sizes = ("result, MiB", "peak so far, MiB")
    print_table(
        ("tensors x ranks", "shards", "travels, MiB", *times, *sizes), rows, "Seconds of CPU on rank 0:"
    )
    print_table(("tensors x ranks", *times), growth, "For each shard, in times that of the fewest:")


if __name__ == "__main__":
    main()
