"""Every preset is a valid model, each family has a tiny sibling, and `stress` uses every feature."""

from __future__ import annotations

import json

import pytest

from moeverify.cases.axes.borrowed import count_lent
from moeverify.cases.axes.stages import count_stages
from moeverify.cases.presets import PRESETS
from moeverify.cases.schema import Layout, MoE, ReferenceModel
from moeverify.cases.validation.load import load_cases

FAMILIES = [name for name in PRESETS if f"tiny-{name}" in PRESETS]


def make(name: str) -> ReferenceModel:
    return ReferenceModel.model_validate_json(json.dumps(PRESETS[name]))


@pytest.mark.parametrize("name", PRESETS)
def test_preset_is_a_valid_case(write, name):
    [case] = load_cases([write("case.yaml", f"recipe: {{model: {{preset: {name}}}}}\n")])
    assert case.recipe.model == make(name).model_copy(update={"preset": name})


def test_every_family_has_a_tiny_sibling():
    assert set(FAMILIES) == {
        "mixtral-8x7b",
        "mixtral-8x22b",
        "mixtral-8x2b",
        "qwen2-57b-a14b",
        "qwen3-30b-a3b",
        "qwen3-235b-a22b",
        "olmoe-1b-7b",
        "deepseek-v2",
        "deepseek-v2-lite",
        "deepseek-v3",
        "glm-4.5-air",
        "minimax-m2",
        "gpt",
    }
    rest = set(PRESETS) - set(FAMILIES) - {f"tiny-{name}" for name in FAMILIES}
    assert rest == {"tiny-deepseek-v3-routing", "stress", "stress-tied"}


@pytest.mark.parametrize("name", FAMILIES)
def test_tiny_sibling_has_the_structure_of_its_family(name):
    full, tiny = make(name), make(f"tiny-{name}")
    switches = ("norm", "norm_eps", "activation", "attention_bias", "qk_norm", "mlp_bias", "rope_theta")
    for switch in (*switches, "tie_embedding", "qk_norm_scope", "attention_bias_scope"):
        assert getattr(tiny, switch) == getattr(full, switch), switch
    assert tiny.num_heads * full.num_kv_heads == full.num_heads * tiny.num_kv_heads
    assert tiny.head_dim * tiny.num_heads * full.hidden == full.head_dim * full.num_heads * tiny.hidden
    assert (tiny.rotary_dim or tiny.head_dim) * full.head_dim == (
        full.rotary_dim or full.head_dim
    ) * tiny.head_dim
    assert (tiny.moe is None) == (full.moe is None)
    assert bool(tiny.num_dense_layers) == bool(full.num_dense_layers)
    if full.mla is None or full.yarn is None:
        assert (tiny.mla, tiny.yarn) == (full.mla, full.yarn)
    else:
        assert bool(tiny.mla.q_lora) == bool(full.mla.q_lora)
        assert tiny.yarn == full.yarn.model_copy(update={"original_length": 8})
    assert tiny.vocab_size == 128
    assert 32 <= tiny.hidden <= 64
    assert 2 <= tiny.num_layers <= 3
    if tiny.moe is not None and full.moe is not None:
        sizes = {"num_experts", "top_k", "expert_hidden", "shared_hidden"}
        assert tiny.moe.model_dump(exclude=sizes) == full.moe.model_dump(exclude=sizes)
        assert bool(tiny.moe.shared_hidden) == bool(full.moe.shared_hidden)
        assert 8 <= tiny.moe.num_experts <= 16


@pytest.mark.parametrize("name", [name for name in PRESETS if "tiny" in name or "stress" in name])
def test_small_preset_fits_small_layouts(write, name):
    layouts = ["tp: 2, loss_parallel: true, sequence_parallel: true", "cp: 2, context_parallel: alltoall"]
    if make(name).moe is not None:
        layouts += ["dp_shard: 2, tp: 2, ep: 4", "dp_shard: 2, tp: 2, ep: 2, etp: 2", "tp: 2, etp: 2"]
    for index, layout in enumerate(layouts):
        load_cases([write(f"{index}.yaml", f"recipe: {{model: {{preset: {name}}}}}\nlayout: {{{layout}}}\n")])


@pytest.mark.parametrize(
    "layout",
    [
        "tp: 2, cp: 2, context_parallel: alltoall",
        "dp_shard: 8, ep: 8",
        "dp_shard: 2, cp: 2, tp: 2, ep: 8",
        "dp_replicate: 2, cp: 4, ep: 4",
        "tp: 4, cp: 2",
    ],
)
def test_stress_fits_large_layouts(write, layout):
    load_cases([write("a.yaml", f"recipe: {{model: {{preset: stress}}}}\nlayout: {{{layout}}}\n")])


def test_stress_has_everything_switched_on():
    model = make("stress")
    assert isinstance(model.moe, MoE)
    off = {field for field in model.moe.model_fields_set if not getattr(model.moe, field)}
    assert not off
    assert model.moe.model_fields_set >= set(MoE.model_fields) - {"renormalize", "balance_scope"}
    assert model.moe.num_experts > 10
    assert model.moe.top_k > 1
    assert model.attention_bias
    assert model.mlp_bias
    assert model.qk_norm
    assert 0 < model.num_dense_layers < model.num_layers
    assert model.num_kv_heads < model.num_heads


def test_stress_tied_is_what_stress_cannot_be():
    stress, tied = make("stress"), make("stress-tied")
    assert isinstance(tied.moe, MoE)
    assert isinstance(stress.moe, MoE)
    for field in ("tie_embedding", "norm", "activation", "num_dense_layers"):
        assert getattr(tied, field) != getattr(stress, field)
    assert (tied.moe.top_k, tied.moe.score, tied.moe.renormalize) == (1, "softmax", False)
    assert tied.moe.num_experts > 10


@pytest.mark.parametrize(
    ("fields", "expert_tp", "lent", "world"),
    [
        ({}, 1, 1, 1),
        ({"tp": 2}, 2, 2, 2),
        ({"tp": 2, "ep": 2}, 1, 2, 2),
        ({"tp": 2, "ep": 2, "etp": 2, "dp_shard": 2}, 2, 4, 4),
        ({"dp_replicate": 2, "dp_shard": 2, "cp": 2, "ep": 4}, 1, 4, 8),
        ({"dp_replicate": 2, "cp": 2, "ep": 4, "data_parallel": "ddp"}, 1, 4, 4),
        ({"pp": 2, "dp_shard": 2, "tp": 2, "etp": 4}, 4, 4, 8),
    ],
)
def test_resolved_degrees(fields, expert_tp, lent, world):
    layout = Layout(**fields)
    assert (layout.expert_tp, count_lent(layout), layout.world_size) == (expert_tp, lent, world)
    assert layout.data_ranks == layout.dp_replicate * layout.dp_shard


@pytest.mark.parametrize(
    ("fields", "slices"),
    [
        ({"tp": 2}, False),
        ({"tp": 2, "ep": 2}, True),
        ({"tp": 2, "etp": 1}, True),
        ({"tp": 4, "etp": 2}, True),
        ({"dp_shard": 2, "etp": 2}, False),
    ],
)
def test_positions_are_cut_where_tp_does_not_cut_experts(fields, slices):
    assert Layout(**fields).slices_tokens is slices


@pytest.mark.parametrize(
    ("fields", "num_stages"),
    [
        ({}, 1),
        ({"pp": 4}, 4),
        ({"pp": 2, "pipeline_schedule": "zbv"}, 4),
        ({"pp": 2, "pipeline_schedule": "interleaved_1f1b", "virtual_stages": 3}, 6),
    ],
)
def test_number_of_stages(fields, num_stages):
    assert count_stages(Layout(**fields)) == num_stages
