"""Rules within a recipe, and for recipe options that no layout can preserve."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from moeverify.cases.rule import blame, experts, reading, reference_model
from moeverify.cases.schema import Case
from moeverify.cases.weights_folder import find_problem
from moeverify.errors import Problem

_MODEL = "recipe.model"
_MOE = "recipe.model.moe"


@reading("recipe.step", _MODEL)
def step_of_own_model(case: Case) -> Iterator[Problem]:
    """Require a user's model for a user's step, which ignores the reference model's router losses."""
    if case.recipe.step is not None and case.recipe.model.reference is not None:
        message = "`step` is for a model of your own, and this recipe trains the reference model"
        remedy = "name a model with `model: {factory: ...}`, or remove `step`"
        yield blame("recipe.step", message, remedy)


@reading(f"{_MODEL}.weights")
def weights_folder(case: Case) -> Iterator[Problem]:
    """Require a readable weights folder. Reading the weights later checks that they fit the model."""
    weights = case.recipe.model.weights
    problem = "" if weights is None else find_problem(Path(weights))
    if problem:
        remedy = (
            "write a folder of safetensors or DCP, seen from that of the case file; see `moeverify convert`"
        )
        yield blame(f"{_MODEL}.weights", problem, remedy)


@reading(f"{_MODEL}.head_dim")
def head_width(case: Case) -> Iterator[Problem]:
    """Require an even head dim, because RoPE rotates pairs of elements."""
    model = reference_model(case)
    if model is not None and model.head_dim % 2:
        remedy = f"write an even number, such as {model.head_dim + 1}"
        yield blame(f"{_MODEL}.head_dim", f"head_dim {model.head_dim} is odd, and RoPE rotates pairs", remedy)


@reading(*(f"{_MODEL}.{name}" for name in ("head_dim", "rotary_dim", "mla")))
def rotary_width(case: Case) -> Iterator[Problem]:
    """Require that the rotary embedding turns pairs of channels within a head."""
    model = reference_model(case)
    if model is None or model.rotary_dim is None:
        return
    path, dim = f"{_MODEL}.rotary_dim", model.rotary_dim
    if model.mla is not None:
        yield blame(
            path, "latent attention has qk_rope channels for the rotary embedding", "remove rotary_dim"
        )
    elif dim % 2 or dim > model.head_dim:
        message = f"rotary_dim {dim} is not an even number up to head_dim {model.head_dim}"
        yield blame(path, message, f"write {model.head_dim}, or remove it")


@reading(*(f"{_MODEL}.{name}" for name in ("mla", "num_heads", "num_kv_heads", "head_dim")))
def latent_heads(case: Case) -> Iterator[Problem]:
    """Require that latent attention has one kv head per head, and a head dim of qk_nope + qk_rope."""
    model = reference_model(case)
    if model is None or model.mla is None:
        return
    mla = model.mla
    if mla.qk_rope % 2:
        message = f"qk_rope {mla.qk_rope} is odd, and RoPE rotates pairs"
        yield blame(f"{_MODEL}.mla.qk_rope", message, f"write an even number, such as {mla.qk_rope + 1}")
    if model.head_dim != mla.qk_nope + mla.qk_rope:
        message = f"head_dim {model.head_dim} is not qk_nope {mla.qk_nope} + qk_rope {mla.qk_rope} of mla"
        yield blame(f"{_MODEL}.head_dim", message, f"write {mla.qk_nope + mla.qk_rope}")
    if model.num_kv_heads != model.num_heads:
        message = f"num_kv_heads {model.num_kv_heads} is not num_heads {model.num_heads}, as mla needs"
        yield blame(f"{_MODEL}.num_kv_heads", message, f"write {model.num_heads}")


@reading(*(f"{_MODEL}.{name}" for name in ("mla", "qk_norm", "qk_norm_scope")))
def query_norms(case: Case) -> Iterator[Problem]:
    """Reject query norms with latent attention, which has its own, and a norm scope without norms."""
    model = reference_model(case)
    if model is None:
        return
    if model.mla is not None and model.qk_norm:
        yield blame(f"{_MODEL}.qk_norm", "qk_norm has no effect on mla", "remove one of them")
    elif model.qk_norm_scope != "head" and not model.qk_norm:
        message = f"qk_norm_scope `{model.qk_norm_scope}` has no effect without qk_norm"
        yield blame(f"{_MODEL}.qk_norm_scope", message, "write `qk_norm: true`, or remove it")


@reading(f"{_MODEL}.attention_bias", f"{_MODEL}.attention_bias_scope")
def attention_biases(case: Case) -> Iterator[Problem]:
    """Require biases for a scope of biases."""
    model = reference_model(case)
    if model is not None and model.attention_bias_scope != "all" and not model.attention_bias:
        message = f"attention_bias_scope `{model.attention_bias_scope}` has no effect without attention_bias"
        remedy = "write `attention_bias: true`, or remove it"
        yield blame(f"{_MODEL}.attention_bias_scope", message, remedy)


@reading(f"{_MODEL}.yarn.beta_fast", f"{_MODEL}.yarn.beta_slow")
def yarn_turns(case: Case) -> Iterator[Problem]:
    """Require beta_fast above beta_slow.

    YaRN keeps frequencies above beta_fast rotations and stretches frequencies below beta_slow.
    """
    model = reference_model(case)
    if model is not None and model.yarn is not None and model.yarn.beta_fast <= model.yarn.beta_slow:
        message = f"beta_fast {model.yarn.beta_fast:g} is not above beta_slow {model.yarn.beta_slow:g}"
        yield blame(f"{_MODEL}.yarn.beta_fast", message, "write a number above beta_slow, such as 32")


@reading(f"{_MODEL}.num_heads", f"{_MODEL}.num_kv_heads")
def grouped_queries(case: Case) -> Iterator[Problem]:
    """Require that each kv head serves the same number of heads."""
    model = reference_model(case)
    if model is not None and model.num_heads % model.num_kv_heads:
        message = f"num_heads {model.num_heads} is not divisible by num_kv_heads {model.num_kv_heads}"
        yield blame(f"{_MODEL}.num_kv_heads", message, f"write a divisor of {model.num_heads}")


@reading(f"{_MODEL}.num_dense_layers", f"{_MODEL}.num_layers")
def dense_layers(case: Case) -> Iterator[Problem]:
    """Require that the dense layers, which come first, are at most all layers."""
    model = reference_model(case)
    if model is not None and model.num_dense_layers > model.num_layers:
        message = f"num_dense_layers {model.num_dense_layers} is above num_layers {model.num_layers}"
        yield blame(f"{_MODEL}.num_dense_layers", message, f"write at most {model.num_layers}")


@reading(f"{_MOE}.top_k", f"{_MOE}.num_experts", f"{_MOE}.idle_experts", _MODEL + ".num_layers")
def reachable_experts(case: Case) -> Iterator[Problem]:
    """Require top_k experts that are not idle."""
    moe = experts(case)
    if moe is None or moe.top_k <= moe.num_experts - moe.idle_experts:
        return
    idle = f" less idle_experts {moe.idle_experts}" if moe.idle_experts else ""
    message = f"top_k {moe.top_k} is above num_experts {moe.num_experts}{idle}"
    if moe.idle_experts >= moe.num_experts:
        yield blame(f"{_MOE}.idle_experts", message, f"leave at least {moe.top_k} experts that get tokens")
    else:
        yield blame(f"{_MOE}.top_k", message, f"write at most {moe.num_experts - moe.idle_experts}")


@reading(f"{_MOE}.num_groups", f"{_MOE}.top_groups", f"{_MOE}.num_experts")
def expert_groups(case: Case) -> Iterator[Problem]:
    """Require expert groups of equal size, and at most all groups in top_groups."""
    moe = experts(case)
    if moe is None:
        return
    if moe.num_experts % moe.num_groups:
        message = f"num_experts {moe.num_experts} is not divisible by num_groups {moe.num_groups}"
        yield blame(f"{_MOE}.num_groups", message, f"write a divisor of {moe.num_experts}")
    if moe.top_groups > moe.num_groups:
        message = f"top_groups {moe.top_groups} is above num_groups {moe.num_groups}"
        yield blame(f"{_MOE}.top_groups", message, f"write at most {moe.num_groups}, or set num_groups")


@reading(*(f"{_MOE}.{name}" for name in ("num_groups", "top_groups", "num_experts", "top_k", "idle_experts")))
def reachable_in_groups(case: Case) -> Iterator[Problem]:
    """Require top_k experts that are not idle in the kept groups, even if these contain all idle experts."""
    moe = experts(case)
    if moe is None or moe.num_experts % moe.num_groups or not 1 < moe.num_groups > moe.top_groups:
        return
    kept = moe.num_experts // moe.num_groups * moe.top_groups
    if kept - moe.idle_experts < moe.top_k <= moe.num_experts - moe.idle_experts:
        idle = f", of which {moe.idle_experts} may be idle" if moe.idle_experts else ""
        message = f"top_groups {moe.top_groups} keep {kept} experts{idle}, too few for top_k {moe.top_k}"
        yield blame(
            f"{_MOE}.top_k", message, f"write at most {max(kept - moe.idle_experts, 0)}, or raise top_groups"
        )


@reading(f"{_MOE}.group_score", f"{_MOE}.num_groups", f"{_MOE}.num_experts")
def group_scores(case: Case) -> Iterator[Problem]:
    """Require two experts per group for a sum of two scores."""
    moe = experts(case)
    if moe is not None and moe.group_score == "top2_sum" and moe.num_groups > 1:
        size = moe.num_experts // moe.num_groups
        if size < 2:
            message = f"group_score `top2_sum` needs 2 experts a group, and there are {size}"
            yield blame(f"{_MOE}.group_score", message, "write `max`, or fewer groups")


@reading(f"{_MOE}.shared_gate", f"{_MOE}.shared_hidden")
def shared_gates(case: Case) -> Iterator[Problem]:
    """Require a shared expert for a shared gate."""
    moe = experts(case)
    if moe is not None and moe.shared_gate and not moe.shared_hidden:
        yield blame(
            f"{_MOE}.shared_gate", "shared_gate needs a shared expert", "set shared_hidden, or remove it"
        )


@reading("layout.micro_batches", "recipe.model.moe.balance_scope", "recipe.model.moe.balance_coef")
def balance_of_parts(case: Case) -> Iterator[Problem]:
    """Reject micro-batches with a balance loss over the batch, which is not a sum over micro-batches."""
    moe = experts(case)
    if (
        moe is None
        or moe.balance_scope != "batch"
        or moe.balance_coef == 0.0
        or case.layout.micro_batches == 1
    ):
        return
    message = "with balance_scope `batch` the loss is not the sum over micro_batches"
    yield blame(
        "layout.micro_batches", message, "write 1, or set recipe.model.moe.balance_scope to `sequence`"
    )


RECIPE_RULES = (
    step_of_own_model,
    weights_folder,
    head_width,
    rotary_width,
    latent_heads,
    query_norms,
    attention_biases,
    yarn_turns,
    grouped_queries,
    dense_layers,
    reachable_experts,
    expert_groups,
    reachable_in_groups,
    group_scores,
    shared_gates,
    balance_of_parts,
)
