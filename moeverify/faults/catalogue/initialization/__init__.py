"""Initial values and random states: shards or replicas that differ from those of one device.

Class F. Seeds that omit the rank for different shards, or include it for copies.
"""

LETTER = "F"
