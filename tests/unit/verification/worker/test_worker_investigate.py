"""The collectives of a module as data, the nearest module that issued some, and the gathered tensors."""

from __future__ import annotations

from typing import Any

from moeverify.cases.schema import CustomModel
from moeverify.explain.fitting.inputs import Issued
from moeverify.faults.setting import make_case
from moeverify.results.collective import IssuedCollective
from moeverify.results.factor import Source
from moeverify.results.finding import Finding
from moeverify.results.trace import CollectiveRecord
from moeverify.train.data import Share
from moeverify.verification.checks.base import Judgement
from moeverify.verification.worker.investigate import (
    _failed_keys,
    _list_shares,
    _make_axes,
    _make_whole_batch,
)
from moeverify.verification.worker.timeline import _summarize, find_issued


def record(op: str, shape: list[int], **fields: Any) -> CollectiveRecord:
    content: dict[str, Any] = {
        "number": 1,
        "op": op,
        "group": (0, 1),
        "group_name": "0",
        "sequence": 1,
        "dtype": "float64",
        "shape": tuple(shape),
        "num_tensors": 1,
        "site": "a.py:1",
        "state": "finished",
    }
    return CollectiveRecord.model_validate({**content, **fields})


def test_collectives_of_one_kind_are_one_record() -> None:
    case = make_case("a", dp_shard=2, tp=2)
    records = [
        record("all_reduce", [4]),
        record("all_reduce", [4]),
        record("all_reduce", [8]),
        record("all_reduce", [4], group=[0, 2]),
        record("barrier", [], group=[0, 1, 2, 3], num_tensors=0, dtype=""),
    ]
    found = list(_summarize(case, "backward", records))
    assert [(each.op, each.axis, each.shapes, each.times) for each in found] == [
        ("all_reduce", "tp", ((4,), (8,)), 3),
        ("all_reduce", "dp_shard", ((4,),), 1),
        ("barrier", "all ranks", (), 1),
    ]
    assert {each.direction for each in found} == {"backward"}
    assert found[2].dtype == ""


def test_the_nearest_module_around_that_issued_some_is_taken() -> None:
    some = (IssuedCollective(direction="forward", op="barrier"),)
    issued = {"layers.0": some, "layers.0.mlp": (), "": some}
    assert find_issued(issued, "layers.0.mlp.up") == Issued("layers.0", some)
    assert find_issued(issued, "layers.0") == Issued("layers.0", some)
    assert find_issued(issued, "head") == Issued("", some)
    assert find_issued({}, "head") == Issued("", ())


def find(check: str, kind: str) -> Finding:
    return Finding(check=check, tensor="w", kind=kind, step=1, rank=0, error=1.0, bound=0.0)


def test_a_tensor_whose_replicas_differ_is_examined_by_its_kind() -> None:
    keys = _failed_keys(Judgement((), (find("replicas", "update"), find("repeat", "weight"))))
    assert keys == {(1, "update", "w")}
    keys = _failed_keys(Judgement((), (find("routing", "router_ids"),)))
    assert keys == {(1, "router_ids", "w"), (1, "router_counts", "w")}


def test_sources_and_groups_are_those_of_the_layout() -> None:
    axes = _make_axes(make_case("a", dp_shard=2, micro_batches=4))
    assert Source(name="dp_shard", size=2) in axes.sources
    assert Source(name="micro-batches", size=4) in axes.sources
    assert set(axes.groups) == {"dp_shard"}
    # The number of experts per token is no factor for tensors that no token is routed by.
    assert axes.sources_of("norm.weight") == [each for each in axes.sources if each.name != "top_k"]


def test_fewer_passes_than_micro_batches_have_no_share() -> None:
    parts = [Share(range(each, each + 1), range(3)) for each in range(2)]
    whole = [(part.rows, part.positions) for part in parts]
    assert [_list_shares(parts, number) for number in (0, 1, 2, 3)] == [whole, [], whole, whole]


def test_the_valid_tokens_of_the_batch_of_any_model_are_a_source() -> None:
    data = {"batch": 4, "seq_len": 8, "min_valid": 0.5}
    case = make_case("a", data=data)
    recipe = case.recipe.model_copy(
        update={"model": CustomModel(factory="a:make", loss="a:loss", vocab_size=9)}
    )
    batch = _make_whole_batch(case.model_copy(update={"recipe": recipe}), 0)
    assert batch is not None
    valid = Source(name="valid tokens of the batch", size=int(batch.valid.sum()))
    assert valid in _make_axes(case, batch).loss_counts
    assert valid.size < 4 * 8
