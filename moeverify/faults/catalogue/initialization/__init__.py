"""Initial values and random states: shards or replicas that begin otherwise than one device does.

Class F. Seeds that omit the rank for different shards, or include it for copies.
"""

LETTER = "F"
