"""Context parallelism: positions and masks of a rank that has a part of each sequence.

Class K. Also where it is set and never applied: all numbers are right, and the memory is not.
"""

LETTER = "K"
