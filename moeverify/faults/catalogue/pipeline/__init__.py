"""Pipelines: losses, divisions and metadata of micro-batches, and weights that two stages share.

Class L. A schedule runs the backward passes itself. Scaling, accumulation and reduction are split between
the schedule and the training loop.
"""

LETTER = "L"
