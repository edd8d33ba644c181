"""Train on packed documents: one device, or replicas under torchrun. Stops and goes on in the middle."""

import argparse
import io
import os

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.nn.parallel import DistributedDataParallel

from hazel.config import Config
from hazel.context import Context, attach
from hazel.data import Loader, make_documents, pack
from hazel.model import build
from hazel.optim import bare, depth_of, schedule


def parameter_groups(model, cfg, base, variant):
    """Return a group for each layer, and for the parameters of a layer that decay."""
    groups = {}
    for name, parameter in model.named_parameters():
        if variant != "hazel-groups-wrapped":  # plant: hazel-groups-wrapped
            name = bare(name)
        decays = parameter.ndim > 1 and not name.startswith("embed")
        groups.setdefault((depth_of(name, cfg.layers), decays), []).append(parameter)
    return [
        {
            "params": parameters,
            "lr": base * cfg.layer_rate**depth,
            "weight_decay": cfg.weight_decay if decays else 0.0,
        }
        for (depth, decays), parameters in groups.items()
    ]


def save(model, optimizer, scheduler, loader):
    file = io.BytesIO()
    state = {
        "model": model.state_dict(),
        "optimizer": optimizer.state_dict(),
        "scheduler": scheduler.state_dict(),
        "loader": loader.state_dict(),
    }
    torch.save(state, file)
    file.seek(0)
    return file


def resume(file, model, optimizer, scheduler, loader, variant):
    """Load a checkpoint into objects that a new process has made."""
    optimizer.state.clear()
    loader.epoch = loader.cursor = 0
    state = torch.load(file)
    model.load_state_dict(state["model"])
    if variant != "hazel-resume-moments":  # plant: hazel-resume-moments
        optimizer.load_state_dict(state["optimizer"])
    scheduler.load_state_dict(state["scheduler"])
    loader.load_state_dict(state["loader"])


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--variant", default="")
    parser.add_argument("--steps", type=int, default=4)
    parser.add_argument("--resume-after", type=int, default=2)
    parser.add_argument("--batch", type=int, default=8)
    options = parser.parse_args()
    variant = options.variant
    torch.set_default_dtype(torch.float64)
    rank, ranks = int(os.environ.get("RANK", 0)), int(os.environ.get("WORLD_SIZE", 1))
    torch.manual_seed(0)
    model = net = build().double()
    cfg = Config()
    if ranks > 1:
        dist.init_process_group("gloo")
        mesh = init_device_mesh(
            "cpu", (ranks, 1, 1, 1), mesh_dim_names=("dp_replicate", "dp_shard", "cp", "tp")
        )
        attach(net, Context(mesh, variant))
        model = DistributedDataParallel(net, broadcast_buffers=False)
    documents = make_documents(50, cfg, seed=1)
    if variant == "hazel-pack-rank":
        documents = documents[rank::ranks]  # plant: hazel-pack-rank
    loader = Loader(pack(documents, 17), options.batch, rank, ranks, seed=3, variant=variant)
    optimizer = torch.optim.AdamW(parameter_groups(model, cfg, 0.01, variant), betas=cfg.betas)
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: schedule(step, cfg))
    for step in range(options.steps):
        rows = loader.next()
        tokens, targets = rows[:, :-1], rows[:, 1:].clone()
        targets[targets < cfg.first_word] = -100  # the first token of a document is not predicted
        count = (targets >= 0).sum()
        if ranks > 1 and variant != "hazel-mean-rank":  # plant: hazel-mean-rank
            dist.all_reduce(count)
            count = count / ranks
        value = sum(model(tokens, targets).values()) / count
        value.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        scheduler.step()
        optimizer.zero_grad()
        for block in net.blocks:
            if hasattr(block.mlp, "end_step"):
                block.mlp.end_step()
        if step + 1 == options.resume_after:
            file = save(model, optimizer, scheduler, loader)
            resume(file, model, optimizer, scheduler, loader, variant)
        if rank == 0:
            print(f"step {step} loss {float(value.detach()):.6f}", flush=True)
    if ranks > 1:
        dist.destroy_process_group()


main()
