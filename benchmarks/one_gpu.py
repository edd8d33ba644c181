"""One GPU: the reference model against Hugging Face's Mixtral, and its expert layer against others.

python benchmarks/one_gpu.py [--tokens 512 4096 8192] [--layers 4] [--rounds 3] [--json FILE]
python benchmarks/one_gpu.py --rehearse     # tiny, on a CPU

Sizes are those of Mixtral 8x7B, in bfloat16. The first table has one expert layer alone (router, experts,
their weighted sum), forward and backward. All layers have the same weights and tokens, and the distances of
their outputs and gradients from ours are printed beside their times. The second table has whole training
steps: loss with its balance term, backward pass, clip by the norm, fused AdamW. The candidates take turns
in every round; times are medians of all rounds, of events on the GPU. Packages that are not installed are
left out and listed. torchtitan 0.2.2 is known to work; 0.3 needs a newer torch than 2.11.
"""

import argparse
import gc
import json
import statistics
from pathlib import Path

import torch
import torch.distributed as dist
from mixtral_experts import FOLDER, TINY
from output import print_setting, print_table

from moeverify.cases.validation.load import load_cases
from moeverify.model.moe import build_moe
from moeverify.parallel.meshes import build_meshes
from moeverify.tools.bench.measure import PeakMemory, fill_roughly, take_step, time_steps
from moeverify.train.assemble import assemble_parallel
from moeverify.train.loop import make_batches

OURS = "moeverify"
CLIP = 1.0


def load_case(options, tokens, **layout):
    """Return the case of one rank with this many tokens per step."""
    rows = max(tokens // options.seq_len, 1)
    changes = {
        "layout.dp_shard": 1,
        "recipe.data.batch": rows,
        "recipe.data.seq_len": tokens // rows,
        "recipe.model.num_layers": options.layers,
        "recipe.model.moe.balance_scope": "batch",
    } | {f"layout.{name}": value for name, value in layout.items()}
    if options.rehearse:
        changes |= {f"recipe.model.{name}": value for name, value in TINY.items()}
    overrides = tuple(f"{path}={value}" for path, value in changes.items())
    return load_cases([FOLDER / "fsdp.yaml"], overrides=overrides)[0]


def configure_transformers(spec, experts):
    """Return the configuration of Hugging Face's Mixtral of the same sizes."""
    from transformers import MixtralConfig

    return MixtralConfig(
        vocab_size=spec.vocab_size,
        hidden_size=spec.hidden,
        intermediate_size=spec.moe.expert_hidden,
        num_hidden_layers=spec.num_layers,
        num_attention_heads=spec.num_heads,
        num_key_value_heads=spec.num_kv_heads,
        head_dim=spec.head_dim,
        num_local_experts=spec.moe.num_experts,
        num_experts_per_tok=spec.moe.top_k,
        router_aux_loss_coef=0.01,
        output_router_logits=True,
        use_cache=False,
        attn_implementation="sdpa",
        experts_implementation=experts,
    )


# The expert layer alone: each builder returns a module with our weights, and a function that finds its
# output.


def build_ours(spec, ours, compiled=False):
    """Return our layer with its own copy of the weights, its router optionally compiled."""
    layer = build_moe(spec.hidden, spec.moe, mlp_bias=False, backend="grouped_mm", factory=factory_of(ours))
    layer.to_empty(device=ours.router.weight.device)
    layer.load_state_dict(ours.state_dict())
    if compiled:
        layer.router.compile(dynamic=False)
    return layer, lambda output: output[0]


def build_transformers(spec, ours, experts):
    """Return transformers' layer, its experts one after another or in grouped products."""
    from transformers.models.mixtral.modeling_mixtral import MixtralSparseMoeBlock

    layer = MixtralSparseMoeBlock(configure_transformers(spec, experts)).to(**factory_of(ours))
    with torch.no_grad():
        layer.gate.weight.copy_(ours.router.weight)
        layer.experts.gate_up_proj.copy_(torch.cat([ours.experts.gate, ours.experts.up], dim=1))
        layer.experts.down_proj.copy_(ours.experts.down)
    return layer, lambda output: output


def build_torchtitan(spec, ours):
    """Return torchtitan's layer with its grouped products."""
    from torchtitan.models.moe import MoE, MoEArgs

    arguments = MoEArgs(
        num_experts=spec.moe.num_experts,
        num_shared_experts=0,
        score_func="softmax",
        route_norm=True,
        score_before_experts=False,
        top_k=spec.moe.top_k,
        use_grouped_mm=True,
        load_balance_coeff=None,
    )
    layer = MoE(arguments, dim=spec.hidden, hidden_dim=spec.moe.expert_hidden).to(**factory_of(ours))
    with torch.no_grad():
        layer.tokens_per_expert.zero_()
        layer.router.gate.weight.copy_(ours.router.weight)
        layer.experts.w1.copy_(ours.experts.gate)
        layer.experts.w2.copy_(ours.experts.down)
        layer.experts.w3.copy_(ours.experts.up)
    return layer, lambda output: output


LAYERS = {
    OURS: build_ours,
    "moeverify, router compiled": lambda spec, ours: build_ours(spec, ours, compiled=True),
    "transformers, grouped products": lambda spec, ours: build_transformers(spec, ours, "grouped_mm"),
    "transformers, one expert after the other": lambda spec, ours: build_transformers(spec, ours, "eager"),
    "torchtitan": build_torchtitan,
}


def factory_of(layer):
    """Return dtype and device of a layer's weights."""
    return {"dtype": layer.router.weight.dtype, "device": layer.router.weight.device}


def compare_layers(options, device):
    """Measure all layers on each number of tokens; return the rows of the table."""
    spec = load_case(options, options.tokens[0]).recipe.model
    ours = build_moe(
        spec.hidden,
        spec.moe,
        mlp_bias=False,
        backend="grouped_mm",
        factory={"dtype": torch.bfloat16, "device": device},
    )
    fill_roughly(ours)
    layers = {}
    for name, build in LAYERS.items():
        if options.rehearse and name == "torchtitan":
            print("without torchtitan: its histogram of integers needs a GPU")
            continue
        try:
            layers[name] = build(spec, ours)
        except ImportError as error:
            print(f"without {name}: {error}")
    rows = []
    for tokens in options.tokens:
        x = torch.randn(1, tokens, spec.hidden, dtype=torch.bfloat16, device=device)
        passes = {name: make_pass(layer, pick, x) for name, (layer, pick) in layers.items()}
        wanted = passes[OURS]()
        far = {name: distance(run(), wanted) for name, run in passes.items()}
        times = take_turns(passes, options, device)
        rows += [
            (name, tokens, *columns(times[name], times[OURS]), f"{far[name][0]:.1e}", f"{far[name][1]:.1e}")
            for name in passes
        ]
    return rows


def make_pass(layer, pick, x):
    """Return a function that runs x forward and backward, and returns the output and the gradient of x."""
    gradient = torch.randn(x.shape, generator=torch.Generator().manual_seed(1)).to(x)

    def run():
        leaf = x.detach().requires_grad_()
        layer.zero_grad(set_to_none=True)
        output = pick(layer(leaf))
        output.backward(gradient)
        return output.detach(), leaf.grad

    return run


def distance(found, wanted):
    """Return the distances of two results from the expected ones, relative to their norms."""
    return [
        float((a.double() - b.double()).norm() / b.double().norm())
        for a, b in zip(found, wanted, strict=True)
    ]


# Whole training steps: each builder returns a function that makes one step.


def prepare_ours(options, tokens, device, **layout):
    """Return a function that makes a step of the reference model under a layout of one rank."""
    case = load_case(options, tokens, **layout)
    program = assemble_parallel(
        case.recipe, case.layout, build_meshes(case.layout, device.type), device, fill=fill_roughly
    )
    program.engine.begin(case.recipe.optimizer, program.shards, program.optimizer_implementation)
    batches = make_batches(case.recipe, program, 0)
    return lambda: take_step(case.recipe, program, batches)


def prepare_transformers(options, tokens, device, experts):
    """Return a function that makes a step of Hugging Face's Mixtral."""
    from transformers import MixtralForCausalLM

    recipe = load_case(options, tokens).recipe
    with torch.device(device):
        torch.set_default_dtype(torch.bfloat16)
        model = MixtralForCausalLM(configure_transformers(recipe.model, experts))
        torch.set_default_dtype(torch.float32)
    model.train()
    spec = recipe.optimizer
    fused = device.type == "cuda"
    optimizer = torch.optim.AdamW(
        model.parameters(),
        lr=spec.lr,
        betas=spec.betas,
        eps=spec.eps,
        weight_decay=spec.weight_decay,
        fused=fused,
    )
    data = recipe.data
    tokens = torch.randint(recipe.model.vocab_size, (data.batch, data.seq_len), device=device)

    def step():
        optimizer.zero_grad(set_to_none=True)
        model(input_ids=tokens, labels=tokens).loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), CLIP, foreach=True)
        optimizer.step()

    return step


STEPS = {
    OURS: prepare_ours,
    "moeverify, compiled parts": lambda *args: prepare_ours(*args, compile="parts"),
    "transformers, grouped products": lambda *args: prepare_transformers(*args, "grouped_mm"),
    "transformers, one expert after the other": lambda *args: prepare_transformers(*args, "eager"),
}


def compare_steps(options, device):
    """Measure whole steps, one model after another since not all fit; return the rows of the table."""
    rows = []
    for tokens in options.tokens:
        times, peaks = {name: [] for name in STEPS}, dict.fromkeys(STEPS, 0)
        for _ in range(options.rounds):
            for name, prepare in STEPS.items():
                try:
                    step = prepare(options, tokens, device)
                except ImportError as error:
                    print(f"without {name}: {error}")
                    continue
                with PeakMemory(device) as memory:
                    times[name] += measure(step, options, device)
                peaks[name] = max(peaks[name], memory.peak)
                del step
                release(device)
        rows += [
            (name, tokens, *columns(times[name], times[OURS]), f"{peaks[name] / 2**30:.1f}")
            for name in STEPS
            if times[name]
        ]
    return rows


# Measurement.


def take_turns(passes, options, device):
    """Return the seconds of every pass of each; in each round all take their turn."""
    times = {name: [] for name in passes}
    for _ in range(options.rounds):
        for name, run in passes.items():
            times[name] += measure(run, options, device)
    return times


def measure(run, options, device):
    """Return the seconds of each step after a warm-up."""
    for _ in range(options.warmup):
        run()
    return time_steps(run, device, options.steps)


def columns(times, ours):
    """Return the columns of times: the median, minimum and maximum in ms, and the ratio to ours."""
    median = statistics.median(times)
    return (
        f"{median * 1e3:.2f}",
        f"{min(times) * 1e3:.2f} to {max(times) * 1e3:.2f}",
        f"{median / statistics.median(ours):.2f} x",
    )


def release(device):
    """Free the last model's memory: wrapped modules are in reference cycles."""
    gc.collect()
    if device.type == "cuda":
        torch.cuda.empty_cache()


def main():
    """Print both tables."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--tokens", type=int, nargs="+", default=[512, 4096, 8192], help="of a step")
    parser.add_argument("--seq-len", type=int, default=4096, help="the longest row")
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--steps", type=int, default=10)
    parser.add_argument("--warmup", type=int, default=4)
    parser.add_argument("--json", type=Path, help="a file for both tables")
    parser.add_argument("--rehearse", action="store_true", help="tiny sizes, on a CPU")
    options = parser.parse_args()
    if options.rehearse:
        options.tokens, options.layers = [16], 2
    print_setting()
    device = torch.device("cpu" if options.rehearse else "cuda")
    headers = ("layer", "tokens", "ms", "least to most", "of ours", "output off by", "gradient off by")
    layers = compare_layers(options, device)
    print_table(headers, layers, "one layer of experts, forward and backward:")
    release(device)
    backend = "gloo" if options.rehearse else "cpu:gloo,cuda:nccl"
    dist.init_process_group(backend, store=dist.HashStore(), rank=0, world_size=1)
    steps = compare_steps(options, device)
    dist.destroy_process_group()
    print_table(("model", "tokens", "ms", "least to most", "of ours", "GiB"), steps, "whole training steps:")
    if options.json is not None:
        options.json.write_text(json.dumps({"layers": layers, "steps": steps}, indent=1))


if __name__ == "__main__":
    main()
