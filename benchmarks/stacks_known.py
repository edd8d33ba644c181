"""Explained differences in releases of other projects: cells of benchmarks/stacks.py, and their causes."""

from dataclasses import dataclass, replace

FOUND = "../../examples/found/"  # relative to the page

# Families whose plan has the style `replicated_with_grad_allreduce`.
SUMMED_AGAIN = (
    "qwen3",
    "gemma3_text",
    "apertus",
    "exaone4",
    "qwen3_moe",
    "qwen3_next",
    "exaone_moe",
    "laguna",
    "hy_v3",
    "mellum",
)


@dataclass(frozen=True)
class KnownBug:
    """A difference in `release`, and its reason.

    `page` is its folder in examples/found, an address, or empty if `reason` is complete. `wrong` is a
    substring of the names of the differing gradients of the first step, of the first finding if no gradient
    differs, or of a rank's error. `cause` is a substring of the cause of the first finding.
    """

    release: str
    reason: str
    page: str
    wrong: str
    cause: str = ""

    def __str__(self) -> str:
        """Return the text of a cell."""
        address = self.page if "://" in self.page or not self.page else FOUND + self.page
        title = "known bug" if self.page else "behaviour"
        return f"{f'[{title}]({address})' if address else title}: {self.reason}"


NORMS = KnownBug(
    release="transformers 5.23.0",
    reason="q_norm and k_norm are summed over tp again in each micro-batch",
    page="transformers-tp-gradient-accumulation",
    wrong="_norm",
    cause="what has been accumulated is reduced again",
)
ACTIVATION = KnownBug(
    release="transformers 5.23.0",
    reason="gradients of the activation's parameters are not summed over tp",
    page="transformers-tp-apertus-activation",
    wrong="act_fn|_norm",
    cause="not reduced over tp",
)
OTHER_RANKS = KnownBug(
    release="transformers 5.23.0",
    reason="eager experts refuse what other ranks' experts take",
    page="transformers-gpt-oss-experts-of-other-ranks",
    wrong="Class values must be smaller than num_classes",
)
# The search finds only a place, and not always the right one: just these gradients may differ.
NORMS_WITH_A_PLACE = replace(NORMS, wrong=r"self_attn\.[qk]_norm\.weight$", cause="first wrong operation")
MASK = KnownBug(
    release="transformers 5.23.0",
    reason="the mask has all heads, and the plan divides the heads",
    page="transformers-tp-doge-mask",
    wrong="The size of tensor a",
)
CONVOLUTIONS = KnownBug(
    release="transformers 5.23.0",
    reason="loading under FSDP permutes the rows of fused weights",
    page="transformers-sharded-load-of-fused-weights",
    wrong=".",  # everything follows from it
    cause="the initial values have the right values, permuted",
)
# By family and mode, in the newest tested release.
KNOWN = {(family, "tp-accumulation"): NORMS for family in SUMMED_AGAIN}
KNOWN |= {("apertus", mode): ACTIVATION for mode in ("tp", "tp-accumulation", "fsdp-tp")}
KNOWN |= {("gpt_oss", "tp-ep-all_reduce"): OTHER_RANKS}
KNOWN |= {
    (family, "tp-accumulation"): NORMS_WITH_A_PLACE
    for family in ("qwen3_5_text", "qwen3_5_moe_text", "beam", "kolibri1")
}
KNOWN |= {("doge", mode): MASK for mode in ("tp", "tp-accumulation", "fsdp-tp")}
KNOWN |= {("olmo_hybrid", mode): CONVOLUTIONS for mode in ("fsdp", "fsdp-accumulation", "fsdp-tp")}
ROUTER = KnownBug(
    release="transformers 5.23.0",
    reason="FSDP2 refuses its router, which stays in float32",
    page="transformers-fsdp-float32-router",
    wrong="FSDP expects uniform original parameter dtype",
)
# In bfloat16, in addition to those above.
NARROW_KNOWN = {("hunyuan_v1_moe", mode): ROUTER for mode in ("fsdp", "fsdp-accumulation", "fsdp-ep")}
# By release and way to request experts.
RELEASES_KNOWN = {
    ("5.17.0", "flag"): KnownBug(
        release="transformers 5.17.0",
        reason="what experts pass back to the router has no mask, and is wrong from there on",
        page="https://github.com/huggingface/transformers/issues/48687",
        wrong="model",
        cause="a mask is missing",
    ),
    ("5.17.0", "flag-without-size"): KnownBug(
        release="transformers 5.17.0",
        reason="the flag raises TypeError without a `tp_size`",
        page="",
        wrong="not supported between instances of 'NoneType' and 'int'",
    ),
    ("5.23.0", "flag"): KnownBug(
        release="transformers 5.23.0",
        reason="the plan of experts alone, which is documented, is refused",
        page="transformers-expert-parallel-only",
        wrong="was requested, but",
    ),
}
RELEASES_KNOWN |= {
    (release, "flag-without-size"): KnownBug(
        release=f"transformers {release}",
        reason="without a size every rank has the whole model",
        page="",
        wrong="axis tp",
        cause="no parameter is divided over tp",
    )
    for release in ("5.20.0", "5.23.0")
}
