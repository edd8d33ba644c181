"""Comparisons of values by type. A value is compared only if one of them covers all of its state.

A comparison splits a value into exact content and parts, which are compared in turn. Values live in different
processes, so nothing may depend on addresses, hash seeds or the order of sets. The rules, in order:

1. The nearest registered class is responsible, together with `__dict__` and `__slots__`, if the memory layout
   of the type has no room for other state.
2. Otherwise the state is that for pickle, with `__dict__` and `__slots__`.
3. A type without either is not compared.

Types are registered by name, since the debugger imports neither torch nor numpy.
"""

from __future__ import annotations

import contextlib
import copyreg
import dataclasses
import struct
import types
from collections.abc import Callable, Iterable
from typing import Any

Parts = list[tuple[str, Any]]  # with their path suffixes

_MOST_TEXT = 4000
_MOST_DIGITS_BITS = 10_000  # Python refuses to convert larger integers to decimal digits
_IMMUTABLE = 1 << 8  # Py_TPFLAGS_IMMUTABLETYPE
# Attributes that Python derives from others, and the class of an enum's member.
_DERIVED = {"__objclass__", "_sort_order_", "__weakref__", "__dict__"}
_CLASS_MACHINERY = {*_DERIVED, "__module__", "__doc__", "__annotations__", "_abc_impl", "__abstractmethods__"}


class NotComparedError(Exception):
    """A value that no comparison covers."""


@dataclasses.dataclass
class State:
    """The state of a value: exact content, and parts, unordered elements or a dense array."""

    content: bytes = b""
    text: str = ""
    parts: Parts = dataclasses.field(default_factory=list)
    keys: list[tuple[Any, Any]] | None = None  # entries of a mapping, in any order
    elements: Iterable[Any] | None = None
    array: Any = None


@dataclasses.dataclass(frozen=True)
class Comparison:
    """How one class is split.

    With `has_attributes`, `split` lists `__dict__` and `__slots__` itself. With `is_whole`, it also covers
    subclasses written in C.
    """

    split: Callable[[Any], State]
    has_attributes: bool = False
    is_whole: bool = False


_REGISTERED: dict[str, Comparison] = {}  # the first that matches is used: special classes come first
Split = Callable[[Any], State]


def compares(*names: str, has_attributes: bool = False, is_whole: bool = False) -> Callable[[Split], Split]:
    """Register a function that returns all state of the instances of these classes."""

    def register(split: Split) -> Split:
        _REGISTERED.update(dict.fromkeys(names, Comparison(split, has_attributes, is_whole)))
        return split

    return register


def name_type(kind: type) -> str:
    """Return the qualified name of a class, equal in all processes."""
    return f"{type.__getattribute__(kind, '__module__')}.{type.__getattribute__(kind, '__qualname__')}"


def choose_comparison(kind: type) -> Comparison:
    """Return the comparison for the instances of a class."""
    known = {name_type(base): base for base in reversed(kind.__mro__)}
    names = [name for name in _REGISTERED if name in known]
    chosen = _REGISTERED[names[0]] if names else Comparison(_split_object)
    largest = max([object, *(known[name] for name in names)], key=lambda base: base.__basicsize__)
    if not chosen.is_whole and _has_hidden_state(kind, largest):
        return Comparison(_split_reduced)
    has_none = not kind.__dictoffset__ and not any("__slots__" in vars(base) for base in kind.__mro__)
    return dataclasses.replace(chosen, has_attributes=True) if has_none else chosen


def split_value(value: Any, comparison: Comparison) -> State:
    """Return the state of a value. Raises whatever user code raises, and NotComparedError."""
    state = comparison.split(value)
    if not comparison.has_attributes:
        state.parts = [*state.parts, *list_attributes(value)]
    return state


def _has_hidden_state(kind: type, base: type) -> bool:
    """Return whether instances have more memory than those of `base`, their dict and their slots."""
    slots = sum(
        isinstance(member, types.MemberDescriptorType)
        for owner in kind.__mro__
        if "__slots__" in vars(owner) and not issubclass(base, owner)
        for member in vars(owner).values()
    )
    pointers = slots + (kind.__dictoffset__ != base.__dictoffset__)
    pointers += kind.__weakrefoffset__ != base.__weakrefoffset__
    return kind.__basicsize__ > base.__basicsize__ + pointers * struct.calcsize("P")


def list_attributes(value: Any) -> Parts:
    """Return the attributes in `__dict__` and `__slots__`, private ones too, without calling user code."""
    found: dict[str, Any] = {}
    for owner in type(value).__mro__:
        for name, member in vars(owner).items():
            if isinstance(member, types.MemberDescriptorType) and "__slots__" in vars(owner):
                try:
                    found[name] = member.__get__(value)
                except AttributeError:  # a slot without a value
                    continue
    with contextlib.suppress(AttributeError):
        found.update(object.__getattribute__(value, "__dict__"))
    return [(f".{name}", child) for name, child in found.items() if name not in _DERIVED]


def _split_reduced(value: Any) -> State:
    """Split into the state that pickle would write."""
    kind = type(value)
    reduce = copyreg.dispatch_table.get(kind)
    try:
        reduced = reduce(value) if reduce else value.__reduce_ex__(4)
    except TypeError as error:
        raise NotComparedError from error
    if isinstance(reduced, str):  # a name in its module
        return State(reduced.encode(), reduced)
    fields: tuple[Any, ...] = (*reduced, None, None, None)
    constructor, args, state, items, pairs = fields[:5]
    given: Parts = [
        (".constructor", None if constructor is kind else constructor),
        (".args", tuple(name_type(kind) if arg is kind else arg for arg in args)),
        (".state", state),
        (".items", None if items is None else list(items)),
        (".pairs", None if pairs is None else list(pairs)),
    ]
    return State(parts=[(name, part) for name, part in given if part is not None])


def cut(text: str) -> str:
    """Return a text of bounded length, its middle left out."""
    half = _MOST_TEXT // 2
    if len(text) <= _MOST_TEXT:
        return text
    return f"{text[:half]} ... {len(text) - 2 * half} characters ... {text[-half:]}"


# Scalars. Methods of the base class are called, since a subclass may override them.


@compares("enum.Enum", has_attributes=True)
def _split_member(value: Any) -> State:
    parts = list_attributes(value)
    return State(text=f"{type(value).__qualname__}.{value._name_}", parts=parts)


@compares("numpy.generic", is_whole=True)
def _split_numpy_scalar(value: Any) -> State:
    if value.dtype.hasobject:
        return State(str(value.dtype).encode(), parts=[(".item()", value.item())])
    # The padding of an extended float is arbitrary.
    content = repr(value).encode() if value.dtype.char in "gG" else value.tobytes()
    return State(f"{value.dtype.descr}".encode() + content, cut(repr(value)))


@compares("builtins.NoneType", "builtins.ellipsis", "builtins.NotImplementedType", "builtins.bool")
def _split_constant(value: Any) -> State:
    return State(repr(value).encode(), repr(value))


@compares("builtins.int")
def _split_integer(value: Any) -> State:
    bits = int.bit_length(value)
    text = int.__repr__(value) if bits < _MOST_DIGITS_BITS else cut(int.__format__(value, "#x"))
    return State(int.to_bytes(value, bits // 8 + 1, "little", signed=True), text)


@compares("builtins.float")
def _split_float(value: Any) -> State:
    return State(struct.pack("<d", value), float.__repr__(value))


@compares("builtins.complex")
def _split_complex(value: Any) -> State:
    pair = complex.real.__get__(value), complex.imag.__get__(value)
    return State(struct.pack("<dd", *pair), complex.__repr__(value))


@compares("builtins.str")
def _split_text(value: Any) -> State:
    text = str.__repr__(value) if len(value) <= _MOST_TEXT else cut(str.__str__(value)).__repr__()
    return State(str.encode(value, "utf-8", "surrogatepass"), text)


@compares("builtins.bytes", "builtins.bytearray")
def _split_bytes(value: Any) -> State:
    content = bytes(memoryview(value))
    return State(content, cut(repr(content[: 2 * _MOST_TEXT])))


@compares("array.array", "builtins.memoryview")
def _split_buffer(value: Any) -> State:
    view = memoryview(value)
    return State(f"{view.format} {view.shape}\0".encode() + view.tobytes(), cut(repr(view.tolist())))


@compares("pathlib.PurePath", has_attributes=True)
def _split_path(value: Any) -> State:
    return State(str(value).encode("utf-8", "surrogatepass"), cut(repr(value)))


@compares("torch.dtype", "torch.device", "torch.layout", "torch.memory_format", "torch.qscheme")
def _split_torch_constant(value: Any) -> State:
    return State(repr(value).encode(), repr(value))


_DESCRIBED = (
    "datetime.datetime",
    "datetime.date",
    "datetime.time",
    "datetime.timedelta",
    "datetime.timezone",
    "decimal.Decimal",
    "fractions.Fraction",
    "uuid.UUID",
)


@compares(*_DESCRIBED)
def _split_described(value: Any) -> State:
    """Split a value whose class describes all state but its time zone in the repr."""
    owner = next(base for base in type(value).__mro__ if name_type(base) in _DESCRIBED)
    zone = getattr(value, "tzinfo", None)
    text = vars(owner)["__repr__"](value)
    return State(text.encode(), text, [(".tzinfo", zone)] if zone is not None else [])


# Containers.


@compares("collections.OrderedDict")
def _split_ordered(value: Any) -> State:
    return State(keys=list(dict.items(value)), parts=[(".keys()", list(dict.keys(value)))])


@compares("collections.defaultdict")
def _split_default(value: Any) -> State:
    return State(keys=list(dict.items(value)), parts=[(".default_factory", value.default_factory)])


@compares("builtins.dict")
def _split_dict(value: Any) -> State:
    return State(keys=list(dict.items(value)))


@compares("builtins.mappingproxy")
def _split_proxy(value: Any) -> State:
    return State(keys=list(dict(value).items()))


@compares("collections.deque")
def _split_deque(value: Any) -> State:
    items: Parts = [(f"[{at}]", child) for at, child in enumerate(value)]
    return State(parts=[*items, (".maxlen", value.maxlen)] if value.maxlen is not None else items)


@compares("torch.Size")
def _split_size(value: Any) -> State:
    return State(repr(tuple(value)).encode(), repr(value))


@compares("builtins.list")
def _split_list(value: Any) -> State:
    return State(parts=[(f"[{at}]", child) for at, child in enumerate(list.__iter__(value))])


@compares("builtins.tuple")
def _split_tuple(value: Any) -> State:
    names = getattr(type(value), "_fields", ())
    items = list(tuple.__iter__(value))
    if len(names) == len(items):
        return State(parts=[(f".{name}", child) for name, child in zip(names, items, strict=True)])
    return State(parts=[(f"[{at}]", child) for at, child in enumerate(items)])


@compares("builtins.set", "builtins.frozenset")
def _split_set(value: Any) -> State:
    return State(elements=list((set if isinstance(value, set) else frozenset).__iter__(value)))


# Code: what a function does is its code, its defaults and its closure, not the module around it.


@compares("builtins.function")
def _split_function(value: Any) -> State:
    free = value.__code__.co_freevars
    cells = [(f".{name}", cell) for name, cell in zip(free, value.__closure__ or (), strict=True)]
    named = ("__code__", "__defaults__", "__kwdefaults__")
    parts = [(f".{name}", part) for name in named if (part := getattr(value, name)) is not None]
    return State(f"{value.__module__}.{value.__qualname__}".encode(), value.__qualname__, [*parts, *cells])


@compares("builtins.cell")
def _split_cell(value: Any) -> State:
    return State(parts=[("", value.cell_contents)])


@compares("builtins.code")
def _split_code(value: Any) -> State:
    names = "argcount posonlyargcount kwonlyargcount flags code names varnames freevars cellvars name"
    content = repr([getattr(value, f"co_{name}") for name in names.split()]).encode()
    return State(content, value.co_name, [(".co_consts", value.co_consts)])


@compares("builtins.method")
def _split_method(value: Any) -> State:
    return State(parts=[(".__func__", value.__func__), (".__self__", value.__self__)])


@compares("builtins.builtin_function_or_method", "builtins.method-wrapper")
def _split_builtin(value: Any) -> State:
    owner = value.__self__
    name = f"{getattr(value, '__module__', None)}.{value.__qualname__}"
    is_free = owner is None or isinstance(owner, types.ModuleType)
    return State(name.encode(), value.__qualname__, [] if is_free else [(".__self__", owner)])


@compares(
    "builtins.wrapper_descriptor",
    "builtins.method_descriptor",
    "builtins.classmethod_descriptor",
    "builtins.getset_descriptor",
    "builtins.member_descriptor",
)
def _split_descriptor(value: Any) -> State:
    return State(f"{name_type(value.__objclass__)}.{value.__name__}".encode(), value.__qualname__)


@compares("builtins.property")
def _split_property(value: Any) -> State:
    return State(parts=[(f".{name}", getattr(value, name)) for name in ("fget", "fset", "fdel")])


@compares("builtins.staticmethod", "builtins.classmethod", has_attributes=True)
def _split_bound(value: Any) -> State:
    return State(parts=[(".__func__", value.__func__)])


@compares("builtins.type", has_attributes=True)
def _split_class(value: Any) -> State:
    """Split a class into its name and, if code can set its attributes, these and its bases."""
    name = name_type(value)
    if value.__flags__ & _IMMUTABLE:
        return State(name.encode(), name)
    own = [(f".{key}", part) for key, part in vars(value).items() if key not in _CLASS_MACHINERY]
    return State(name.encode(), name, [*own, (".__bases__", value.__bases__)])


# Objects.


@compares("weakref.ReferenceType")
def _split_reference(value: Any) -> State:
    return State(parts=[("()", value()), (".__callback__", value.__callback__)])


@compares("builtins.BaseException")
def _split_exception(value: Any) -> State:
    named = ("args", "__cause__", "__context__")
    return State(parts=[(f".{name}", part) for name in named if (part := getattr(value, name)) is not None])


@compares("builtins.module", has_attributes=True)
def _refuse(value: Any) -> State:
    raise NotComparedError


def _split_object(value: Any) -> State:
    return State()
