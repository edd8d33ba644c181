"""Rules on the layout and across fields: what breaks them, what is said, and what barely keeps them."""

from __future__ import annotations

import pytest

from moeverify.validation.load import load_cases

# Each row: fields put into the layout, fields put into the recipe, the path blamed, parts of the message and
# of the remedy. The recipe is `stress` with 8 rows of 16 tokens: 3 layers (1 dense), 8 heads, 4 kv heads,
# 16 experts in 4 groups of which 2 are kept, k = 3, one idle expert.
BROKEN = [
    (
        "dp_shard: 2, tp: 2, ep: 8",
        "",
        "layout.ep",
        "ep 8 does not divide the 4 ranks that experts borrow (dp_shard 2 x cp 1 x tp 2)",
        "write a divisor of 4",
    ),
    ("dp_shard: 3", "", "layout.dp_shard", "recipe.data.batch 8 is not divisible by dp_shard 3", "such as 9"),
    ("micro_batches: 16", "", "layout.micro_batches", "not divisible by micro_batches 16", "such as 16"),
    (
        "dp_replicate: 2, dp_shard: 2, micro_batches: 4",
        "",
        "layout.dp_replicate",
        "recipe.data.batch 8 is not divisible by dp_replicate 2 x dp_shard 2 x micro_batches 4",
        "a multiple of 16, such as 16",
    ),
    ("tp: 4", "num_heads: 6, num_kv_heads: 3", "layout.tp", "num_heads 6 (attention heads)", "such as 8"),
    ("tp: 8", "", "layout.tp", "recipe.model.num_kv_heads 4 (key and value heads) is not", "such as 8"),
    ("tp: 2", "ffn_hidden: 33", "layout.tp", "recipe.model.ffn_hidden 33", "such as 34, or change tp"),
    ("tp: 2", "moe: {shared_hidden: 33}", "layout.tp", "recipe.model.moe.shared_hidden 33", "such as 34"),
    ("tp: 2", "moe: {expert_hidden: 33}", "layout.tp", "expert_hidden 33 (the width of an expert)", "34"),
    ("tp: 2, ep: 1, etp: 2", "moe: {expert_hidden: 33}", "layout.etp", "is not divisible by etp 2", "34"),
    ("tp: 2, loss_parallel: true", "vocab_size: 97", "layout.tp", "recipe.model.vocab_size 97", "98"),
    ("dp_shard: 4, ep: 4", "moe: {num_experts: 18, num_groups: 1, top_groups: 1}", "layout.ep", "18", "20"),
    ("dp_shard: 2, ep: 2", "moe: null", "layout.ep", "ep 2 needs a model with experts", "remove ep"),
    ("dp_shard: 2, ep: 2", "num_dense_layers: 3", "layout.ep", "ep 2 needs a model with experts", "remove"),
    ("tp: 2, etp: 2", "moe: null", "layout.etp", "etp 2 needs a model with experts", "remove etp"),
    ("tp: 4, etp: 3", "moe: {expert_hidden: 33}", "layout.etp", "etp 3 does not divide the 4 ranks", "of 4"),
    ("dp_shard: 2, ep: 2, etp: 2", "", "layout.ep", "ep 2 x etp 2 do not divide the 2 ranks", "divisor of 1"),
    (
        "dp_shard: 2, ep: 4",
        "",
        "layout.ep",
        "ep 4 does not divide the 2 ranks that experts borrow (dp_shard 2 x cp 1 x tp 1)",
        "write a divisor of 2, or raise one of dp_shard, cp, tp",
    ),
    ("dp_replicate: 4, ep: 4", "", "layout.ep", "does not divide the 1 ranks", "raise one of dp_shard"),
    (
        "dp_shard: 2, tp: 2, ep: 4, etp: 2",
        "",
        "layout.ep",
        "ep 4 x etp 2 do not divide the 4 ranks that experts borrow (dp_shard 2 x cp 1 x tp 2)",
        "",
    ),
    (
        "dp_replicate: 2, ep: 4, data_parallel: ddp",
        "",
        "layout.ep",
        "the 2 ranks that experts borrow (dp_replicate 2 x dp_shard 1 x cp 1 x tp 1)",
        "",
    ),
    ("cp: 3", "", "layout.cp", "recipe.data.seq_len 16 is not divisible by 6 (2 x cp, for the", "such as 18"),
    ("cp: 16", "", "layout.cp", "recipe.data.seq_len 16 is not divisible by 32", "such as 32"),
    ("cp: 3, context_parallel: alltoall", "", "layout.cp", "not divisible by 3 (cp)", "such as 18"),
    (
        "cp: 2, context_parallel: torch",
        "precision: float32",
        "layout.context_parallel",
        "chunks of a multiple of 32 positions in float32",
        "a multiple of 128",
    ),
    ("cp: 2, context_parallel: torch", "", "layout.context_parallel", "no kernel in float64", "float32 or"),
    (
        "tp: 2, sequence_parallel: true",
        "seq_len: 9",
        "layout.sequence_parallel",
        "recipe.data.seq_len 9 is not divisible by tp 2, as sequence_parallel needs",
        "such as 10",
    ),
    (
        "tp: 4, cp: 2, sequence_parallel: true",
        "seq_len: 12",
        "layout.sequence_parallel",
        "recipe.data.seq_len 12 / cp 2 is not divisible by tp 4",
        "a multiple of 8, such as 16",
    ),
    ("tp: 2, ep: 2", "seq_len: 9", "layout.tp", "9 is not divisible by tp 2, as etp 1 needs", "10"),
    (
        "cp: 8, context_parallel: alltoall",
        "",
        "layout.context_parallel",
        "num_kv_heads 4 is not divisible by cp 8, as context_parallel `alltoall` needs",
        "write `allgather`, or change cp",
    ),
    ("tp: 2, cp: 4, context_parallel: alltoall", "", "layout.context_parallel", "num_kv_heads 4 / tp 2", ""),
    (
        "sequence_parallel: true",
        "",
        "layout.sequence_parallel",
        "sequence_parallel needs tp above 1",
        "set tp",
    ),
    ("loss_parallel: true", "", "layout.loss_parallel", "loss_parallel needs tp above 1", "remove loss_par"),
    (
        "pp: 2, micro_batches: 2",
        "",
        "layout.pp",
        "recipe.model.num_layers 3 is not divisible by pp 2",
        "a multiple of 2, such as 4, or write `stage_layers: [2, 1]`",
    ),
    (
        "pp: 2, micro_batches: 2, pipeline_schedule: zbv",
        "",
        "layout.pp",
        "num_layers 3 is not divisible by 4 stages (pp 2 x 2)",
        "such as 4, or write `stage_layers: [0, 1, 1, 1]`",
    ),
    (
        "pp: 8, micro_batches: 8",
        "",
        "layout.pp",
        "num_layers 3 is too few for pp 8",
        "at least 6, or lower pp",
    ),
    (
        "pp: 2, micro_batches: 4, pipeline_schedule: interleaved_1f1b, virtual_stages: 40",
        "",
        "layout.pp",
        "recipe.model.num_layers 3 is too few for 80 stages (pp 2 x 40)",
        "set it to at least 78, or lower pp or virtual_stages",
    ),
    (
        "pp: 2, micro_batches: 2, stage_layers: [1, 1]",
        "",
        "layout.stage_layers",
        "the stages have 2 layers together, the model 3",
        "write `stage_layers: [2, 1]`",
    ),
    (
        "pp: 2, micro_batches: 2, stage_layers: [1, 1, 1]",
        "",
        "layout.stage_layers",
        "3 stages are given for pp 2",
        "write `stage_layers: [2, 1]`",
    ),
    (
        "pp: 4, micro_batches: 4, stage_layers: [1, 0, 1, 1]",
        "",
        "layout.stage_layers",
        "stage 1 has no layer, which only the first and the last may",
        "write `stage_layers: [0, 1, 1, 1]`",
    ),
    (
        "pp: 2, stage_layers: [2, 1]",
        "",
        "layout.micro_batches",
        "1f1b needs at least as many micro_batches as stages: 1 for pp 2",
        "set it to 2 or more",
    ),
    (
        "pp: 2, micro_batches: 5, pipeline_schedule: interleaved_1f1b, stage_layers: [0, 1, 1, 1]",
        "",
        "layout.micro_batches",
        "interleaved_1f1b takes 2 rounds, which do not divide micro_batches 5",
        "a multiple of pp, such as 6",
    ),
    (
        "pp: 2, micro_batches: 2, stage_layers: [2, 1], virtual_stages: 2",
        "num_layers: 4",
        "layout.virtual_stages",
        "1f1b has one stage a rank, so virtual_stages cannot be 2",
        "`pipeline_schedule: interleaved_1f1b`",
    ),
    (
        "pp: 2, micro_batches: 2, virtual_stages: 3, pipeline_schedule: zbv",
        "num_layers: 6",
        "layout.virtual_stages",
        "zbv has two stages a rank, so virtual_stages cannot be 3",
        "write 2",
    ),
    (
        "pp: 2, micro_batches: 2, virtual_stages: 1, pipeline_schedule: interleaved_zero_bubble",
        "num_layers: 2",
        "layout.virtual_stages",
        "has several stages a rank, so virtual_stages cannot be 1",
        "write 2",
    ),
    ("stage_layers: [3]", "", "layout.stage_layers", "stage_layers needs pp above 1", "set pp, or remove"),
    ("pipeline_schedule: zbv", "", "layout.pipeline_schedule", "needs pp above 1", "set pp"),
    (
        "pp: 2, dp_replicate: 2, data_parallel: ddp, micro_batches: 2, stage_layers: [2, 1]",
        "",
        "layout.data_parallel",
        "ddp together with pp is not supported",
        "fsdp2",
    ),
    (
        "dp_replicate: 2, dp_shard: 2, data_parallel: ddp",
        "",
        "layout.dp_shard",
        "ddp shards nothing, so dp_shard cannot be 2",
        "write `dp_replicate: 4` and no dp_shard, or `data_parallel: fsdp2`",
    ),
    (
        "dp_replicate: 2, tp: 2, data_parallel: ddp",
        "",
        "layout.data_parallel",
        "ddp together with tp",
        "fsdp2",
    ),
    ("cp: 2, tp: 2, data_parallel: ddp", "", "layout.data_parallel", "ddp together with tp", "fsdp2"),
    (
        "dp_shard: 2, tp: 2, data_parallel: fsdp1",
        "",
        "layout.data_parallel",
        "fsdp1 together with tp",
        "fsdp2",
    ),
    (
        "dp_shard: 2, cp: 2, data_parallel: fsdp1",
        "",
        "layout.data_parallel",
        "together with cp is not",
        "fsdp2",
    ),
    (
        "dp_shard: 2, ep: 2, data_parallel: fsdp1",
        "",
        "layout.data_parallel",
        "together with ep is not",
        "fsdp2",
    ),
    (
        "cp: 2, tp: 2, ep: 2, data_parallel: fsdp1",
        "",
        "layout.data_parallel",
        "with tp and cp and ep",
        "fsdp2",
    ),
    ("placement: striped", "", "layout.placement", "placement needs ep above 1", "set ep"),
    (
        "dp_shard: 2, ep: 2, placement: spread",
        "",
        "layout.placement",
        "there is no strategy `spread`",
        "`striped`",
    ),
    (
        "dp_shard: 2, ep: 2, placement: [[0, 1, 2], [3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14]]",
        "",
        "layout.placement",
        "no rank holds expert 15",
        "put each expert on at least one rank",
    ),
    (
        "dp_shard: 2, ep: 2, placement: [[0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15, 16], [1]]",
        "",
        "layout.placement[0]",
        "expert 16 is not one of the 16 experts",
        "0 to 15",
    ),
    (
        "dp_shard: 2, ep: 2, placement: [[0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15], []]",
        "",
        "layout.placement[1]",
        "rank 1 holds no expert",
        "at least one",
    ),
    (
        "dp_shard: 4, ep: 4, placement: {1: [[0], [1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15]]}",
        "",
        "layout.placement.1",
        "2 rows for the 4 ranks of ep",
        "write 4 rows, or `ep: 2`",
    ),
    (
        "dp_shard: 2, ep: 2, placement: {0: [[0], [1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15]]}",
        "",
        "layout.placement",
        "there is no matrix for MoE layer 1, 2",
        "one for all",
    ),
    (
        "dp_shard: 2, ep: 2, placement: {0: [[0], [1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15]]}",
        "",
        "layout.placement.0",
        "the model has no MoE layer `0`",
        "1, 2",
    ),
    (
        "dp_shard: 2, tp: 2, ep: 2, etp: 2, placement: striped",
        "",
        "layout.placement",
        "placement together with etp 2 is not supported",
        "write `etp: 1`",
    ),
    (
        "dp_shard: 2, ep: 2, experts: megablocks, placement: striped",
        "",
        "layout.placement",
        "placement together with `experts: megablocks` is not supported",
        "`experts: loop`",
    ),
    (
        "dp_shard: 2, data_parallel: fsdp1, reshard: step",
        "",
        "layout.reshard",
        "fsdp1 has no `reshard`",
        "`data_parallel: fsdp2`",
    ),
    (
        "pp: 2, dp_shard: 2, micro_batches: 4, stage_layers: [2, 1], reshard: backward",
        "",
        "layout.reshard",
        "a stage of a pipeline keeps its gathered parameters",
        "remove it, or remove pp",
    ),
    (
        "parallelize: 'mine:divide', dp_shard: 2, reshard: step",
        "",
        "layout.reshard",
        "for the built-in FSDP2 of the reference model",
        "remove it",
    ),
    (
        "recompute: true, compile: parts",
        "",
        "layout.compile",
        "together with recompute are",
        "remove recompute",
    ),
    ("tp: 2, compile: parts", "", "layout.compile", "together with tp are not supported", "remove tp"),
    (
        "parallelize: 'mine:divide', dp_shard: 2, compile: parts",
        "",
        "layout.compile",
        "for the built-in parallelism of the reference model",
        "remove it",
    ),
    ("dp_shard: 2, dispatch: padded", "", "layout.dispatch", "a way to exchange tokens over ep", "set ep"),
    (
        "dp_shard: 2, ep: 2, dispatch: padded, placement: striped",
        "",
        "layout.dispatch",
        "equal blocks of experts",
        "placement",
    ),
    ("experts: grouped_mm", "", "layout.experts", "grouped_mm cannot compute in float64", "`experts: loop`"),
    (
        "experts: grouped_mm",
        "precision: float32, moe: {expert_hidden: 30}",
        "layout.experts",
        "rows of a multiple of 16 bytes, and recipe.model.moe.expert_hidden 30 is not",
        "a multiple of 4, such as 32",
    ),
    (
        "experts: grouped_mm, tp: 4",
        "precision: bfloat16, moe: {expert_hidden: 16}",
        "layout.experts",
        "recipe.model.moe.expert_hidden 16 / etp 4 is not",
        "a multiple of 32, such as 32",
    ),
    (
        "experts: grouped_mm",
        "precision: bfloat16, hidden: 36",
        "layout.experts",
        "recipe.model.hidden 36",
        "40",
    ),
    (
        "experts: grouped_mm, dp_shard: 2",
        "precision: mixed, hidden: 36",
        "layout.experts",
        "recipe.model.hidden 36",
        "40",
    ),
    (
        "dp_replicate: 2, data_parallel: ddp",
        "precision: mixed",
        "recipe.precision",
        "mixed is a precision of fsdp2, and ddp is another data parallelism",
        "`data_parallel: fsdp2`",
    ),
    (
        "dp_shard: 2, data_parallel: fsdp1",
        "precision: mixed",
        "recipe.precision",
        "and fsdp1 is another",
        "`data_parallel: fsdp2`",
    ),
    ("tp: 2", "precision: mixed", "recipe.precision", "needs more than one rank", "set layout.dp_shard"),
    (
        "pp: 2, dp_shard: 2, micro_batches: 2",
        "precision: mixed, num_layers: 4",
        "recipe.precision",
        "mixed together with pp is not supported",
        "float32 or bfloat16",
    ),
    (
        "experts: megablocks, dp_shard: 2",
        "precision: mixed",
        "recipe.precision",
        "mixed together with megablocks' experts is not supported",
        "`experts: grouped_mm`",
    ),
    (
        "dp_shard: 2, parallelize: 'mine:divide', in_float32: [norm]",
        "precision: float32",
        "layout.in_float32",
        "in_float32 has no effect on the precision float32",
        "remove it",
    ),
    (
        "dp_shard: 2, in_float32: [norm]",
        "precision: mixed",
        "layout.in_float32",
        "no module of a built-in layout is left in float32",
        "divide the model by `parallelize`",
    ),
    (
        "micro_batches: 2",
        "moe: {balance_scope: batch}",
        "layout.micro_batches",
        "with balance_scope `batch` the loss is not the sum over micro_batches",
        "write 1, or set recipe.model.moe.balance_scope to `sequence`",
    ),
]

KEPT = [
    ("dp_replicate: 2, dp_shard: 2, micro_batches: 2", ""),
    ("tp: 2, loss_parallel: true, sequence_parallel: true", ""),
    ("tp: 4, cp: 2", ""),
    ("tp: 2, cp: 2, context_parallel: alltoall", ""),
    ("cp: 4, context_parallel: alltoall", ""),
    ("cp: 8", ""),
    ("cp: 2, context_parallel: torch", "precision: float32, seq_len: 128"),
    ("cp: 2, context_parallel: torch", "precision: bfloat16"),
    ("dp_shard: 4, ep: 4", ""),
    ("dp_shard: 2, tp: 2, ep: 4", ""),
    ("dp_shard: 2, tp: 2, ep: 2, etp: 2", ""),
    ("dp_shard: 2, tp: 2, etp: 2", ""),
    ("dp_replicate: 2, dp_shard: 2, cp: 2, ep: 4", ""),
    ("dp_replicate: 4, ep: 4, data_parallel: ddp", ""),
    ("dp_replicate: 2, cp: 2, ep: 4, data_parallel: ddp", ""),
    ("tp: 2, data_parallel: ddp", ""),
    ("tp: 2, data_parallel: fsdp1", ""),
    ("dp_replicate: 2, dp_shard: 2, data_parallel: fsdp1", ""),
    ("dp_shard: 2, data_parallel: fsdp1, fsdp1_strategy: shard_grad_op", ""),
    ("dp_replicate: 8", ""),
    ("dp_shard: 2, ep: 2, dispatch: padded, reshard: step, compile: parts", ""),
    ("dp_shard: 2, tp: 2, ep: 4, dispatch: padded, reshard: backward", ""),
    ("experts: grouped_mm", "precision: float32"),
    ("experts: grouped_mm, tp: 4", "precision: bfloat16"),
    ("experts: grouped_mm", "moe: null"),
    ("dp_shard: 2, experts: grouped_mm", "precision: mixed"),
    ("dp_replicate: 2", "precision: mixed"),
    ("cp: 2, tp: 2", "precision: mixed"),
    ("parallelize: 'mine:divide', tp: 2, data_parallel: ddp", "precision: mixed"),
    ("parallelize: 'mine:divide', dp_shard: 2, in_float32: [norm]", "precision: mixed"),
    ("tp: 2", "num_dense_layers: 0, ffn_hidden: 33"),
    ("tp: 2", "moe: null"),
    ("tp: 2, ep: 1", "moe: null, seq_len: 9"),
    ("micro_batches: 2", "moe: {balance_scope: batch, balance_coef: 0.0}"),
    ("", "moe: {balance_scope: batch}"),
    ("", "moe: {top_k: 7}"),
    ("", "moe: {top_k: 15, top_groups: 4}"),
    ("", "moe: {num_groups: 16, top_groups: 8, group_score: max}"),
    ("", "num_dense_layers: 3"),
    ("tp: 2, etp: 1", ""),
    ("tp: 4, etp: 2", ""),
    ("dp_shard: 2, etp: 2", ""),
    ("dp_shard: 2, tp: 2, etp: 4, ep: 1", ""),
    ("pp: 2, micro_batches: 2", "num_layers: 4"),
    ("pp: 2, micro_batches: 1, pipeline_schedule: gpipe, stage_layers: [1, 2]", ""),
    ("pp: 2, micro_batches: 2, pipeline_schedule: zbv, stage_layers: [0, 1, 2, 0]", ""),
    ("pp: 2, micro_batches: 1, pipeline_schedule: interleaved_1f1b, virtual_stages: 3", "num_layers: 6"),
    ("pp: 2, cp: 2, tp: 2, micro_batches: 2", "num_layers: 4"),
    ("pp: 2, micro_batches: 2, data_parallel: ddp", "num_layers: 4"),
    ("", "optimizer: {name: sgd, momentum: 0.9}"),
    ("", "optimizer: {name: sgd, betas: [0.9, 0.95]}"),
    ("", "optimizer: {name: adam, betas: [0.8, 0.9], eps: 1e-6}"),
    ("optimizer: fused", "optimizer: {name: sgd}"),
    ("", "precision: bfloat16, tolerance: {kind: exact}"),
    ("", "precision: float32, tolerance: {kind: exact}"),
    ("", "tolerance: {kind: fixed, rtol: 0.0, atol: 0.0}"),
    ("", "tolerance: {factor: 2.0}"),
]


@pytest.mark.parametrize(("layout", "recipe", "path", "message", "remedy"), BROKEN)
def test_broken_rule(check_broken, layout, recipe, path, message, remedy):
    check_broken(layout, recipe, path, message, remedy)


@pytest.mark.parametrize(("layout", "recipe"), KEPT)
def test_kept_rule(write, find_problems, compose, layout, recipe):
    assert find_problems(write("case.yaml", compose(layout, recipe))) == []


def test_a_rule_names_the_line_inside_the_recipe_file(write, find_problems):
    own = write("recipes/own.yaml", "# what\nmodel:\n  preset: stress\n  moe:\n    top_k: 15\n")
    [problem] = find_problems(write("case.yaml", "recipe: own\n"))
    assert (problem.file, problem.line, problem.path) == (str(own), 5, "recipe.model.moe.top_k")


def test_a_rule_on_a_field_of_the_preset_names_the_line_of_the_preset(write, find_problems):
    own = write("recipes/own.yaml", "# what\nmodel:\n  preset: stress\n  moe: {idle_experts: 7}\n")
    [problem] = find_problems(write("case.yaml", "recipe: own\n"))
    assert (problem.file, problem.line, problem.path) == (str(own), 3, "recipe.model.moe.top_k")


def test_a_rule_on_a_default_names_its_section_or_only_the_file(write, find_problems):
    text = "recipe: {model: {preset: stress}, data: {batch: 7}}\nlayout:\n  dp_shard: 2\n"
    [problem] = find_problems(write("case.yaml", text))
    assert (problem.line, problem.path) == (3, "layout.dp_shard")


PLACED = """
recipe: {model: {preset: stress}}
layout:
  dp_shard: 2
  ep: 2
  placement: %s
"""
ALL_BUT_15 = list(range(15))


def test_a_row_of_a_placement_is_blamed_at_its_line(write, find_problems):
    rows = f"\n  - {ALL_BUT_15}\n  - [15, 16]\n"
    [problem] = find_problems(write("case.yaml", PLACED % rows))
    assert (problem.path, problem.line) == ("layout.placement[1]", 7)


def test_a_placement_file_stands_beside_the_case(write):
    write(
        "where/placed.yaml",
        f"num_experts: 16\nlayers:\n  1: [{ALL_BUT_15}, [15]]\n  2: [[15], {ALL_BUT_15}]\n",
    )
    [case] = load_cases([write("where/case.yaml", PLACED % "placed.yaml")])
    assert case.layout.placement == {"1": (tuple(ALL_BUT_15), (15,)), "2": ((15,), tuple(ALL_BUT_15))}


def test_what_is_wrong_with_a_placement_file_is_blamed_there(write, find_problems):
    file = write("placed.yaml", "num_experts: 16\nlayers:\n  1:\n  - [0, 1]\n  - []\n")
    problems = find_problems(write("case.yaml", PLACED % "placed.yaml"))
    assert {(problem.file, problem.line) for problem in problems} == {(str(file), 3), (str(file), 5)}


def test_a_placement_file_that_is_not_there(write, find_problems):
    [problem] = find_problems(write("case.yaml", PLACED % "placed.yaml"))
    assert (problem.file.endswith("placed.yaml"), problem.message) == (True, "there is no such file")
