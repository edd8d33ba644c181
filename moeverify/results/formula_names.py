"""Names of formulas, and of ways of their parts, by which something is computed otherwise."""

from __future__ import annotations

from typing import Literal

BiasWay = Literal[
    "reversed",
    "frequency",
    "median",
    "largest",
    "smallest",
    "of-busy",
    "unsigned",
    "root",
    "overloaded",
    "underloaded",
    "up-at-mean",
    "down-at-mean",
    "other-rate",
    "centred",
    "not-below-zero",
    "kept",
    "tanh",
    "sigmoid",
    "arctan",
    "clipped",
    "increasing",
    "over-mean",
    "over-largest",
    "over-total",
    "over-deviation",
]

NormOrder = Literal[
    "absolute", "largest", "squares", "mean-square", "mean-absolute", "root", "clipped", "absolute-apart"
]

ClipFormulaName = Literal[
    "guard",
    "unbounded",
    "without-limit",
    "squared",
    "of-squared-norm",
    "root",
    "inverse",
    "soft",
    "limit",
    "limit-squared",
    "of-root-norm",
]
