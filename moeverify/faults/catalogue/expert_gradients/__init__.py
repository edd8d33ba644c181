"""Gradients of experts: another scale, or a reduction over other ranks, than dense gradients need.

Class A. An expert sees the tokens of all ranks of ep, so its gradient is already a sum over them, and its
copies are on fewer ranks than those of a dense parameter. Divisors and groups of data parallelism do not fit.
The loss of the first step is right, and AdamW hides a wrong scale.
"""

LETTER = "A"
