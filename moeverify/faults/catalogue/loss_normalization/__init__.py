"""Denominators of the loss: tokens counted on one rank, a mean of means, a factor of a mesh axis.

Class G. The loss is divided by the valid tokens of the global batch, however it is divided over ranks and
micro-batches.
"""

LETTER = "G"
