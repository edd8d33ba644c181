"""Routing: wrong combine weights, and gradients of routing and of the tokens that are not summed over ranks.

Class B. A replicated parameter that sees a slice of the tokens or of the experts has a partial gradient on
each rank. Without the sum, replicas diverge. The loss of the first step is right unless the weights
themselves are wrong.
"""

LETTER = "B"
