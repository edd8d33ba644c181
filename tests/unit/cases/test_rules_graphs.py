"""Rules on graphs of micro-batches, on joined gradients and on recomputation, as in `test_rules`."""

from __future__ import annotations

import pytest

BROKEN = [
    (
        "dp_shard: 2, graphs: micro_batch",
        "moe: null",
        "layout.graphs",
        "stay gathered for all micro-batches of a step",
        "write `reshard: step`",
    ),
    (
        "dp_replicate: 2, data_parallel: ddp, graphs: micro_batch",
        "moe: null",
        "layout.graphs",
        "the passes of ddp reduce gradients",
        "write `data_parallel: fsdp2`",
    ),
    (
        "dp_shard: 2, pp: 2, graphs: micro_batch",
        "moe: null",
        "layout.graphs",
        "together with pp are not supported",
        "remove pp",
    ),
    (
        "dp_shard: 2, reshard: step, graphs: micro_batch, recompute: true",
        "moe: null",
        "layout.graphs",
        "together with recompute are not supported",
        "remove recompute",
    ),
    (
        "dp_shard: 2, reshard: step, graphs: micro_batch",
        "",
        "layout.graphs",
        "only `grouped_mm` in bfloat16",
        "recipe.precision bfloat16",
    ),
    (
        "dp_shard: 2, ep: 2, reshard: step, graphs: micro_batch, experts: grouped_mm",
        "precision: bfloat16",
        "layout.graphs",
        "cannot wait for the sizes of an exchange",
        "write `dispatch: padded`",
    ),
    (
        "dp_shard: 2, reshard: step, graphs: micro_batch",
        "precision: mixed, moe: null",
        "layout.graphs",
        "together with the precision mixed",
        "another recipe.precision",
    ),
    (
        "parallelize: 'mine:divide', dp_shard: 2, graphs: micro_batch",
        "",
        "layout.graphs",
        "for the built-in parallelism of the reference model",
        "remove it",
    ),
    (
        "micro_batches: 4, experts: grouped_mm, joined_micro_batches: 3",
        "precision: bfloat16",
        "layout.joined_micro_batches",
        "micro_batches 4 is not divisible by joined_micro_batches 3",
        "a multiple of 3",
    ),
    (
        "micro_batches: 2, joined_micro_batches: 2",
        "",
        "layout.joined_micro_batches",
        "only `grouped_mm` joins gradients",
        "write `experts: grouped_mm`",
    ),
    (
        "micro_batches: 2, joined_micro_batches: 2",
        "moe: null",
        "layout.joined_micro_batches",
        "only experts of the reference model",
        "remove it",
    ),
    (
        "dp_shard: 2, ep: 2, micro_batches: 2, joined_micro_batches: 2, experts: grouped_mm",
        "precision: bfloat16",
        "layout.joined_micro_batches",
        "equally many rows",
        "write `dispatch: padded`",
    ),
    (
        "dp_shard: 2, pp: 2, recompute: selective, micro_batches: 2, pipeline_schedule: zbv",
        "{moe: null, num_layers: 4}",
        "layout.recompute",
        "selective recomputation does not go with zbv, which splits backward passes",
        "write `recompute: true`",
    ),
    (
        "dp_shard: 2, reshard: step, graphs: micro_batch, recompute: selective",
        "moe: null",
        "layout.graphs",
        "together with recompute are not supported",
        "remove recompute",
    ),
    (
        "micro_batches: 2, joined_micro_batches: 2, experts: grouped_mm, recompute: true",
        "precision: bfloat16",
        "layout.joined_micro_batches",
        "together with recompute are not supported",
        "remove recompute",
    ),
]
KEPT = [
    ("dp_shard: 2, reshard: step, graphs: micro_batch", "moe: null"),
    ("micro_batches: 4, experts: grouped_mm, joined_micro_batches: 2", "precision: bfloat16"),
]


@pytest.mark.parametrize(("layout", "recipe", "path", "message", "remedy"), BROKEN)
def test_broken_rule(check_broken, layout, recipe, path, message, remedy):
    check_broken(layout, recipe, path, message, remedy)


@pytest.mark.parametrize(("layout", "recipe"), KEPT)
def test_kept_rule(write, find_problems, compose, layout, recipe):
    assert find_problems(write("case.yaml", compose(layout, recipe))) == []


@pytest.mark.parametrize("check", ["activations", "forced blocks"])
def test_nothing_inside_a_graph_is_shown(write, find_problems, compose, check):
    text = compose("dp_shard: 2, reshard: step, graphs: micro_batch", "moe: null")
    file = write("case.yaml", text.replace("checks: {}", f"checks: {{also: [{check}]}}"))
    [problem] = find_problems(file)
    assert (problem.path, f"`{check}`" in problem.message) == ("layout.graphs", True)
