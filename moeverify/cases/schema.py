"""The fields of a case: a recipe (determines the result) under a layout (must not change the result).

Each field is documented only by its description. `moeverify schema` generates the reference and JSON schema
from it.
"""

from __future__ import annotations

import hashlib
import json
import math
from functools import cache
from pathlib import Path
from typing import Annotated, Any, Literal, get_args

from pydantic import AfterValidator, Field

from moeverify.cases.attention import MLA, Yarn
from moeverify.cases.fields import (
    ADDS_RANKS,
    SPLITS_ROWS,
    BorrowedDegree,
    Count,
    Degree,
    Factor,
    Fraction,
    NotNegative,
    Positive,
    RowDegree,
    Seconds,
    Section,
    Target,
    WholeNumber,
    default_section,
)
from moeverify.cases.weights_folder import hash_weights
from moeverify.results.checks import check_name

ExpertMatrix = tuple[tuple[WholeNumber, ...], ...]  # one row per rank of `ep`: the experts that it holds
CheckNames = tuple[Annotated[str, AfterValidator(check_name)], ...]
Precision = Literal["float64", "float32", "bfloat16", "mixed"]
PRECISIONS: tuple[Precision, ...] = get_args(Precision)
Float8 = Literal["none", "rowwise", "rowwise_with_gw_hp", "tensorwise"]

# Options of fields with several implementations. `moeverify.cases.validation.choices` lists the implementations.
DataParallel = Literal["ddp", "fsdp1", "fsdp2"]
Fsdp1Strategy = Literal["full_shard", "shard_grad_op"]
ContextParallel = Literal["allgather", "alltoall", "ring", "torch"]
AttentionCore = Literal["plain", "fused"]
ExpertBackend = Literal["loop", "grouped_mm", "megablocks"]
RouterLosses = Literal["global", "megablocks"]
PipelineSchedule = Literal["gpipe", "1f1b", "interleaved_1f1b", "interleaved_zero_bubble", "zbv"]
OptimizerKind = Literal["sgd", "adam", "adamw"]
OptimizerKernels = Literal["foreach", "fused", "loop"]
Reshard = Literal["forward", "backward", "step"]
Recompute = bool | Literal["selective"]
Dispatch = Literal["sized", "padded"]
Compile = Literal["none", "parts"]
Graphs = Literal["none", "micro_batch"]
RateSchedule = Literal["constant", "cosine", "linear"]


class MoE(Section):
    """A mixture-of-experts block. Sizes in elements, rates and coefficients dimensionless."""

    num_experts: Count = Field(description="number of routed experts")
    top_k: Count = Field(description="experts that each token is sent to")
    expert_hidden: Count = Field(description="width of an expert")
    score: Literal["softmax", "sigmoid"] = Field(
        default="softmax", description="turns router logits into scores"
    )
    renormalize: bool = Field(
        default=True, description="whether the combine weights of a token are scaled to sum to 1"
    )
    route_scale: float = Field(default=1.0, description="factor on the combine weights")
    num_groups: Count = Field(default=1, description="groups of experts of equal size")
    top_groups: Count = Field(default=1, description="groups that a token may choose experts from")
    group_score: Literal["max", "top2_sum"] = Field(
        default="max", description="score by which groups are ranked"
    )
    router_bias: bool = Field(default=False, description="whether the router's projection has a bias")
    expert_bias: bool = Field(default=False, description="whether the experts' projections have biases")
    shared_hidden: WholeNumber = Field(default=0, description="width of the shared expert; 0 for none")
    shared_gate: bool = Field(
        default=False, description="whether a sigmoid gate scales the shared expert's output"
    )
    balance_coef: NotNegative = Field(default=0.0, description="coefficient of the load-balancing loss")
    balance_scope: Literal["sequence", "batch"] = Field(
        default="sequence",
        description="tokens over which the load-balancing loss counts: each row, or the whole batch",
    )
    z_coef: NotNegative = Field(default=0.0, description="coefficient of the router z loss")
    selection_bias_rate: NotNegative = Field(
        default=0.0,
        description="change of the selection bias in a step (auxiliary-loss-free balancing); 0 for no bias",
    )
    idle_experts: WholeNumber = Field(
        default=0, description="experts that no token chooses, to verify layouts with empty experts"
    )


class ReferenceModel(Section):
    """The reference decoder-only transformer, or a preset with some fields changed. Sizes in elements."""

    preset: str | None = Field(default=None, description="a known model; the other fields change it")
    vocab_size: Count = Field(description="rows of the embedding and of the head")
    hidden: Count = Field(description="width of the residual stream")
    num_layers: Count = Field(description="number of blocks")
    num_heads: Count = Field(description="query heads")
    num_kv_heads: Count = Field(description="key and value heads, a divisor of `num_heads`")
    head_dim: Count = Field(
        description="width of a head, even; with `mla` the sum of `qk_nope` and `qk_rope`"
    )
    ffn_hidden: Count = Field(description="width of a dense MLP")
    num_dense_layers: WholeNumber = Field(
        default=0, description="how many of the first blocks have a dense MLP although there is `moe`"
    )
    mla: MLA | None = Field(default=None, description="latent attention in place of projected heads")
    moe: MoE | None = Field(default=None, description="the experts of all blocks but the dense ones")
    norm: Literal["rms", "layer"] = Field(default="rms", description="RMSNorm or LayerNorm")
    norm_eps: Positive = Field(default=1e-5, description="epsilon of the norms")
    activation: Literal["swiglu", "gelu"] = Field(
        default="swiglu", description="activation of dense MLPs; `swiglu` has a gate projection"
    )
    attention_bias: bool = Field(
        default=False, description="whether the projections of attention have biases"
    )
    attention_bias_scope: Literal["all", "qkv"] = Field(
        default="all",
        description="which projections of attention have them; `qkv` leaves out that of the output",
    )
    qk_norm: bool = Field(default=False, description="whether queries and keys are normalized")
    qk_norm_scope: Literal["head", "all"] = Field(
        default="head", description="whether they are normalized head by head, or all heads together"
    )
    mlp_bias: bool = Field(default=False, description="whether the projections of MLPs have biases")
    rope_theta: Positive = Field(default=10000.0, description="base of the rotary embedding")
    rotary_dim: Count | None = Field(
        default=None, description="channels of a head that the rotary embedding turns, even; by default all"
    )
    yarn: Yarn | None = Field(default=None, description="the rotary embedding stretched by YaRN")
    tie_embedding: bool = Field(default=False, description="whether embedding and head share one weight")
    init_std: Positive = Field(default=0.02, description="standard deviation of initial weights")
    weights: str | None = Field(
        default=None,
        description="folder with the initial weights, from that of the case file: safetensors of Hugging Face or of "
        "megablocks, or DCP; by default they are drawn by `seed`",
    )

    @property
    def functions(self) -> dict[str, str]:
        """Return the user's functions that the model needs, keyed by the path of the field: none."""
        return {}

    @property
    def title(self) -> str:
        """Return the name of the model in messages."""
        return self.preset or "the reference model"

    @property
    def reference(self) -> ReferenceModel:
        """Return this model. Its module names have a known meaning."""
        return self

    @property
    def may_have_experts(self) -> bool:
        """Return whether some parameters may belong to experts."""
        return self.moe is not None

    @property
    def gives_token_losses(self) -> bool:
        """Return whether the loss of each token is known, and not only their sum."""
        return True


class CustomModel(Section):
    """A user's own model: `factory(**arguments)` returns an `nn.Module` with `model(tokens) -> logits`."""

    factory: Target = Field(
        description="function that makes the model: `factory(**arguments)` -> `nn.Module`"
    )
    arguments: dict[str, Any] = Field(
        default_factory=dict, description="keyword arguments that the factory is called with"
    )
    loss: Target | None = Field(
        default=None,
        description="`loss(model, tokens, targets)`: the loss of each token, or their sum over valid tokens "
        "(`targets != -100`), or a dict of such terms by name; by default the cross entropy of the logits",
    )
    vocab_size: Count = Field(description="tokens are drawn from 0 to `vocab_size` - 1")
    weights: str | None = Field(
        default=None,
        description="folder with the initial weights, from that of the case file: safetensors or DCP under the names "
        "of the model's own `state_dict()`; by default they are as the factory leaves them",
    )

    @property
    def title(self) -> str:
        """Return the name of the model in messages."""
        return self.factory

    @property
    def moe(self) -> None:
        """Return None: the experts of a custom model are unknown."""

    @property
    def functions(self) -> dict[str, str]:
        """Return the user's functions that the model needs, keyed by the path of the field."""
        named = {"recipe.model.factory": self.factory}
        return named if self.loss is None else {**named, "recipe.model.loss": self.loss}

    @property
    def reference(self) -> None:
        """Return None: the modules of a custom model are unknown."""

    @property
    def may_have_experts(self) -> bool:
        """Return whether some parameters may belong to experts."""
        return True

    @property
    def gives_token_losses(self) -> bool:
        """Return whether the loss of each token is known. A user's loss may return only a sum."""
        return self.loss is None


class Data(Section):
    """The synthetic global batch of every step."""

    batch: Count = Field(default=8, description="rows of the global batch")
    seq_len: Count = Field(default=16, description="tokens of each row")
    min_valid: Fraction = Field(
        default=1.0,
        description="the least fraction of a row that is not padding; rows end in padding of random length",
    )


class Optimizer(Section):
    """The optimizer, with the clip of the global gradient norm before each step."""

    name: OptimizerKind = Field(default="adamw", description="kind of optimizer")
    lr: Positive = Field(default=1e-3, description="learning rate")
    momentum: Fraction = Field(default=0.0, description="momentum of SGD")
    betas: tuple[Fraction, Fraction] = Field(
        default=(0.9, 0.95), description="decay of the two moments of Adam and AdamW"
    )
    eps: Positive = Field(default=1e-8, description="epsilon of Adam and AdamW")
    weight_decay: NotNegative = Field(default=0.0, description="weight decay of matrices; vectors have none")
    clip_norm: Positive | None = Field(
        default=None, description="largest global gradient norm; gradients are scaled to it"
    )
    schedule: RateSchedule = Field(
        default="constant", description="decay of the learning rate after the warmup"
    )
    warmup_steps: WholeNumber = Field(default=0, description="steps in which the learning rate rises")


class Recipe(Section):
    """Everything that determines the right answer."""

    name: str = Field(
        description="key of the golden; by default the name of the recipe's file, its base or the case"
    )
    model: ReferenceModel | CustomModel = Field(description="the reference model, or your own by a `factory`")
    data: Data = default_section(Data, "the batch of each step")
    optimizer: Optimizer = default_section(Optimizer, "the optimizer and its schedule")
    precision: Precision = Field(
        default="float64",
        description="precision of the ranks; `mixed`: float32 state and reductions, bfloat16 arithmetic, FSDP2",
    )
    reference: Literal["float64", "float32"] = Field(
        default="float64",
        description="precision of the golden; `float32` only for sketches and narrower ranks",
    )
    float8: Float8 = Field(
        default="none",
        description="scaling of the operands of dense linear layers that are rounded to float8, golden included; the "
        "layouts' layers are those of torchao",
    )
    step: Target | None = Field(
        default=None,
        description="your own `train_step(model, optimizer, micro_batches)`, which makes one optimizer step of a "
        "model with a `factory`, in place of the built-in loop",
    )
    steps: Count = Field(default=2, description="optimizer steps that are trained and compared")
    seed: int = Field(default=0, description="seed of weights and data")

    @property
    def functions(self) -> dict[str, str]:
        """Return the user's functions that affect the result, keyed by the path of the field."""
        return self.model.functions | ({} if self.step is None else {"recipe.step": self.step})

    def fingerprint(self) -> str:
        """Return 16 hex digits that change with any field that affects the result. `name` has no effect.

        Fields at their default are left out, so that a new field does not change existing recipes. Initial
        weights are hashed by content, not by path.
        """
        content = self.model_dump(
            mode="json", exclude={"name": True, "model": {"preset", "weights"}}, exclude_defaults=True
        )
        if self.model.weights is not None:
            content["weights"] = hash_weights(Path(self.model.weights))
        canonical = json.dumps(content, sort_keys=True, separators=(",", ":"))
        return hashlib.sha256(canonical.encode()).hexdigest()[:16]


class Rebalance(Section):
    """Placements that are solved during training, from the load of the steps so far."""

    every: Count = Field(description="steps between two placements")
    slots: Count = Field(description="experts that a rank has room for")
    last: Count | None = Field(default=None, description="use so many of the last steps alone")
    max_moves: WholeNumber | None = Field(
        default=None, description="the most experts that are sent at a time"
    )


class Layout(Section):
    """Everything that must not change the answer: how the model is divided over ranks, and computed there."""

    dp_replicate: RowDegree = Field(
        default=1, description="data-parallel ranks that hold copies of all parameters"
    )
    dp_shard: RowDegree = Field(
        default=1, description="data-parallel ranks over which parameters are sharded"
    )
    cp: Degree = Field(
        default=1, description="ranks over which the positions of a row are split (context parallelism)"
    )
    tp: Degree = Field(
        default=1,
        description="ranks over which heads, hidden units and the vocabulary are sharded (tensor parallelism)",
    )
    ep: BorrowedDegree = Field(
        default=1,
        description="ranks over which the experts are spread, borrowed from the other axes (expert parallelism)",
    )
    placement: str | ExpertMatrix | dict[str, ExpertMatrix] | None = Field(
        default=None,
        description="which ranks of `ep` hold which experts: a row of experts for each rank, for all MoE layers or "
        "by the index of each; the file of one, as `moeverify place` writes it; or `blocks`, `striped`, "
        "`everywhere`. By default equal consecutive blocks",
    )
    exchange: dict[str, str | ExpertMatrix | dict[str, ExpertMatrix]] = Field(
        default_factory=dict,
        description="placements that the experts go to during training, by the number of steps after which",
    )
    rebalance: Rebalance | None = Field(
        default=None, description="new placements every so many steps, solved from the load of the run"
    )
    etp: BorrowedDegree | None = Field(
        default=None,
        description="ranks over which the hidden units of each expert are sharded; by default `tp` where `ep` is 1, "
        "else 1",
    )
    pp: Degree = Field(default=1, description="ranks over which the layers are split (pipeline parallelism)")
    data_parallel: DataParallel = Field(default="fsdp2", description="implementation of data parallelism")
    fsdp1_strategy: Fsdp1Strategy = Field(default="full_shard", description="the state that FSDP1 shards")
    reshard: Reshard = Field(
        default="forward", description="when FSDP2 frees the parameters that it has gathered"
    )
    sequence_parallel: bool = Field(
        default=False,
        description="whether the residual stream is sharded over `tp` by positions between the blocks",
    )
    loss_parallel: bool = Field(
        default=False, description="whether the logits stay sharded over `tp` by the vocabulary"
    )
    context_parallel: ContextParallel = Field(
        default="allgather", description="implementation of attention over `cp`"
    )
    attention: AttentionCore = Field(default="plain", description="implementation of attention on one rank")
    dispatch: Dispatch = Field(default="sized", description="implementation of the exchange over `ep`")
    experts: ExpertBackend = Field(default="loop", description="implementation of the experts of a rank")
    router_losses: RouterLosses = Field(
        default="global", description="implementation of the balance and z losses"
    )
    micro_batches: Count = Field(
        default=1, description="parts of a rank's rows whose gradients are accumulated"
    )
    joined_micro_batches: Count = Field(
        default=1, description="micro-batches whose experts' weight gradients are one product"
    )
    pipeline_schedule: PipelineSchedule = Field(
        default="1f1b", description="order of the passes of a pipeline"
    )
    virtual_stages: Count | None = Field(
        default=None,
        description="pipeline stages on each rank of `pp`; by default as many as the schedule takes",
    )
    stage_layers: tuple[WholeNumber, ...] | None = Field(
        default=None, description="layers of each pipeline stage; by default equally many"
    )
    recompute: Recompute = Field(
        default=False,
        description="whether activations of a block are computed again in the backward pass: all, or, if "
        "`selective`, all but the outputs of matrix products and attention",
    )
    compile: Compile = Field(default="none", description="the parts of a block that torch.compile compiles")
    graphs: Graphs = Field(default="none", description="the work that a GPU launches as one CUDA graph")
    optimizer: OptimizerKernels = Field(
        default="foreach", description="implementation of the optimizer's arithmetic"
    )
    parallelize: Target | None = Field(
        default=None,
        description="your own `parallelize(model, mesh)`, which returns the parallel model; it replaces all of "
        "the built-in parallelism",
    )
    arguments: dict[str, Any] = Field(
        default_factory=dict, description="further arguments that `parallelize` is called with, by name"
    )
    in_float32: tuple[str, ...] = Field(
        default=(),
        description="modules, by names with `*`, that `parallelize` leaves in float32 under `precision: mixed`",
    )

    @property
    def world_size(self) -> int:
        """Return the number of ranks. A borrowed degree adds none."""
        return math.prod(getattr(self, name) for name in _find_degrees(ADDS_RANKS))

    @property
    def data_ranks(self) -> int:
        """Return the number of shares of the rows of the global batch."""
        return math.prod(getattr(self, name) for name in _find_degrees(SPLITS_ROWS))

    @property
    def expert_tp(self) -> int:
        """Return the number of ranks that shard the weights of each expert: `etp` or its default."""
        if self.etp is not None:
            return self.etp
        return self.tp if self.ep == 1 else 1

    @property
    def slices_tokens(self) -> bool:
        """Return whether each tensor-parallel rank routes its own slice of the positions."""
        return self.tp > 1 and self.expert_tp != self.tp


@cache
def _find_degrees(mark: str) -> tuple[str, ...]:
    return tuple(name for name, field in Layout.model_fields.items() if mark in field.metadata)


class Tolerance(Section):
    """The allowed difference between a tensor of the layout and the golden."""

    kind: Literal["calibrated", "exact", "fixed"] = Field(
        default="calibrated",
        description="`calibrated`: the measured noise times `factor`; `exact`: bit for bit; `fixed`",
    )
    factor: Factor = Field(default=8.0, description="factor on the noise, of `calibrated`")
    rtol: NotNegative | None = Field(default=None, description="relative tolerance, of `fixed`")
    atol: NotNegative | None = Field(default=None, description="absolute tolerance, of `fixed`")


class Checks(Section):
    """How the layout is compared with its golden."""

    tolerance: Tolerance = default_section(Tolerance, "how far a tensor may be from the golden's")
    steps: Literal["free", "forced"] = Field(
        default="free", description="`forced` starts each step from the golden's state after the step before"
    )
    repeat: Literal["first_step", "every_step", "never"] = Field(
        default="first_step", description="which steps are trained a second time and compared bit for bit"
    )
    skip: CheckNames = Field(default=(), description="names of checks that are left out")
    also: CheckNames = Field(default=(), description="names of optional checks to make")
    differs: CheckNames = Field(
        default=(),
        description="names of checks that must find something: the layout's code means something else",
    )
    allow_replicated: tuple[Literal["dp_replicate", "dp_shard", "cp", "tp"], ...] = Field(
        default=(), description="axes of the mesh that `parallelize` leaves unused on purpose"
    )
    because: str = Field(default="", description="why they differ, for the report")
    timeout: Seconds = Field(default=120.0, description="seconds for the case, without waits for a CPU")


class Checkpoint(Section):
    """When and how a case saves the state that `moeverify reshard` loads into other layouts."""

    after: Count = Field(default=1, description="steps after which `moeverify reshard` saves")
    asynchronous: bool = Field(default=False, description="whether training goes on while the state is saved")


class Case(Section):
    """One recipe under one layout, with the checks to make."""

    name: str = Field(description="name of the case in reports; by default the file's stem")
    description: str = Field(default="", description="a line for the reader")
    file: str = ""  # path of the case file
    recipe: Recipe = Field(
        description="the name of a file of `recipes/`, or the fields; `base:` names a recipe that they change"
    )
    layout: Layout = default_section(Layout, "how the model is divided over ranks, and computed there")
    checks: Checks = default_section(Checks, "how the layout is compared with its golden")
    checkpoint: Checkpoint = default_section(Checkpoint, "when and how the state is saved")
