"""Tensor and sequence parallelism: gradients of replicated parameters, and of gathered tensors.

Class J. A norm that sees a slice of positions or of heads has a partial gradient. A gather may sum
gradients that are already complete.
"""

LETTER = "J"
