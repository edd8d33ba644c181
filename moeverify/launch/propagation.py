"""What torch's propagation of shardings works out again and again, found once: the same answers, by torch's own code.

torch keeps what it finds for a whole call, all tensors of a `foreach` list and the mesh included, and the optimizer
gives all parameters to one such call: where a single tensor differs, each of them is worked out anew. Two parts of an
answer depend on less. The strategies of one tensor of such a list depend on that tensor alone, and most tensors of a
model are like another one. And shapes, strides and dtypes of results depend on no mesh.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from typing import Any

import torch
from torch.distributed.tensor import _sharding_prop
from torch.distributed.tensor._dtensor_spec import DTensorSpec
from torch.distributed.tensor._op_schema import OpSchema, OpStrategy, TupleStrategy
from torch.distributed.tensor.placement_types import Partial, Replicate, Shard, _StridedShard

_PROPAGATOR = _sharding_prop.ShardingPropagator
_EXPAND, _PROPAGATE = "_expand_single_dim_strategy_to_mesh", "_propagate_tensor_meta_non_cached"

# Where these two functions are known to depend on nothing but what the keys below hold. Other releases work as ever.
_KNOWN = ("2.13.",)

_PLAIN = (bool, int, float, str, type(None), torch.dtype, torch.device, torch.layout, torch.memory_format)

_PLACEMENTS = (Shard, Replicate, Partial, _StridedShard)

Function = Callable[..., Any]


class PropagationMemo:
    """Answers for parts of calls that torch has been asked for before, between `install` and `remove`.

    For jobs alone whose tensors and operators are torch's own: what a user's code registers may depend on anything.
    """

    def __init__(self) -> None:
        self._strategies: dict[Hashable, OpStrategy] = {}
        self._metas: dict[Hashable, Any] = {}
        self._originals: tuple[Function, Function] | None = None

    def install(self) -> None:
        """Let torch ask here first, where its release is known."""
        if self._originals is not None or not torch.__version__.startswith(_KNOWN):
            return
        expand: Function = getattr(_sharding_prop, _EXPAND)
        propagate: Function = getattr(_PROPAGATOR, _PROPAGATE)
        self._originals = expand, propagate

        def expand_once(mesh: Any, schema: OpSchema, strategy: Any, meta: Any) -> Function:
            return self._expand(expand, mesh, schema, strategy, meta)

        def propagate_once(propagator: Any, schema: OpSchema) -> Any:
            return self._propagate(propagate, propagator, schema)

        setattr(_sharding_prop, _EXPAND, expand_once)
        setattr(_PROPAGATOR, _PROPAGATE, propagate_once)

    def remove(self) -> None:
        """Leave torch as it was; what is known stays for the next `install`."""
        if self._originals is not None:
            setattr(_sharding_prop, _EXPAND, self._originals[0])
            setattr(_PROPAGATOR, _PROPAGATE, self._originals[1])
            self._originals = None

    def forget_meshes(self) -> None:
        """Forget what holds a mesh."""
        self._strategies.clear()

    def _expand(self, expand: Function, mesh: Any, schema: OpSchema, strategy: Any, meta: Any) -> Function:
        """Return what finds the strategies of a call, of a `foreach` list those of unlike tensors alone."""
        try:
            keys = _key_strategies(schema, strategy, meta)
        except _UnknownError:
            found: Function = expand(mesh, schema, strategy, meta)
            return found

        def find(op: Any, args_meta: Any, kwargs_meta: Any) -> TupleStrategy:
            unknown = {key: number for number, key in enumerate(keys) if key not in self._strategies}
            if unknown:
                numbers = [*unknown.values()]
                fewer = _choose_elements(schema, numbers)
                metas = None if meta is None else [meta[number] for number in numbers]
                answer = expand(mesh, fewer, strategy, metas)(op, fewer.args_meta, fewer.kwargs_meta)
                self._strategies.update(zip(unknown, answer.children, strict=True))
            return TupleStrategy(children=[self._strategies[key] for key in keys])

        return find

    def _propagate(self, propagate: Function, propagator: Any, schema: OpSchema) -> Any:
        """Return shapes, strides and dtypes of what an operator of torch's own makes, without storage."""
        try:
            if _is_foreach(schema):
                return self._propagate_list(propagate, propagator, schema)
            key = _freeze_call(schema, schema.args_schema)
        except _UnknownError:
            return propagate(propagator, schema)
        if key not in self._metas:
            self._metas[key] = propagate(propagator, schema)
        found = self._metas[key]
        return list(found) if type(found) is list else found

    def _propagate_list(self, propagate: Function, propagator: Any, schema: OpSchema) -> list[Any] | None:
        """Return those of each tensor of a `foreach` call, None where it changes its tensors in place.

        Raises: _UnknownError.
        """
        lists = [arg for arg in schema.args_schema if isinstance(arg, list | tuple)]
        rest = _freeze_call(schema, [arg for arg in schema.args_schema if not isinstance(arg, list | tuple)])
        if len({len(each) for each in lists}) != 1:
            raise _UnknownError
        keys = [(rest, _freeze(element)) for element in zip(*lists, strict=True)]
        unknown = {key: number for number, key in enumerate(keys) if key not in self._metas}
        if unknown:
            found = propagate(propagator, _choose_elements(schema, [*unknown.values()]))
            self._metas.update(zip(unknown, found or [None] * len(unknown), strict=True))
        answers = [self._metas[key] for key in keys]
        return None if None in answers else answers


class _UnknownError(Exception):
    """A value that may hold more than can be seen here."""


def _is_foreach(schema: OpSchema) -> bool:
    """Return whether an operator does the same with each tensor of its lists."""
    return str(schema.op).startswith("aten._foreach_") and not schema.kwargs_schema


def _freeze_call(schema: OpSchema, args: Sequence[Any]) -> Hashable:
    """Return what shapes, strides and dtypes of an operator's results depend on, of these arguments.

    Raises: _UnknownError.
    """
    if schema.op.namespace != "aten":
        raise _UnknownError
    named = tuple((name, _freeze(value)) for name, value in schema.kwargs_schema.items())
    return schema.op, torch.get_default_dtype(), _freeze(tuple(args)), named


def _freeze(value: Any) -> Hashable:
    """Return a value with its type, since 1 and 1.0 make different results, and a tensor without its mesh.

    Raises: _UnknownError.
    """
    kind = type(value)
    if kind is DTensorSpec:
        if value.tensor_meta is None:
            raise _UnknownError
        shape, stride, dtype = value.tensor_meta
        return _freeze(tuple(shape)), _freeze(tuple(stride)), dtype, value.mesh.device_type
    if kind in (list, tuple, torch.Size):
        return kind, tuple(map(_freeze, value))
    if kind in _PLAIN:
        return kind, value
    raise _UnknownError


def _key_strategies(schema: OpSchema, strategy: Any, meta: Sequence[Any] | None) -> list[Hashable]:
    """Return for each tensor of a `foreach` call what its strategies depend on.

    That is how it lies in each of the lists, what its result is, and what the call has beside lists.

    Raises: _UnknownError for calls of another kind.
    """
    lists = [arg.children for arg in schema.args_schema if isinstance(arg, TupleStrategy)]
    scalars = [arg for arg in schema.args_schema if isinstance(arg, list | tuple)]
    lengths = {len(each) for each in (*lists, *scalars, *([] if meta is None else [meta]))}
    if not _is_foreach(schema) or not lists or len(lengths) != 1:
        raise _UnknownError
    elements = [tuple(map(_find_spec, element)) for element in zip(*lists, strict=True)]
    rest = tuple(map(_freeze_beside, schema.args_schema))
    # torch writes into strategies that it has found where tensors that are sharded twice along a dim are told so in
    # two ways.
    ways = {way for element in elements for _, way in element} | {each[1] for each in rest if _is_spec(each)}
    if len(ways - {None}) > 1:
        raise _UnknownError
    results = [None] * len(elements) if meta is None else meta
    return [(schema.op, id(strategy), rest, *pair) for pair in zip(elements, results, strict=True)]


def _freeze_beside(arg: Any) -> Any:
    """Return an argument of a call, without the tensors of a list. Raises: _UnknownError."""
    if isinstance(arg, TupleStrategy):
        return "list"
    return _find_spec(arg) if isinstance(arg, OpStrategy) else _freeze(arg)


def _is_spec(frozen: Any) -> bool:
    return isinstance(frozen, tuple) and isinstance(frozen[0], DTensorSpec)


def _find_spec(strategy: Any) -> tuple[DTensorSpec, bool | None]:
    """Return how a tensor lies on its mesh, and in which way it is told to be sharded twice along a dim, if it is.

    Raises: _UnknownError where a placement may hold more than torch compares.
    """
    if not isinstance(strategy, OpStrategy) or len(strategy.strategies) != 1:
        raise _UnknownError
    spec = strategy.strategies[0].output_spec
    if any(type(placement) not in _PLACEMENTS for placement in spec.placements):
        raise _UnknownError
    is_twice = any(type(placement) is _StridedShard for placement in spec.placements)
    return spec, spec.use_strided_shard_as_shard_order if is_twice else None


def _choose_elements(schema: OpSchema, numbers: Sequence[int]) -> OpSchema:
    """Return a `foreach` call with these elements of its lists alone."""

    def choose(arg: Any) -> Any:
        if isinstance(arg, TupleStrategy):
            return TupleStrategy(children=[arg.children[number] for number in numbers])
        return [arg[number] for number in numbers] if isinstance(arg, list | tuple) else arg

    args = tuple(map(choose, schema.args_schema))
    return OpSchema(schema.op, args, schema.kwargs_schema, schema_info=schema.schema_info)
