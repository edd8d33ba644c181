"""Denominators of the loss: tokens counted on one rank, a mean of means, a factor of a mesh axis.

Class G. The right divisor is the number of valid tokens of the global batch, for any split over ranks and
micro-batches.
"""

LETTER = "G"
