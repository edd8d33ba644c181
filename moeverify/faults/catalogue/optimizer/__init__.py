"""The optimizer step: weights that computation goes on to use as they were before it.

Class N. Gradients and updates are right, but forward passes do not see the updates.
"""

LETTER = "N"
