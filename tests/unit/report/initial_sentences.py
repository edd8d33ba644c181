"""Explanations of initial values with their sentences: rules of shapes, and how they are drawn."""

from __future__ import annotations

from explanations import explain

from moeverify.results.cause import Cause
from moeverify.results.explanation import Quantity
from moeverify.results.factor import Product
from moeverify.results.initial_values import Draw, Drawn, ScaledByShape, Spread, Tails

INITIAL = [
    *(
        (
            explain(
                Cause.INITIALIZATION,
                Quantity.INITIAL_VALUE,
                Drawn(spread=Spread(mean=0.0, deviation=0.0212, right_mean=1.0, right_deviation=0.1, **like)),
            ),
            f"the initial values lie around 0 with a deviation of 0.0212{text}; the right ones lie around 1 with a "
            "deviation of 0.1",
            "",
        )
        for like, text in (
            ({}, ""),
            ({"like": ("a",), "num_like": 1}, ", as the right ones of a do"),
            ({"like": ("a", "b"), "num_like": 4}, ", as the right ones of a, b and 2 more do"),
        )
    ),
    *(
        (
            explain(
                Cause.INITIALIZATION,
                Quantity.INITIAL_VALUE,
                Drawn(tails=Tails(way=way, num_beyond=45, num_elements=1000, **numbers)),
                tensors=("a", "b"),
            ),
            f"the initial values of 2 tensors beyond {text}",
            "",
        )
        for way, numbers, text in (
            (
                "drawn-again",
                {"deviations": 2.0},
                "2 deviations are drawn again within that bound, as of a truncated distribution: 45 of 1000, and all "
                "others are right",
            ),
            (
                "cut-off",
                {"bound": 0.04, "factor": 1.1368},
                "0.04 are cut off there: 45 of 1000, and all others are 1.137 times the right ones",
            ),
            ("zero", {}, "a bound of each weight's own are zero: 45 of 1000, and all others are right"),
        )
    ),
    (
        explain(
            Cause.SCALE,
            Quantity.INITIAL_VALUE,
            ScaledByShape(
                products=(Product(times=("columns of the weight",), over=("rows of the weight",)),),
                power=2,
                least=0.5773502691,
                largest=1.414213562,
            ),
            tensors=("a", "b", "c"),
        ),
        "the initial values of 3 tensors are the root of columns of the weight/rows of the weight times the expected "
        "values, each by the shape of its own weight: from 0.57735 to 1.41421 times",
        "",
    ),
    (
        explain(
            Cause.INITIALIZATION,
            Quantity.INITIAL_VALUE,
            Drawn(draws=(Draw(distribution="uniform", over=("columns of the weight",)),)),
            tensors=("a", "b"),
        ),
        "the initial values of 2 tensors are uniform in +-1/root of columns of the weight, as in torch's "
        "default for linear layers, and not those that the seed and the names give",
        "",
    ),
    (
        explain(
            Cause.INITIALIZATION,
            Quantity.INITIAL_VALUE,
            Drawn(draws=(Draw(distribution="uniform", times=6, over=("rows and columns of the weight",)),)),
            tensors=("a", "b"),
        ),
        "the initial values of 2 tensors are uniform in +-the root of 6/rows and columns of the weight, as "
        "in Xavier's initialization, and not those that the seed and the names give",
        "",
    ),
    (
        explain(
            Cause.INITIALIZATION,
            Quantity.INITIAL_VALUE,
            Drawn(draws=(Draw(distribution="normal", number=1.0004),)),
            tensors=("embed.weight",),
        ),
        "the initial values are normal with deviation 1, as in torch's default for embeddings, and not those that "
        "the seed and the names give",
        "",
    ),
    (
        explain(
            Cause.INITIALIZATION,
            Quantity.INITIAL_VALUE,
            Drawn(draws=(Draw(distribution="normal", number=0.0502),)),
            tensors=("a", "b"),
        ),
        "the initial values of 2 tensors are normal with deviation 0.05, and not those that the seed and the "
        "names give",
        "",
    ),
    (
        explain(
            Cause.INITIALIZATION,
            Quantity.INITIAL_VALUE,
            Drawn(
                draws=(
                    Draw(distribution="normal", times=1, over=("hidden",), cut=3),
                    Draw(distribution="normal", times=1, over=("hidden",), cut=3, is_after_cut=True),
                )
            ),
            tensors=("a", "b"),
        ),
        "the initial values of 2 tensors are normal, cut at 3 deviations, with deviation 1/root of hidden "
        "before the cut, or normal, cut at 3 deviations, with deviation 1/root of hidden after the cut, and "
        "not those that the seed and the names give",
        "",
    ),
    (
        explain(
            Cause.INITIALIZATION,
            Quantity.INITIAL_VALUE,
            Drawn(draws=(Draw(distribution="right"),)),
            tensors=("a", "b"),
        ),
        "the initial values of 2 tensors are distributed as they should be, as of another seed, and not "
        "those that the seed and the names give",
        "",
    ),
    *(
        (
            explain(
                Cause.INITIALIZATION,
                Quantity.INITIAL_VALUE,
                Drawn(draws=(Draw(distribution="right"),), source=source),
                tensors=("a", "b"),
            ),
            f"the initial values of 2 tensors are distributed as they should be, and not those of {right}",
            "",
        )
        for source, right in (
            ("factory", "the model that `recipe.model.factory` makes"),
            ("weights", "the folder of weights"),
        )
    ),
    (
        explain(
            Cause.INITIALIZATION,
            Quantity.INITIAL_VALUE,
            Drawn(draws=(Draw(distribution="constant", number=1.0),)),
            tensors=("a", "b"),
        ),
        "the initial values of 2 tensors are all 1, and not those that the seed and the names give",
        "",
    ),
    (
        explain(
            Cause.INITIALIZATION,
            Quantity.INITIAL_VALUE,
            Drawn(draws=(Draw(distribution="identity", number=1.0),)),
            tensors=("a", "b"),
        ),
        "the initial values of 2 tensors are an identity, and not those that the seed and the names give",
        "",
    ),
    (
        explain(
            Cause.INITIALIZATION,
            Quantity.INITIAL_VALUE,
            Drawn(draws=(Draw(distribution="orthogonal", number=1.414),)),
            tensors=("a", "b"),
        ),
        "the initial values of 2 tensors are 1.414 times an orthogonal matrix, and not those that the seed "
        "and the names give",
        "",
    ),
]
