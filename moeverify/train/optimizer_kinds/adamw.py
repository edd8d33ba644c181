"""AdamW: weight decay is apart from the gradient (arXiv 1711.05101)."""

from __future__ import annotations

from moeverify.train.optimizer_kinds.adam import AdamKind

IMPLEMENTATION = AdamKind("AdamW", decays_weight=True)
