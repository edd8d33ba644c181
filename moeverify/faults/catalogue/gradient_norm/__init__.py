"""The gradient norm and the clip by it: shards missed, copies counted twice, a clip that does not act.

Class H. Gradients are right. The norm is a sum over ranks that must count each element of each parameter
once.
"""

LETTER = "H"
