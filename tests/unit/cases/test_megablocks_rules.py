"""Unsupported options of megablocks' router and experts are refused early; the package is not needed."""

from __future__ import annotations

import pytest

CASE = """\
recipe:
  model:
    vocab_size: 48
    hidden: 16
    num_layers: 2
    num_heads: 2
    num_kv_heads: 2
    head_dim: 8
    ffn_hidden: 32
    mlp_bias: {mlp_bias}
    moe: {{{moe}}}
  data: {{batch: 4, seq_len: 8, min_valid: {min_valid}}}
layout: {{experts: megablocks, {layout}}}
"""

LAYOUT = CASE.splitlines().index("layout: {{experts: megablocks, {layout}}}") + 1

# Fields put into the layout, changed fields of the experts, the path blamed, the message, the remedy.
BROKEN = [
    ("tp: 2", {}, "layout.tp", "megablocks' experts together with tp are not", "remove tp, or write `exp"),
    (
        "pp: 2, micro_batches: 2",
        {},
        "layout.pp",
        "together with pp are not",
        "remove pp, or write `experts: l",
    ),
    (
        "dp_shard: 2, etp: 2",
        {},
        "layout.etp",
        "together with etp are not",
        "remove etp, or write `experts: l",
    ),
    ("dp_shard: 2, data_parallel: fsdp1", {}, "layout.data_parallel", "fsdp1 together with meg", "fsdp2"),
    ("parallelize: 'a:b'", {}, "layout.experts", "cannot be divided by your own function", "remove one"),
    ("", {"score": "sigmoid"}, "layout.experts", "no score but softmax", "moe.score to softmax, or write `e"),
    ("", {"route_scale": "2.0"}, "layout.experts", "no route_scale but 1.0", "moe.route_scale to 1.0"),
    ("", {"num_groups": "2"}, "layout.experts", "no num_groups but 1", "moe.num_groups to 1"),
    ("", {"router_bias": "true"}, "layout.experts", "no router_bias but false", "router_bias to false, or"),
    ("", {"expert_bias": "true"}, "layout.experts", "no expert_bias but false", "expert_bias to false, or"),
    ("", {"shared_gate": "true"}, "layout.experts", "no shared_gate but false", "shared_gate to false, or"),
    ("", {"selection_bias_rate": "0.1"}, "layout.experts", "no selection_bias_rate but 0.0", "rate to 0.0"),
    ("", {"idle_experts": "1"}, "layout.experts", "no idle_experts but 0", "idle_experts to 0"),
    ("", {"expert_hidden": "8"}, "layout.experts", "num_experts x expert_hidden of 128", "more or larger"),
    ("dp_shard: 4", {"num_experts": "6"}, "layout.experts", "6 does not give whole exp", "multiple of 4"),
    ("router_losses: megablocks, recompute: true", {}, "layout.recompute", "counts its losses again", "one"),
]


def compose(layout: str, moe: dict[str, str], *, mlp_bias: str = "false", min_valid: str = "1.0") -> str:
    fields = {"num_experts": "8", "top_k": "2", "expert_hidden": "24", "shared_hidden": "24", **moe}
    text = ", ".join(f"{name}: {value}" for name, value in fields.items())
    return CASE.format(layout=layout, moe=text, mlp_bias=mlp_bias, min_valid=min_valid)


@pytest.mark.parametrize(("layout", "moe", "path", "message", "remedy"), BROKEN)
def test_broken_rule(write, find_problems, *, layout, moe, path, message, remedy) -> None:
    file = write("case.yaml", compose(layout, moe))
    [problem] = find_problems(file)
    assert (problem.file, problem.line, problem.path) == (str(file), LAYOUT, path)
    assert message in problem.message
    assert remedy in problem.remedy


def test_a_bias_of_the_shared_expert(write, find_problems) -> None:
    [problem] = find_problems(write("case.yaml", compose("", {}, mlp_bias="true")))
    assert (problem.path, problem.line) == ("layout.experts", LAYOUT)
    assert "shared expert has no bias" in problem.message
    assert find_problems(write("b.yaml", compose("", {"shared_hidden": "0"}, mlp_bias="true"))) == []


def test_its_own_losses_count_padding(write, find_problems) -> None:
    text = compose("router_losses: megablocks", {"balance_coef": "0.1"}, min_valid="0.5")
    [problem] = find_problems(write("case.yaml", text))
    assert (problem.path, problem.line) == ("layout.router_losses", LAYOUT)
    assert "count padding too" in problem.message
    assert "recipe.data.min_valid to 1.0" in problem.remedy


def test_its_own_losses_need_its_experts(write, find_problems) -> None:
    text = compose("router_losses: megablocks", {}).replace("experts: megablocks, ", "")
    [problem] = find_problems(write("case.yaml", text))
    assert (problem.path, problem.line) == ("layout.router_losses", LAYOUT)
    assert "`experts: megablocks`" in problem.remedy


@pytest.mark.parametrize(
    "layout",
    [
        "",
        "dp_shard: 2",
        "dp_shard: 2, ep: 2",
        "dp_shard: 2, cp: 2, ep: 4",
        "dp_replicate: 2, dp_shard: 2, ep: 2",
        "dp_replicate: 2, data_parallel: ddp, ep: 2, micro_batches: 2, recompute: true",
        "dp_shard: 2, ep: 2, router_losses: megablocks, micro_batches: 2",
    ],
)
def test_kept_rule(write, find_problems, layout) -> None:
    assert find_problems(write("case.yaml", compose(layout, {}))) == []
