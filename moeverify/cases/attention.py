"""Schema of latent attention and YaRN."""

from __future__ import annotations

from pydantic import Field

from moeverify.cases.fields import Count, Factor, NotNegative, Positive, Section, WholeNumber


class MLA(Section):
    """Multi-head latent attention; sizes in elements."""

    q_lora: WholeNumber = Field(
        default=0, description="width of the latent of the queries; 0 projects without a latent"
    )
    kv_lora: Count = Field(description="width of the latent of keys and values")
    qk_nope: Count = Field(description="width of a query or key head without position")
    qk_rope: Count = Field(description="width of a query or key head with position, even")
    v_head: Count = Field(description="width of a value head")


class Yarn(Section):
    """YaRN: rotary frequencies stretched by `factor` beyond `original_length` tokens.

    Cosine and sine are multiplied by m(`mscale`) / m(`mscale_all_dim`), with m(x) = 0.1 x ln(factor) + 1, and the
    scores of latent attention by m(`mscale_all_dim`) squared.
    """

    factor: Factor = Field(description="factor by which the context is stretched")
    original_length: Count = Field(description="tokens of the context before stretching")
    beta_fast: Positive = Field(
        default=32.0, description="turns within the original context from which a frequency is kept as it is"
    )
    beta_slow: Positive = Field(
        default=1.0,
        description="turns within the original context up to which a frequency is divided by `factor`",
    )
    mscale: NotNegative = Field(default=1.0, description="scale of cosine and sine")
    mscale_all_dim: NotNegative = Field(
        default=0.0, description="scale of the attention scores, in place of `mscale`"
    )
