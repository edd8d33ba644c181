"""Users' own training steps for the model of examples/my_moe: right ones, and one per kind of mistake."""

from __future__ import annotations

import torch
import torch.distributed as dist
from my_moe.model import MoE, loss, spread_experts
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel


def parallelize(model: MoE, mesh):
    """Spread the experts over `dp_shard` and wrap the rest in DDP; no gradient needs more than that."""
    weights = {id(weight) for weight in spread_experts(model, mesh["dp_shard"])}
    ignored = [name for name, weight in model.named_parameters() if id(weight) in weights]
    DistributedDataParallel._set_params_and_buffers_to_ignore_for_model(model, ignored)
    return DistributedDataParallel(model, process_group=mesh["dp_shard"].get_group())


class Training:
    """One optimizer step in parts; each bug changes one of them."""

    def __init__(self, model, optimizer, micro_batches, mesh, num_valid) -> None:
        self.model, self.optimizer, self.micro_batches = model, optimizer, micro_batches
        self.num_ranks = 1 if mesh is None else dist.get_world_size()
        self.num_valid = num_valid
        self.limit = 0.05

    def backward(self, tokens, targets):
        (loss(self.model, tokens, targets) * (self.num_ranks / self.num_valid)).backward()

    def finish(self):
        """Average the experts' gradients, which are sums over the ranks."""
        for weight in self.experts():
            weight.grad.to_local().div_(self.num_ranks)

    def experts(self):
        return [weight for weight in self.model.parameters() if isinstance(weight, DTensor)]

    def dense(self):
        return [weight for weight in self.model.parameters() if not isinstance(weight, DTensor)]

    def norm(self, times=1):
        """Return the norm of all gradients, counting the squares of the dense ones `times` times."""
        experts = sum(w.grad.to_local().square().sum() for w in self.experts())
        dense = sum(w.grad.square().sum() for w in self.dense())
        total = torch.as_tensor(experts + dense * (times / self.num_ranks))
        if self.num_ranks > 1:
            dist.all_reduce(total)
        return total.sqrt()

    def clip(self, times=1):
        norm = self.norm(times)
        coefficient = min(1.0, self.limit / (float(norm) + 1e-6))
        for weight in self.model.parameters():
            weight.grad.mul_(coefficient)
        return {"gradient_norm": norm, "clip_coefficient": coefficient}


def right(model, optimizer, micro_batches, mesh, num_valid):
    run = Training(model, optimizer, micro_batches, mesh, num_valid)
    optimizer.zero_grad()
    for part in micro_batches:
        run.backward(*part)
    run.finish()
    reported = run.clip()
    optimizer.step()
    return reported


def zeroes_inside(model, optimizer, micro_batches, mesh, num_valid):
    run = Training(model, optimizer, micro_batches, mesh, num_valid)
    for part in micro_batches:
        optimizer.zero_grad()
        run.backward(*part)
    run.finish()
    reported = run.clip()
    optimizer.step()
    return reported


def never_zeroes(model, optimizer, micro_batches, mesh, num_valid):
    run = Training(model, optimizer, micro_batches, mesh, num_valid)
    for part in micro_batches:
        run.backward(*part)
    run.finish()
    reported = run.clip()
    optimizer.step()
    return reported


def counts_replicas(model, optimizer, micro_batches, mesh, num_valid):
    """Clip by a norm that counts replicated parameters once per rank."""
    run = Training(model, optimizer, micro_batches, mesh, num_valid)
    optimizer.zero_grad()
    for part in micro_batches:
        run.backward(*part)
    run.finish()
    reported = run.clip(times=run.num_ranks)
    optimizer.step()
    return reported


def schedules_inside(model, optimizer, micro_batches, mesh, num_valid, scheduler):
    run = Training(model, optimizer, micro_batches, mesh, num_valid)
    optimizer.zero_grad()
    for part in micro_batches:
        run.backward(*part)
        scheduler.step()
    run.finish()
    reported = run.clip()
    optimizer.step()
    return reported


def cubes(model, optimizer, micro_batches, mesh, num_valid, times=1.0):
    """Step with cubed gradients instead of the clipped ones, as Muon changes them in such a hook."""
    run = Training(model, optimizer, micro_batches, mesh, num_valid)
    optimizer.zero_grad()
    for part in micro_batches:
        run.backward(*part)
    run.finish()
    reported = run.clip()

    def cube(*_):
        for weight in model.parameters():
            weight.grad = weight.grad**3 * (1e4 * times)

    hook = optimizer.register_step_pre_hook(cube)
    optimizer.step()
    hook.remove()
    return reported


def cubes_by_rank(model, optimizer, micro_batches, mesh, num_valid):
    return cubes(model, optimizer, micro_batches, mesh, num_valid, times=1.0 if mesh is None else 2.0)


def schedules_by_rank(model, optimizer, micro_batches, mesh, num_valid, scheduler):
    """Step the scheduler once per rank, since it counts the samples of all ranks."""
    reported = right(model, optimizer, micro_batches, mesh, num_valid)
    for _ in range(1 if mesh is None else dist.get_world_size()):
        scheduler.step()
    return reported
