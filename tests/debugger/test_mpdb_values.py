"""Comparison in `diff`: every kind of value in full, and no claim of equality for uncompared values."""

import collections
import dataclasses
import io
import subprocess
import sys
import threading
import types

import numpy as np
import pytest
import torch

from multiprocessing_pdb.rank.request_handler import RequestHandler
from multiprocessing_pdb.rank.tensors import hash_parts, read_element, read_flat, summarise
from multiprocessing_pdb.rank.values import Value


def check():
    """Compare everything."""


def describe(value):
    return Value(value, check).describe()


@dataclasses.dataclass
class Fields:
    tensor: torch.Tensor


Pair = collections.namedtuple("Pair", "first second")


class Slotted:
    __slots__ = ("value",)

    def __init__(self, value):
        self.value = value


class Described(Slotted):
    """An object whose repr shows none of its content."""

    def __init__(self, value):
        super().__init__(value)
        self.more = value

    def __repr__(self):
        return "Described()"


def make_model(value):
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.BatchNorm1d(4))
    with torch.no_grad():
        model[0].weight[2, 3] = value
    return model


def make_optimizer(value):
    model = make_model(1.0)
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.ones(2, 4)).sum().backward()
    optimizer.step()
    optimizer.state[model[0].weight]["exp_avg"][1, 1] = value
    optimizer.model = model
    return optimizer


def make_big(value):
    tensor = torch.zeros(100_000)
    tensor[55_555] = value
    return tensor


KINDS = {
    "ordered dict": lambda v: collections.OrderedDict(a=make_big(v)),
    "default dict": lambda v: collections.defaultdict(dict, {0: {"exp": make_big(v)}}),
    "mapping": lambda v: types.MappingProxyType({"a": make_big(v)}),
    "state dict": lambda v: make_model(v).state_dict(),
    "module": make_model,
    "optimizer": make_optimizer,
    "dataclass": lambda v: Fields(make_big(v)),
    "namedtuple": lambda v: Pair(make_big(v), 1),
    "object": lambda v: types.SimpleNamespace(a=make_big(v)),
    "slots": lambda v: Slotted(make_big(v)),
    "own repr": lambda v: Described(make_big(v)),
    "deque": lambda v: collections.deque([make_big(v)]),
    "late leaf": lambda v: [0] * 2500 + [v] + [0] * 99,
    "long text": lambda v: "x" * 10_000 + str(v) + "x" * 10_000,
    "deep": lambda v: [[[[[[[[[[[[v]]]]]]]]]]]],
    "sparse": lambda v: torch.diag(torch.tensor([1.0, v])).to_sparse(),
    "csr": lambda v: torch.diag(torch.tensor([1.0, v])).to_sparse_csr(),
    "object array": lambda v: np.array([None, make_big(v)], dtype=object),
    "strided": lambda v: make_big(v).view(100, 1000).t(),
    "bfloat16": lambda v: make_big(v).to(torch.bfloat16),
    "numpy strided": lambda v: make_big(v).view(100, 1000).numpy()[1::2].T,
    "nested": lambda v: {"a": [(make_big(v),)]},
    "shape": lambda v: torch.zeros(2 if v > 1 else 3),
    "type": lambda v: v if v > 1 else int(v),
    "set": lambda v: {"a", "b", str(v)},
}


@pytest.mark.filterwarnings("ignore:Sparse CSR tensor support is in beta")
@pytest.mark.parametrize("kind", KINDS)
def test_values_that_differ_are_told_apart_and_equal_ones_are_not(kind):
    make = KINDS[kind]
    first, again, other = describe(make(3.0)), describe(make(3.0)), describe(make(1.0))
    assert first["key"] == again["key"]
    assert first["key"] != other["key"]
    assert first["caveat"] == ""


@pytest.mark.parametrize(
    ("value", "words"),
    [
        ([threading.Lock()], "[0] is not compared: lock"),
        (
            torch.zeros(3, device="meta"),
            "the value is not compared: Tensor (has no elements that can be read)",
        ),
        ((number for number in range(3)), "the value is not compared: generator"),
        ({1, len, threading}, "the value is not compared: module"),
        (list(range(150_000)), ""),
    ],
)
def test_what_is_not_compared_in_full_says_so(value, words):
    assert describe(value)["caveat"] == words


def test_values_that_are_too_deep_say_so():
    deep = []
    for _ in range(100):
        deep = [deep]
    assert "too deep" in describe(deep)["caveat"]


def test_a_cycle_ends():
    cycle = [1]
    cycle.append(cycle)
    assert describe(cycle)["caveat"] == ""


def test_sets_are_equal_in_any_order():
    code = (
        "from multiprocessing_pdb.rank.values import Value\n"
        "value = Value({'a%d' % n for n in range(9)} | {('b', frozenset('xyz'))}, lambda: None).describe()\n"
        "print(value['key'], value['text'])"
    )
    runs = {
        subprocess.run(
            [sys.executable, "-c", code],
            env={"PYTHONPATH": ":".join(sys.path), "PYTHONHASHSEED": seed},
            capture_output=True,
            text=True,
            check=True,
        ).stdout
        for seed in ("1", "2")
    }
    assert len(runs) == 1
    assert "'a8'" in runs.pop()


def test_the_order_of_keys_does_not_matter():
    assert describe({"a": 1, "b": 2})["key"] == describe({"b": 2, "a": 1})["key"]


def test_parts_have_the_names_users_know():
    def list_differing(make):
        keys = [
            {leaf["path"]: leaf["key"] for leaf in Value(make(v), check).list_leaves(0, 999)}
            for v in (1.0, 2.0)
        ]
        return [path for path in keys[0] if keys[0][path] != keys[1][path]]

    assert list_differing(make_model) == [".0.weight"]
    assert list_differing(lambda v: {"batch": {"ids": make_big(v)}}) == ["['batch']['ids']"]
    assert list_differing(make_optimizer) == [".state[0.weight]['exp_avg']"]


@pytest.mark.parametrize(
    "make", [lambda t: t.t(), lambda t: t[::3], lambda t: t[:, ::7], lambda t: t[None].expand(2, 90, 77)]
)
def test_strided_arrays_are_read_in_logical_order(make):
    whole = make(torch.arange(90.0 * 77).view(90, 77))
    for array in (whole, whole.numpy()):
        for begin, end in ((0, 1), (5, 6), (76, 80), (10, 500), (0, 990)):
            expected = array.reshape(-1)[begin:end].tolist()
            assert read_flat(array, begin, end).tolist() == expected
        same = whole.clone(memory_format=torch.contiguous_format)
        assert summarise(array, check)["content"] == summarise(same, check)["content"]
    assert read_element(whole, 77) == repr(whole.reshape(-1)[77].item())


def test_hashes_lead_to_the_first_difference():
    first, second = make_big(0.0), make_big(5.0)
    parts = zip(
        hash_parts(first, 0, 100_000, 256, check), hash_parts(second, 0, 100_000, 256, check), strict=True
    )
    assert [a[:2] for a, b in parts if a != b] == [[55522, 55913]]


@pytest.mark.parametrize("value", ["nan", "inf", "-inf"])
def test_norms_count_what_is_not_finite(value):
    tensor = torch.tensor([3.0, 4.0, float(value)])
    name = value.removeprefix("-")
    assert f"norm 5, 1 {name}" in summarise(tensor, check)["content"]
    assert f"norm 5, 1 {name}" in summarise(tensor.numpy(), check)["content"]


class Stopped:
    """A stub of a debugger at a prompt."""

    curframe = types.SimpleNamespace(f_globals={"big": torch.zeros(1 << 24)})

    def frame_locals(self):
        return {}


def test_comparing_is_cancelled_at_the_deadline():
    handler = RequestHandler()
    reached, cancelled = threading.Event(), threading.Event()
    answers = []

    class Slow(io.BytesIO):
        def __reduce_ex__(self, protocol):
            reached.set()
            cancelled.wait(60)
            return Slow, (b"",)

    Stopped.curframe.f_globals["slow"] = Slow()
    request = {"do": "evaluate", "text": "slow", "id": 7}
    asking = threading.Thread(target=lambda: answers.append(handler.answer(Stopped(), 1, request)))
    asking.start()
    assert reached.wait(60)
    handler.cancel(1, 7)
    cancelled.set()
    asking.join(60)
    assert "deadline has passed" in answers[0].get("error", "")
    assert "value" in handler.answer(Stopped(), 1, {"do": "evaluate", "text": "big", "id": 8})
