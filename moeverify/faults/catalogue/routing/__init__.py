"""Routing: wrong combine weights, and gradients of routing and of the tokens that are not summed over ranks.

Class B. A replicated parameter that sees a slice of the tokens or of the experts has a gradient on each rank
that is a partial sum only. Where the sum is left out, replicas drift apart; the loss of the first step is
right unless the weights are wrong themselves.
"""

LETTER = "B"
