"""A mistake in a user's own module, in words: `it has scaling = 0.25 in place of 0.353553`."""

from __future__ import annotations

from collections.abc import Mapping

from moeverify.report.words.factor import describe_sources, format_factor
from moeverify.report.words.layout import describe_head_layout
from moeverify.report.words.merging import describe_merge
from moeverify.report.words.subject import MODEL, name_culprit, name_subject
from moeverify.report.words.varied import describe_restriction
from moeverify.results.explanation import Explanation, Quantity
from moeverify.results.observation import Replay
from moeverify.results.own_module import Mistake, Mistaken

MOST_MISTAKES = 3

# By part and way; a dim that a way names stands behind a colon.
_WORDS: Mapping[tuple[str, str], str] = {
    ("attribute", "value"): "with {name} = {after} in place of {before}",
    ("attribute", "fitted"): "with {name} = {number} in place of {before}",
    ("attribute", "activation"): "with {after} as {name} in place of {before}",
    ("child", "left-out"): "without {name}: what goes in comes out",
    ("child", "zero"): "without what {name} returns",
    ("child", "bfloat16"): "with what {name} returns rounded to bfloat16",
    ("child", "centered"): "with what goes into {name} less its mean",
    ("child", "twice"): "with {name} applied twice",
    ("child", "times"): "with what {name} returns counted {number} times{sources}",
    ("child", "exchanged"): "with what {name} and {after} return exchanged",
    ("child", "detached"): "without a gradient through {name}",
    ("child", "input-detached"): "without the gradient that {name} passes back to its input",
    ("child", "input-gradient"): "with the gradient that {name} passes back counted {number} times{sources}",
    ("parameter", "stale"): "with {its} of the step before",
    ("parameter", "other"): "with {after} in the place of {its}",
    ("parameter", "times"): "with {its} counted {number} times{sources}",
    ("parameter", "power"): "with {its} to the power of {number}, as of another base",
    ("parameter", "hidden"): "without {its} in a softmax",
    ("experts", "all"): "with the weights of the expert {number} further in the place of each one's",
    ("experts", "one"): "with the weights of expert {after} in the place of those of expert {number}",
    ("experts", "zero"): "without what expert {number} computes",
    ("input", "none"): "without {its}",
    ("input", "other"): "with {after} in the place of {its}",
    ("input", "exchanged"): "with its {name} and {after} exchanged",
    ("input", "times"): "with {its} counted {number} times{sources}",
    ("input", "reach"): "with {its} showing each query {keys}",
    ("input", "short"): "with {its} hiding {keys} from each query",
    ("step", "value"): "with {after} in place of {before} in {step}",
    ("step", "fitted"): "with {after}{number} in place of {before} in {step}",
    ("step", "function"): "with {after} in the place of {step}",
    ("step", "left-out"): "without {step}",
    ("step", "one"): "with 1 in the place of the result of {step}",
    ("step", "centered"): "with the result of {step} less its mean",
    ("step", "exchanged"): "with the two results of {step} exchanged",
    ("step", "turned-round"): "with the operands or parts of {step} in reverse order",
    ("step", "only-operand"): "with {after} of {step} alone, and not its result",
    ("step", "operand-times"): "with {after} of {step} counted {number} times{sources}",
    ("step", "operand-detached"): "without a gradient through {after} of {step}",
    (
        "step",
        "operand-gradient",
    ): "with the gradient through {after} of {step} counted {number} times{sources}",
    ("step", "merged"): "{merge}, in {step}",
    ("step", "relaid"): "{layout}",
    ("sum", "added"): "with {name} added {number} times more{sources}",
}
_TRANSFORMS: Mapping[str, str] = {
    "inverted": "with {what} inverted",
    "all-true": "with {what} true everywhere",
    "all-false": "with {what} true nowhere",
    "shifted": "with {what} shifted by {number} along dim {dim}",
    "zero": "with zeros in the place of {what}",
    "one": "with 1 in the place of {what}",
    "in-parts": "with {what} in reverse order along dim {dim} in each of {number} parts",
    "bfloat16": "with {what} rounded to bfloat16",
    "offset": "with {what} off by {number}",
    "moved": "with {what} moved by {number} along dim {dim}",
    "restarted": "with the first {number} of {what} along dim {dim} in the place of the others too",
    "reversed": "with {what} in reverse order along dim {dim}",
    "in-turn": "with {what} along dim {dim} taken in turn from groups of {number}",
    "transposed": "with {what} transposed",
}


def describe_mistake(mistake: Mistake, module: str = "") -> str:
    """Return a mistake as what follows "computes what it would": `without its attention_mask`.

    What belongs to another module than the one that was replayed has its whole name.
    """
    owned = mistake.part in ("attribute", "parameter") and mistake.module not in ("", module)
    own = f"{mistake.module}.{mistake.name}" if owned else mistake.name
    its = own if owned else f"its {own}"
    way, _, dim = mistake.way.partition(":")
    number = mistake.number if mistake.number is not None else 0.0
    sources = describe_sources(mistake.factor) if mistake.factor is not None else ""
    step = f"{mistake.name} at {mistake.line}" if mistake.line else mistake.name
    names = {
        "name": own,
        "its": its,
        "step": step,
        "what": f"the result of {step}" if mistake.part == "step" else its,
        "before": mistake.before,
        "after": mistake.after,
        "number": format_factor(number),
        "keys": _count_keys(number),
        "dim": dim,
        "layout": _describe_layout(mistake, dim, step) if way == "relaid" else "",
        "merge": _describe_merge(mistake, dim) if way == "merged" else "",
        "sources": f" ({sources})" if sources else "",
    }
    text = _WORDS.get((mistake.part, way)) or _TRANSFORMS[way]
    return text.format(**names)


_TAKEN = {"keys-and-values": "keys and values", "all": "queries, keys and values"}


def _describe_layout(mistake: Mistake, way: str, step: str) -> str:
    """Return in which layout heads are read: what a step gives, or some of what attention takes."""
    _, is_output, source = mistake.after.partition("output:")
    what = (
        f"the output of {source}"
        if is_output
        else _TAKEN.get(mistake.after, mistake.after) or f"the result of {step}"
    )
    words = describe_head_layout(way, what)
    return f"{words}, in {step}" if mistake.after else words


def _describe_merge(mistake: Mistake, change: str) -> str:
    """Return how blocks of keys are merged: `softmax/sum-of-chunks`."""
    part, _, way = change.partition("/")
    number = "" if mistake.number is None else format_factor(mistake.number)
    words = describe_merge(part, way, mistake.after, number)
    return words if words.startswith("with") else f"with attention {words}"


def _count_keys(number: float) -> str:
    count = abs(int(number))
    return f"{count} more key{'s' if count > 1 else ''} further {'ahead' if number < 0 else 'back'}"


def describe_mistakes(mistakes: tuple[Mistake, ...], module: str = "") -> str:
    """Return all of several mistakes that give the same, the first few by name."""
    texts = list(dict.fromkeys(describe_mistake(each, module) for each in mistakes))
    named, left = texts[:MOST_MISTAKES], len(texts) - MOST_MISTAKES
    if left > 0:
        others = f"one of {left} other mistakes that give" if left > 1 else "another mistake that gives"
        named.append(f"with {others} the same")
    return ", or ".join(named)


def describe_mistaken(operation: Mistaken, explanation: Explanation) -> str:
    """Return which mistake in a user's own module gives what ranks have."""
    where = describe_restriction(operation.ranks, operation.tokens)
    mistakes = describe_mistakes(operation.mistakes, operation.module)
    culprit = operation.module or name_culprit(explanation.subject)
    subject = name_subject(explanation.subject)
    if explanation.subject.quantity is Quantity.MODULE_GRADIENT:
        return f"{subject} is what {culprit} passes back {mistakes}{where}"
    return f"{subject} is what {culprit} gives {mistakes}{where}"


def describe_own_replay(seen: Replay) -> str:
    """Return how often a user's module was replayed, and what the best mistake leaves of the error."""
    replayed = f"{seen.formula or MODEL} replayed {seen.num_tried} times on right inputs, with a mistake each"
    if seen.residual is None:
        return f"{replayed}: none gives what ranks have"
    return f"{replayed}: this one leaves {seen.residual:.2g} of the error"
