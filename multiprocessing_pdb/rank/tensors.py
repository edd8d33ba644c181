"""Comparison of tensors between ranks that transfers only the form, a norm, hashes and single elements.

Elements are read in logical order and in chunks. A transposed or sliced tensor is therefore compared by
value, and no memory of its size is allocated. Hashes are over bits: equal hashes mean bitwise equality,
including NaN.
"""

from __future__ import annotations

import hashlib
import math
import sys
from collections.abc import Callable, Iterator
from typing import Any

_BLOCK = 1 << 20  # elements per read: reads of a transposed tensor use whole cache lines
# Elements per chunk on a CPU. The float64 copy (1 MiB) fits into a core's cache, and the call overhead is
# negligible. bfloat16 takes 2.2 s for 1 GB with chunks of 2^15 elements, and 1.4 s with these.
_CHUNK = 1 << 17
_MOST_PARTS = 256
_FEW = 8  # maximum number of elements to show

Summary = dict[str, Any]
Check = Callable[[], None]  # called between chunks; raises when the console no longer waits


def get_local(value: Any) -> Any:
    """Return this rank's shard of a DTensor without communication, or any other array unchanged."""
    return getattr(value, "_local_tensor", value)


def is_torch(value: Any) -> bool:
    """Return whether `value` is a torch tensor."""
    return isinstance(value, getattr(sys.modules.get("torch"), "Tensor", ()))


def has_data(value: Any) -> bool:
    """Return whether elements can be read: not for meta, sparse or quantized tensors, nor object arrays."""
    if not is_torch(value):
        return not value.dtype.hasobject
    import torch

    return value.layout == torch.strided and value.device.type != "meta" and not value.is_quantized


def read_flat(value: Any, begin: int, end: int) -> Any:
    """Return the elements begin to end, in logical order, as one contiguous array."""
    if not is_torch(value):
        return value.reshape(-1)[begin:end] if value.flags.c_contiguous else _read_block(value, begin, end)
    tensor = value.detach().resolve_conj().resolve_neg()
    return tensor.view(-1)[begin:end] if tensor.is_contiguous() else _read_block(tensor, begin, end)


def _read_block(value: Any, begin: int, end: int) -> Any:
    """Return the same for arbitrary strides: whole rows by one strided copy, the rest by recursion."""
    if value.ndim <= 1:
        return _copy(value.reshape(-1)[begin:end])
    row = math.prod(value.shape[1:])
    first, last = -(-begin // row), end // row  # range of whole rows
    if first > last:  # inside one row
        at = begin // row
        return _read_block(value[at], begin - at * row, end - at * row)
    parts = [_gather(value[first:last])]
    if begin < first * row:
        parts.insert(0, _read_block(value[first - 1], begin - (first - 1) * row, row))
    if last * row < end:
        parts.append(_read_block(value[last], 0, end - last * row))
    if len(parts) == 1:
        return _copy(parts[0])
    return sys.modules["torch"].cat(parts) if is_torch(value) else sys.modules["numpy"].concatenate(parts)


def _gather(rows: Any) -> Any:
    """Return whole rows as one flat array, copied in memory order first.

    A column-wise read of a transposed tensor has a TLB miss per element: 4.4 s for 1 GB instead of 1.6 s.
    """
    return (rows.clone() if is_torch(rows) else rows.copy(order="K")).reshape(-1)


def _copy(part: Any) -> Any:
    # Views of a single-element torch tensor keep any stride, and then cannot be viewed as bytes.
    return part.clone(memory_format=sys.modules["torch"].contiguous_format) if is_torch(part) else part.copy()


def _hash_chunk(chunk: Any, key: Any) -> None:
    """Update `key` with the bits of a contiguous chunk, or with a checksum computed on the accelerator."""
    if not is_torch(chunk):
        key.update(chunk.tobytes())  # not every dtype has a buffer
        return
    import torch

    chunk = chunk.contiguous()
    if chunk.device.type == "cpu":
        octets = chunk.view(torch.uint8) if chunk.numel() else chunk.new_empty(0, dtype=torch.uint8)
        key.update(memoryview(octets.numpy()))
        return
    # Integer sums wrap and do not depend on order, so equal bits give equal sums on every rank. The weights
    # depend on the position, so exchanged elements are detected. Lanes are narrower than the sum: a
    # difference in the highest bit of a lane still changes at least 33 bits of each of the two sums.
    words = chunk.view(torch.int32) if chunk.element_size() % 4 == 0 else chunk.view(torch.uint8)
    lanes = (words.to(torch.int64) & 0xFFFFFFFF) + 1
    place = torch.arange(lanes.numel(), device=lanes.device, dtype=torch.int64)
    mixed = (place + 1) * 0x27D4EB2F165667C5
    mixed = mixed ^ (mixed >> 29)
    for weight in (mixed, mixed * 0x165667B19E3779F9 + 1):
        key.update(int((lanes * weight).sum()).to_bytes(8, "little", signed=True))


def _read_chunks(value: Any, begin: int, end: int, check: Check) -> Iterator[Any]:
    for at in range(begin, end, _BLOCK):
        check()
        block = read_flat(value, at, min(end, at + _BLOCK))
        if getattr(block, "is_cpu", True):  # numpy 1 lacks this attribute
            yield from (block[place : place + _CHUNK] for place in range(0, len(block), _CHUNK))
        else:
            yield block


def hash_parts(value: Any, begin: int, end: int, parts: int, check: Check) -> list[list[Any]]:
    """Return [begin, end, hash] for each of `parts` parts of the elements begin to end."""
    local = get_local(value)
    parts = max(1, min(parts, _MOST_PARTS, end - begin))
    size = -(-(end - begin) // parts)
    answer = []
    for at in range(begin, end, size):
        stop = min(end, at + size)
        key = hashlib.sha256()
        for chunk in _read_chunks(local, at, stop, check):
            _hash_chunk(chunk, key)
        answer.append([at, stop, key.hexdigest()])
    return answer


def read_element(value: Any, at: int) -> str:
    """Return one element as text, at full precision."""
    return repr(read_flat(get_local(value), at, at + 1).tolist()[0])


def _shorten(element: object) -> str:
    return f"{element:.6g}" if isinstance(element, float) else repr(element)


class Norm:
    """The 2-norm over chunks, in float64, and the number of non-finite elements."""

    def __init__(self) -> None:
        self.squares = 0.0
        self.nans = 0
        self.infinities = 0

    def add(self, chunk: Any) -> None:
        """Add the elements of one chunk."""
        wide = _widen(chunk)
        if wide is None:
            return
        squares = float(wide @ wide)
        if not math.isfinite(squares):  # only then read every element again
            library = sys.modules["torch" if is_torch(wide) else "numpy"]
            self.nans += int(library.count_nonzero(library.isnan(wide)))
            self.infinities += int(library.count_nonzero(abs(wide) == math.inf))
            finite = library.nan_to_num(wide, nan=0.0, posinf=0.0, neginf=0.0)
            squares = float(finite @ finite)
        self.squares += squares

    def text(self) -> str:
        """Return the norm and the counts of non-finite elements as text."""
        odd = [f"{n} {name}" for n, name in ((self.nans, "nan"), (self.infinities, "inf")) if n]
        return f"norm {math.sqrt(self.squares):.9g}" + "".join(f", {part}" for part in odd)


def _widen(chunk: Any) -> Any:
    """Return absolute values in float64 (float32 if the accelerator lacks it), or None for other types."""
    if not is_torch(chunk):
        numpy = sys.modules["numpy"]
        if chunk.dtype.kind not in "biufc":
            return None
        chunk = numpy.abs(chunk) if chunk.dtype.kind == "c" else chunk
        with numpy.errstate(over="ignore", invalid="ignore"):
            return numpy.ascontiguousarray(chunk, dtype=numpy.float64)
    import torch

    chunk = chunk.abs() if chunk.is_complex() else chunk
    try:
        return chunk.to(torch.float64)
    except (RuntimeError, TypeError):
        return chunk.to(torch.float32)


def count_bad(value: Any) -> tuple[int, int]:
    """Return the number of NaN and of infinite elements, without communication."""
    local = get_local(value)
    norm = Norm()
    if has_data(local):
        for chunk in _read_chunks(local, 0, math.prod(local.shape), lambda: None):
            norm.add(chunk)
    return norm.nans, norm.infinities


def _describe_form(value: Any, local: Any) -> dict[str, Any]:
    form: dict[str, Any] = {
        "shape": list(value.shape),
        "dtype": str(value.dtype).removeprefix("torch."),
        "device": str(getattr(local, "device", "cpu")).partition(":")[0],
    }
    placements = getattr(value, "placements", None)
    if placements is not None:
        form["placement"] = ", ".join(str(p) for p in placements)
    if getattr(value, "requires_grad", False):
        form["requires_grad"] = True
    return form


def describe_shard(value: Any) -> dict[str, Any] | None:
    """Return which shard of a DTensor this rank holds: its coordinates on axes that do not replicate.

    Ranks with equal coordinates hold replicas. Return None for an undivided value.
    """
    placements, mesh = getattr(value, "placements", None), getattr(value, "device_mesh", None)
    if placements is None or mesh is None or mesh.get_coordinate() is None:
        return None
    names = mesh.mesh_dim_names or [f"axis{number}" for number in range(mesh.ndim)]
    coordinate = mesh.get_coordinate()
    placed = [
        (str(name), int(at), placement.is_partial())
        for name, at, placement in zip(names, coordinate, placements, strict=True)
        if not placement.is_replicate()
    ]
    if not placed:
        return None
    return {
        "place": ", ".join(f"{name}={at}" for name, at, _ in placed),
        "partial": any(partial for _, _, partial in placed),
        "offset": _find_offset(value),
    }


def _find_offset(value: Any) -> list[int]:
    """Return the offset of this rank's shard in the whole tensor, or an empty list if unknown."""
    try:
        from torch.distributed.tensor._utils import compute_local_shape_and_global_offset as locate

        _, offset = locate(value.shape, value.device_mesh, value.placements)
        return [int(at) for at in offset]
    except Exception:  # a private function, which may move or reject a placement
        return []


def summarise(value: Any, check: Check) -> Summary:
    """Return form, norm and hash of a tensor as text, and a key that is equal for equal tensors."""
    local = get_local(value)
    form = _describe_form(value, local)
    text = f"{form['dtype']}[{', '.join(map(str, form['shape']))}] {form['device']}"
    shard = describe_shard(value)
    if "placement" in form:
        text += f" placement ({form['placement']})"
    key = hashlib.sha256(repr([*sorted(form.items()), list(local.shape)]).encode())
    length = math.prod(local.shape)
    summary: Summary = {
        "form": form,
        "text": text,
        "local": list(local.shape),
        "length": 0,
        "shard": shard,
        "bad": (0, 0),
    }
    if not has_data(local):
        return {**summary, "key": key.hexdigest(), "caveat": "has no elements that can be read"}
    norm, content = Norm(), hashlib.sha256()
    for chunk in _read_chunks(local, 0, length, check):
        norm.add(chunk)
        _hash_chunk(chunk, content)
    key.update(content.digest())
    few = f" local {list(local.shape)}" if shard is not None else ""
    if 0 < length <= _FEW:
        few += f" [{', '.join(_shorten(element) for element in read_flat(local, 0, length).tolist())}]"
    return {
        **summary,
        "content": f"{few} {norm.text()} hash {content.hexdigest()[:8]}",
        "squares": norm.squares if math.isfinite(norm.squares) else None,
        "key": key.hexdigest(),
        "length": length,
        "bad": (norm.nans, norm.infinities),
    }
