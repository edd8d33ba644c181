"""Precision: sums and buffers in a narrower dtype than the recipe asks for, or a wider one.

Class M. The error is as large as rounding and has no direction. Below float64 only dtypes distinguish it
from noise.
"""

LETTER = "M"
