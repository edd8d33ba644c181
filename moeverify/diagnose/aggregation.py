"""Wrong gradients as wrong sums: the fit on the golden's parts, put into words.

Hypotheses are tried from the one with the fewest coefficients on; the first that leaves nothing of the
error is the cause, because a wrong one with fewer coefficients cannot fit that many numbers by chance.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

from moeverify.diagnose.components import Components
from moeverify.diagnose.fit import (
    PADDING,
    Column,
    Fit,
    Wrong,
    fit_columns,
    padding_columns,
    scale_columns,
    share_columns,
    term_columns,
    term_share_columns,
)
from moeverify.diagnose.verdict import Verdict, name_factor
from moeverify.results.cause import Cause
from moeverify.results.finding import Trial

EXPLAINED = 1e-3
"""The share of the error that may be left: rounding leaves 1e-5 of the smallest error that is found at all."""


Hypothesis = tuple[str, Sequence[tuple[str, Column]], Callable[[Fit], Verdict]]


def examine_aggregation(
    wrong: Sequence[Wrong], components: Components | None, degrees: Mapping[str, int]
) -> tuple[Verdict | None, tuple[Trial, ...]]:
    """Return the verdict on some wrong gradients taken together, and what each hypothesis said.

    Without components, which a user's own model has not, one factor on the whole golden is all that can be tried.
    """
    trials: list[Trial] = []
    verdict: Verdict | None = None
    for name, columns, say in _list_hypotheses(wrong, components, degrees):
        if verdict is not None:
            trials.append(Trial(name=name, verdict="untried", words="fewer coefficients explain it already"))
            continue
        fit = fit_columns(wrong, columns) if columns else None
        trials.append(_describe_fit(name, fit, has_parts=bool(columns)))
        if fit is not None and fit.residual < EXPLAINED:
            verdict = say(fit)
    return verdict, tuple(trials)


def _list_hypotheses(
    wrong: Sequence[Wrong], components: Components | None, degrees: Mapping[str, int]
) -> list[Hypothesis]:
    """Return what is tried, in order; a hypothesis whose parts are not known has no columns."""

    def list_parts(make: Callable[[Components], list[tuple[str, Column]]]) -> list[tuple[str, Column]]:
        return make(components) if components is not None else []

    def say_shares(fit: Fit) -> Verdict:
        assert components is not None
        return _say_shares(fit, components, degrees)

    padding = components is not None and bool(components.padding)
    return [
        ("one factor", scale_columns(wrong), lambda fit: _say_scale(fit, degrees)),
        ("a factor for each loss term", list_parts(term_columns), lambda fit: _say_terms(fit, degrees)),
        ("a factor for each share of the batch", list_parts(share_columns), say_shares),
        ("loss terms and padding", list_parts(padding_columns) if padding else [], _say_padding),
        ("a factor for each term of each share", list_parts(term_share_columns), say_shares),
    ]


def _describe_fit(name: str, fit: Fit | None, *, has_parts: bool) -> Trial:
    if not has_parts:
        words = "the golden has no such parts here"
        return Trial(name=name, verdict="untried", words=words)
    if fit is None:
        words = "too few numbers for so many coefficients, or every part is zero"
        return Trial(name=name, verdict="untried", words=words)
    return Trial(
        name=name,
        verdict="yes" if fit.residual < EXPLAINED else "no",
        words=f"{fit.residual:.2g} of the error is left",
        coefficients=dict(zip(fit.labels, fit.coefficients, strict=True)),
        residual=fit.residual,
    )


def _say_scale(fit: Fit, degrees: Mapping[str, int]) -> Verdict:
    factor = fit.coefficients[0]
    text, axes = name_factor(factor, degrees)
    where = f"axis {', '.join(axes)}" if axes else ""
    return Verdict(Cause.SCALE, f"every value is {text} times the right one", where, _numbers(fit), axes)


def _say_terms(fit: Fit, degrees: Mapping[str, int]) -> Verdict:
    wrong = [(term, value) for term, value in zip(fit.labels, fit.coefficients, strict=True) if _off(value)]
    texts, places, fitting = [], [], []
    for term, value in wrong:
        text, axes = name_factor(value, degrees)
        missing = abs(value) < 1e-6
        texts.append(
            f"the part of the {term} loss is {'missing' if missing else text + ' times the right one'}"
        )
        places += [f"{term} loss"] + ([f"axis {', '.join(axes)}"] if axes else [])
        fitting += [axis for axis in axes if axis not in fitting]
    return Verdict(Cause.TERM_SCALE, "; ".join(texts), ", ".join(places), _numbers(fit), tuple(fitting))


def _say_padding(fit: Fit) -> Verdict:
    counted = [
        label.removesuffix(f" {PADDING}")
        for label, value in zip(fit.labels, fit.coefficients, strict=True)
        if label.endswith(PADDING) and abs(value) > 1e-6
    ]
    sentence = f"padding tokens count in the {' and the '.join(counted)} loss"
    return Verdict(Cause.PADDING, sentence, ", ".join(f"{term} loss" for term in counted), _numbers(fit))


def _say_shares(fit: Fit, components: Components, degrees: Mapping[str, int]) -> Verdict:
    wrong = [(label, value) for label, value in zip(fit.labels, fit.coefficients, strict=True) if _off(value)]
    missing = [label for label, value in wrong if abs(value) < 1e-6]
    evidence = _numbers(fit)
    if len(missing) == len(wrong):
        return Verdict(
            Cause.SHARE_WEIGHTS, f"the share of {_some(missing)} is missing", _some(missing), evidence
        )
    local = _local_means(fit, components)
    if local:
        return Verdict(Cause.SHARE_WEIGHTS, local, "denominators", evidence)
    sentence = "the shares of the batch are weighted otherwise: " + _some(
        [f"{label} by {name_factor(value, degrees)[0]}" for label, value in wrong]
    )
    return Verdict(Cause.SHARE_WEIGHTS, sentence, _some([label for label, _ in wrong]), evidence)


def _local_means(fit: Fit, components: Components) -> str:
    """Return a sentence if the lm weights are those of a mean of each share's own mean."""
    weights = dict(zip(fit.labels, fit.coefficients, strict=True))
    total, count = sum(components.num_valid), len(components.cells)
    hits = 0
    for cell, num_valid in zip(components.cells, components.num_valid, strict=True):
        value = weights.get(cell.label, weights.get(f"lm of {cell.label}"))
        if value is None:
            continue
        if abs(value - total / (count * num_valid)) > 1e-6 * abs(value):
            return ""
        hits += 1
    if not hits:
        return ""
    return f"a mean of means: each of the {count} shares divides by its own number of valid tokens"


def _numbers(fit: Fit) -> tuple[str, ...]:
    shown = [f"{label}: {value:.10g}" for label, value in zip(fit.labels, fit.coefficients, strict=True)]
    return (*shown, f"{fit.residual:.2g} of the error is left")


def _off(value: float) -> bool:
    return abs(value - 1.0) > 1e-6


def _some(texts: Sequence[str]) -> str:
    return "; ".join(texts[:4]) + (f"; and {len(texts) - 4} more" if len(texts) > 4 else "")
