"""The definition: softmax of all scores, which are kept whole."""

from __future__ import annotations

from typing import TYPE_CHECKING

from moeverify.model.attention_cores import AttentionKind

if TYPE_CHECKING:
    from moeverify.model.attention import Core


class _Plain(AttentionKind):
    def make_core(self) -> Core:
        from moeverify.model.attention import causal_core

        return causal_core


IMPLEMENTATION = _Plain()
