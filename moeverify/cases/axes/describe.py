"""Short text for a layout, for tables and reports."""

from __future__ import annotations

from moeverify.cases.axes.stages import count_stages
from moeverify.cases.schema import Layout


def describe_layout(layout: Layout) -> str:
    """Return a text such as `hsdp 2x2 + cp 2 + ep 4`; `one device` if nothing is divided."""
    parts = [_describe_data(layout)] if layout.data_ranks > 1 else []
    if layout.pp > 1:
        parts.append(_describe_pipeline(layout))
    if layout.tp > 1:
        parts.append(f"tp {layout.tp}")
    if layout.sequence_parallel:
        parts.append("sequence parallel")
    if layout.loss_parallel:
        parts.append("loss parallel")
    if layout.cp > 1:
        parts.append(f"cp {layout.cp} {layout.context_parallel}")
    if layout.ep > 1:
        padded = " padded" if layout.dispatch == "padded" else ""
        parts.append(f"ep {layout.ep}{padded}{_describe_placement(layout)}")
    if layout.expert_tp != (1 if layout.ep > 1 else layout.tp):
        parts.append(f"etp {layout.expert_tp}")
    parts = parts or ["one device"]
    parts += _describe_backend(layout)
    parts += _describe_passes(layout)
    if layout.parallelize is not None:
        parts.append(layout.parallelize)
    return " + ".join(parts)


def _describe_passes(layout: Layout) -> list[str]:
    parts = [f"{layout.micro_batches} micro-batches"] if layout.micro_batches > 1 else []
    joined = layout.joined_micro_batches
    parts += [f"gradients of {joined} joined"] if joined > 1 else []
    parts += [] if layout.reshard == "forward" else [f"reshard after {layout.reshard}"]
    how = "selective " if layout.recompute == "selective" else ""
    parts += [f"{how}recompute"] if layout.recompute else []
    parts += [] if layout.compile == "none" else [f"compiled {layout.compile}"]
    parts += [] if layout.graphs == "none" else ["a graph a micro-batch"]
    return parts if layout.optimizer == "foreach" else [*parts, f"{layout.optimizer} optimizer"]


def _describe_placement(layout: Layout) -> str:
    words = ""
    if layout.placement is not None:
        words = f" {layout.placement}" if isinstance(layout.placement, str) else " placed"
    words += f", exchanged after {', '.join(layout.exchange)}" if layout.exchange else ""
    if layout.rebalance is not None:
        every = layout.rebalance.every
        words += f", placed anew every {every} steps" if every > 1 else ", placed anew after each step"
    return words


def _describe_backend(layout: Layout) -> list[str]:
    parts: list[str] = [] if layout.attention == "plain" else [f"{layout.attention} attention"]
    parts += [] if layout.experts == "loop" else [layout.experts]
    return parts if layout.router_losses == "global" else [*parts, "its own router losses"]


def _describe_pipeline(layout: Layout) -> str:
    text = f"pp {layout.pp}"
    if layout.pipeline_schedule != "1f1b":
        text += f" {layout.pipeline_schedule}"
    num_stages = count_stages(layout)
    if num_stages > layout.pp:
        text += f" of {num_stages} stages"
    return text


def _describe_data(layout: Layout) -> str:
    kind = layout.data_parallel
    if layout.parallelize is not None:  # the user's code decides how to use these ranks
        both = layout.dp_replicate > 1 and layout.dp_shard > 1
        return f"dp {layout.dp_replicate}x{layout.dp_shard}" if both else f"dp {layout.data_ranks}"
    name = (
        kind if kind != "fsdp1" or layout.fsdp1_strategy == "full_shard" else f"fsdp1 {layout.fsdp1_strategy}"
    )
    if layout.dp_replicate > 1 and layout.dp_shard > 1:
        return f"{'hsdp' if kind == 'fsdp2' else f'{name} hybrid'} {layout.dp_replicate}x{layout.dp_shard}"
    if layout.dp_replicate > 1 and kind != "ddp":
        return f"{name} {layout.dp_replicate}x1"
    return f"{name} {layout.data_ranks}"
