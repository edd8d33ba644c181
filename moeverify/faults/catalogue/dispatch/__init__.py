"""Dispatch and combine: tokens sent twice, outputs put in wrong places, sums in too few bits.

Class E. Bugs between the router's choice and the weighted sum of the outputs: index arithmetic, exchanges,
kernels.
"""

LETTER = "E"
