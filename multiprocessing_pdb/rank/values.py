"""Decomposition of a value for comparison between ranks: leaves with a path, a text and a key.

Every part that is not compared completely carries a caveat. "Equal" always means bitwise equality.
"""

from __future__ import annotations

import dataclasses
import enum
import hashlib
import re
import sys
import types
from collections import deque
from collections.abc import Mapping, Set
from typing import Any

from multiprocessing_pdb.rank import tensors

_ADDRESS = re.compile(r"\b0x[0-9a-fA-F]{6,}\b")
_MOST_LEAVES = 100_000
_MOST_DEPTH = 60
_MOST_TEXT = 4000
_LEAF_TEXT = 200
# Values from these modules are fully described by their repr: numpy.float64, torch.dtype, pathlib.Path.
_VALUE_MODULES = ("numpy", "torch", "datetime", "decimal", "fractions", "pathlib", "uuid")
_PLAIN = (
    bool,
    int,
    float,
    complex,
    str,
    bytes,
    bytearray,
    type(None),
    enum.Enum,
    range,
    type,
    types.ModuleType,
)

Description = dict[str, Any]
Children = list[tuple[str, Any]]


@dataclasses.dataclass
class Leaf:
    """One compared part of a value. `tensor` is kept for the search for the first difference."""

    path: str
    text: str
    key: str
    caveat: str = ""
    tensor: Any = None
    summary: Description | None = None


class Value:
    """A decomposed value."""

    def __init__(self, value: Any, check: tensors.Check) -> None:
        self._check = check
        self._path: set[int] = set()  # ids of the containers on the current path, to end cycles
        self._names: dict[int, str] = {}  # names of parameters by id
        self.type = type(value).__qualname__
        self.leaves: list[Leaf] = []
        self.text = self._visit(value, "", 0)

    def describe(self) -> Description:
        """Return the fields that a console needs to group ranks and to ask for details."""
        if len(self.leaves) == 1 and self.leaves[0].path == "" and self.leaves[0].summary is not None:
            summary = self.leaves[0].summary
            return {**summary, "leaves": 1, "type": self.type, "caveat": summary.get("caveat", "")}
        key = hashlib.sha256()
        for leaf in sorted(self.leaves, key=lambda leaf: leaf.path):
            key.update(f"{leaf.path}\0{leaf.key}\0".encode("utf-8", "backslashreplace"))
        text = self.text
        if len(text) > _MOST_TEXT:
            half = _MOST_TEXT // 2
            text = f"{text[:half]} ... {len(text) - 2 * half} characters ... {text[-half:]}"
        return {
            "text": text,
            "key": key.hexdigest(),
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
        self._check()
        if tensors.is_array(value):
            return self._visit_array(value, path, depth)
        if isinstance(value, _PLAIN) or type(value).__module__ in _VALUE_MODULES:
            return self._add(_make_leaf(path, value, ""))
        children = self._list_children(value)
        if children is None:
            return self._add(_make_leaf(path, value, "was compared by its repr only"))
        if id(value) in self._path:
            return self._add(Leaf(path, "(itself)", hashlib.sha256(b"cycle").hexdigest()))
        if depth >= _MOST_DEPTH or len(self.leaves) >= _MOST_LEAVES:
            return self._add(Leaf(path, "...", "", "was not looked into: the value is too deep or too large"))
        self._path.add(id(value))
        kind = f"{type(value).__qualname__} of {len(children)}"
        self.leaves.append(Leaf(f"{path}#", kind, hashlib.sha256(kind.encode()).hexdigest()))
        if isinstance(value, Set):
            text = self._visit_set(value, path, depth)
        else:
            parts = [(name, self._visit(child, f"{path}{name}", depth + 1)) for name, child in children]
            text = _join(value, parts)
        self._path.discard(id(value))
        return text

    def _visit_set(self, value: Set[Any], path: str, depth: int) -> str:
        """Compare the elements in any order: the order of strings differs between processes."""
        before = len(self.leaves)
        found = []
        for element in value:
            start = len(self.leaves)
            text = self._visit(element, f"{path}{{}}", depth + 1)
            found.append(
                (hashlib.sha256("".join(x.key for x in self.leaves[start:]).encode()).hexdigest(), text)
            )
        caveat = next((leaf.caveat for leaf in self.leaves[before:] if leaf.caveat), "")
        del self.leaves[before:]
        found.sort()
        key = hashlib.sha256("".join(key for key, _ in found).encode()).hexdigest()
        text = "{" + ", ".join(sorted(text for _, text in found)) + "}"
        return self._add(Leaf(path, text, key, caveat))

    def _visit_array(self, value: Any, path: str, depth: int) -> str:
        parts = _divide_array(value)
        if parts is not None:
            return _join(value, [(n, self._visit(child, f"{path}{n}", depth + 1)) for n, child in parts])
        summary = tensors.summarise(value, self._check)
        text = summary["text"] + summary.get("content", "")
        caveat = summary.get("caveat", "")
        return self._add(Leaf(path, text, summary["key"], caveat, value, summary))

    def _list_children(self, value: Any) -> Children | None:
        """Return the parts of a value with their path suffixes, or None for a value with only a repr."""
        module, optimizer = _get_torch_class("nn", "Module"), _get_torch_class("optim", "Optimizer")
        children: Children | None = None
        if module and isinstance(value, module):
            children = _list_module(value)
        elif optimizer and isinstance(value, optimizer):
            children = self._list_optimizer(value)
        elif isinstance(value, Mapping):
            children = [(self._name_key(key, at), child) for at, (key, child) in enumerate(value.items())]
        elif isinstance(value, tuple) and hasattr(value, "_fields"):
            children = [(f".{name}", getattr(value, name)) for name in value._fields]
        elif isinstance(value, list | tuple | deque):
            children = [(f"[{at}]", child) for at, child in enumerate(value)]
        elif isinstance(value, Set):
            children = [("", child) for child in value]
        elif not callable(value):
            children = _list_attributes(value)
        return children

    def _name_key(self, key: Any, at: int) -> str:
        if tensors.is_array(key):  # an optimizer's state has parameters as keys
            return f"[{self._names.get(id(key), f'#{at}')}]"
        return f"[{_ADDRESS.sub('0x..', repr(key))}]"

    def _list_optimizer(self, optimizer: Any) -> Children:
        children: Children = []
        known = _name_parameters()
        for number, group in enumerate(optimizer.param_groups):
            for at, parameter in enumerate(group["params"]):
                self._names[id(parameter)] = known.get(id(parameter), f"{number}.{at}")
            children.append((f".param_groups[{number}]", {k: v for k, v in group.items() if k != "params"}))
        return [*children, (".state", dict(optimizer.state))]


def _shard(leaf: Leaf) -> Description | None:
    return leaf.summary.get("shard") if leaf.summary else None


def _make_leaf(path: str, value: Any, caveat: str) -> Leaf:
    # Addresses differ between processes and carry no information.
    text = _ADDRESS.sub("0x..", repr(value))
    key = hashlib.sha256(f"{type(value).__qualname__}:{text}".encode("utf-8", "backslashreplace"))
    return Leaf(path, text, key.hexdigest(), caveat)


def _join(value: Any, parts: list[tuple[str, str]]) -> str:
    if type(value) is dict:
        return "{" + ", ".join(f"{name[1:-1]}: {text}" for name, text in parts) + "}"
    if type(value) is list:
        return f"[{', '.join(text for _, text in parts)}]"
    if type(value) is tuple:
        return f"({', '.join(text for _, text in parts)})"
    return f"{type(value).__qualname__}({', '.join(f'{name}: {text}' for name, text in parts)})"


def _get_torch_class(package: str, name: str) -> Any:
    return getattr(getattr(sys.modules.get("torch"), package, None), name, None)


def _list_module(module: Any) -> Children:
    named = [*module.named_parameters(remove_duplicate=False), *module.named_buffers(remove_duplicate=False)]
    modes = [(name, child.training) for name, child in module.named_modules()]
    mixed = len({mode for _, mode in modes}) > 1
    children: Children = [(f".{name}", child) for name, child in named]
    return [*children, (".training", dict(modes) if mixed else module.training)]


def _list_attributes(value: Any) -> Children | None:
    names = dict(getattr(value, "__dict__", {}))
    for kind in type(value).__mro__:
        slots = kind.__dict__.get("__slots__", ())
        for name in (slots,) if isinstance(slots, str) else slots:
            if hasattr(value, name) and not name.startswith("__"):
                names[name] = getattr(value, name)
    return [(f".{name}", child) for name, child in names.items()] if names else None


def _divide_array(value: Any) -> Children | None:
    """Return the dense parts of a sparse or quantized tensor, or the elements of an object array."""
    if not tensors.is_torch(value):
        return [(f"[{at}]", child) for at, child in enumerate(value.flat)] if value.dtype.hasobject else None
    import torch

    if value.is_quantized:
        return [(".int_repr()", value.int_repr()), (".scheme", str(value.qscheme()))]
    if value.layout == torch.sparse_coo:
        entries = value.detach().coalesce()  # the same values in another order are equal
        return [
            (".indices()", entries.indices()),
            (".values()", entries.values()),
            (".shape", tuple(value.shape)),
        ]
    if value.layout == torch.strided:
        return None
    by_rows = value.layout in (torch.sparse_csr, torch.sparse_bsr)
    names = ("crow_indices", "col_indices") if by_rows else ("ccol_indices", "row_indices")
    return [(f".{name}()", getattr(value.detach(), name)()) for name in (*names, "values")]


def _name_parameters() -> dict[int, str]:
    """Return the longest qualified name of each parameter in any live module, by the parameter's id."""
    import gc

    module = _get_torch_class("nn", "Module")
    names: dict[int, str] = {}
    for found in gc.get_objects():
        if module and issubclass(type(found), module):  # isinstance would evaluate lazy objects
            for name, parameter in found.named_parameters():
                if len(name) > len(names.get(id(parameter), "")):
                    names[id(parameter)] = name
    return names
