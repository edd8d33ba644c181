"""Precision: sums and buffers in a narrower dtype than the recipe asks for, or a wider one.

Class M. The error has the size of rounding and no direction; below float64 only dtypes tell it apart from
noise.
"""

LETTER = "M"
