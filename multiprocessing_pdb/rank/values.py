"""Decomposition of a value for comparison between ranks: leaves with a path, a text and a key.

A part that no comparison covers, and one that is too deep, carries a caveat. "Equal" means bitwise equality.
"""

from __future__ import annotations

import dataclasses
import hashlib
from collections.abc import Iterable
from typing import Any

import multiprocessing_pdb.rank.array_comparisons  # noqa: F401  # registers the types of torch and numpy
from multiprocessing_pdb.rank import tensors
from multiprocessing_pdb.rank.comparisons import (
    Comparison,
    NotComparedError,
    State,
    choose_comparison,
    cut,
    name_type,
    split_value,
)

_MOST_LEAVES = 100_000
_MOST_DEPTH = 60
_LEAF_TEXT = 200
_KEY_TEXT = 80

Description = dict[str, Any]


@dataclasses.dataclass
class Leaf:
    """One compared part of a value. `tensor` is kept for the search for the first difference.

    A container's own leaf has the path of the container and "#".
    """

    path: str
    text: str
    key: str
    caveat: str = ""
    tensor: Any = None
    summary: Description | None = None


def _hash(*parts: str | bytes) -> str:
    """Return the hash of texts, each after its length."""
    key = hashlib.sha256()
    for part in parts:
        octets = part.encode("utf-8", "surrogatepass") if isinstance(part, str) else part
        key.update(len(octets).to_bytes(8, "little"))
        key.update(octets)
    return key.hexdigest()


def _hash_leaves(leaves: list[Leaf]) -> str:
    ordered = sorted(leaves, key=lambda leaf: (leaf.path, leaf.key))
    return _hash(*(text for leaf in ordered for text in (leaf.path, leaf.key)))


class Value:
    """A decomposed value."""

    def __init__(self, value: Any, check: tensors.Check) -> None:
        self._check = check
        self._path: dict[int, int] = {}  # depth of the values on the current path by id, to end cycles
        self._comparisons: dict[type, Comparison] = {}
        self.type = type(value).__qualname__
        self.leaves: list[Leaf] = []
        self.text = self._visit(value, "", 0)

    def describe(self) -> Description:
        """Return the fields that a console needs to group ranks and to ask for details."""
        if len(self.leaves) == 1 and self.leaves[0].path == "" and self.leaves[0].summary is not None:
            summary = self.leaves[0].summary
            return {**summary, "leaves": 1, "type": self.type, "caveat": summary.get("caveat", "")}
        return {
            "text": cut(self.text),
            "key": _hash_leaves(self.leaves),
            "type": self.type,
            "leaves": len(self.leaves),
            "is_sharded": any(_shard(leaf) is not None for leaf in self.leaves),
            "caveat": self._explain_caveats(),
        }

    def _explain_caveats(self) -> str:
        affected = [leaf for leaf in self.leaves if leaf.caveat]
        if not affected:
            return ""
        first = f"{affected[0].path or 'the value'} {affected[0].caveat}"
        return first if len(affected) == 1 else f"{first}, and {len(affected) - 1} other(s)"

    def list_leaves(self, begin: int, end: int) -> list[Description]:
        """Return path, key, text and shard of the leaves begin to end, ordered by path."""
        ordered = sorted(self.leaves, key=lambda leaf: leaf.path)
        return [
            {
                "path": leaf.path,
                "key": leaf.key[:24],
                "text": leaf.text[:_LEAF_TEXT],
                "length": (leaf.summary or {}).get("length", 0),
                "form": (leaf.summary or {}).get("form"),
                "local": (leaf.summary or {}).get("local"),
                "shard": _shard(leaf),
            }
            for leaf in ordered[begin:end]
        ]

    def find_bad(self, kind: str) -> str | None:
        """Return the path of the first part with a NaN (or inf, depending on `kind`), or None."""
        for leaf in self.leaves:
            bad = leaf.summary["bad"][kind == "inf"] if leaf.summary else leaf.text.lstrip("-") == kind
            if bad:
                return leaf.path
        return None

    def get_tensor(self, path: str) -> Any:
        """Return the tensor at a path. Raises KeyError."""
        for leaf in self.leaves:
            if leaf.path == path and leaf.tensor is not None:
                return leaf.tensor
        raise KeyError(f"no tensor at {path or 'the top'}")

    def _add(self, leaf: Leaf) -> str:
        self.leaves.append(leaf)
        return leaf.text

    def _visit(self, value: Any, path: str, depth: int) -> str:
        """Add the leaves of a value, and return its text."""
        self._check()
        kind = type(value)
        if id(value) in self._path:
            return self._add(Leaf(path, "(itself)", _hash("cycle", str(depth - self._path[id(value)]))))
        try:
            if kind not in self._comparisons:
                self._comparisons[kind] = choose_comparison(kind)
            state = split_value(value, self._comparisons[kind])
            summary = None if state.array is None else tensors.summarise(state.array, self._check)
        except Exception as error:  # code of the program, and whatever a library does not implement
            return self._refuse(path, kind, error)
        self._path[id(value)] = depth
        try:
            if summary is not None:
                return self._visit_array(kind, state, summary, path, depth)
            return self._visit_parts(kind, state, path, depth)
        finally:
            del self._path[id(value)]

    def _refuse(self, path: str, kind: type, error: Exception) -> str:
        text = _flatten(f"not compared: {kind.__qualname__}")
        name = "" if isinstance(error, NotComparedError) else f"{type(error).__name__} "
        reason = _flatten(f"{name}{error}")[:_LEAF_TEXT]
        return self._add(Leaf(path, text, _hash(text), f"is {text}{reason and f' ({reason})'}"))

    def _visit_array(self, kind: type, state: State, summary: Description, path: str, depth: int) -> str:
        key = _hash(name_type(kind), summary["key"])
        text = f"{summary['text']}{summary.get('content', '')}"
        leaf = Leaf(path, text, key, summary.get("caveat", ""), state.array, {**summary, "key": key})
        self._add(leaf)
        parts = [(name, self._visit(child, f"{path}{name}", depth + 1)) for name, child in state.parts]
        return text + (f" ({', '.join(f'{name}: {part}' for name, part in parts)})" if parts else "")

    def _visit_parts(self, kind: type, state: State, path: str, depth: int) -> str:
        name = _flatten(kind.__qualname__)
        is_mapping, is_set = state.keys is not None, state.elements is not None
        if not state.parts and not is_mapping and not is_set and (state.content or state.text):
            return self._add(Leaf(path, state.text or name, _hash(name_type(kind), state.content)))
        if depth >= _MOST_DEPTH or len(self.leaves) >= _MOST_LEAVES:
            return self._add(Leaf(path, "...", "", "was not looked into: the value is too deep or too large"))
        count = len(state.parts) + len(state.keys or ())
        shown = " ".join(filter(None, [name, state.text])) + ("" if is_set else f" of {count}")
        self._add(Leaf(f"{path}#", shown, _hash(name_type(kind), state.content, str(count))))
        texts = [] if state.elements is None else [("", self._visit_set(state.elements, path, depth))]
        for key, child in state.keys or ():
            place = self._name_key(key, path, depth)
            texts.append((place, self._visit(child, f"{path}{place}", depth + 1)))
        texts += [(place, self._visit(child, f"{path}{place}", depth + 1)) for place, child in state.parts]
        return _join(kind, state, texts)

    def _name_key(self, key: Any, path: str, depth: int) -> str:
        """Return the path suffix of a key, and add its leaf unless the suffix determines the key."""
        if type(key) in (str, int, bool, type(None)):
            return f"[{key!r}]"
        found = self._visit_apart(key, depth)
        text = found.text if len(found.text) <= _KEY_TEXT else f"{found.text[:_KEY_TEXT]}... {found.key[:8]}"
        self._add(Leaf(f"{path}[{text}] (key)", found.text, found.key, found.caveat))
        return f"[{text}]"

    def _visit_apart(self, value: Any, depth: int) -> Leaf:
        """Return one leaf for a whole value."""
        before, self.leaves = self.leaves, []
        try:
            text = self._visit(value, "", depth + 1)
            caveat = next((leaf.caveat for leaf in self.leaves if leaf.caveat), "")
            return Leaf("", text, _hash_leaves(self.leaves), caveat)
        finally:
            self.leaves = before

    def _visit_set(self, elements: Iterable[Any], path: str, depth: int) -> str:
        """Compare the elements in any order: the order of strings differs between processes."""
        found = [self._visit_apart(element, depth) for element in elements]
        caveat = next((leaf.caveat for leaf in found if leaf.caveat), "")
        text = "{" + ", ".join(sorted(leaf.text for leaf in found)) + "}"
        return self._add(Leaf(path, text, _hash(*sorted(leaf.key for leaf in found)), caveat))


def _shard(leaf: Leaf) -> Description | None:
    return leaf.summary.get("shard") if leaf.summary else None


def _flatten(text: str) -> str:
    """Return a text on one line: a name could otherwise forge lines of the console."""
    return " ".join(text.split())


def _join(kind: type, state: State, texts: list[tuple[str, str]]) -> str:
    if state.text:
        return state.text
    if kind is dict:
        return "{" + ", ".join(f"{name[1:-1]}: {text}" for name, text in texts) + "}"
    if kind is list:
        return f"[{', '.join(text for _, text in texts)}]"
    if kind is tuple:
        return f"({', '.join(text for _, text in texts)})"
    if kind is set:
        return texts[0][1]
    inner = ", ".join(f"{name}: {text}" if name else text for name, text in texts)
    return f"{_flatten(kind.__qualname__)}({inner})"
