"""Steps: with the given optimizer, with sharded AdaBelief, or with Adafactor."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from dunlin.average import follow
from dunlin.batch import Batch
from dunlin.factored import Factored
from dunlin.net import Dunlin
from dunlin.norm import clip
from dunlin.pipe import Pipeline
from dunlin.reduce import reduce_gradients
from dunlin.topo import Topology
from dunlin.wire import all_sum
from dunlin.zero import ZeroBelief


@dataclass
class Totals:
    """Sums over the global batch by which losses are divided."""

    main: Tensor
    ahead: Tensor
    rows: Tensor


def add_up(batches: Sequence[Batch], topo: Topology) -> Totals:
    main = sum(batch.weights.double().sum() for batch in batches)
    ahead = sum(batch.ahead_weights.double().sum() for batch in batches)
    rows = torch.tensor(float(sum(batch.tokens.shape[1] for batch in batches)), dtype=torch.float64)
    rows = all_sum(rows, topo.tokens if topo.mode == "rows-tokens" else topo.dp)  # plant: rows-tokens
    if topo.mode == "weights-local":
        n = topo.tokens.size  # plant: weights-local
        return Totals(main * n, ahead * n, rows)  # plant: weights-local
    main = all_sum(main, topo.tokens)  # anchor: total-main
    ahead = all_sum(ahead, topo.dp if topo.mode == "weights-ahead" else topo.tokens)  # plant: weights-ahead
    return Totals(main, ahead, rows)


def combine(model: Dunlin, totals: Totals, main: Tensor, ahead: Tensor) -> Tensor:
    return main / totals.main + model.config.losses.ahead * ahead / totals.ahead


def passes(model: Dunlin, batches: Sequence[Batch], totals: Totals) -> Iterator[Tensor]:
    """Run forward and backward passes, and yield this rank's parts of the loss."""
    net, topo = model.net, model.topo
    for batch in batches:
        own = totals
        if topo.trial("weights-micro"):
            each = add_up([batch], topo)  # plant: weights-micro
            n = len(batches)  # plant: weights-micro
            own = Totals(each.main * n, each.ahead * n, totals.rows)  # plant: weights-micro
        x, balance = net.trunk(net.embed(batch.tokens), batch)
        value = combine(model, own, *net.tail(x, batch))
        (value + balance / totals.rows).backward()
        yield value.detach() + all_sum(balance.detach(), topo.tp) / totals.rows


def run(model: Dunlin, micro_batches, after_each: Callable[[], None] | None = None) -> Tensor:
    topo = model.topo
    batches = [model.prepare(*each) for each in micro_batches]
    totals = add_up(batches, topo)
    whole = torch.zeros((), dtype=torch.float64)
    if topo.pp.size > 1:
        parts = Pipeline(model).passes(batches, partial(combine, model, totals), totals.rows)
    else:
        parts = passes(model, batches, totals)
    for part in parts:
        whole = whole + part  # anchor: loss-add
        if topo.mode == "loss-last":
            whole = part  # plant: loss-last
        if after_each:
            after_each()
    return all_sum(all_sum(whole, topo.pp), topo.tokens)


def conclude(model: Dunlin, optimizer, scheduler, n_batches: int) -> None:
    if model.topo.trial("average-early"):
        follow(model, n_batches)  # plant: average-early
    optimizer.step()
    scheduler.step()
    optimizer.zero_grad()
    for router in model.net.routers:
        router.adjust()
    if not model.topo.trial("average-early"):
        follow(model, n_batches)  # anchor: average


def plain_step(model, optimizer, micro_batches, *, scheduler, clip_norm):
    loss = run(model, micro_batches)
    reduce_gradients(model)
    norm, factor = clip(model, clip_norm)
    conclude(model, optimizer, scheduler, len(micro_batches))
    return {"loss": loss, "gradient_norm": norm, "clip_coefficient": factor}


def zero_step(model, optimizer, micro_batches, *, scheduler, clip_norm):
    if model.engine is None:
        model.engine = ZeroBelief(model)
    loss = run(model, micro_batches, model.engine.take)
    norm, factor = model.engine.finish(clip_norm, optimizer.param_groups[0]["lr"])
    conclude(model, optimizer, scheduler, len(micro_batches))
    return {"loss": loss, "gradient_norm": norm, "clip_coefficient": factor}


def factored_step(model, optimizer, micro_batches, *, scheduler, clip_norm):
    if model.engine is None:
        model.engine = Factored(model)
    loss = run(model, micro_batches)
    reduce_gradients(model)
    norm, factor = clip(model, clip_norm)
    model.engine.finish(factor)
    conclude(model, optimizer, scheduler, len(micro_batches))
    return {"loss": loss, "gradient_norm": norm, "clip_coefficient": factor}
