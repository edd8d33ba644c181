"""One optimizer step: with torch's AdamW, or with the sharded one."""

import io

import torch

from linden.moe import move_bias
from linden.rules import average, clip
from linden.topo import all_sum
from linden.zero import ZeroAdam


def count_tokens(micro_batches, topo):
    """Return the number of targets that count in the global batch."""
    count = sum((targets >= 0).sum() for _, targets in micro_batches)
    axis = topo.data  # anchor: count-axis
    if topo.on("linden-count-rows"):
        axis = topo.rows  # plant: linden-count-rows
    return all_sum(count.clone(), axis)


def backward(net, micro_batches, after=None):
    """Accumulate gradients of the loss per token. Returns this rank's part of the loss."""
    topo, total = net.topo, 0.0
    count = count_tokens(micro_batches, topo)
    for tokens, targets in micro_batches:
        terms = net(tokens, targets)
        value = sum(terms.values()) / count
        value.backward()
        total = total + value.detach()
        if after:
            after()
    return total


def train_step(net, optimizer, micro_batches, *, scheduler, finish):
    topo = net.topo
    total = backward(net, micro_batches)
    if topo.on("linden-clip-early"):
        norm, factor = clip(net)
        finish()  # plant: linden-clip-early
    else:
        finish()  # anchor: finish
        norm, factor = clip(net)
    optimizer.step()
    scheduler.step()
    optimizer.zero_grad()
    move_bias(net)
    return {"loss": all_sum(total, topo.data), "gradient_norm": norm, "clip_coefficient": factor}


class Run:
    """What a run with the sharded optimizer has beside the net."""

    def __init__(self, net):
        self.adam, self.done = ZeroAdam(net), 0


def save(net):
    """Return the state of the run as a file of this rank."""
    file = io.BytesIO()
    state = {
        "net": {name: x.clone() for name, x in net.state_dict().items()},
        "adam": net.run.adam.saved(),
        "done": net.run.done,
    }
    torch.save(state, file)
    file.seek(0)
    return file


@torch.no_grad()
def restart(net, file):
    """Go on as a new process does, which begins with other values."""
    for x in (*net.parameters(), *net.buffers()):
        x.zero_()
    net.run = Run(net)
    state = torch.load(file)
    biases = [f"b{i}_bias" for i in net.routers()]
    for name, x in net.state_dict().items():
        if net.topo.on("linden-restart-bias") and name in biases:
            continue  # plant: linden-restart-bias
        x.copy_(state["net"][name])
    net.run.adam.load(state["adam"])
    net.run.done = state["done"]


def zero_step(net, optimizer, micro_batches):
    if net.run is None:
        net.run = Run(net)
    run, topo, sizes = net.run, net.topo, net.sizes
    total = backward(net, micro_batches, run.adam.collect)
    norm, factor = run.adam.update(optimizer.param_groups[0]["lr"])
    optimizer.step()
    optimizer.zero_grad()
    move_bias(net)
    if sizes.ema:
        average(net, run.done)
    run.done += 1
    if topo.on("linden-done-micro"):
        run.done += len(micro_batches) - 1  # plant: linden-done-micro
    if sizes.restart_at == run.done:
        restart(net, save(net))
    return {"loss": all_sum(total, topo.data), "gradient_norm": norm, "clip_coefficient": factor}
