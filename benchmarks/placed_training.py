"""Training under a skewed router: experts in equal blocks, placed by their load, and placed with replicas.

python benchmarks/placed_training.py [--ranks 2] [--spare 4] [--rounds 5] [--json FILE]
python benchmarks/placed_training.py --rehearse     # tiny, on a CPU

All ranks are on one node and in one launch. The router's bias makes the probability of expert e
proportional to 1 / (e + 1)^1.2, so equal blocks have the hot experts on rank 0. The placements are computed
from the load of the first layout. The layouts take turns, round by round, and steps per second are those of
the median step. `balance` is the mean over the largest load of a rank. An exchange moves the experts from
blocks to the computed placement and back, with both moments of AdamW. The cost of the trace is the
synchronized time of its counts in a step, as a share of that step.
"""

import argparse
import json
import math
import statistics
import sys
import tempfile
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import numpy as np
import torch
import torch.distributed as dist
import torch.multiprocessing
from output import print_setting, print_table

from moeverify.cases.axes.expert_placement import find_placement
from moeverify.cases.axes.groups import find_source
from moeverify.cases.validation.load import build_case
from moeverify.parallel.meshes import build_meshes
from moeverify.parallel.regions.local_shard import parameters
from moeverify.tools.bench.measure import fill_roughly, take_step
from moeverify.tools.placement.cluster import Cluster
from moeverify.tools.placement.cost import measure_cost
from moeverify.tools.placement.load_trace import LoadTrace, TraceHeader, sum_steps
from moeverify.tools.placement.marks import mark
from moeverify.tools.placement.moves import list_moves
from moeverify.tools.placement.placement import place_in_blocks
from moeverify.tools.placement.policy import Policy
from moeverify.train.assemble import assemble_parallel
from moeverify.train.exchange import exchange_experts
from moeverify.train.loop import make_batches
from moeverify.train.rebalancing import Rebalancing

LARGE = {
    "model": {
        "vocab_size": 32000,
        "hidden": 2048,
        "num_layers": 4,
        "num_heads": 16,
        "num_kv_heads": 4,
        "head_dim": 128,
        "ffn_hidden": 5632,
        "moe": {"num_experts": 32, "top_k": 4, "expert_hidden": 1408, "router_bias": True},
    },
    "data": {"seq_len": 4096},
    "precision": "bfloat16",
}
TINY = {
    "model": {
        "vocab_size": 256,
        "hidden": 64,
        "num_layers": 2,
        "num_heads": 4,
        "num_kv_heads": 4,
        "head_dim": 16,
        "ffn_hidden": 128,
        "moe": {"num_experts": 16, "top_k": 2, "expert_hidden": 256, "router_bias": True},
    },
    "data": {"seq_len": 256},
    "precision": "float32",
}
ROWS = 4  # of each rank
EXPONENT = 1.2
NOISE = math.pi / math.sqrt(6)  # the standard deviation of Gumbel noise: choices then follow the bias


def make_case(name, options, **layout):
    """Return a case with all ranks in one ep group."""
    sizes = TINY if options.rehearse else LARGE
    recipe = {
        **sizes,
        "data": {**sizes["data"], "batch": ROWS * options.ranks},
        "optimizer": {"name": "adamw", "lr": 1e-9, "clip_norm": 1.0},
        "steps": 2,
    }
    experts = "loop" if options.rehearse else options.experts
    given = {"dp_shard": options.ranks, "ep": options.ranks, "experts": experts, **layout}
    return build_case({"name": name, "recipe": recipe, "layout": given})


@torch.no_grad()
def fill_skewed(model):
    """Fill this rank's tensors, with routers that choose some experts far more often than others."""
    fill_roughly(model)
    for shard in parameters(model):
        if shard.name.endswith("moe.router.weight"):
            shard.local().normal_(0.0, NOISE / math.sqrt(shard.region.shape[1]))
        elif shard.name.endswith("moe.router.bias"):
            rank = torch.tensor(list(shard.region.dims[0]), dtype=torch.float64) + 1.0
            shard.local().copy_(-EXPONENT * rank.log())


class Trained:
    """A layout that takes steps on this rank."""

    def __init__(self, case, device):
        torch.manual_seed(0)
        self.case, self.device = case, device
        self.program = assemble_parallel(
            case.recipe, case.layout, build_meshes(case.layout, device.type), device, fill=fill_skewed
        )
        recipe, program = case.recipe, self.program
        self.optimizer = program.engine.begin(
            recipe.optimizer, program.shards, program.optimizer_implementation
        )
        self.batches = make_batches(recipe, program, 0)

    def step(self):
        take_step(self.case.recipe, self.program, self.batches)

    def time(self, action):
        """Return the seconds of an action of all ranks."""
        dist.barrier()
        synchronize(self.device)
        begun = time.perf_counter()
        action()
        synchronize(self.device)
        return time.perf_counter() - begun


def synchronize(device):
    if device.type == "cuda":
        torch.cuda.synchronize()


def count_load(trained):
    """Return the token copies in a step of all ranks, (1, L, E, n), and the times of counting and summing."""
    first = place_blocks(trained.case)
    rebalancing = Rebalancing(Policy(1, 1), first, find_source(trained.case.layout, dist.get_rank()))
    counted = [trained.time(lambda: rebalancing.count(trained.program.routers)) for _ in range(20)]
    rebalancing = Rebalancing(Policy(1, 1), first, find_source(trained.case.layout, dist.get_rank()))
    rebalancing.count(trained.program.routers)
    rebalancing.end_step()
    summed = [trained.time(rebalancing.sum_copies) for _ in range(5)]
    return rebalancing.sum_copies().cpu().numpy(), statistics.median(counted), statistics.median(summed)


def place_blocks(case):
    layers = tuple(range(case.recipe.model.num_layers))
    return place_in_blocks(case.recipe.model.moe.num_experts, case.layout.ep, layers)


def measure_balance(placement, copies):
    """Return mean over largest load of a rank, over all layers."""
    cluster = Cluster(placement.num_ranks)
    header = TraceHeader(placement.layers, placement.num_experts, num_sources=placement.num_ranks)
    return measure_cost(
        mark(placement), sum_steps(LoadTrace(header, (0,), copies), cluster), cluster
    ).balancedness


def time_exchange(trained, placement, rounds):
    """Return the seconds of exchanges to a placement and back, and the bytes that one sends to all ranks."""
    blocks = find_placement(trained.case.layout, trained.case.recipe.model)
    moves = list_moves(blocks, placement, Cluster(blocks.num_ranks))
    sent = sum(move.kind in ("move", "copy") for move in moves)
    experts = next(iter(trained.program.placed)).layers[0].moe.experts
    each = sum(parameter[0].nbytes for parameter in experts.parameters())
    seconds = []
    for _ in range(rounds):
        for target in (placement, blocks):
            seconds.append(
                trained.time(
                    lambda target=target: exchange_experts(trained.program, trained.optimizer, target)
                )
            )
    return seconds[2:] or seconds, sent, 3 * each * sent


def run(rank, options, file, answer):
    torch.set_num_threads(1)
    device = torch.device("cpu" if options.rehearse else f"cuda:{rank}")
    if device.type == "cuda":
        torch.cuda.set_device(device)
    backend = "gloo" if options.rehearse else "nccl"
    dist.init_process_group(backend, init_method=f"file://{file}", rank=rank, world_size=options.ranks)
    static = Trained(make_case("static", options), device)
    static.step()
    copies, counting, summing = count_load(static)
    blocks = place_blocks(static.case)
    slots = blocks.num_experts // options.ranks
    Policy(1, slots).solve(copies, blocks)  # excludes imports at first use from the timing
    begun = time.perf_counter()
    solved = [Policy(1, slots + spare).solve(copies, blocks) for spare in (0, options.spare)]
    solving = (time.perf_counter() - begun) / 2
    placements = {"static": blocks, "placed": solved[0], "placed-replicas": solved[1]}
    trained = {"static": static}
    for name, placement in list(placements.items())[1:]:
        matrices = {str(layer): placement.matrices[at] for at, layer in enumerate(placement.layers)}
        trained[name] = Trained(make_case(name, options, placement=matrices), device)
    for each in trained.values():
        for _ in range(2):
            each.step()
    seconds = {name: [] for name in trained}
    for _ in range(options.rounds):
        for name, each in trained.items():
            seconds[name] += [each.time(each.step) for _ in range(options.steps)]
    moved = Trained(make_case("blocks", options, placement="blocks"), device)
    moved.step()
    exchanges, moves, size = time_exchange(moved, solved[1], options.rounds)
    if rank == 0:
        found = {
            "seconds": seconds,
            "balance": {name: measure_balance(placement, copies) for name, placement in placements.items()},
            "exchange": exchanges,
            "experts sent": moves,
            "bytes sent": size,
            "counting": counting,
            "summing": summing,
            "solving": solving,
            "load": np.asarray(copies).tolist(),
        }
        Path(answer).write_text(json.dumps(found))
    dist.destroy_process_group()


def print_answer(found):
    base = statistics.median(found["seconds"]["static"])
    rows = []
    for name, seconds in found["seconds"].items():
        step = statistics.median(seconds)
        spread = f"{1e3 * min(seconds):.1f} to {1e3 * max(seconds):.1f}"
        speed = (f"{1 / step:.2f}", f"{base / step:.2f} x")
        rows.append((name, f"{found['balance'][name]:.3f}", f"{1e3 * step:.1f}", spread, *speed))
    print_table(("experts", "balance", "ms a step", "least to most", "steps/s", "speed"), rows)
    exchange = statistics.median(found["exchange"])
    rate = f"{found['bytes sent'] / exchange / 1e9:.2f} GB/s"
    counting = f"{100 * found['counting'] / base:.3f} % of a step"
    print_table(
        ("alone", "ms", ""),
        [
            (
                f"exchange of {found['experts sent']} experts with moments",
                f"{1e3 * exchange:.1f}",
                f"{found['bytes sent'] / 2**20:.1f} MiB, {rate}",
            ),
            ("counts of the trace, each step", f"{1e3 * found['counting']:.3f}", counting),
            ("sum of the trace over ranks, at a placement", f"{1e3 * found['summing']:.3f}", ""),
            ("solving, at a placement", f"{1e3 * found['solving']:.1f}", ""),
        ],
    )


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--spare", type=int, default=4, help="slots a rank for replicas")
    parser.add_argument("--experts", choices=("grouped_mm", "loop"), default="grouped_mm")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--steps", type=int, default=4, help="of each layout in a round")
    parser.add_argument("--json", type=Path, help="a file for all that was measured")
    parser.add_argument("--rehearse", action="store_true", help="tiny sizes, on a CPU")
    options = parser.parse_args()
    print_setting()
    with tempfile.TemporaryDirectory() as folder:
        answer = f"{folder}/answer.json"
        torch.multiprocessing.spawn(run, (options, f"{folder}/store", answer), nprocs=options.ranks)
        found = json.loads(Path(answer).read_text())
    if options.json is not None:
        options.json.write_text(json.dumps(found))
    print_answer(found)


if __name__ == "__main__":
    main()
