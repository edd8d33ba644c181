"""Equal means equal: values that differ in one place, wherever that is, and values made twice.

A leaf is a kind of value, as two functions that make the one and the other. Wraps put it into another value.
"""

import array
import collections
import ctypes
import dataclasses
import datetime
import decimal
import enum
import fractions
import functools
import io
import pathlib
import random
import sys
import types
import uuid

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from multiprocessing_pdb.console.broadcast import Answer
from multiprocessing_pdb.console.comparison import Coverage
from multiprocessing_pdb.console.target import Target
from multiprocessing_pdb.rank.conditions import make_condition, parse_watch
from multiprocessing_pdb.rank.values import Value


def describe(value):
    return Value(value, lambda: None).describe()


Color = enum.Enum("Color", {"RED": "0x1234567", "BLUE": "0x1234568"})
Level = enum.IntEnum("Level", {"LOW": 1, "HIGH": 2})
Pair = collections.namedtuple("Pair", "first second")


@dataclasses.dataclass
class Fields:
    value: object = dataclasses.field(repr=False, compare=False)


class Slotted:
    __slots__ = ("__value",)

    def __init__(self, value):
        self.__value = value


class Liar:
    """Hides its attributes."""

    def __init__(self, value):
        object.__setattr__(self, "value", value)

    def __getattribute__(self, name):
        return {} if name == "__dict__" else object.__getattribute__(self, name)

    def __repr__(self):
        return "Liar()"

    def __eq__(self, other):
        return True

    __hash__ = object.__hash__


def keep(kind):
    """Return a subclass of a class that keeps a value in an attribute."""
    return type(f"Kept{kind.__name__}", (kind,), {"__module__": __name__})


KEPT = {
    kind: keep(kind) for kind in (int, float, str, bytes, list, dict, set, tuple, io.BytesIO, array.array)
}
KEPT_ARGUMENTS = {array.array: ("i", [1])}


def add_attribute(kind, value):
    kept = KEPT[kind](*KEPT_ARGUMENTS.get(kind, ()))
    kept.extra = value
    return kept


class Structure(ctypes.Structure):
    _fields_ = (("x", ctypes.c_int),)


def make_model(**changes):
    """Return a model that differs from make_model() by one setting."""
    put = {"p": 0.1, "eps": 1e-5, "top_k": 2, "act": nn.ReLU, "grad": False, "frozen": False, **changes}
    torch.manual_seed(0)
    model = nn.Sequential(
        nn.Linear(2, 2), nn.Dropout(put["p"]), nn.LayerNorm(2, eps=put["eps"]), put["act"]()
    )
    model.add_module("head", nn.Linear(2, 2))
    model.top_k = put["top_k"]
    model[0].weight.requires_grad_(not put["frozen"])
    if put["grad"]:
        model.head.bias.grad = torch.ones(2)
    if put.get("tied") is not None:
        model.head.weight = model[0].weight if put["tied"] else nn.Parameter(model[0].weight.detach().clone())
    model[1].train(put.get("training", True))
    if put.get("hook"):
        model.register_forward_hook(lambda *given: None)
    return model


def make_optimizer(**changes):
    put = {"kind": torch.optim.AdamW, "lr": 0.1, "at": 1.0, "moment": 1.0, "many": True, **changes}
    first, second = nn.Parameter(torch.tensor([put["at"]])), nn.Parameter(torch.ones(3))
    optimizer = put["kind"]([first, second] if put["many"] else [first], lr=put["lr"], weight_decay=0.01)
    optimizer.state[first]["exp_avg"] = torch.tensor([put["moment"]])
    return optimizer


def vary(make, **changes):
    """Return the default value, and one for each change, as leaves."""
    return {
        f"{make.__name__} {name}": (make, lambda n=name, v=value: make(**{n: v}))
        for name, value in changes.items()
    }


def quantize(scale=1.0, zero=0, dtype=torch.quint8):
    return torch.quantize_per_tensor(torch.tensor([scale, 2 * scale]), scale, zero, dtype)


def quantize_channels(scale=1.0, axis=0):
    scales = torch.tensor([scale, 1.0])
    return torch.quantize_per_channel(
        torch.ones(2, 2) * scales[:, None], scales, torch.zeros(2), axis, torch.qint8
    )


def compress(columns=2, value=1.0, make=torch.sparse_csr_tensor):
    return make(torch.tensor([0, 1, 1]), torch.tensor([0]), torch.tensor([value]), (2, columns))


def compress_columns(rows=2):
    return torch.sparse_csc_tensor(torch.tensor([0, 1, 1]), torch.tensor([0]), torch.tensor([1.0]), (rows, 2))


def scatter(size=2, at=0):
    return torch.sparse_coo_tensor(torch.tensor([[at]]), torch.tensor([1.0]), (size,))


def nest(parts=((1.0,), (2.0, 3.0)), layout=torch.jagged):
    return torch.nested.nested_tensor([torch.tensor(part) for part in parts], layout=layout)


def make_parameter(grad=0.0, tag=0, requires_grad=True, value=1.0):
    parameter = nn.Parameter(torch.tensor([value]), requires_grad)
    parameter.grad, parameter.tag = torch.tensor([grad]), tag
    return parameter


def make_masked(mask=0, value=2.0):
    return np.ma.array([1.0, value], mask=[0, mask])


def make_exception(text="a", note="n", cause=None):
    error = ValueError(text)
    error.add_note(note)
    error.__cause__ = cause
    return error


def view_as(dtype, octet):
    return torch.tensor([octet, *[0] * 15], dtype=torch.uint8).view(dtype)


def plain(first, second):
    return lambda: first, lambda: second


DTYPES = "float8_e4m3fn float8_e5m2 float8_e8m0fnu bfloat16 float16 complex64 uint16 bool float4_e2m1fn_x2"
LEAVES = {
    "hexadecimal text": plain("0xd202ef8d", "0xa505df1b"),
    "surrogate": plain("\ud800", "\\ud800"),
    "long text": plain("a" * 9000 + "b" + "a" * 9000, "a" * 9000 + "c" + "a" * 9000),
    "bytes": plain(b"0x1234567", b"0x1234568"),
    "type of text": plain("a", b"a"),
    "integer": plain(10**6000, 10**6000 + 1),
    "truth": plain(1, True),
    "number": plain(1, 1.0),
    "sign of zero": plain(0.0, -0.0),
    "nan": plain(float("nan"), "nan"),
    "enum": plain(Color.RED, Color.BLUE),
    "enum of integers": plain(Level.LOW, 1),
    "path": plain(pathlib.Path("0x1234567"), pathlib.Path("0x1234568")),
    "fold": plain(datetime.datetime(2020, 1, 1), datetime.datetime(2020, 1, 1, fold=1)),
    "decimal": plain(decimal.Decimal("1.0"), decimal.Decimal("1.00")),
    "fraction": plain(fractions.Fraction(1, 2), fractions.Fraction(1, 3)),
    "uuid": plain(uuid.UUID(int=1), uuid.UUID(int=2)),
    "dtype": plain(torch.float32, torch.float64),
    "device": plain(torch.device("cpu"), torch.device("meta")),
    "size": plain(torch.Size([1]), (1,)),
    "slice": plain(slice(1), slice(2)),
    "range": plain(range(3), range(4)),
    "class": plain(type("C", (), {"x": 1}), type("C", (), {"x": 2})),
    "function": plain(eval("lambda: 1"), eval("lambda: 2")),
    "built-in function": plain(len, abs),
    "order of keys": (lambda: collections.OrderedDict(a=1, b=2), lambda: collections.OrderedDict(b=2, a=1)),
    "factory": (lambda: collections.defaultdict(int), lambda: collections.defaultdict(list)),
    "length of a deque": (lambda: collections.deque([1], 2), lambda: collections.deque([1], 3)),
    "frozen or not": plain({1}, frozenset({1})),
    "list or tuple": plain([1], (1,)),
    "buffer": (lambda: array.array("i", [1]), lambda: array.array("l", [1])),
    "structure": (lambda: Structure(1), lambda: Structure(2)),
    "file in memory": (lambda: io.BytesIO(b"a"), lambda: io.BytesIO(b"b")),
    "random": (lambda: random.Random(1), lambda: random.Random(2)),
    "torch generator": (lambda: torch.Generator().manual_seed(1), lambda: torch.Generator().manual_seed(2)),
    "numpy generator": (lambda: np.random.default_rng(1), lambda: np.random.default_rng(2)),
    "storage": (lambda: torch.ones(1).untyped_storage(), lambda: torch.zeros(1).untyped_storage()),
    "nan payload": (lambda: view_as(torch.float32, 0), lambda: view_as(torch.float32, 1)),
    "shape": (lambda: torch.zeros(2, 3), lambda: torch.zeros(3, 2)),
    "numpy scalar": plain(np.float32(1), np.float64(1)),
    "numpy dates": plain(np.array(["2020-01-01"], "M8[D]"), np.array(["2020-01-02"], "M8[D]")),
    "numpy objects": plain(np.array([1, 2], object), np.array([[1, 2]], object)),
    "numpy matrix": (lambda: np.matrix([[1, 2], [3, 4]]), lambda: np.array([[1, 2], [3, 4]])),
    "numpy record": plain(np.array([(1, 2.0)], "i4,f8"), np.array([(1, 3.0)], "i4,f8")),
    "cycle": (lambda: (o := [], o.append([o]))[0], lambda: (o := [[]], o[0].append(o[0]))[0]),
    **{
        name: (functools.partial(view_as, d, 0), functools.partial(view_as, d, 1))
        for name in DTYPES.split()
        if (d := getattr(torch, name))
    },
    **vary(
        make_model, p=0.5, eps=1e-3, top_k=3, act=nn.GELU, grad=True, frozen=True, training=False, hook=True
    ),
    "tied": (lambda: make_model(tied=True), lambda: make_model(tied=False)),
    **vary(make_optimizer, kind=torch.optim.Adam, lr=0.2, at=2.0, moment=2.0, many=False),
    **vary(quantize, scale=2.0, zero=3, dtype=torch.qint8),
    **vary(quantize_channels, scale=2.0, axis=1),
    **vary(compress, columns=5, value=2.0),
    **vary(compress_columns, rows=5),
    **vary(scatter, size=3, at=1),
    **vary(nest, parts=((1.0, 2.0), (3.0,)), layout=torch.strided),
    **vary(make_parameter, grad=1.0, tag=1, requires_grad=False, value=2.0),
    **vary(make_masked, mask=1, value=3.0),
    **vary(make_exception, text="b", note="m", cause=KeyError(1)),
}


def close_over(value):
    return lambda: value


def put_in_module(value):
    module = nn.Identity()
    module.config = {"value": value}
    return nn.Sequential(module)


WRAPS = {
    "list": lambda v: [1, v],
    "tuple": lambda v: (v,),
    "dict": lambda v: {"a": 1, "b": v},
    "key": lambda v: {Liar(v): 1},
    "set": lambda v: {Liar(v), 2},
    "ordered": lambda v: collections.OrderedDict(a=v),
    "proxy": lambda v: types.MappingProxyType({"a": v}),
    "deque": lambda v: collections.deque([v]),
    "chain": lambda v: collections.ChainMap({}, {"a": v}),
    "namedtuple": lambda v: Pair(1, v),
    "dataclass": Fields,
    "slots": Slotted,
    "liar": Liar,
    "namespace": lambda v: types.SimpleNamespace(a=v),
    "closure": close_over,
    "partial": lambda v: functools.partial(print, v),
    "exception": ValueError,
    "objects": lambda v: np.array([None, Fields(v)], object),
    "module": put_in_module,
    **{f"attribute of {kind.__name__}": functools.partial(add_attribute, kind) for kind in KEPT},
}


@pytest.mark.filterwarnings("ignore")  # of torch and numpy, about the kinds that are made here
@pytest.mark.parametrize("leaf", LEAVES)
def test_each_kind_is_told_apart(leaf):
    first, second = LEAVES[leaf]
    one, again, other = describe(first()), describe(first()), describe(second())
    assert one["key"] == again["key"]
    assert one["key"] != other["key"]
    assert one["caveat"] == other["caveat"] == ""


@pytest.mark.parametrize("wrap", WRAPS)
def test_each_place_of_a_difference_is_looked_at(wrap):
    assert describe(WRAPS[wrap](1))["key"] == describe(WRAPS[wrap](1))["key"]
    assert describe(WRAPS[wrap](1))["key"] != describe(WRAPS[wrap](2))["key"]


@pytest.mark.filterwarnings("ignore")  # of torch and numpy, about the kinds that are made here
@settings(max_examples=200, deadline=None)
@given(leaf=st.sampled_from(sorted(LEAVES)), wraps=st.lists(st.sampled_from(sorted(WRAPS)), max_size=5))
def test_one_difference_is_seen_through_everything_around_it(leaf, wraps):
    def make(build):
        value = build()
        for name in wraps:
            value = WRAPS[name](value)
        return describe(value)

    first, second = LEAVES[leaf]
    one, again, other = make(first), make(first), make(second)
    assert one["key"] == again["key"]
    assert one["key"] != other["key"]
    assert one["caveat"] == other["caveat"] == ""


PLAIN = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text() | st.binary(),
    lambda inner: (
        st.lists(inner, max_size=3) | st.tuples(inner, inner) | st.dictionaries(st.text(), inner, max_size=3)
    ),
    max_leaves=8,
)


@settings(max_examples=300, deadline=None)
@given(first=PLAIN, second=PLAIN)
def test_plain_values_are_equal_as_their_reprs(first, second):
    assert (describe(first)["key"] == describe(second)["key"]) == (_sort(first) == _sort(second))


def _sort(value):
    """Return the repr of a value, its dicts in one order."""
    if isinstance(value, dict):
        return f"{{{sorted((repr(key), _sort(child)) for key, child in value.items())}}}"
    if isinstance(value, list | tuple):
        return f"{type(value)}{[_sort(child) for child in value]}"
    return repr(value)


def make_target(number, world):
    return Target(None, str(number), "job", {"number": number, "world": world})


@pytest.mark.parametrize(
    ("answered", "failed", "running", "world", "words"),
    [
        ([0, 1], [], [], 2, "equal on all"),
        ([0, 1], [2], [], 3, "equal on these; no value of rank 2"),
        ([0, 1], [], [2], 3, "equal on these; no value of rank 2"),
        ([0, 1], [2], [4], 6, "equal on these; no value of ranks 2-5"),
        ([0, 1], [], None, 6, "equal on all selected"),
        ([0, 1], [2], None, 6, "equal on these; no value of rank 2"),
    ],
)
def test_all_means_that_all_have_answered(answered, failed, running, world, words):
    answers = [Answer(make_target(n, world), {}, "raised" if n in failed else "") for n in answered + failed]
    others = None if running is None else [make_target(n, world) for n in running]
    assert Coverage.find(answers, others).equal == words


def watch(expression, names):
    return parse_watch(f"{expression} changes", watch.__code__, names)


@pytest.mark.parametrize("leaf", ["hexadecimal text", "random", "make_model top_k", "make_optimizer many"])
def test_a_watch_stops_at_each_difference(leaf):
    first, second = LEAVES[leaf]
    condition = watch("value", {"value": 1})
    assert [bool(condition.check({}, {"value": make()})) for make in (first, first, second)] == [
        False,
        False,
        True,
    ]


@pytest.mark.parametrize("expression", ["typo", "value.x + typo", "[typo for v in value]"])
def test_a_name_that_does_not_exist_is_not_watched(expression):
    with pytest.raises(ValueError, match="typo is not defined here"):
        watch(expression, {"value": 1})


def test_a_value_that_is_gone_has_changed():
    condition = watch("value.x", {"value": 1})
    kept = types.SimpleNamespace(x=1)
    values = [types.SimpleNamespace(), kept, kept, types.SimpleNamespace()]
    reasons = [condition.check({}, {"value": value}) for value in values]
    assert reasons == ["", "", "", "value.x changed: AttributeError"]
    assert "has no value here yet (AttributeError" in condition.caveat


@pytest.mark.parametrize("value", [types, sys.stdout, (part for part in ())])
def test_a_watch_says_that_a_value_is_not_compared(value):
    condition = watch("value", {"value": value})
    condition.check({}, {"value": value})
    assert "is not compared: " in condition.caveat


def test_names_that_a_module_assigns_later_are_watched():
    code = compile("Tra()\nlater = 1\nimport json", "<module>", "exec")
    assert parse_watch("(later, json) changes", code, {}).kind == "changes"
    with pytest.raises(ValueError, match="Tra is not defined here"):
        make_condition("Tra > later", "true", code, {})


@pytest.mark.parametrize("expression", ["names", "len(value)", "[v for v in value]", "(lambda v: v)(value)"])
def test_names_of_the_function_are_watched(expression):
    assert watch(expression, {"value": 1}).expression == expression
