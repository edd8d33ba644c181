"""The fields of a case: a recipe (what determines the answer) under a layout (what must not change it)."""

from __future__ import annotations

import hashlib
import json
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, BaseModel, ConfigDict, Field

from moeverify.results.checks import check_name

Degree = Annotated[int, Field(ge=1)]
Count = Annotated[int, Field(ge=1)]
Fraction = Annotated[float, Field(ge=0.0, le=1.0)]
Target = Annotated[str, Field(pattern=r"^[A-Za-z_][\w.]*:[A-Za-z_]\w*$")]
CheckNames = tuple[Annotated[str, AfterValidator(check_name)], ...]
Precision = Literal["float64", "float32", "bfloat16", "mixed"]


class Section(BaseModel):
    """A part of a case: immutable, every field known, no silent conversion of types."""

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True, allow_inf_nan=False)


class MoE(Section):
    """A mixture-of-experts block. Sizes in elements, rates and coefficients dimensionless."""

    num_experts: Count
    top_k: Count
    expert_hidden: Count
    score: Literal["softmax", "sigmoid"] = "softmax"
    renormalize: bool = True
    route_scale: float = 1.0
    num_groups: Count = 1
    top_groups: Count = 1
    group_score: Literal["max", "top2_sum"] = "max"
    router_bias: bool = False
    expert_bias: bool = False
    shared_hidden: Annotated[int, Field(ge=0)] = 0
    shared_gate: bool = False
    balance_coef: Annotated[float, Field(ge=0.0)] = 0.0
    balance_scope: Literal["sequence", "batch"] = "sequence"
    z_coef: Annotated[float, Field(ge=0.0)] = 0.0
    selection_bias_rate: Annotated[float, Field(ge=0.0)] = 0.0
    idle_experts: Annotated[int, Field(ge=0)] = 0


class MLA(Section):
    """Multi-head latent attention; sizes in elements. `q_lora` 0 projects queries without a latent."""

    q_lora: Annotated[int, Field(ge=0)] = 0
    kv_lora: Count
    qk_nope: Count
    qk_rope: Count
    v_head: Count


class Yarn(Section):
    """YaRN: rotary frequencies stretched by `factor` beyond `original_length` tokens.

    Cosine and sine are multiplied by m(`mscale`) / m(`mscale_all_dim`), with m(x) = 0.1 x ln(factor) + 1, and the
    scores of latent attention by m(`mscale_all_dim`) squared.
    """

    factor: Annotated[float, Field(ge=1.0)]
    original_length: Count
    beta_fast: Annotated[float, Field(gt=0.0)] = 32.0
    beta_slow: Annotated[float, Field(gt=0.0)] = 1.0
    mscale: Annotated[float, Field(ge=0.0)] = 1.0
    mscale_all_dim: Annotated[float, Field(ge=0.0)] = 0.0


class ReferenceModel(Section):
    """The reference decoder-only transformer, or a preset with some fields changed."""

    preset: str | None = None
    vocab_size: Count
    hidden: Count
    num_layers: Count
    num_heads: Count
    num_kv_heads: Count
    head_dim: Count
    ffn_hidden: Count
    num_dense_layers: Annotated[int, Field(ge=0)] = 0
    mla: MLA | None = None
    moe: MoE | None = None
    norm: Literal["rms", "layer"] = "rms"
    norm_eps: Annotated[float, Field(gt=0.0)] = 1e-5
    activation: Literal["swiglu", "gelu"] = "swiglu"
    attention_bias: bool = False
    attention_bias_scope: Literal["all", "qkv"] = "all"
    qk_norm: bool = False
    qk_norm_scope: Literal["head", "all"] = "head"
    mlp_bias: bool = False
    rope_theta: Annotated[float, Field(gt=0.0)] = 10000.0
    yarn: Yarn | None = None
    tie_embedding: bool = False
    init_std: Annotated[float, Field(gt=0.0)] = 0.02


class CustomModel(Section):
    """A user's own model: `factory(**arguments)` returns an `nn.Module` with `model(tokens) -> logits`.

    `loss`, if given, is called as `loss(model, tokens, targets)` and returns the loss summed over the valid
    tokens (`targets != -100`); otherwise the cross entropy of the logits is summed.
    """

    factory: Target
    arguments: dict[str, Any] = Field(default_factory=dict)
    loss: Target | None = None
    vocab_size: Count


class Data(Section):
    """The synthetic global batch of every step: `batch` rows of `seq_len` tokens."""

    batch: Count = 8
    seq_len: Count = 16
    min_valid: Fraction = 1.0


class Optimizer(Section):
    """The optimizer, with the clip of the global gradient norm before each step."""

    name: Literal["sgd", "adam", "adamw"] = "adamw"
    lr: Annotated[float, Field(gt=0.0)] = 1e-3
    momentum: Fraction = 0.0
    betas: tuple[Fraction, Fraction] = (0.9, 0.95)
    eps: Annotated[float, Field(gt=0.0)] = 1e-8
    weight_decay: Annotated[float, Field(ge=0.0)] = 0.0
    clip_norm: Annotated[float, Field(gt=0.0)] | None = None
    schedule: Literal["constant", "cosine", "linear"] = "constant"
    warmup_steps: Annotated[int, Field(ge=0)] = 0


class Recipe(Section):
    """Everything that determines the right answer."""

    name: str
    model: ReferenceModel | CustomModel
    data: Data = Data()
    optimizer: Optimizer = Optimizer()
    precision: Precision = "float64"
    steps: Count = 2
    seed: int = 0

    def fingerprint(self) -> str:
        """Return 16 hex digits that change whenever a field that affects the answer does; `name` does not.

        Fields at their default are left out, so that a field added later changes no recipe that lacks it.
        """
        content = self.model_dump(
            mode="json", exclude={"name": True, "model": {"preset"}}, exclude_defaults=True
        )
        canonical = json.dumps(content, sort_keys=True, separators=(",", ":"))
        return hashlib.sha256(canonical.encode()).hexdigest()[:16]


class Layout(Section):
    """Everything that must not change the answer.

    `etp` left out means `tp` if `ep` is 1, and else 1: read it through `expert_tp`. `virtual_stages` left out
    means what the schedule takes: read it through `num_stages`.
    """

    dp_replicate: Degree = 1
    dp_shard: Degree = 1
    cp: Degree = 1
    tp: Degree = 1
    ep: Degree = 1
    etp: Degree | None = None
    pp: Degree = 1
    data_parallel: Literal["ddp", "fsdp1", "fsdp2"] = "fsdp2"
    fsdp1_strategy: Literal["full_shard", "shard_grad_op"] = "full_shard"
    sequence_parallel: bool = False
    loss_parallel: bool = False
    context_parallel: Literal["allgather", "alltoall", "torch"] = "allgather"
    attention: Literal["plain", "fused"] = "plain"
    experts: Literal["loop", "grouped_mm", "megablocks"] = "loop"
    router_losses: Literal["global", "megablocks"] = "global"
    micro_batches: Count = 1
    pipeline_schedule: Literal["gpipe", "1f1b", "interleaved_1f1b", "interleaved_zero_bubble", "zbv"] = "1f1b"
    virtual_stages: Count | None = None
    stage_layers: tuple[Annotated[int, Field(ge=0)], ...] | None = None
    recompute: bool = False
    optimizer: Literal["foreach", "fused", "loop"] = "foreach"
    parallelize: Target | None = None
    in_float32: tuple[str, ...] = ()

    @property
    def world_size(self) -> int:
        """Return the number of ranks; ep and etp borrow ranks from the other axes and add none."""
        return self.pp * self.dp_replicate * self.dp_shard * self.cp * self.tp

    @property
    def num_stages(self) -> int:
        """Return into how many stages the layers are divided: `virtual_stages` for each rank of pp."""
        single = self.pp == 1 or self.pipeline_schedule in ("gpipe", "1f1b")
        return self.pp * (self.virtual_stages or (1 if single else 2))

    @property
    def data_ranks(self) -> int:
        """Return over how many groups of ranks the rows of the global batch are divided."""
        return self.dp_replicate * self.dp_shard

    @property
    def expert_tp(self) -> int:
        """Return over how many ranks each expert's weights are divided: `etp`, with its default resolved."""
        if self.etp is not None:
            return self.etp
        return self.tp if self.ep == 1 else 1

    @property
    def slices_tokens(self) -> bool:
        """Return whether each tensor-parallel rank routes a slice of the positions, and not all alike."""
        return self.tp > 1 and self.expert_tp != self.tp

    @property
    def expert_mesh_size(self) -> int:
        """Return how many ranks `ep` and `etp` regroup, within one pipeline stage and one replica.

        Under DDP the replicas are what is lent.
        """
        data = self.dp_replicate * self.dp_shard if self.data_parallel == "ddp" else self.dp_shard
        return data * self.cp * self.tp


class Tolerance(Section):
    """What may differ: `calibrated` (measured noise times a factor), `exact` (bitwise), or `fixed`."""

    kind: Literal["calibrated", "exact", "fixed"] = "calibrated"
    factor: Annotated[float, Field(ge=1.0)] = 8.0
    rtol: Annotated[float, Field(ge=0.0)] | None = None
    atol: Annotated[float, Field(ge=0.0)] | None = None


class Checks(Section):
    """How the layout is compared with its golden.

    `also` names optional checks to make. `differs` names checks that must find something: where an implementation
    means something else than the golden. `because` says what.
    """

    tolerance: Tolerance = Tolerance()
    steps: Literal["free", "forced"] = "free"
    repeat: Literal["first_step", "every_step", "never"] = "first_step"
    skip: CheckNames = ()
    also: CheckNames = ()
    differs: CheckNames = ()
    because: str = ""
    timeout: Annotated[float, Field(gt=0.0)] = 120.0


class Checkpoint(Section):
    """When a case saves its state, and how: what `moeverify reshard` loads into other layouts."""

    after: Count = 1
    asynchronous: bool = False


class Case(Section):
    """One recipe under one layout, with the checks to make. `file` is where it was read from."""

    name: str
    description: str = ""
    file: str = ""
    recipe: Recipe
    layout: Layout = Layout()
    checks: Checks = Checks()
    checkpoint: Checkpoint = Checkpoint()
