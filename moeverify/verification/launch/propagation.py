"""Memoization of parts of the sharding propagation of DTensor. torch's own code computes the results.

torch caches propagation by the whole call, including all tensors of a `foreach` list and the mesh. The
optimizer passes all parameters in one such call, so one different tensor repeats the work for each of them.
Two parts of the result depend on less. The strategies of one tensor of a `foreach` list depend only on that
tensor, and most tensors of a model look like another one. The shapes, strides and dtypes of results do not
depend on the mesh.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from typing import Any

import torch
from torch._guards import detect_fake_mode
from torch.distributed.tensor import _sharding_prop
from torch.distributed.tensor._dtensor_spec import DTensorSpec
from torch.distributed.tensor._op_schema import OpSchema, OpStrategy, TupleStrategy
from torch.distributed.tensor.placement_types import Partial, Replicate, Shard, _StridedShard

_PROPAGATOR = _sharding_prop.ShardingPropagator
_EXPAND, _PROPAGATE = "_expand_single_dim_strategy_to_mesh", "_propagate_tensor_meta_non_cached"

# Releases in which both functions depend only on the contents of the keys below. Other releases are not
# patched.
_KNOWN = ("2.13.",)

_PLAIN = (bool, int, float, str, type(None), torch.dtype, torch.device, torch.layout, torch.memory_format)

_PLACEMENTS = (Shard, Replicate, Partial, _StridedShard)

Function = Callable[..., Any]


class PropagationMemo:
    """Memo of partial results of sharding propagation, active between `install` and `remove`.

    It knows the operators of `aten` only: an operator registered by a user may depend on anything. Like torch's
    own cache, it is valid as long as the rules of the operators do not change.
    """

    def __init__(self) -> None:
        self._strategies: dict[Hashable, OpStrategy] = {}
        self._metas: dict[Hashable, Any] = {}
        self._originals: tuple[Function, Function] | None = None

    def install(self) -> None:
        """Patch torch to look up this memo first, in known releases only."""
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
        """Restore torch's functions. The memo is kept for the next `install`."""
        if self._originals is not None:
            setattr(_sharding_prop, _EXPAND, self._originals[0])
            setattr(_PROPAGATOR, _PROPAGATE, self._originals[1])
            self._originals = None

    def forget_meshes(self) -> None:
        """Forget the entries that hold a mesh."""
        self._strategies.clear()

    def _expand(self, expand: Function, mesh: Any, schema: OpSchema, strategy: Any, meta: Any) -> Function:
        """Return a function that finds the strategies of a call.

        A `foreach` list is searched once per distinct tensor.
        """
        try:
            _refuse_tracing()
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
        """Return the shapes, strides and dtypes of the results of an `aten` operator."""
        try:
            _refuse_tracing()
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
        """Return the metadata of each result of a `foreach` call, or None if it updates its tensors in place.

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
    """A value whose contents the keys cannot represent completely."""


def _refuse_tracing() -> None:
    """Raise _UnknownError under a compiler, whose tensors are symbols of its own."""
    if detect_fake_mode() is not None:
        raise _UnknownError


def _is_foreach(schema: OpSchema) -> bool:
    """Return whether an operator applies the same function to each tensor of its lists."""
    return str(schema.op).startswith("aten._foreach_") and not schema.kwargs_schema


def _freeze_call(schema: OpSchema, args: Sequence[Any]) -> Hashable:
    """Return a hashable key for the shapes, strides and dtypes of an operator's results.

    Raises: _UnknownError.
    """
    if schema.op.namespace != "aten":
        raise _UnknownError
    named = tuple((name, _freeze(value)) for name, value in schema.kwargs_schema.items())
    return schema.op, torch.get_default_dtype(), _freeze(tuple(args)), named


def _freeze(value: Any) -> Hashable:
    """Return a hashable key of a value, without meshes, and with its type: 1 and 1.0 promote differently.

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
    """Return a key of the strategies for each tensor of a `foreach` call.

    The key holds the spec of the tensor in each list, the metadata of its result, and the arguments that
    are not lists.

    Raises: _UnknownError for other kinds of calls.
    """
    lists = [arg.children for arg in schema.args_schema if isinstance(arg, TupleStrategy)]
    scalars = [arg for arg in schema.args_schema if isinstance(arg, list | tuple)]
    lengths = {len(each) for each in (*lists, *scalars, *([] if meta is None else [meta]))}
    if not _is_foreach(schema) or not lists or len(lengths) != 1:
        raise _UnknownError
    elements = [tuple(map(_find_spec, element)) for element in zip(*lists, strict=True)]
    rest = tuple(map(_freeze_beside, schema.args_schema))
    # torch modifies cached strategies if the arguments describe tensors sharded twice along a dim in two
    # ways (`use_strided_shard_as_shard_order`).
    ways = {way for element in elements for _, way in element} | {each[1] for each in rest if _is_spec(each)}
    if len(ways - {None}) > 1:
        raise _UnknownError
    results = [None] * len(elements) if meta is None else meta
    return [(schema.op, id(strategy), rest, *pair) for pair in zip(elements, results, strict=True)]


def _freeze_beside(arg: Any) -> Any:
    """Return a key of an argument, without the tensors of a list. Raises: _UnknownError."""
    if isinstance(arg, TupleStrategy):
        return "list"
    return _find_spec(arg) if isinstance(arg, OpStrategy) else _freeze(arg)


def _is_spec(frozen: Any) -> bool:
    return isinstance(frozen, tuple) and isinstance(frozen[0], DTensorSpec)


def _find_spec(strategy: Any) -> tuple[DTensorSpec, bool | None]:
    """Return the spec of a tensor, and its `use_strided_shard_as_shard_order`.

    The flag is None if no placement is a `_StridedShard`.

    Raises: _UnknownError when a placement may hold more than torch compares.
    """
    if not isinstance(strategy, OpStrategy) or len(strategy.strategies) != 1:
        raise _UnknownError
    spec = strategy.strategies[0].output_spec
    if any(type(placement) not in _PLACEMENTS for placement in spec.placements):
        raise _UnknownError
    is_twice = any(type(placement) is _StridedShard for placement in spec.placements)
    return spec, spec.use_strided_shard_as_shard_order if is_twice else None


def _choose_elements(schema: OpSchema, numbers: Sequence[int]) -> OpSchema:
    """Return a `foreach` call restricted to these elements of its lists."""

    def choose(arg: Any) -> Any:
        if isinstance(arg, TupleStrategy):
            return TupleStrategy(children=[arg.children[number] for number in numbers])
        return [arg[number] for number in numbers] if isinstance(arg, list | tuple) else arg

    args = tuple(map(choose, schema.args_schema))
    return OpSchema(schema.op, args, schema.kwargs_schema, schema_info=schema.schema_info)
