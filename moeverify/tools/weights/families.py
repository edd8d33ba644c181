"""Hugging Face model families that the reference model covers, with conversion of config.json both ways.

Only settings that affect the weights and the forward pass are converted. Loss coefficients are not, because
their definitions differ (see docs/conversion.md).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from pydantic import ValidationError

from moeverify.cases.schema import MoE, ReferenceModel
from moeverify.errors import FormatError
from moeverify.json_file import name_path, read_problem
from moeverify.tools.weights import names
from moeverify.tools.weights.names import Names
from moeverify.tools.weights.rotary import read_rotary, write_rotary

Config = Mapping[str, Any]


@dataclass(frozen=True)
class Family:
    """One family of Hugging Face models.

    `fields` maps our dotted field to their key. `constants` are values of our fields that are the same in
    every model of the family. `words` are the keys of `WORDS` that its config.json has. `defaults` are
    values of keys that are missing, as in the family's class of transformers. `fixed` are keys with the
    only value that the reference model supports, which is also written.
    """

    model_type: str
    architecture: str
    names: Names
    fields: Mapping[str, str]
    constants: Mapping[str, Any] = field(default_factory=dict)
    words: Sequence[str] = ("hidden_act",)
    defaults: Mapping[str, Any] = field(default_factory=dict)
    fixed: Mapping[str, Any] = field(default_factory=dict)

    def get_constant(self, ours: str) -> Any:
        """Return the value of a dotted field in every model of the family: by default the schema's."""
        section, _, name = ours.rpartition(".")
        schema = MoE if section else ReferenceModel
        return self.constants.get(ours, schema.model_fields[name].default)

    def spell(self, key: str) -> str:
        """Return the word of a key of `WORDS` in every config.json of the family."""
        ours, words = WORDS[key]
        return next(word for word, value in words.items() if value == self.get_constant(ours))


WORDS: Mapping[str, tuple[str, Mapping[str, str]]] = {
    "hidden_act": ("activation", {"silu": "swiglu"}),
    "scoring_func": ("moe.score", {"softmax": "softmax", "sigmoid": "sigmoid"}),
    "topk_method": (
        "moe.group_score",
        {"group_limited_greedy": "max", "greedy": "max", "noaux_tc": "top2_sum"},
    ),
    "qk_norm_type": ("qk_norm_scope", {"per_layer": "all"}),
}
"""Keys whose values are words: our dotted field, and its value in the schema of cases for each word."""

_FIELDS = {
    "vocab_size": "vocab_size",
    "hidden": "hidden_size",
    "num_layers": "num_hidden_layers",
    "num_heads": "num_attention_heads",
    "num_kv_heads": "num_key_value_heads",
    "head_dim": "head_dim",
    "ffn_hidden": "intermediate_size",
    "norm_eps": "rms_norm_eps",
    "tie_embedding": "tie_word_embeddings",
    "moe.top_k": "num_experts_per_tok",
}
_DEFAULTS: Config = {"tie_word_embeddings": False, "attention_bias": False}
_EVERY_LAYER: Config = {"decoder_sparse_step": 1, "mlp_only_layers": [], "use_sliding_window": False}

# Alternative key names written by some versions of transformers.
_ALIASES = {"num_experts": "num_local_experts"}

_BIAS = {"attention_bias": "attention_bias"}

# Meanings of null.
_NULL: Config = {"q_lora_rank": 0, "n_group": 1, "topk_group": 1, "n_shared_experts": 0}

_SIGMOID: Config = {
    "moe.score": "sigmoid",
    # The rate is from DeepSeek's paper. Any rate above 0 gives the model the buffer that the weights fill.
    "moe.selection_bias_rate": 1e-3,
}
_GROUPED = {
    "num_dense_layers": "first_k_dense_replace",
    "moe.num_experts": "n_routed_experts",
    "moe.expert_hidden": "moe_intermediate_size",
    "moe.shared_hidden": "n_shared_experts",  # in units of expert_hidden
    "moe.num_groups": "n_group",
    "moe.top_groups": "topk_group",
    "moe.route_scale": "routed_scaling_factor",
}
_GROUPED_DEFAULTS: Config = {"n_group": 1, "topk_group": 1, "routed_scaling_factor": 1.0}

_DEEPSEEK_FIELDS = {
    **_BIAS,
    **{ours: theirs for ours, theirs in _FIELDS.items() if ours != "head_dim"},
    **_GROUPED,
    "mla.q_lora": "q_lora_rank",
    "mla.kv_lora": "kv_lora_rank",
    "mla.qk_nope": "qk_nope_head_dim",
    "mla.qk_rope": "qk_rope_head_dim",
    "mla.v_head": "v_head_dim",
}
_CHOICES = ("hidden_act", "scoring_func", "topk_method")
_DEEPSEEK_FIXED: Config = {"moe_layer_freq": 1, "rope_interleave": True}

FAMILIES: Mapping[str, Family] = {
    family.model_type: family
    for family in (
        Family(
            "mixtral",
            "MixtralForCausalLM",
            names.MIXTRAL,
            {**_FIELDS, "moe.num_experts": "num_local_experts", "moe.expert_hidden": "intermediate_size"},
            defaults={**_DEFAULTS, "rope_theta": 1e6},
            fixed={"sliding_window": None},
        ),
        Family(
            "qwen2_moe",
            "Qwen2MoeForCausalLM",
            names.QWEN2_MOE,
            {
                **_FIELDS,
                "attention_bias": "qkv_bias",
                "moe.num_experts": "num_experts",
                "moe.expert_hidden": "moe_intermediate_size",
                "moe.renormalize": "norm_topk_prob",
                "moe.shared_hidden": "shared_expert_intermediate_size",
            },
            constants={"moe.shared_gate": True, "attention_bias_scope": "qkv"},
            defaults={**_DEFAULTS, "qkv_bias": True, "norm_topk_prob": False},
            fixed=_EVERY_LAYER,
        ),
        Family(
            "qwen3_moe",
            "Qwen3MoeForCausalLM",
            names.QWEN3_MOE,
            {
                **_FIELDS,
                **_BIAS,
                "moe.num_experts": "num_experts",
                "moe.expert_hidden": "moe_intermediate_size",
                "moe.renormalize": "norm_topk_prob",
            },
            constants={"qk_norm": True},
            defaults={**_DEFAULTS, "norm_topk_prob": False},
            fixed=_EVERY_LAYER,
        ),
        Family(
            "olmoe",
            "OlmoeForCausalLM",
            names.OLMOE,
            {
                **_FIELDS,
                **_BIAS,
                "moe.num_experts": "num_experts",
                "moe.expert_hidden": "intermediate_size",
                "moe.renormalize": "norm_topk_prob",
            },
            constants={"qk_norm": True, "qk_norm_scope": "all"},
            defaults={**_DEFAULTS, "norm_topk_prob": False},
            fixed={"clip_qkv": None},
        ),
        Family(
            "deepseek_v2",
            "DeepseekV2ForCausalLM",
            names.DEEPSEEK_V2,
            _DEEPSEEK_FIELDS,
            constants={"moe.renormalize": False},
            words=_CHOICES,
            defaults={
                **_DEFAULTS,
                **_GROUPED_DEFAULTS,
                "q_lora_rank": 1536,
                "n_shared_experts": 2,
                "first_k_dense_replace": 0,
            },
            fixed={**_DEEPSEEK_FIXED, "norm_topk_prob": False, "mlp_bias": False},
        ),
        *(
            Family(
                model_type,
                "DeepseekV3ForCausalLM",
                names.DEEPSEEK_V3,
                {**_DEEPSEEK_FIELDS, "moe.renormalize": "norm_topk_prob"},
                constants={**_SIGMOID, "moe.group_score": "top2_sum"},
                words=_CHOICES,
                defaults={
                    **_DEFAULTS,
                    "q_lora_rank": 1536,
                    "n_shared_experts": 1,
                    "n_group": 8,
                    "topk_group": 4,
                    "norm_topk_prob": True,
                    "routed_scaling_factor": 2.5,
                    "first_k_dense_replace": 3,
                },
                fixed=_DEEPSEEK_FIXED,
            )
            for model_type in ("deepseek_v3", "kimi_k2")  # Kimi K2 has DeepSeek's code under another name
        ),
        Family(
            "glm4_moe",
            "Glm4MoeForCausalLM",
            names.GLM4_MOE,
            {**_FIELDS, **_BIAS, **_GROUPED, "moe.renormalize": "norm_topk_prob", "qk_norm": "use_qk_norm"},
            constants={**_SIGMOID, "moe.group_score": "top2_sum", "attention_bias_scope": "qkv"},
            defaults={
                **_DEFAULTS,
                **_GROUPED_DEFAULTS,
                "n_shared_experts": 1,
                "norm_topk_prob": True,
                "use_qk_norm": False,
                "first_k_dense_replace": 1,
                "partial_rotary_factor": 0.5,
            },
        ),
        Family(
            "minimax_m2",
            "MiniMaxM2ForCausalLM",
            names.MINIMAX_M2,
            {**_FIELDS, "moe.num_experts": "num_local_experts", "moe.expert_hidden": "intermediate_size"},
            constants={**_SIGMOID, "qk_norm": True, "qk_norm_scope": "all"},
            words=("hidden_act", "scoring_func", "qk_norm_type"),
            defaults={**_DEFAULTS, "head_dim": 128, "rope_theta": 5e6, "rotary_dim": None},
            fixed={"use_qk_norm": True},
        ),
    )
}


# Known families that the reference model does not compute, and why.
_OTHERS: Mapping[str, str] = {
    "deepseek_v32": "sparse attention chosen by an indexer",
    "gpt_oss": "attention sinks, clamped activations and biases of experts",
    "llama4": "chunked attention, layers without positions, and weights on the inputs of experts",
    "qwen3_next": "linear attention",
    "qwen3_5_moe": "linear attention",
}


def read_config(config: Config, file: str) -> tuple[Family, ReferenceModel]:
    """Return the family and the model of a config.json that was read from `file`.

    Raises: FormatError with the file and the key.
    """
    family = FAMILIES.get(str(config.get("model_type")))
    if family is None:
        kind, known = str(config.get("model_type")), ", ".join(FAMILIES)
        why = f", with {_OTHERS[kind]}, which the reference model cannot compute" if kind in _OTHERS else ""
        raise FormatError(f"{file}: model_type is {kind!r}{why}; known are {known}")
    if config.get("quantization_config"):
        raise FormatError(f"{file}: quantization_config: quantized weights cannot be converted")
    for key, value in family.fixed.items():
        if config.get(key) not in (None, value):
            raise FormatError(f"{file}: {key} is {config[key]!r}, and the reference model has {value!r} only")
    _check_words(config, family, file)
    flat: dict[str, Any] = dict(family.constants)
    for ours, theirs in family.fields.items():
        flat[ours] = _find(config, theirs, family, file)
    _complete(flat, config, family, file)
    latent = "mla.kv_lora" in flat
    flat |= read_rotary(config, file, family.defaults, latent=latent, head_dim=flat.get("head_dim"))
    try:
        return family, ReferenceModel.model_validate(_nest(flat))
    except ValidationError as error:
        where, message = read_problem(error)
        path = name_path(where)
        raise FormatError(f"{file}: {family.fields.get(path, path)}: {message}") from None


def _check_words(config: Config, family: Family, file: str) -> None:
    for key in family.words:
        word, known = config.get(key), WORDS[key][1]
        if word is None:
            continue
        if not isinstance(word, str) or word not in known:
            raise FormatError(f"{file}: {key} is {word!r}; known are {', '.join(known)}")
        if known[word] != known[family.spell(key)]:
            raise FormatError(
                f"{file}: {key} is {word!r}, and {family.model_type} has {family.spell(key)!r} only"
            )


def _find(config: Config, key: str, family: Family, file: str) -> Any:
    value = config.get(key)
    if value is None and key in _ALIASES:
        value = config.get(_ALIASES[key])
    if value is None and key in config:
        value = _NULL.get(key)
    if value is None:
        value = family.defaults.get(key)
    if value is None and key == "num_key_value_heads":
        value = config.get("num_attention_heads")
    if value is None and key == "head_dim":
        value = _divide(config.get("hidden_size"), config.get("num_attention_heads"))
    if value is None:
        raise FormatError(f"{file}: {key} is missing")
    return value


def _divide(size: Any, parts: Any) -> int | None:
    return size // parts if isinstance(size, int) and isinstance(parts, int) and parts > 0 else None


def _complete(flat: dict[str, Any], config: Config, family: Family, file: str) -> None:
    """Add the fields that do not correspond to a single key.

    Raises: FormatError for a `head_dim` that is not the width of the latent heads, or of their rotary part.
    """
    numbers = {name for name, value in flat.items() if isinstance(value, int)}
    if (
        family.fields.get("moe.shared_hidden") == "n_shared_experts"
        and {
            "moe.shared_hidden",
            "moe.expert_hidden",
        }
        <= numbers
    ):
        flat["moe.shared_hidden"] *= flat["moe.expert_hidden"]
    if {"mla.qk_nope", "mla.qk_rope"} <= numbers:
        rotary, flat["head_dim"] = flat["mla.qk_rope"], flat["mla.qk_nope"] + flat["mla.qk_rope"]
        if config.get("head_dim") not in (None, rotary, flat["head_dim"]):
            raise FormatError(f"{file}: head_dim is {config['head_dim']!r}, and qk_rope_head_dim {rotary}")
    if config.get("topk_method") == "greedy":
        flat |= {"moe.num_groups": 1, "moe.top_groups": 1}


def _nest(flat: Mapping[str, Any]) -> dict[str, Any]:
    nested: dict[str, Any] = {}
    for path, value in flat.items():
        section, _, name = path.rpartition(".")
        (nested.setdefault(section, {}) if section else nested)[name] = value
    return nested


def write_config(family: Family, model: ReferenceModel, dtype: str) -> dict[str, Any]:
    """Return the config.json of a model of this family, whose weights are mostly of `dtype`."""
    config: dict[str, Any] = {"architectures": [family.architecture], "model_type": family.model_type}
    for ours, theirs in family.fields.items():
        config[theirs] = _get(model, ours)
    config |= {key: family.spell(key) for key in family.words}
    config |= {key: value for key, value in family.fixed.items() if value is not None}
    if "n_shared_experts" in config and model.moe is not None:
        config["n_shared_experts"] = model.moe.shared_hidden // model.moe.expert_hidden
    if model.mla is not None and model.moe is not None:
        config["q_lora_rank"] = model.mla.q_lora or None
        if family.model_type == "deepseek_v2" and model.moe.num_groups == 1:
            config["topk_method"] = "greedy"
    return {**config, **write_rotary(model), "initializer_range": model.init_std, "torch_dtype": dtype}


def _get(model: ReferenceModel, path: str) -> Any:
    value: Any = model
    for name in path.split("."):
        value = getattr(value, name, None)
    return value


def find_family(model: ReferenceModel) -> Family:
    """Return the family that represents exactly this model.

    Raises: FormatError with the differences from the nearest family.
    """
    best: tuple[Family, list[str]] | None = None
    for family in FAMILIES.values():
        differing = _compare(family, model)
        if not differing:
            return family
        if best is None or len(differing) < len(best[1]):
            best = family, differing
    assert best is not None
    raise FormatError(
        f"no family of Hugging Face has this model: the nearest is {best[0].model_type}, "
        f"which differs in {', '.join(best[1])}"
    )


def _compare(family: Family, model: ReferenceModel) -> list[str]:
    """Return the fields that a model loses in a round trip through this family's config."""
    if model.moe is None:
        return ["moe", "everything that routes"]
    try:
        _, back = read_config(write_config(family, model, "float32"), family.model_type)
    except FormatError as error:
        return [str(error), "and so cannot be written"]
    return sorted(_diff(_essence(model), _essence(back)))


def _essence(model: ReferenceModel) -> dict[str, Any]:
    """Return the dotted fields that affect weights and forward pass."""
    left_out = {"preset", "init_std"} | (set() if model.num_dense_layers else {"ffn_hidden"})
    training = {"balance_coef", "balance_scope", "z_coef", "selection_bias_rate", "idle_experts"}
    flat: dict[str, Any] = {}
    for name, value in model.model_dump(exclude=left_out).items():
        if isinstance(value, dict):
            kept = {inner: each for inner, each in value.items() if name != "moe" or inner not in training}
            flat |= {f"{name}.{inner}": each for inner, each in kept.items()}
        else:
            flat[name] = value
    if not model.attention_bias:
        del flat["attention_bias_scope"]
    if model.moe is not None:
        flat["moe.selection_bias"] = model.moe.selection_bias_rate > 0 or model.moe.idle_experts > 0
        if model.moe.num_groups == model.moe.top_groups:
            for name in ("num_groups", "top_groups", "group_score"):
                del flat[f"moe.{name}"]
    return flat


def _diff(expected: Mapping[str, Any], actual: Mapping[str, Any]) -> set[str]:
    return {name for name in {*expected, *actual} if expected.get(name) != actual.get(name)}
