"""Ways in which a module computes otherwise than its formula, in words: `without a causal mask`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from moeverify.report.numbers import format_ranks
from moeverify.report.words.attention import describe_attention
from moeverify.report.words.exchange import describe_step
from moeverify.report.words.factor import (
    AMBIGUOUS,
    describe_no_count,
    describe_sources,
    format_factor,
    name_product,
)
from moeverify.report.words.gradients import describe_gradient
from moeverify.report.words.layout import describe_head_layout
from moeverify.report.words.mistakes import describe_mistake
from moeverify.report.words.shards import describe_shards
from moeverify.results.change import Change

_TOKENWISE: Mapping[tuple[str, str], str] = {
    ("input", "of-position"): "with the token of the position {number} further in the place of each",
    ("input", "of-row"): "with the token of the row {number} further in the place of each",
    ("input", "of-module"): "from the {name} in place of the right input",
    ("eps", "none"): "without eps",
    ("root", "power"): "divided by the power {number} of the mean square, not by its root",
    ("all", "identity"): "nothing: it puts out its input",
    ("eps", "outside"): "with eps outside of the root",
    (
        "eps",
        "of",
    ): "with an eps that is multiplied by the square of {size}: it is added after a division by that",
    ("eps", "outside-of"): "with eps outside of the root and multiplied by {size}",
    ("eps", "over-width"): "with eps divided by the width, as if it were added to the sum of squares",
    ("eps", "times-width"): "with eps multiplied by the width",
    ("eps", "root"): "with the root of eps in the place of eps",
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
    ("centre", "in-numerator"): "with the mean treated otherwise in what is divided, and not in the squares",
    ("centre", "in-statistics"): "with the mean treated otherwise in the squares, and not in what is divided",
    ("rounded", "bfloat16"): "with {tensor} rounded to bfloat16",
    ("rounded", "float16"): "with {tensor} rounded to float16",
    ("statistics", "detached"): "with statistics that are taken for constants",
    ("mean", "sum"): "with the sum of squares in place of their mean",
    ("mean", "unbiased"): "with squares divided by the width less one",
    ("mean", "absolute"): "with the mean of absolute values in place of the root of the mean square",
    ("mean", "deviation"): "with the variance in place of the mean of squares",
    ("mean", "unbiased-deviation"): "with the variance by the width less one in place of the mean of squares",
    ("mean", "largest"): "with the largest square in place of their mean",
    ("mean", "median"): "with the median of squares in place of their mean",
    ("mean", "over-tokens"): "with the mean over tokens in place of that over the width",
    ("mean", "over-positions"): "with the mean over positions in place of that over the width",
    ("mean", "over-rows"): "with the mean over the rows of the batch in place of that over the width",
    ("mean", "over-all"): "with the mean over tokens and width in place of that over the width",
    (
        "mean",
        "over-blocks",
    ): "with the mean of squares over each block of {number} positions for each of them",
    (
        "mean",
        "largest-of-blocks",
    ): "with the largest mean of squares in each block of {number} positions for each of them",
    (
        "mean",
        "first-of-blocks",
    ): "with the mean of squares of the first position in each block of {number} for each of them",
    (
        "mean",
        "last-of-blocks",
    ): "with the mean of squares of the last position in each block of {number} for each of them",
    ("mean", "of-position"): "with the mean of squares of the position {number} further in the place of each",
    ("mean", "of-row"): "with the mean of squares of the row {number} further in the place of each",
    ("mean", "every"): "with the mean of every {number}th square for that of all",
    ("mean", "next-part"): "with the mean over the next of {number} parts of the width for each",
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
    (
        "sum-over-ep",
        "of-other-tokens",
    ): "with the sum over ep of what each rank's experts make of its own tokens, which are others on each rank",
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
    verbs = {"attention": "attends", "input": made, "output": made, "cross-entropy": "is the cross entropy"}
    if formula.startswith("parameter:"):
        made = f"makes the gradient of its {formula.partition(':')[2]}"
        return f"{made} {', and '.join(_describe_change(each) for each in changes)}"
    passed = f"passes back the {name_formula(formula)}"
    verb = passed if formula.startswith("gradient:") else verbs.get(formula.partition(":")[0], "computes")
    return f"{verb} {', and '.join(_describe_change(each) for each in changes)}"


def name_formula(formula: str) -> str:
    """Return what a formula is called: `routed experts`, `gradient of the norm`, `input of layers.0.attention`."""
    kind, _, of = formula.partition(":")
    if kind == "gradient":
        return f"gradient of the {name_formula(of)}"
    if kind == "parameter":
        return f"gradient of the module's {of}"
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
    return "" if change.way == "twice" else f", {describe_no_count(change.number or 0.0)}"


def _describe_way(change: Change) -> str:
    number = "" if change.number is None else format_factor(change.number)
    if attended := describe_attention(change, number):
        return attended
    if divided := describe_head_layout(change) or describe_shards(change, number):
        return divided
    if (change.part in _BIASES or change.part.startswith("term-")) and change.way != "unweighted":
        what = f"the {_BIASES.get(change.part, change.name)}"
        return _TIMES.get(change.way, "with {number} times {what}").format(what=what, number=number)
    step = describe_step(change.part, change.way, number) or describe_gradient(change, number)
    if told := step or describe_mistake(change, number):
        return told
    words = _TOKENWISE[change.part, change.way]
    size, tensor = _SIZES.get(change.name, ""), _TENSORS.get(change.name, "")
    return words.format(number=number, name=_name(change.name), size=size, tensor=tensor)


_SIZES = {
    "largest": "the row's largest element",
    "length": "the row's length",
    "mean-size": "the row's mean absolute value",
    "deviation": "the row's deviation",
    "first-element": "the row's first element",
}
_TENSORS = {
    "squares": "the mean of squares",
    "root": "its root",
    "normed": "the normalized values",
    "weight": "its weight",
}


_MADE_OF = {
    "rotated": "rotary embedding of its right input",
    "gated": "right input times the sigmoid of {module}",
    "multiplied": "right input times the output of {module}",
}


def _name(name: str) -> str:
    """Return what a change names: the end of a module, or what is made of one."""
    end, _, module = name.partition(":")
    if end in _MADE_OF:
        return _MADE_OF[end].format(module=module)
    return f"{end} of {module}" if module else name


def describe_restriction(
    ranks: Sequence[int], blocks: Sequence[int], tokens: tuple[int, int] | None = None
) -> str:
    """Return where alone a variant holds: ` on ranks 1, 3 alone`, ` at 8 of 16 tokens alone`; nothing for all."""
    of_ranks = f" on {format_ranks(tuple(ranks))} alone" if ranks else ""
    heads = f"head{'s' if len(blocks) > 1 else ''} {', '.join(map(str, blocks))}"
    some = "" if tokens is None else f" at {tokens[0]} of {tokens[1]} tokens alone"
    return of_ranks + some + (f" in {heads} alone" if blocks else "")
