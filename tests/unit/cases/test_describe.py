"""Short descriptions of layouts and recipes."""

from __future__ import annotations

import pytest

from moeverify.cases.axes.describe import describe_layout
from moeverify.cases.schema import Layout
from moeverify.cases.validation.load import load_cases
from moeverify.report.case_list import describe_recipe


@pytest.mark.parametrize(
    ("fields", "text"),
    [
        ({}, "one device"),
        ({"micro_batches": 4}, "one device + 4 micro-batches"),
        ({"dp_shard": 4}, "fsdp2 4"),
        ({"dp_replicate": 2, "dp_shard": 2, "cp": 2, "ep": 4}, "hsdp 2x2 + cp 2 allgather + ep 4"),
        ({"dp_replicate": 4, "data_parallel": "ddp"}, "ddp 4"),
        ({"dp_replicate": 4}, "fsdp2 4x1"),
        ({"dp_shard": 2, "data_parallel": "fsdp1"}, "fsdp1 2"),
        (
            {"dp_shard": 2, "data_parallel": "fsdp1", "fsdp1_strategy": "shard_grad_op"},
            "fsdp1 shard_grad_op 2",
        ),
        ({"dp_replicate": 2, "dp_shard": 2, "data_parallel": "fsdp1"}, "fsdp1 hybrid 2x2"),
        (
            {"tp": 2, "sequence_parallel": True, "loss_parallel": True},
            "tp 2 + sequence parallel + loss parallel",
        ),
        ({"cp": 2, "context_parallel": "alltoall"}, "cp 2 alltoall"),
        ({"dp_shard": 2, "tp": 2, "ep": 2, "etp": 2}, "fsdp2 2 + tp 2 + ep 2 + etp 2"),
        ({"dp_shard": 2, "tp": 2, "ep": 2}, "fsdp2 2 + tp 2 + ep 2"),
        (
            {"dp_shard": 2, "experts": "grouped_mm", "recompute": True, "optimizer": "fused"},
            "fsdp2 2 + grouped_mm + recompute + fused optimizer",
        ),
        (
            {"dp_shard": 2, "reshard": "step", "graphs": "micro_batch"},
            "fsdp2 2 + reshard after step + a graph a micro-batch",
        ),
        (
            {"dp_shard": 2, "experts": "grouped_mm", "micro_batches": 4, "joined_micro_batches": 2},
            "fsdp2 2 + grouped_mm + 4 micro-batches + gradients of 2 joined",
        ),
        ({"tp": 2, "pp": 2, "parallelize": "a.b:c"}, "pp 2 + tp 2 + a.b:c"),
    ],
)
def test_layout(fields, text):
    assert describe_layout(Layout(**fields)) == text


@pytest.mark.parametrize(
    ("recipe", "text"),
    [
        (
            "{model: {preset: stress}}",
            "stress: 3 layers, hidden 32, 16 experts top-3, adamw, float64, 2 steps of 8x16 tokens",
        ),
        (
            "{model: {preset: tiny-gpt, num_layers: 1}, steps: 1, optimizer: {name: sgd}}",
            "tiny-gpt: 1 layer, hidden 32, dense, sgd, float64, 1 step of 8x16 tokens",
        ),
        ("{model: {factory: 'a:b', vocab_size: 8}}", "a:b, adamw, float64, 2 steps of 8x16 tokens"),
    ],
)
def test_recipe(write, recipe, text):
    [case] = load_cases([write("a.yaml", f"recipe: {recipe}\n")])
    assert describe_recipe(case.recipe) == text
