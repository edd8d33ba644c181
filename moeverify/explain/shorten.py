"""Shorter chains of edits: without steps that no result needs."""

from __future__ import annotations

from collections.abc import Sequence

from moeverify.explain.cause import OperatorCause
from moeverify.explain.chains import is_own_op
from moeverify.explain.edit import SUBSTITUTIONS, Edit
from moeverify.explain.joint import At, Changes, Execution, Joint
from moeverify.explain.proof import Proof
from moeverify.explain.suspects import Target


class Shortener:
    """Leaves out needless steps of chains. `wrong` are the wrong results of the step."""

    def __init__(self, joint: Joint, proof: Proof, wrong: Sequence[Target]) -> None:
        self._joint, self._proof, self._wrong = joint, proof, wrong

    def shorten(
        self,
        chain: list[OperatorCause],
        done: Execution,
        target: Target,
        unknown: Sequence[At],
        state: Execution,
    ) -> tuple[list[OperatorCause], Execution]:
        """Return a chain of edits without its first one, or its last alone, if these repair the same results.

        An edit that inserts a right value repairs later results, whatever was wrong before it. Then no
        experiment confirms a first edit that inserts an operand of another module.
        """
        last = chain[-1].repairs[0]
        earlier = {op for cause in chain[:-1] for op in cause.ops}
        is_first = earlier.isdisjoint(
            self._joint.list_before([at for op in last.ops for at in self._joint.reads(op)])
        )
        if is_first and (alone := self._proof.repairs(last, target, unknown, state)) is not None:
            return chain[-1:], alone
        first = set(chain[0].ops)
        later = [at for cause in chain[1:] for op in cause.ops for at in self._joint.reads(op)]
        comes_after = bool(later) and not first.isdisjoint(self._joint.list_before(later))
        inserts = any(cause.repairs[0].changes.values for cause in chain[1:])
        if comes_after and inserts and not self._is_foreign(chain[0]):
            return chain, done  # the inserted values were computed with the first edit
        changes = Changes()
        for cause in chain[1:]:
            changes = changes | cause.repairs[0].changes
        without = Edit(last.kind, last.ops, changes, last.others, last.place)
        again = self._proof.repairs(without, target, unknown, state)
        again = again or self._repair_as_many(changes, done, state)
        return (chain, done) if again is None else (chain[1:], again)

    def _repair_as_many(self, changes: Changes, done: Execution, state: Execution) -> Execution | None:
        """Return the execution with fewer changes, if it repairs all results of the step that `done` repairs."""
        repaired = [target for target in self._wrong if self._proof.is_repaired(target, done)]
        after = self._joint.execute(changes, None, state)
        return after if repaired and all(self._proof.is_repaired(each, after) for each in repaired) else None

    def _is_foreign(self, cause: OperatorCause) -> bool:
        """Return whether an edit inserts an operand of an operator of another module."""
        edit = cause.repairs[0]
        module = self._joint.op(cause.ops[0]).module
        return edit.kind in SUBSTITUTIONS and edit.other is not None and edit.other.module != module

    def drop_patches(self, chain: list[OperatorCause]) -> list[OperatorCause]:
        """Return a chain without edits of the training loop's own operators, if it also edits user code."""
        kept = [cause for cause in chain if not is_own_op(self._joint, cause.ops[0])] or chain
        if len(kept) < len(chain):
            kept[0].is_local = True
        return kept
