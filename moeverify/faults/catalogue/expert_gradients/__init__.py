"""Gradients of experts: another scale, or a reduction over other ranks, than dense gradients need.

Class A. An expert sees the tokens of all ep ranks, so its gradient is already a sum over them. It is
replicated on fewer ranks than a dense parameter. The divisors and groups of data parallelism are therefore
wrong for it. The loss of the first step is right, and AdamW hides a wrong scale.
"""

LETTER = "A"
