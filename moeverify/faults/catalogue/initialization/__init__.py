"""Initial values and random states: shards or replicas that begin otherwise than one device does.

Class F. Seeds without the rank where ranks have different shards, or with it where they have copies.
"""

LETTER = "F"
