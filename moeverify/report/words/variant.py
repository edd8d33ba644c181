"""Ways in which a module computes otherwise than its formula, in words: `without a causal mask`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from moeverify.report.numbers import format_ranks
from moeverify.report.words.exchange import describe_step
from moeverify.report.words.factor import AMBIGUOUS, NO_COUNT, describe_sources, format_factor, name_product
from moeverify.report.words.mistakes import describe_mistake
from moeverify.results.operation import Change

# By part and way; `{number}` is what the way leaves open.
_ATTENTION: Mapping[tuple[str, str], str] = {
    ("mask", "none"): "without a causal mask: every query sees every key",
    ("mask", "diagonal"): "with a mask that hides a query's own position",
    ("mask", "reversed"): "with a mask that is turned round: a query sees what comes after it",
    ("mask", "offset"): "with a causal mask that is off by {number} positions",
    ("mask", "places"): "with a causal mask of local places in place of positions",
    ("mask", "arrivals"): "with a causal mask of the order in which ranks' keys arrive in place of positions",
    ("mask", "place-of-query"): "with a causal mask that takes local places for the positions of queries",
    ("mask", "place-of-key"): "with a causal mask that takes local places for the positions of keys",
    (
        "mask",
        "arrival-of-query",
    ): "with a causal mask that takes the order of ranks for the positions of queries",
    (
        "mask",
        "arrival-of-key",
    ): "with a causal mask that takes the order of arrival for the positions of keys",
    ("mask", "top-left"): "with a causal mask from the top left: queries are taken for the first of all keys",
    (
        "mask",
        "bottom-right",
    ): "with a causal mask from the bottom right: queries are taken for the last of all keys",
    ("mask", "ranks"): "with a causal mask of whole chunks: by the rank that has the key and not by position",
    (
        "mask",
        "of-rank",
    ): "with a mask of the positions that another rank's keys have, {number} further over cp",
    ("hidden", "zero-score"): "with scores of 0 in place of -inf where keys are hidden",
    ("hidden", "after-softmax"): "with a mask after the softmax, whose denominator still counts hidden keys",
    ("scale", "none"): "without the scale of the scores",
    ("scale", "width"): "with scores divided by the width of a head and not by its root, as if scaled twice",
    ("scale", "value-width"): "with scores divided by the root of the width of the values",
    ("scale", "rotated-width"): "with scores divided by the root of the rotated width",
    ("scale", "all-heads"): "with scores divided by the root of the width of all heads",
    ("scale", "hidden-width"): "with scores divided by the root of the hidden width",
    ("scale", "kv-width"): "with scores divided by the root of the width of all key-value heads",
    (
        "scale",
        "log-length",
    ): "with scores multiplied by the logarithm of a query's number of keys to the base {number} + 1",
    (
        "scale",
        "log-position",
    ): "with scores multiplied by 1 + {number} log(1 + floor((position + 1) / {name}))",
    ("scores", "slopes"): "with a bias by distance on the scores, with the slopes of ALiBi",
    (
        "scores",
        "slopes-opposite",
    ): "with a bias by distance on the scores, with the slopes of ALiBi and the other sign",
    ("scores", "slopes-times"): "with {number} times the slopes of ALiBi as a bias by distance on the scores",
    ("scores", "distance"): "with {number} times the distance subtracted from the scores",
    ("value-rotation", "added"): "with the rotary embedding applied to the values too",
    (
        "value-rotation",
        "opposite",
    ): "with the rotary embedding applied to the values too, in the opposite direction",
    ("scale", "multiplied"): "with scores multiplied by the root of the width, not divided",
    ("scale", "factor"): "with scores that are {number}x the right ones",
    ("heads", "modulo"): "with query heads that read key-value heads in turn and not in groups",
    ("heads", "reversed"): "with query heads that read the key-value heads in reverse order",
    ("heads", "next"): "with query heads that read the next group's key-value head",
    ("heads", "first"): "with query heads that all read the first key-value head",
    ("heads", "of-rank"): "with query heads that read the key-value heads of the first rank over tp",
    ("outputs", "next"): "with the output of the next head in the place of each, in groups of {number}",
    ("outputs", "previous"): "with the output of the head before in the place of each, in groups of {number}",
    ("outputs", "reversed"): "with the outputs of heads in reverse order, in groups of {number}",
    (
        "outputs",
        "transposed",
    ): "with the outputs of heads in turn from groups of {number}, not group by group",
    ("outputs", "next-group"): "with the outputs of the next {number} heads in the place of each {number}",
    (
        "outputs",
        "previous-group",
    ): "with the outputs of the {number} heads before in the place of each {number}",
    (
        "outputs",
        "reversed-groups",
    ): "with the outputs of heads in groups of {number} that stand in reverse order",
    ("softmax", "mean-of-chunks"): "with the mean of the ranks' own softmaxes in place of one over all keys",
    ("softmax", "sum-of-chunks"): "with the sum of the ranks' own softmaxes in place of one over all keys",
    ("softmax", "extra-one"): "with 1 more in the softmax's denominator, as of a sink",
    ("softmax", "not-normalized"): "without the softmax's denominator",
    ("softmax", "extra"): "with {number} more in the softmax's denominator, as of a sink",
    ("softmax", "of-queries"): "with a softmax over the queries and not over the keys",
    ("softmax", "sigmoid"): "with a sigmoid of the scores in place of a softmax",
    ("softmax", "relu"): "with a relu of the scores in place of a softmax",
    ("softmax", "squared"): "with the square of the softmax",
    ("softmax", "largest-alone"): "to the key of the largest score alone",
    ("softmax", "of-heads"): "with a softmax over the heads and not over the keys",
    ("merge", "undivided"): "without the softmax's denominator, relative to the largest score",
    ("merge", "divided-twice"): "with the softmax's denominator applied twice, relative to the largest score",
    ("merge", "numerator-last"): "with the values of the last rank's chunk alone over the denominator of all",
    ("merge", "numerator-first"): "with the values of the rank's own chunk alone over the denominator of all",
    (
        "merge",
        "denominator-first",
    ): "with the values of all chunks over the denominator of the rank's own alone",
    (
        "merge",
        "numerator-factor",
    ): "with the factor that rescales earlier chunks in the place of their rescaled values",
    (
        "merge",
        "denominator-factor",
    ): "with the factor that rescales earlier chunks in the place of their rescaled denominators",
    (
        "merge",
        "numerator-opposite",
    ): "with earlier chunks' values divided by what rescales them, not multiplied",
    (
        "merge",
        "denominator-opposite",
    ): "with earlier chunks' denominators divided by what rescales them, not multiplied",
    ("merge", "both-opposite"): "with earlier chunks divided by what rescales them, not multiplied",
    ("merge", "denominator-mean"): "with the mean over each chunk's keys in place of the sum below",
    (
        "queries",
        "own",
    ): "of the queries of each rank's own chunk alone, to keys or values that others see too",
    ("queries", "not-own"): "without the queries of each rank's own chunk",
    ("queries", "own-twice"): "with the queries of each rank's own chunk counted twice",
    ("queries", "without-rank"): "without the queries of rank {number} over cp",
    (
        "heads-of",
        "own",
    ): "with the heads that the rank itself computed alone, and none from other ranks over cp",
    ("heads-of", "not-own"): "without the heads that the rank itself computed",
    ("heads-of", "next"): "with the heads of the next rank over cp in the place of each rank's",
    ("heads-of", "reversed"): "with the heads of the ranks over cp in reverse order",
    ("heads-of", "without-rank"): "without the heads that rank {number} over cp computed",
    ("shared", "none"): "without the part that all heads share",
    (
        "shared",
        "first-heads",
    ): "with the part that all heads share from the first of {number} groups of heads alone",
    ("norm", "detached"): "with the statistics of the latent's norm taken for constants",
    ("shared", "twice"): "with the part that all heads share twice",
    ("sums", "of-rank"): "with the sums for the keys or values of the rank {number} further over cp",
    (
        "sums",
        "arrival",
    ): "with sums in the order in which ranks' parts stand, taken for the order of positions",
    (
        "sums",
        "position",
    ): "with sums in the order of positions, taken for the order in which ranks' parts stand",
    ("reach", "valid"): "without the keys of padding",
    ("reach", "own"): "to the keys of the rank's own chunk alone",
    ("reach", "not-own"): "without the keys of the rank's own chunk",
    ("reach", "own-run"): "to the keys of the query's own run of positions alone",
    ("reach", "not-own-run"): "without the keys of the query's own run of positions",
    ("reach", "without-rank"): "without the keys of rank {number} over cp",
    ("reach", "without-run"): "without the keys of run {number} of the positions that ranks have",
    ("reach", "without-key"): "without the key of position {number}",
    ("reach", "blocks"): "inside blocks of {number} positions alone",
    ("scores", "capped"): "with scores that are capped at {number} by a tanh",
    ("reach", "beyond"): "without the last {number} positions that a query should see",
    ("reach", "boundary"): "with a boundary of documents at position {number}",
    ("reach", "prefix"): "with a mask that shows the first {number} positions to every query, as of a prefix",
    ("reach", "window"): "to the last {number} positions alone",
    ("rotation", "unstretched"): "with a rotary embedding without its YaRN stretch",
    ("rotation", "base"): "with a rotary base of {number}",
    ("rotation", "interpolated"): "with rotary positions that are {number}x the right ones",
}
_ROTATIONS: Mapping[str, str] = {
    "none": "without the rotary embedding{of}",
    "place": "with a rotary embedding{of} by local places in place of positions",
    "arrival": "with a rotary embedding{of} by the order in which ranks' parts stand in place of positions",
    "zigzag": "with a rotary embedding{of} by the positions of a split in zigzag, which is not this layout's",
    "in-turn": "with a rotary embedding{of} by positions that ranks take in turn, as they do not here",
    "gap": "with rotary positions{of} that are off by {number} more on each further rank over cp",
    "opposite": "with a rotary embedding{of} in the opposite direction",
    "twice": "with a rotary embedding{of} that is applied twice",
    "neighbours": "with a rotary embedding{of} of neighbouring elements in place of halves",
    "halves": "with a rotary embedding{of} of halves in place of neighbouring elements",
    "first-half": "with a rotary embedding{of} of the higher half of the frequencies alone",
    "swapped": "with cosine and sine of the rotary embedding{of} exchanged",
    "mixed-pairs": "with a rotary embedding{of} whose angles stand as for the other kind of pairs",
    "own-part-first": "with a rotary embedding{of} of the first elements of a head, not of the last",
    "whole": "with a rotary embedding{of} of all elements of a head",
    "partial": "with a rotary embedding{of} of the first {number} elements of a head's rotated part alone",
    "partial-last": "with a rotary embedding{of} of the last {number} elements of a head alone",
    "partial-frequencies": "with a rotary embedding{of} of the first {number} elements alone, by the frequencies of all",
    "modulo": "with rotary positions{of} that begin again after every {number}",
    "restart": "with rotary positions{of} that begin again at position {number}",
    "clamped": "with rotary positions{of} that stop after {number}",
    "offset": "with a rotary embedding{of} that is off by {number} positions",
}
_ORDERS: Mapping[str, str] = {
    "of-rank": "with the {what} of the rank {number} further over cp in the place of each rank's own",
    "arrival": "with {what} in the order in which ranks' parts stand, taken for the order of positions",
    "position": "with {what} in the order of positions, taken for the order in which ranks' parts stand",
    "own": "with the {what} of the query's own rank in the place of those of every rank",
    "reversed": "with {what} in reverse order",
    "exchanged": "with the halves of each rank's {what} exchanged",
    "of-position": "with the {what} of the position {number} further in the place of each",
    "of-row": "with the {what} of the row {number} further in the place of each",
}
_RESCALED = {"both": "them", "numerator": "their values", "denominator": "their denominators"}
_ROTATED = {"rotation": "", "query-rotation": " of the queries", "key-rotation": " of the keys"}
_NORMED = {"query-norm": "the queries", "key-norm": "the keys", "norms": "queries and keys"}
_NORMS = {
    "none": "without the norm of {of}",
    "after": "with the norm of {of} after their rotary embedding",
    "twice": "with the norm of {of} applied twice",
    "of-unit-length": "with {of} divided by their length and not by the root of their mean square",
    "exchanged": "with the other norm's weight in the norm of {of}",
    "of-head": "with the norm of {of} taken over each head",
    "of-all": "with the norm of {of} taken over all heads",
}
_ORDERED = {"keys": "keys", "values": "values", "keys-and-values": "keys and values"}
_TOKENWISE: Mapping[tuple[str, str], str] = {
    ("input", "of-position"): "with the token of the position {number} further in the place of each",
    ("input", "of-row"): "with the token of the row {number} further in the place of each",
    ("input", "of-module"): "from the {name} in place of the right input",
    ("eps", "none"): "without eps",
    ("eps", "outside"): "with eps outside of the root",
    ("eps", "value"): "with an eps of {number}",
    ("eps", "outside-value"): "with an eps of {number} outside of the root",
    ("weight", "none"): "without its weight",
    ("weight", "plus-one"): "with 1 + weight in place of the weight",
    ("weight", "twice"): "with its weight applied twice",
    ("weight", "minus-one"): "with weight - 1 in place of the weight",
    ("weight", "exponential"): "with the exponential of its weight",
    ("weight", "times"): "with {number} times its weight",
    ("weight", "plus"): "with {number} added to its weight",
    ("weight", "before"): "with its weight applied before the norm",
    ("weight", "transposed"): "with its weight transposed",
    ("weight", "of-module"): "with the weight of {name}",
    ("bias", "none"): "without its bias",
    ("bias", "opposite"): "with its bias subtracted",
    ("bias", "times"): "with its bias added {number} times",
    ("bias", "twice"): "with its bias added twice",
    ("bias", "scaled"): "with its bias added before the weight multiplies",
    ("centre", "kept"): "without subtracting the mean",
    ("centre", "removed"): "after subtracting the mean",
    ("statistics", "detached"): "with statistics that are taken for constants",
    ("mean", "sum"): "with the sum of squares in place of their mean",
    ("mean", "unbiased"): "with squares divided by the width less one",
    ("mean", "absolute"): "with the mean of absolute values in place of the root of the mean square",
    ("mean", "over-tokens"): "with the mean over tokens in place of that over the width",
    ("mean", "none"): "without dividing by the root of the mean square",
    ("mean", "times"): "with {number} times the mean of squares",
    (
        "mean",
        "first-part",
    ): "with the mean of squares over the first of {number} parts of the width for all of it",
    (
        "mean",
        "last-part",
    ): "with the mean of squares over the last of {number} parts of the width for all of it",
    (
        "statistics",
        "own-part",
    ): "with statistics whose gradient comes from each of {number} parts of the width alone",
    ("statistics", "times"): "with statistics whose gradient counts {number} times",
    (
        "normalization",
        "over-tokens",
    ): "with weights that are normalized over the tokens of a rank, not over choices",
    ("normalization", "over-rank"): "with weights that are normalized over all tokens and choices of a rank",
    **{
        (part, way): words.replace("WHAT", what)
        for part, what in (
            ("weight", "weight"),
            ("rows", "rows of its weight"),
            ("columns", "columns of its weight"),
        )
        for way, words in (
            ("next-slice", "with the next of {number} slices of the WHAT in the place of each"),
            ("slices-reversed", "with {number} slices of the WHAT in reverse order"),
            ("first-slice", "with the first of {number} slices of the WHAT in the place of each"),
            ("in-turn", "with the WHAT dealt in turn to {number} slices, not slice by slice"),
        )
    },
    ("mean", "parts"): "with the mean over each of {number} parts of the width in place of all of it",
    ("activation", "none"): "without an activation",
    ("gate", "exchanged"): "with gate and up exchanged",
    ("gate", "weights-exchanged"): "with the weights of gate and up exchanged, and their biases not",
    ("gate", "none"): "without the gate: the activation of up alone",
    ("gate", "alone"): "without up: the activation of the gate alone",
    ("gate", "interleaved"): "with gate and up taken in turn from what holds them one after the other",
    ("gate", "added"): "with up added to the activation of the gate, not multiplied",
    ("gate", "up-plus-one"): "with 1 added to up",
    ("gate", "of-product"): "with the activation of gate times up",
    ("gate", "up-squared"): "with the activation of up times up: the gate is up",
    ("gate", "halves"): "with up in the place of the gate too",
    ("gate", "bilinear"): "without an activation of the gate",
    ("score", "softmax"): "with softmax scores",
    ("score", "sigmoid"): "with sigmoid scores",
    ("score", "logits"): "with logits in place of scores",
    ("score", "of-choices"): "with the softmax after the choice and not before",
    ("score", "softmax-twice"): "with a softmax of the softmax",
    ("logits", "times"): "with logits that are {number}x the right ones",
    ("normalization", "none"): "without normalizing the weights over a token's choices",
    ("normalization", "added"): "with weights that are normalized over a token's choices",
    ("normalization", "softmax"): "with a softmax of the chosen scores",
    ("route-scale", "none"): "without the scale of the weights",
    ("route-scale", "twice"): "with the scale of the weights applied twice",
    ("order", "reversed"): "with its choices in reverse order",
    ("order", "worst"): "with the worst experts chosen",
    ("order", "next"): "with the choice moved on by one rank of the scores",
    ("selection-bias", "none"): "without the selection bias",
    ("selection-bias", "opposite"): "with the selection bias subtracted",
    ("selection-bias", "in-weights"): "with the selection bias in the combine weights",
    ("groups", "none"): "without limiting the choice to groups",
    ("groups", "sum"): "with groups ranked by the sum of their two best scores",
    ("groups", "max"): "with groups ranked by their best score",
    ("weights", "none"): "without combine weights",
    ("weights", "equal"): "with equal combine weights",
    ("weights", "before"): "with the combine weights applied to what goes into the experts",
    ("weights", "squared"): "with the combine weights applied twice",
    ("weights", "reversed"): "with the combine weights of a token's choices in reverse order",
    ("weights", "of-position"): "with the combine weights of the position {number} further",
    ("weights", "of-choice"): "with the combine weight of the choice {number} further in the place of each",
    ("weights", "sorted"): "with combine weights by expert that are taken for those in the order of tokens",
    ("weights", "unsorted"): "with combine weights in the order of tokens that are taken for those by expert",
    ("all", "times"): "with {number} times what it should be",
    ("where", "slice"): "in slice {number} of each expert's hidden units alone",
    ("where", "expert-rank"): "at the experts of rank {number} over ep alone",
    (
        "slices",
        "own",
    ): "with each rank's own slice of the experts' hidden units alone: the sum over slices is missing",
    ("slices", "not-own"): "without each rank's own slice of the experts' hidden units",
    ("slices", "own-times"): "with each rank's own slice of the experts' hidden units in the place of all",
    ("slices", "without"): "without slice {number} of the experts' hidden units",
    ("slices", "of"): "with slice {number} of the experts' hidden units in the place of all",
    **{
        (f"{weight}-units", way): words.replace("WEIGHT", weight)
        for weight in ("gate", "up", "down")
        for way, words in (
            (
                "of-rank",
                "with the slice of the WEIGHT weights of the rank {number} further in the place of each",
            ),
            ("reversed", "with the slices of the WEIGHT weights in reverse order of ranks"),
            ("first", "with the first rank's slice of the WEIGHT weights on all ranks"),
            (
                "in-turn",
                "with the hidden units of the WEIGHT weights dealt in turn to ranks, not slice by slice",
            ),
        )
    },
    ("choices", "without"): "without choice {number} of each token",
    ("choices", "only"): "with choice {number} of each token alone",
    ("choices", "without-expert"): "without what expert {number} puts out",
    ("choices", "without-local"): "without what expert {number} of each rank's own over ep puts out",
    ("choices", "without-rank"): "without the experts of rank {number} over ep",
    ("choices", "only-rank"): "with the experts of rank {number} over ep alone",
    ("choices", "own-rank"): "with the experts of each rank's own part over ep alone",
    ("choices", "not-own-rank"): "without the experts of each rank's own part over ep",
    ("choices", "capacity"): "without what comes to an expert after its first {number} copies",
    (
        "choices",
        "capacity-of-call",
    ): "without what comes to an expert after its first {number} copies of an exchange",
    (
        "choices",
        "capacity-of-rank",
    ): "without what each rank sends to an expert after its first {number} copies",
    ("experts", "of-choice"): "with the expert of the choice {number} further in the place of each",
    ("experts", "of-expert"): "with the expert {number} further in the place of each",
    ("experts", "of-rank"): "with the experts of the rank {number} further over ep in the place of each",
    ("experts", "reversed-in-rank"): "with each rank's experts in reverse order",
    ("experts", "next-in-rank"): "with the expert {number} further on the same rank in the place of each",
    ("experts", "reversed"): "with the experts in reverse order",
    ("experts", "first-rank"): "with the experts of the first rank over ep in the place of those of all",
    ("experts", "across"): "with experts numbered in turn over the ranks of ep and not rank by rank",
    (
        "experts",
        "by-units",
    ): "with slices of the hidden units of all experts on the ranks of ep in the place of whole experts",
    **{
        (f"{part}-held", way): words.format(what=what, number="{number}")
        for part, what in (
            ("gate", "gate weights"),
            ("up", "up weights"),
            ("down", "down weights"),
            ("gate-bias", "gate biases"),
            ("up-bias", "up biases"),
            ("down-bias", "down biases"),
        )
        for way, words in (
            ("first-rank", "with the {what} of the first rank's experts over ep on every rank"),
            ("of-rank", "with the {what} of the rank {number} further over ep in the place of each"),
            ("reversed", "with the {what} of the experts in reverse order"),
            (
                "across",
                "with the {what} of experts numbered in turn over the ranks of ep and not rank by rank",
            ),
        )
    },
    ("experts", "along"): "with experts numbered rank by rank where they are dealt in turn",
    ("down-bias", "unweighted"): "with a down bias that is not weighted",
}
_BIASES = {"gate-bias": "gate bias", "up-bias": "up bias", "down-bias": "down bias"}
_TIMES = {
    "none": "without {what}",
    "twice": "with {what} twice",
    "opposite": "with {what} subtracted",
    "ungated": "with {what} not gated",
    "raw-gate": "with {what} gated by its gate's logits, without the sigmoid",
    "tanh-gate": "with {what} gated by a tanh and not by a sigmoid",
    "silu-gate": "with {what} gated by a silu and not by a sigmoid",
    "gated-twice": "with {what} gated twice",
    "opposite-gate": "with {what} gated by what its gate leaves of 1",
}


def describe_variant(formula: str, changes: Sequence[Change]) -> str:
    """Return what a module does, with its verb: `attends without a causal mask`."""
    made = f"makes the {name_formula(formula)}"
    verbs = {"attention": "attends", "input": made, "output": made}
    passed = f"passes back the {name_formula(formula)}"
    verb = passed if formula.startswith("gradient:") else verbs.get(formula.partition(":")[0], "computes")
    return f"{verb} {', and '.join(_describe_change(each) for each in changes)}"


def name_formula(formula: str) -> str:
    """Return what a formula is called: `routed experts`, `gradient of the norm`, `input of layers.0.attention`."""
    kind, _, of = formula.partition(":")
    if kind == "gradient":
        return f"gradient of the {name_formula(of)}"
    return f"{kind} of {of}" if of else " ".join(kind.split("-"))


def _describe_change(change: Change) -> str:
    return _describe_way(change) + _describe_multiple(change)


def _describe_multiple(change: Change) -> str:
    """Return what a number comes from by which something is multiplied; nothing where it is no such number.

    What is there twice may be there once on each of two ranks, or for each of two micro-batches.
    """
    factor = change.factor
    if factor is None or factor.is_zero:
        return ""
    names = " or ".join(name_product(each) for each in factor.equals)
    if factor.equals and change.is_summed:
        return f", once on each rank of {names} before the sum"
    if factor.equals and change.way == "twice":
        return f" (2 is also {names})"
    if factor.equals:
        return f" ({describe_sources(factor)})".replace(f" {AMBIGUOUS}", ", ambiguous in this layout")
    return "" if change.way == "twice" else f", {NO_COUNT}"


def _describe_way(change: Change) -> str:
    number = "" if change.number is None else format_factor(change.number)
    if change.part in _NORMED:
        return _NORMS[change.way].format(of=_NORMED[change.part])
    if change.part == "rotation-back":
        return f"{_ROTATIONS[change.way].format(of='', number=number)} in the backward pass alone"
    if change.part in _ROTATED and change.way in _ROTATIONS:
        return _ROTATIONS[change.way].format(of=_ROTATED[change.part], number=number)
    if change.part in _ORDERED:
        return _ORDERS[change.way].format(what=_ORDERED[change.part], number=number)
    if (change.part in _BIASES or change.part.startswith("term-")) and change.way != "unweighted":
        what = f"the {_BIASES.get(change.part, change.name)}"
        return _TIMES.get(change.way, "with {number} times {what}").format(what=what, number=number)
    if change.part == "softmax" and change.way.partition("-")[2] in _RESCALED:
        what = _RESCALED[change.way.partition("-")[2]]
        return f"with ranks' chunks merged without rescaling {what} to the largest score of all"
    if step := describe_step(change.part, change.way, number):
        return step
    if mistake := describe_mistake(change, number):
        return mistake
    words = _ATTENTION.get((change.part, change.way)) or _TOKENWISE[change.part, change.way]
    return words.format(number=number, name=_name(change.name))


def _name(name: str) -> str:
    """Return the end of a module that a change names."""
    end, _, module = name.partition(":")
    return f"{end} of {module}" if module else name


def describe_restriction(
    ranks: Sequence[int], blocks: Sequence[int], tokens: tuple[int, int] | None = None
) -> str:
    """Return where alone a variant holds: ` on ranks 1, 3 alone`, ` at 8 of 16 tokens alone`; nothing for all."""
    of_ranks = f" on {format_ranks(tuple(ranks))} alone" if ranks else ""
    heads = f"head{'s' if len(blocks) > 1 else ''} {', '.join(map(str, blocks))}"
    some = "" if tokens is None else f" at {tokens[0]} of {tokens[1]} tokens alone"
    return of_ranks + some + (f" in {heads} alone" if blocks else "")
