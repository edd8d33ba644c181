"""Pipelines: losses, divisions and metadata of micro-batches, and weights that two stages share.

Class L. A schedule runs backward by itself: who scales, accumulates and reduces is settled between it and the
training loop.
"""

LETTER = "L"
