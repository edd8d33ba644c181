"""Steps that ranks make otherwise, and which of them are one mistake together."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from moeverify.diagnose.families import strip_alike
from moeverify.diagnose.graph.joined import Joint, Values

Way = Literal["number", "function", "left-out", "added", "operand", "order", "index", "other"]

_SHARES = frozenset({"div", "mul"})
"""Operators that make the share of a rank of a parameter, by a number."""


@dataclass(frozen=True)
class Edit:
    """One step that is otherwise: `right` are the nodes of one device, `wrong` those of the ranks that differ.

    A step that is `added`, or takes rows where one device takes all (`index`), stands between `kept`, of what it
    takes, and what one device makes of that. One that is left out by some ranks alone has what these have in its
    place as `wrong`.
    """

    way: Way
    right: Joint
    wrong: Joint = ()
    kept: Joint = ()


Edits = frozenset[Edit]


class Mistakes:
    """Says which edits are one mistake, by the parameters that tensors are."""

    def __init__(self, values: Values) -> None:
        self._values, self._one, self._ranks = values, values.one, values.ranks

    def group(self, edits: Edits) -> list[list[Edit]]:
        """Return edits in the order of one device, those together that are one mistake.

        Where elements lie otherwise, all that is made of them does; and a module may use the parameters of another.
        """
        groups: dict[object, list[Edit]] = {}
        for edit in sorted(edits, key=lambda edit: (edit.right, edit.wrong)):
            key: object = edit.way if edit.way == "order" else self.find_modules(edit) or edit
            groups.setdefault(key, []).append(edit)
        return list(groups.values())

    def find_modules(self, edit: Edit) -> tuple[str, str] | None:
        """Return where a parameter should be from and where it is from, where another one stands in its place.

        Ranks that add up may have a share of a bias each.
        """
        if edit.way not in ("operand", "other"):
            return None
        wrong = edit.wrong
        if edit.way == "other":
            made = self._ranks.strip(wrong)
            node = self._ranks.same(made)
            if node is not None and node.operator in _SHARES and len(node.args) == 1:
                wrong = self._ranks.args(made)[0]
        found = self._values.find(wrong)
        names = [self._one.node(each[0]).name for each in (edit.right, found) if each is not None]
        modules = strip_alike(*names) if len(names) == 2 and all(names) else ("", "")
        return modules if all(modules) else None
