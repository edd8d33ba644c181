"""The optimizer step: weights that computation goes on to use as they were before it.

Class N. Right gradients and right updates, of which forward passes see nothing.
"""

LETTER = "N"
