"""How rounding grows under Adam, AdamW and SGD: tensor parallelism beside single-device runs that are perturbed.

    python benchmarks/optimizer_noise.py [--steps 100] [--precision float64 float32] [--optimizer adamw ...]

The recipe is that of examples/torchtitan. For each precision and optimizer one device trains the golden (float64);
then single-device runs that differ by rounding only (rows in another order, in two micro-batches, initial weights
off by one unit in the last place, and below float64 the plain run) and tensor parallelism on two ranks, with
sequence and loss parallelism, are compared with it at every step. `free` runs train on their own; `forced` ones
start each step from the golden's weights and moments. Errors are those of all weights, or all updates of the
step, together: the norm of the difference over the norm. `ratio` is TP over the largest perturbed run.

Last, each optimizer alone: 100 steps over DTensors that two ranks share, rows and columns, beside plain tensors,
with gradients of the same bits; what differs then is the optimizer's doing, and neither the model's nor a sum's.
"""

import argparse
import json
import math
import sys
import tempfile
from pathlib import Path

from output import print_setting, print_table

ROOT = Path(__file__).resolve().parents[1]
OPTIMIZERS = {
    "sgd": {"name": "sgd", "lr": 0.1, "momentum": 0.9},
    "adam": {"name": "adam", "lr": 1e-3},
    "adam decay 0.1": {"name": "adam", "lr": 1e-3, "weight_decay": 0.1},
    "adamw decay 0.1": {"name": "adamw", "lr": 1e-3, "weight_decay": 0.1},
    "adamw eps 1e-5": {"name": "adamw", "lr": 1e-3, "weight_decay": 0.1, "eps": 1e-5},
}
KINDS = ("weight", "update", "gradient", "loss")


class Growth:
    """An observer that sums squared errors and squared norms of each kind and step, each element once."""

    def __init__(self, golden, num_ranks, rank):
        self.golden, self.num_ranks, self.rank = golden, num_ranks, rank
        self.sums = {}

    def observe(self, step, kind, name, local, region):
        """Add one piece; replicated values are counted on rank 0."""
        if kind not in KINDS or step < 0 or (kind == "loss" and name != "total"):
            return
        if region.is_whole and self.rank != 0:
            return
        expected = self.golden.read(step, kind, name, region).to("cpu").double()
        error = (local.detach().double().reshape(expected.shape) - expected).square().sum().item()
        found = self.sums.setdefault((step, kind), [0.0, 0.0])
        found[0] += error
        found[1] += expected.square().sum().item()

    def begin_step(self, step):
        """Do nothing."""


def errors_of(parts, kind, num_steps):
    """Return the relative error of a kind at each step, from the sums of the ranks."""
    series = []
    for step in range(num_steps):
        error = sum(part.get((step, kind), (0.0, 0.0))[0] for part in parts)
        norm = sum(part.get((step, kind), (0.0, 0.0))[1] for part in parts)
        series.append(math.sqrt(error / norm))
    return series


def run_alone(context, num_steps):
    """Return on rank 0 the differences of optimizers on DTensors and plain tensors, with equal gradients."""
    import torch
    import torch.distributed as dist
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import Replicate, Shard, distribute_tensor

    mesh = init_device_mesh(context.device.type, (2,))
    placements = {"rows": [Shard(0)], "columns": [Shard(1)], "copies": [Replicate()]}
    found = {}
    for name, fields in OPTIMIZERS.items():
        options = {key: value for key, value in fields.items() if key != "name"}
        kind = {"sgd": torch.optim.SGD, "adam": torch.optim.Adam, "adamw": torch.optim.AdamW}[fields["name"]]
        ways = {"foreach": {"foreach": True}, "fused": {"fused": True}, "loop": {"foreach": False}}
        if kind is torch.optim.SGD:
            del ways["fused"]  # torch has no sharding rule for it
        for way, chosen in ways.items():
            for dtype in (torch.float64, torch.float32, torch.bfloat16):
                generator = torch.Generator().manual_seed(0)

                def draw(dtype=dtype, generator=generator):
                    return torch.randn(66, 34, generator=generator).to(dtype).to(context.device)

                start = [draw() for _ in placements]
                plain = [torch.nn.Parameter(tensor.clone()) for tensor in start]
                cut = [
                    torch.nn.Parameter(distribute_tensor(tensor.clone(), mesh, place, src_data_rank=None))
                    for tensor, place in zip(start, placements.values(), strict=True)
                ]
                optimizers = [kind(parameters, **options, **chosen) for parameters in (plain, cut)]
                for _ in range(num_steps):
                    for one, other, place in zip(plain, cut, placements.values(), strict=True):
                        # Many orders of magnitude: Adam divides by nearly zero gradients.
                        one.grad = draw() * 10.0 ** (4.0 * draw() - 4.0)
                        other.grad = distribute_tensor(one.grad.clone(), mesh, place, src_data_rank=None)
                    for optimizer in optimizers:
                        optimizer.step()
                worst = max(
                    float((other.full_tensor().double() - one.double()).norm() / one.double().norm())
                    for one, other in zip(plain, cut, strict=True)
                )
                found[f"{name}, {way}, {str(dtype).removeprefix('torch.')}"] = worst
    dist.barrier()
    return found if context.rank == 0 else None


def make_recipe(optimizer, precision, num_steps):
    """Return the recipe of examples/torchtitan with another optimizer, precision and number of steps."""
    from moeverify.cases.schema import Optimizer
    from moeverify.cases.validation.load import load_cases

    [case] = load_cases([ROOT / "examples/torchtitan/fsdp-adamw.yaml"])
    chosen = Optimizer(**OPTIMIZERS[optimizer], clip_norm=1.0)
    return case.recipe.model_copy(update={"optimizer": chosen, "precision": precision, "steps": num_steps})


def run_job(context, job):
    """Return on rank 0 the errors of one optimizer and precision, for every run, kind and step."""
    import torch.distributed as dist

    from moeverify.cases.schema import Layout
    from moeverify.parallel.meshes import build_meshes
    from moeverify.train.assemble import assemble_parallel, assemble_single
    from moeverify.train.loop import train
    from moeverify.verification.golden.store import GoldenWriter, StoredGolden
    from moeverify.verification.golden_run.noise import perturbed_programs

    payload = job.payload
    if payload["optimizer"] is None:
        return run_alone(context, payload["steps"])
    recipe = make_recipe(payload["optimizer"], payload["precision"], payload["steps"])
    folder = Path(payload["folder"]) / job.name
    if context.rank == 0:
        with GoldenWriter(folder) as writer:
            train(recipe, assemble_single(recipe, context.device, compute="float64"), writer)
            writer.finish({}, {})
    dist.barrier()
    golden = StoredGolden(folder)
    low = recipe.precision != "float64"
    layout = Layout(tp=2, sequence_parallel=True, loss_parallel=True)
    found = {}
    for mode in ("free", "forced"):
        if context.rank == 0:
            for number, (_, program) in enumerate(perturbed_programs(recipe, context.device)):
                growth = Growth(golden, 1, 0)
                train(recipe, program, growth, golden=golden, replay_routing=low, forced=mode == "forced")
                found[f"{mode} perturbed {number}"] = [growth.sums]
        growth = Growth(golden, 2, context.rank)
        program = assemble_parallel(recipe, layout, build_meshes(layout, context.device.type), context.device)
        train(recipe, program, growth, golden=golden, replay_routing=low, forced=mode == "forced")
        parts = [None, None]
        dist.all_gather_object(parts, growth.sums)
        found[f"{mode} tp"] = parts
    if context.rank != 0:
        return None
    return {
        run: {kind: errors_of(parts, kind, recipe.steps) for kind in KINDS} for run, parts in found.items()
    }


def show(title, result, num_steps):
    """Print the errors at some steps, TP beside the smallest and the largest perturbed run."""
    rows = []
    marks = sorted({0, 1, min(9, num_steps - 1), min(29, num_steps - 1), num_steps - 1})
    for mode in ("free", "forced"):
        noise = [values for run, values in result.items() if run.startswith(f"{mode} perturbed")]
        for kind in ("loss", "gradient", "update", "weight"):
            for step in marks:
                least, most = (choose(run[kind][step] for run in noise) for choose in (min, max))
                tp = result[f"{mode} tp"][kind][step]
                ratio = tp / most if most else math.nan
                numbers = (f"{number:.1e}" for number in (tp, least, most))
                rows.append((f"{mode} {kind}", str(step + 1), *numbers, f"{ratio:.2g}"))
    print_table(("errors", "step", "tp", "least noise", "most noise", "ratio"), rows, f"{title}:")


def show_alone(result, num_steps):
    """Print the difference of each optimizer between DTensors and plain tensors."""
    rows = [(name, "none" if worst == 0.0 else f"{worst:.1e}") for name, worst in result.items()]
    title = f"DTensors against plain tensors after {num_steps} steps with the same gradients:"
    print_table(("optimizer", "difference"), rows, title)


def main():
    """Run every combination and print its table; `--json` keeps all numbers."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--steps", type=int, default=100)
    parser.add_argument("--precision", nargs="+", default=["float64", "float32"])
    parser.add_argument("--optimizer", nargs="*", default=list(OPTIMIZERS), help="none: the last table alone")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    print_setting()
    from moeverify.verification.launch.launcher import run_jobs
    from moeverify.verification.launch.plan import Job

    everything = {}
    with tempfile.TemporaryDirectory(prefix="optimizer-noise-") as folder:
        jobs = [
            Job(
                name=f"{optimizer}, {precision}",
                num_ranks=2,
                timeout=1800.0,
                payload={
                    "optimizer": optimizer,
                    "precision": precision,
                    "steps": options.steps,
                    "folder": folder,
                },
            )
            for precision in options.precision
            for optimizer in options.optimizer
        ]
        alone = {"optimizer": None, "steps": options.steps}
        jobs.append(Job(name="alone", num_ranks=2, timeout=600.0, payload=alone))
        for outcome in run_jobs(jobs, entry=str(Path(__file__)), folder=Path(folder)):
            if outcome.result is None:
                sys.exit(f"{outcome}")
            name = jobs[outcome.index].name
            everything[name] = outcome.result
            if name == "alone":
                show_alone(outcome.result, options.steps)
            else:
                show(name, outcome.result, options.steps)
    if options.json:
        options.json.write_text(json.dumps(everything))


if __name__ == "__main__":
    if sys.argv[1:] and Path(sys.argv[1]).name == "plan.json":  # on a rank
        from moeverify.verification.launch.rank import serve

        serve(sys.argv[1], run_job)
    else:
        main()
