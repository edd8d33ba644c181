"""Names of wrong formulas for the gradient norm and the clip coefficient."""

from __future__ import annotations

from typing import Literal

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
