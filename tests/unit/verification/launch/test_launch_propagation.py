"""Shardings cached for equal tensors and shapes equal those that torch computes anew."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import nullcontext
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, _sharding_prop
from torch.distributed.tensor._dtensor_spec import DTensorSpec, TensorMeta
from torch.distributed.tensor.debug import _clear_sharding_prop_cache
from torch.distributed.tensor.placement_types import Placement, _StridedShard
from torch.testing._internal.distributed.fake_pg import FakeStore

from moeverify.verification.launch.caches import MeshCaches
from moeverify.verification.launch.propagation import PropagationMemo

Propagator = _sharding_prop.ShardingPropagator
EXPAND, PROPAGATE = "_expand_single_dim_strategy_to_mesh", "_propagate_tensor_meta_non_cached"
Asked = list[tuple[Any, Any]]

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(
        not torch.__version__.startswith("2.13."), reason="other releases of torch are left as they are"
    ),
]


@pytest.fixture
def mesh() -> Iterator[DeviceMesh]:
    _clear_sharding_prop_cache()
    dist.init_process_group("fake", rank=1, world_size=4, store=FakeStore())  # type: ignore[no-untyped-call]
    try:
        yield init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    finally:
        dist.destroy_process_group()
        _clear_sharding_prop_cache()


@pytest.fixture
def memo() -> Iterator[PropagationMemo]:
    made = PropagationMemo()
    made.install()
    yield made
    made.remove()


@pytest.fixture
def asked(memo: PropagationMemo, monkeypatch: pytest.MonkeyPatch) -> Asked:
    """Return all calls whose shardings are computed, with the results."""
    calls: Asked = []
    find = Propagator.propagate_op_sharding_non_cached

    def note(self: Any, schema: Any) -> Any:
        calls.append((schema, find(self, schema)))
        return calls[-1][1]

    monkeypatch.setattr(Propagator, "propagate_op_sharding_non_cached", note)
    return calls


@pytest.fixture
def worked_out(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[Any]]:
    """Return the calls of torch itself: tensors of lists, and operators with results without storage."""
    found: list[Any] = []
    expand, propagate = find_functions()

    def note_expansion(mesh: Any, schema: Any, *rest: Any) -> Any:
        if schema.op.name().startswith("aten::_foreach_"):
            found.append((schema.op.name(), len(schema.args_schema[0].children)))
        return expand(mesh, schema, *rest)

    def note_meta(self: Any, schema: Any) -> Any:
        found.append(schema.op.name())
        return propagate(self, schema)

    with monkeypatch.context() as patch:
        patch.setattr(_sharding_prop, EXPAND, note_expansion)
        patch.setattr(Propagator, PROPAGATE, note_meta)
        yield found


def find_functions() -> tuple[Any, Any]:
    """Return the two functions of torch that are replaced temporarily."""
    return getattr(_sharding_prop, EXPAND), getattr(Propagator, PROPAGATE)


def make_parameters(mesh: DeviceMesh, dtype: torch.dtype = torch.float64) -> list[nn.Parameter]:
    """Return tensors that are alike in all properties, or in all but one of shape, placement and mesh."""
    places: list[tuple[tuple[int, ...], DeviceMesh, list[Placement]]] = [
        ((8, 4), mesh, [Shard(0), Shard(1)]),
        ((8, 4), mesh, [Shard(0), Shard(1)]),
        ((8, 4), mesh, [Shard(0), Replicate()]),
        ((8, 4), mesh, [Shard(1), Shard(0)]),
        ((4, 8), mesh, [Shard(0), Shard(1)]),
        ((8, 4), mesh["dp"], [Shard(0)]),
        ((8, 4), mesh["tp"], [Shard(0)]),
        ((8, 4), mesh["dp"], [Shard(0)]),
        ((5,), mesh["tp"], [Replicate()]),
        ((5,), mesh["tp"], [Shard(0)]),
        ((8, 4), mesh, [_StridedShard(0, split_factor=2), Shard(0)]),
        ((8, 4), mesh, [_StridedShard(0, split_factor=2), Shard(0)]),
    ]
    made = []
    for shape, where, placements in places:
        local = torch.ones(shape, dtype=dtype)
        whole = DTensor.from_local(local, where, [Replicate()] * where.ndim, run_check=False)
        made.append(nn.Parameter(whole.redistribute(where, placements)))
    return made


def train(mesh: DeviceMesh, make_optimizer: Callable[[list[nn.Parameter]], torch.optim.Optimizer]) -> None:
    """Make one step, with a clipped gradient and some products, as if nothing were cached."""
    _clear_sharding_prop_cache()
    parameters = make_parameters(mesh)
    optimizer = make_optimizer(parameters)
    for parameter in parameters:
        parameter.grad = torch.ones_like(parameter)
    nn.utils.clip_grad_norm_([each for each in parameters if each.device_mesh is mesh], 1.0)
    optimizer.step()
    x = parameters[0]
    (x @ x.t()).softmax(-1).sum().backward()
    x.view(32).mean(0, keepdim=True, dtype=torch.float32)


def describe(found: Any) -> Any:
    """Return all properties that a dispatcher reads of a result."""
    if found is None:
        return None
    specs = found.output_spec
    several = specs if isinstance(specs, list | tuple) else [specs]
    return (
        [
            None if each is None else (each, each.tensor_meta, each.use_strided_shard_as_shard_order)
            for each in several
        ],
        type(specs),
        found.redistribute_schema,
        found.needs_redistribute,
        found.use_val_from_redistribute_schema,
    )


@pytest.mark.parametrize(
    "make_optimizer",
    [
        lambda parameters: torch.optim.AdamW(parameters, foreach=True),
        lambda parameters: torch.optim.AdamW(parameters, foreach=True, amsgrad=True, maximize=True),
        lambda parameters: torch.optim.SGD(parameters, momentum=0.9, foreach=True, weight_decay=0.1),
        lambda parameters: torch.optim.AdamW(parameters, fused=True),
    ],
    ids=["adamw", "amsgrad", "sgd", "fused"],
)
def test_answers_are_those_of_torch(
    mesh: DeviceMesh,
    memo: PropagationMemo,
    asked: Asked,
    make_optimizer: Callable[..., torch.optim.Optimizer],
) -> None:
    for _ in range(2):
        train(mesh, make_optimizer)
    memo.remove()
    assert any(schema.op.name().startswith(("aten::_foreach", "aten::_fused")) for schema, _ in asked)
    propagator = DTensor._op_dispatcher.sharding_propagator
    for schema, found in list(asked):
        alone = propagator.propagate_op_sharding_non_cached(schema)
        assert describe(found) == describe(alone), schema


def test_each_tensor_of_a_list_is_worked_out_once(
    mesh: DeviceMesh,
    worked_out: list[Any],  # first, so that it sees all calls
    memo: PropagationMemo,
) -> None:
    def train_once() -> list[Any]:
        worked_out.clear()
        train(mesh, lambda parameters: torch.optim.AdamW(parameters, foreach=True))
        return list(worked_out)

    # Of twelve, three are like another one.
    assert ("aten::_foreach_lerp_.Scalar", 9) in train_once()
    assert train_once() == []
    memo.forget_meshes()
    again = train_once()
    assert ("aten::_foreach_lerp_.Scalar", 9) in again
    assert all(isinstance(each, tuple) for each in again), "shapes do not depend on meshes"


def test_what_else_shapes_strides_and_dtypes_depend_on(mesh: DeviceMesh, memo: PropagationMemo) -> None:
    def spread(x: torch.Tensor) -> Any:
        return DTensor.from_local(x, mesh, [Replicate()] * 2, run_check=False)

    def find(x: Any) -> TensorMeta:
        assert (x.shape, x.stride(), x.dtype) == tuple(x._spec.tensor_meta)
        found: TensorMeta = x._spec.tensor_meta
        return found

    whole, square = spread(torch.ones(4, dtype=torch.int64)), torch.ones(4, 4)
    # 1 and 1.0 are one key of a dict.
    assert [find(torch.pow(whole, by)).dtype for by in (1, 1.0)] == [torch.int64, torch.float32]
    assert [find(torch.exp(spread(x))).stride for x in (square, square.t())] == [(4, 1), (1, 4)]
    torch.set_default_dtype(torch.float64)
    try:
        _clear_sharding_prop_cache()
        assert find(torch.pow(whole, 1.0)).dtype == torch.float64
    finally:
        torch.set_default_dtype(torch.float32)


def test_operators_that_treat_sums_otherwise(mesh: DeviceMesh, memo: PropagationMemo) -> None:
    parts = [DTensor.from_local(torch.ones(4), mesh["dp"], [Partial()], run_check=False)]
    placements = [found[0].placements for found in (torch._foreach_neg(parts), torch._foreach_exp(parts))]
    assert placements == [(Partial(),), (Replicate(),)]


@pytest.mark.parametrize(
    ("ways", "num_each_time"),
    [
        ((False, False), [1, 0]),
        ((False, True), [2, 2]),  # torch changes the strategies of the first one
    ],
)
def test_tensors_sharded_twice_along_a_dim_in_two_ways_are_left_to_torch(
    mesh: DeviceMesh,
    worked_out: list[Any],  # first, so that it sees all calls
    memo: PropagationMemo,
    asked: Asked,
    ways: tuple[bool, bool],
    num_each_time: list[int],
) -> None:
    seen = []
    for _ in num_each_time:
        _clear_sharding_prop_cache()
        worked_out.clear()
        torch._foreach_mul([shard_twice(mesh, way) for way in ways], 2.0)
        seen.append(sum(each[1] for each in worked_out if isinstance(each, tuple)))
    assert seen == num_each_time
    memo.remove()
    for schema, found in list(asked):
        alone = DTensor._op_dispatcher.sharding_propagator.propagate_op_sharding_non_cached(schema)
        assert describe(found) == describe(alone), schema


def shard_twice(mesh: DeviceMesh, way: bool) -> DTensor:
    """Return a tensor whose first dim is sharded along both axes, expressed in one of two ways."""
    meta = TensorMeta(torch.Size((8, 4)), (4, 1), torch.float32)
    placements = (_StridedShard(0, split_factor=2), Shard(0))
    spec = DTensorSpec(mesh, placements, meta, use_strided_shard_as_shard_order=way)
    return DTensor(torch.ones(2, 4), spec, requires_grad=False)


def test_under_a_compiler_torch_computes_anew(
    mesh: DeviceMesh,
    worked_out: list[Any],  # first, so that it sees all calls
    memo: PropagationMemo,
) -> None:
    x = DTensor.from_local(torch.ones(4, 4), mesh, [Replicate()] * 2, run_check=False)
    computed = []
    for context in (nullcontext(), FakeTensorMode(allow_non_fake_inputs=True)):
        for _ in range(2):
            _clear_sharding_prop_cache()
            worked_out.clear()
            with context:
                torch.exp(x)
            computed.append(len(worked_out))
    assert computed == [1, 0, 1, 1]


def test_a_job_that_may_build_other_meshes_has_a_memo_that_ends_with_it() -> None:
    outside = find_functions()
    caches = MeshCaches(torch.device("cpu"))
    caches.begin(False)
    try:
        assert not set(find_functions()) & set(outside)
    finally:
        caches.end(False)
        caches.settle()
    assert find_functions() == outside
    assert caches._memo is None


def test_torch_is_left_as_it_was(memo: PropagationMemo) -> None:
    memo.install()
    inside = find_functions()
    memo.remove()
    memo.remove()
    outside = find_functions()
    assert not set(inside) & set(outside)
    assert all(each.__module__.startswith("torch.") for each in outside)


def test_other_releases_are_left_as_they_are(monkeypatch: pytest.MonkeyPatch) -> None:
    before = find_functions()
    monkeypatch.setattr(torch, "__version__", "2.14.0")
    memo = PropagationMemo()
    memo.install()
    try:
        assert find_functions() == before
    finally:
        memo.remove()
