"""Context parallelism: positions and masks of a rank that has a part of each sequence.

Class K. Includes a setting that is never applied: all numbers are right, but not the memory use.
"""

LETTER = "K"
