"""Cost of verification: training compared with its golden, against the same training alone.

    python benchmarks/verification_cost.py [--batch 16] [--hidden 256] [--precision float32] [--pairs 5]
    python benchmarks/verification_cost.py --device cuda --hidden 2048 --layers 4 --seq-len 2048 --batch 8 \
        --precision bfloat16 --experts grouped_mm --attention fused [--only gradient]

Ranks (two, or --ranks) train under FSDP2 with experts over all of them; one process group serves
everything. After a warm-up, four kinds of runs take turns: training alone, with the comparison, with all
observations of checks too (`checked`), and a repeat of the first step. Ratios are medians. `whole run` is
the checked run plus the repeat, relative to training alone, over all steps. The output also has the peak of
anonymous memory beside the size of the local shard. On GPUs it is the peak of torch's allocations, and a
run waits for the device at the start of a step. `--only gradient` compares only the gradients of every
step. `--sketch` compares with a golden of sketches. `--also gradient_sum` measures the checks with this
one added, in separate runs (`with also`).
CPU seconds are those of rank 0's process (all threads), which a busy machine disturbs less than wall time.
"""

import argparse
import gc
import os
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path

from output import print_setting, print_table

SETTLE = 1  # the first step makes the optimizer's state and is left out of the per-step figures
LARGE = {
    "initial_weight",
    "weight",
    "gradient",
    "update",
    "optimizer_state",
}  # kinds whose size is that of the model


class Clock:
    """An observer that forwards to another one, and records when the steps begin and end."""

    def __init__(self, inner=None, synchronize=None, only=None):
        self._inner = inner
        self._synchronize = synchronize
        self._only = only
        self._times = []
        self._num_steps = 0

    def observe(self, step, kind, name, local, region):
        """Forward the tensor."""
        if self._inner is not None and self._only in (None, kind):
            self._inner.observe(step, kind, name, local, region)

    def observe_all(self, step, kind, shown):
        """Forward the tensors."""
        from moeverify.parallel.regions.observer import show_all

        if self._inner is not None and self._only in (None, kind):
            show_all(self._inner, step, kind, shown)

    def begin_step(self, step):
        """Record the time where it is needed: between other steps nothing waits for the device."""
        self._num_steps += 1
        if step in (0, SETTLE):
            self.note()

    def note(self):
        """Record the time after the device has finished its work."""
        if self._synchronize is not None:
            self._synchronize()
        self._times.append((time.perf_counter(), time.process_time()))

    def per_step(self, which):
        """Return the mean seconds of a step after the first; `which` is 0 for wall time, 1 for CPU time."""
        return (self._times[2][which] - self._times[1][which]) / (self._num_steps - SETTLE)

    def rest(self, which):
        """Return the seconds after the last step, until the result is available."""
        return self._times[3][which] - self._times[2][which]

    def total(self, which):
        """Return the seconds of all steps."""
        return self._times[-1][which] - self._times[0][which]


class Sieve:
    """An observer that forwards to another one, except for model-sized kinds that are not requested."""

    def __init__(self, inner, only):
        self._inner, self._only = inner, only

    def begin_step(self, step):
        """Forward the call."""
        self._inner.begin_step(step)

    def observe(self, step, kind, name, local, region):
        """Forward the tensor."""
        if self._only in (None, kind) or kind not in LARGE:
            self._inner.observe(step, kind, name, local, region)


class AllocatedPeak:
    """A context that tracks torch's allocations on the CPU. Units: bytes, the largest sum at one time.

    Exact, and without freed memory that the C library keeps. Recording costs time, so no time is measured
    here.
    """

    def __enter__(self):
        import torch

        self._profile = torch.profiler.profile(
            activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True
        )
        self._profile.__enter__()
        return self

    def __exit__(self, *error):
        self._profile.__exit__(*error)
        found = self._profile.profiler.kineto_results.events()
        changes = sorted((event.start_ns(), event.nbytes()) for event in found if event.name() == "[memory]")
        live = self.peak = 0
        for _, change in changes:
            live += change
            self.peak = max(self.peak, live)


class DevicePeak:
    """A context that measures the peak of allocated GPU memory. Units: bytes."""

    def __enter__(self):
        import torch

        torch.cuda.reset_peak_memory_stats()
        return self

    def __exit__(self, *_):
        import torch

        self.peak = torch.cuda.max_memory_allocated()


class MemoryPeak:
    """A context that samples the peak of this process's anonymous memory. Units: bytes."""

    def __enter__(self):
        self.peak = self.start = _anonymous()
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._watch)
        self._thread.start()
        return self

    def __exit__(self, *_):
        self._over.set()
        self._thread.join()

    def _watch(self):
        while not self._over.wait(0.002):
            self.peak = max(self.peak, _anonymous())


def _anonymous():
    lines = Path("/proc/self/status").read_text().splitlines()
    return int(next(line for line in lines if line.startswith("RssAnon")).split()[1]) * 1024


def make_benchmark_case(options):
    """Return the case: a small MoE transformer, large enough for its arithmetic to count."""
    from moeverify.faults.setting import make_case

    hidden = options.hidden
    model = {
        "vocab_size": 1024,
        "hidden": hidden,
        "num_layers": options.layers,
        "num_heads": hidden // 64,
        "num_kv_heads": hidden // 64,
        "head_dim": 64,
        "ffn_hidden": 4 * hidden,
        "num_dense_layers": 1,
    }
    moe = {"num_experts": 8, "top_k": 2, "expert_hidden": 2 * hidden, "shared_hidden": 0, "idle_experts": 0}
    moe |= {"num_groups": 1, "top_groups": 1, "balance_scope": "sequence"}
    return make_case(
        "verification-cost",
        optimizer="adamw",
        model=model,
        moe=moe,
        data={"batch": options.batch, "seq_len": options.seq_len},
        recipe={"steps": options.steps, "precision": options.precision},
        dp_shard=options.ranks,
        ep=options.ranks,
        experts=options.experts,
        attention=options.attention,
    )


class Bench:
    """The case on this rank with its stored golden, and ways to run it."""

    def __init__(self, case, folder, device, only):
        from moeverify.parallel.meshes import build_meshes
        from moeverify.verification.golden.store import StoredGolden

        self.meshes = build_meshes(case.layout, device.type)
        self.case, self.device, self.folder, self.only = case, device, folder, only
        self.golden = StoredGolden(folder)

    def run(self, observer, num_steps=None, watched=None):
        """Train once under the layout; return the clock and the bytes of parameters that this rank holds.

        Without an observer each step is that of a production run, with nothing to show. Its routing is that
        of the golden too if the other run's is, so that both do the same work. `watched`, names of optional
        checks, adds the observations of these and all other checks, as in `moeverify run`, except for the
        second run of `repeat`.
        """
        import torch.distributed as dist

        from moeverify.train.assemble import assemble_parallel
        from moeverify.train.loop import train
        from moeverify.train.subjects import replays_routing

        gc.collect()  # models are in reference cycles: else the memory of earlier runs counts too
        recipe = self.case.recipe
        program = assemble_parallel(recipe, self.case.layout, self.meshes, self.device)
        clock = Clock(observer, choose_synchronize(self.device), None if observer is None else self.only)
        dist.barrier()
        replayed = replays_routing(recipe)
        if observer is None:
            train_alone(recipe, program, clock, self.golden if replayed else None)
        elif watched is not None:
            self._train_watched(program, clock, watched)
        else:
            train(recipe, program, clock, golden=self.golden, replay_routing=replayed, num_steps=num_steps)
        clock.note()
        if hasattr(observer, "entries"):
            list(observer.entries())  # on a GPU the comparison follows behind the training
        clock.note()
        return clock, sum(held.local().nbytes for held in program.shards)

    def _train_watched(self, program, clock, also):
        from moeverify.verification.checks.base import RankRun
        from moeverify.verification.checks.registry import choose_checks
        from moeverify.verification.collectives.trace import CollectiveTrace
        from moeverify.verification.worker.verify import train_observed

        checks = choose_checks(also=tuple(also))
        chosen = self.case.checks.model_copy(update={"also": tuple(also)})
        with CollectiveTrace() as trace:
            run = RankRun(
                self.case.model_copy(update={"checks": chosen}), trace, list, lambda observer, num_steps: None
            )
            watches = [watch for check in checks if (watch := check.watch(run, program)) is not None]
            train_observed(self.case, self.golden, program, clock, checks, watches)

    def compare(self):
        """Return an observer that compares with the golden."""
        from moeverify.verification.compare.comparison import Comparison
        from moeverify.verification.worker.by_sketch import SketchComparison

        return SketchComparison(self.golden) if self.golden.sketches else Comparison(self.golden)


def train_alone(recipe, program, clock, ids):
    """Train for the recipe's steps and show nothing; with `ids` the routers use those of a golden."""
    from moeverify.tools.bench.measure import take_step
    from moeverify.train.loop import make_batches
    from moeverify.train.routing import replay
    from moeverify.train.state import TrainingState

    state = TrainingState.begin(recipe, program)
    for step in range(recipe.steps):
        clock.begin_step(step)
        [batch] = make_batches(recipe, program, step)
        if ids is not None:
            replay(recipe, program.routers, batch, ids, step, program.device)
        take_step(recipe, program, [batch])
        state.advance()


def choose_synchronize(device):
    """Return the function that waits for the device, or nothing for a CPU."""
    import torch

    return torch.cuda.synchronize if device.type == "cuda" else None


def record(case, folder, device, only, by_sketch):
    """Write the golden of the case, whole or as sketches: one run on one device in float64."""
    import torch

    from moeverify.train.assemble import assemble_single
    from moeverify.train.loop import train
    from moeverify.verification.golden.sketched import SketchRecorder
    from moeverify.verification.golden.store import GoldenWriter
    from moeverify.verification.golden_run.golden import COARSE

    with GoldenWriter(folder) as writer:
        program = assemble_single(case.recipe, torch.device(device), compute="float64")
        program.num_micro_batches = max(
            case.recipe.data.batch // 16, 1
        )  # float64 of all rows takes much memory
        if by_sketch:
            recorder = SketchRecorder()
            train(case.recipe, program, Sieve(recorder, only))
            recorder.write(writer)
            writer.finish({}, {}, sketches=recorder.shapes)
            return
        train(case.recipe, program, Sieve(writer, only))
        if case.recipe.precision in COARSE:
            writer.narrow()
        writer.finish({}, {})


def work(options):
    """On a rank: measure; rank 0 prints."""
    import torch
    import torch.distributed as dist

    from moeverify.verification.checks.repeat import BitRecorder

    torch.set_num_threads(1)
    device = torch.device("cpu")
    if options.device == "cuda":
        device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
        torch.cuda.set_device(device)
    dist.init_process_group("cpu:gloo,cuda:nccl" if options.device == "cuda" else "gloo")
    case, folder = make_benchmark_case(options), Path(options.work) / "golden"
    bench = Bench(case, folder, device, options.only)
    bench.run(None)
    bench.run(bench.compare(), watched=options.also)
    alone, shown, compared, checked, extended, repeated = [], [], [], [], [], []
    for _ in range(options.pairs):
        alone.append(bench.run(None)[0])
        shown.append(bench.run(Clock())[0])
        compared.append(bench.run(bench.compare())[0])
        checked.append(bench.run(bench.compare(), watched=[])[0])
        if options.also:
            extended.append(bench.run(bench.compare(), watched=options.also)[0])
        repeated.append(bench.run(BitRecorder(), num_steps=1)[0])
    ways = {"alone": lambda: None, "compared": bench.compare}
    peaks, allocated = {name: [] for name in ways}, {}
    for _ in range(
        options.pairs
    ):  # in turns: the memory that a process frees and keeps differs from run to run
        for name, make in ways.items():
            with DevicePeak() if options.device == "cuda" else MemoryPeak() as memory:
                _, shard = bench.run(make())
            peaks[name].append(memory.peak)
    for name, make in ways.items() if options.device == "cpu" else ():
        with AllocatedPeak() as memory:
            bench.run(make())
        allocated[name] = [memory.peak]
    if options.traces is not None:
        trace_runs(bench, options)
    rows = [None] * options.ranks
    dist.all_gather_object(rows, (peaks, allocated or peaks, shard))
    if dist.get_rank() == 0:
        report(options, alone, shown, compared, checked, extended, repeated, rows)
    dist.destroy_process_group()


def trace_runs(bench, options):
    """Write rank 0's trace of each kind of run for Perfetto: the timeline of every thread and the device."""
    import torch
    import torch.distributed as dist
    from torch.profiler import ProfilerActivity, profile

    activities = [ProfilerActivity.CPU]
    if options.device == "cuda":
        activities.append(ProfilerActivity.CUDA)
    kinds = {
        "alone": (None, None),
        "compared": (bench.compare(), None),
        "checked": (bench.compare(), options.also),
    }
    for name, (observer, watched) in kinds.items():
        with profile(activities=activities) as seen:
            bench.run(observer, watched=watched)
            if options.device == "cuda":
                torch.cuda.synchronize()
        if dist.get_rank() == 0:
            options.traces.mkdir(parents=True, exist_ok=True)
            seen.export_chrome_trace(str(options.traces / f"{name}.json.gz"))


def report(options, alone, shown, compared, checked, extended, repeated, rows):
    """Print seconds, ratios and memory."""
    times, spread = (
        [],
        lambda values: f"{statistics.median(values):.2f} ({min(values):.2f} to {max(values):.2f})",
    )
    for which, name in ((0, "wall"), (1, "CPU")):
        plain = [clock.per_step(which) for clock in alone]
        seen = [clock.per_step(which) for clock in compared]
        watched = [clock.per_step(which) for clock in checked]
        ratio = [b / a for a, b in zip(plain, seen, strict=True)]
        checked_ratio = [b / a for a, b in zip(plain, watched, strict=True)]
        more = [clock.per_step(which) for clock in extended]
        more_ratio = [spread([b / a for a, b in zip(plain, more, strict=True)])] if more else []
        totals = [[clock.total(which) for clock in clocks] for clocks in (alone, checked, repeated)]
        all_checks = [(b + c) / a for a, b, c in zip(*totals, strict=True)]
        idle = [clock.per_step(which) for clock in shown]
        rest = [clock.rest(which) for clock in compared]
        seconds = (f"{statistics.median(each):.3f}" for each in (plain, idle, seen, watched, rest))
        times.append((name, *seconds, spread(ratio), spread(checked_ratio), spread(all_checks), *more_ratio))
    headers = (
        "seconds",
        "alone",
        "observed",
        "compared",
        "checked",
        "at the end",
        "compared / alone",
        "checked / alone",
        "whole run / alone",
        *(["with also / alone"] if extended else []),
    )
    print_table(
        headers, times, f"A step, of {len(alone)} pairs of {options.steps} steps on {options.ranks} ranks:"
    )
    memory = []
    for rank, (resident, allocated, shard) in enumerate(rows):
        for name, peak in (("resident", resident), ("allocated by torch", allocated)):
            plain, seen = (statistics.median(peak[which]) for which in ("alone", "compared"))
            differ = 100 * (max(peak["alone"]) - min(peak["alone"])) / plain
            extra = seen - plain
            sizes = (
                f"{plain / 2**20:.1f}",
                f"{differ:.1f} %",
                f"{extra / 2**20:+.1f}",
                f"{100 * extra / plain:+.1f} %",
            )
            memory.append((f"rank {rank}, {name}", *sizes, f"{shard / 2**20:.1f}", f"{extra / shard:.2f}"))
    headers = (
        "peak memory, MiB",
        "alone",
        "its runs differ by",
        "comparing adds",
        "in %",
        "shard",
        "added / shard",
    )
    print_table(headers, memory)


def main():
    """Start the ranks, or run as one."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--hidden", type=int, default=256)
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--seq-len", type=int, default=128)
    parser.add_argument("--batch", type=int, default=16)
    parser.add_argument("--steps", type=int, default=3)
    parser.add_argument("--precision", default="float32")
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--experts", choices=("loop", "grouped_mm"), default="loop")
    parser.add_argument("--attention", choices=("plain", "fused"), default="plain")
    parser.add_argument("--only", metavar="KIND", help="compare this kind alone, such as gradient")
    parser.add_argument(
        "--also", action="append", default=[], metavar="CHECK", help="an optional check, such as gradient_sum"
    )
    parser.add_argument("--sketch", action="store_true", help="compare with a golden of sketches")
    parser.add_argument("--pairs", type=int, default=5)
    parser.add_argument(
        "--traces", type=Path, metavar="DIR", help="also leave a trace of each kind of run for Perfetto"
    )
    parser.add_argument("--work", help=argparse.SUPPRESS)
    parser.add_argument("--record", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.work:
        work(options)
        return
    if options.record:
        case, folder = make_benchmark_case(options), Path(options.record) / "golden"
        record(case, folder, options.device, options.only, options.sketch)
        return
    print_setting()
    with tempfile.TemporaryDirectory(prefix="verification-cost-") as folder:
        environ = {**os.environ, "OMP_NUM_THREADS": "1"}
        own = [sys.argv[0], *sys.argv[1:]]
        # In a process of its own, so that no rank keeps memory of it.
        subprocess.run([sys.executable, *own, "--record", folder], env=environ, check=True)
        launch = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(options.ranks)]
        command = [sys.executable, *launch, *own, "--work", folder]
        subprocess.run(command, env=environ, check=True)


if __name__ == "__main__":
    main()
