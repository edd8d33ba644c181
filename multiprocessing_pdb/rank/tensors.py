"""Comparing tensors between ranks without moving them: a form, a norm, hashes and one element travel.

Elements are read in logical order in chunks, so that a transposed or sliced tensor compares by its values and
nothing of its size is ever allocated. Hashes are over bits: equal means equal to the last bit, NaN included.
"""

from __future__ import annotations

import hashlib
import math
import sys
from collections.abc import Iterator
from typing import Any

_CHUNK = 1 << 20
_MOST_PARTS = 256

Summary = dict[str, Any]


def is_array(value: Any) -> bool:
    """Tell whether `value` is a torch tensor or a numpy array; neither library is imported for that."""
    torch, numpy = sys.modules.get("torch"), sys.modules.get("numpy")
    return isinstance(value, (getattr(torch, "Tensor", ()), getattr(numpy, "ndarray", ())))


def _get_local(value: Any) -> Any:
    """Return the chunk this rank holds: the local tensor of a DTensor, no communication."""
    return getattr(value, "_local_tensor", value)


def _is_torch(value: Any) -> bool:
    return isinstance(value, getattr(sys.modules.get("torch"), "Tensor", ()))


def has_data(value: Any) -> bool:
    """Tell whether elements can be read: not of meta, sparse or quantized tensors, nor object arrays."""
    if not _is_torch(value):
        return not value.dtype.hasobject
    import torch

    return value.layout == torch.strided and value.device.type != "meta" and not value.is_quantized


def read_flat(value: Any, begin: int, end: int) -> Any:
    """Return elements begin to end, in logical order, as one contiguous chunk."""
    if not _is_torch(value):
        return value.reshape(-1)[begin:end] if value.flags.c_contiguous else value.flat[begin:end]
    import torch

    tensor = value.detach().resolve_conj().resolve_neg()
    if tensor.is_contiguous():
        return tensor.view(-1)[begin:end]
    rest = torch.arange(begin, end, device=tensor.device)
    offsets = torch.zeros_like(rest)
    for size, stride in zip(reversed(tensor.shape), reversed(tensor.stride()), strict=True):
        offsets += (rest % size) * stride
        rest = rest // size
    reach = int(sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True)))
    return torch.as_strided(tensor, (reach + 1,), (1,))[offsets]


def _hash_chunk(chunk: Any, key: Any) -> None:
    """Feed the bits of a contiguous chunk into `key`; on an accelerator, a checksum taken there."""
    if not _is_torch(chunk):
        key.update(chunk.tobytes())
        return
    import torch

    octets = chunk.contiguous().view(torch.uint8) if chunk.numel() else chunk.new_empty(0, dtype=torch.uint8)
    if octets.device.type == "cpu":
        key.update(memoryview(octets.numpy()))
        return
    # Sums of integers wrap and do not depend on order, so equal bits give equal sums on every rank. The
    # weights depend on the place: two elements that changed places are seen.
    place = torch.arange(octets.numel(), device=octets.device, dtype=torch.int64)
    mixed = (place + 1) * 0x27D4EB2F165667C5
    mixed = mixed ^ (mixed >> 29)
    bits = octets.to(torch.int64) + 1
    for weight in (mixed, mixed * 0x165667B19E3779F9 + 1):
        key.update(int((bits * weight).sum()).to_bytes(8, "little", signed=True))


def _read_chunks(value: Any, begin: int, end: int) -> Iterator[Any]:
    for at in range(begin, end, _CHUNK):
        yield read_flat(value, at, min(end, at + _CHUNK))


def hash_parts(value: Any, begin: int, end: int, parts: int) -> list[list[Any]]:
    """Return [begin, end, hash] of each of `parts` parts of the elements begin to end."""
    local = _get_local(value)
    parts = max(1, min(parts, _MOST_PARTS, end - begin))
    size = -(-(end - begin) // parts)
    answer = []
    for at in range(begin, end, size):
        stop = min(end, at + size)
        key = hashlib.sha256()
        for chunk in _read_chunks(local, at, stop):
            _hash_chunk(chunk, key)
        answer.append([at, stop, key.hexdigest()])
    return answer


def read_element(value: Any, at: int) -> str:
    """Return one element as text, at full precision."""
    return repr(read_flat(_get_local(value), at, at + 1).tolist()[0])


def _shorten(element: object) -> str:
    return f"{element:.6g}" if isinstance(element, float) else repr(element)


class _Norm:
    """The 2-norm over chunks, and how many elements are not finite."""

    def __init__(self) -> None:
        self.squares = 0.0
        self.nans = 0
        self.infinities = 0

    def add(self, chunk: Any) -> None:
        if not _is_torch(chunk):
            import numpy

            if chunk.dtype.kind not in "biufc":
                return
            wide = numpy.abs(chunk.astype(numpy.complex128 if chunk.dtype.kind == "c" else numpy.float64))
            self.nans += int(numpy.isnan(wide).sum())
            self.infinities += int(numpy.isinf(wide).sum())
            self.squares += float((wide[numpy.isfinite(wide)] ** 2).sum())
            return
        import torch

        wide = chunk.abs() if chunk.is_complex() else chunk
        try:
            wide = wide.to(torch.float64)
        except (RuntimeError, TypeError):  # an accelerator without float64
            wide = wide.to(torch.float32)
        self.nans += int(wide.isnan().sum())
        self.infinities += int(wide.isinf().sum())
        self.squares += float(torch.where(wide.isfinite(), wide, 0).square().sum())

    def text(self) -> str:
        odd = [f"{n} {name}" for n, name in ((self.nans, "nan"), (self.infinities, "inf")) if n]
        return f"norm {math.sqrt(self.squares):.9g}" + "".join(f", {part}" for part in odd)


def _describe_form(value: Any, local: Any) -> dict[str, Any]:
    form: dict[str, Any] = {
        "shape": list(value.shape),
        "dtype": str(value.dtype).removeprefix("torch."),
        "device": str(getattr(local, "device", "cpu")).partition(":")[0],
    }
    placements = getattr(value, "placements", None)
    if placements is not None:
        form["placement"] = ", ".join(str(p) for p in placements)
        form["local"] = list(local.shape)
    return form


def summarise(value: Any) -> Summary:
    """Return form, norm and hash of a tensor as text, and a key that is equal for equal tensors."""
    local = _get_local(value)
    form = _describe_form(value, local)
    text = f"{form['dtype']}[{', '.join(map(str, form['shape']))}] {form['device']}"
    if "placement" in form:
        text += f" placement ({form['placement']}) local [{', '.join(map(str, form['local']))}]"
    key = hashlib.sha256(repr(sorted(form.items())).encode())
    length = math.prod(local.shape)
    if not has_data(local):
        key.update(repr(value).encode())
        return {"form": form, "text": f"{text} no data to compare", "key": key.hexdigest(), "length": 0}
    norm, content = _Norm(), hashlib.sha256()
    for chunk in _read_chunks(local, 0, length):
        norm.add(chunk)
        _hash_chunk(chunk, content)
    key.update(content.digest())
    if 0 < length <= 8:
        text += f" [{', '.join(_shorten(element) for element in read_flat(local, 0, length).tolist())}]"
    return {
        "form": form,
        "text": f"{text} {norm.text()} hash {content.hexdigest()[:8]}",
        "key": key.hexdigest(),
        "length": length,
        "indices": list(local.shape),
    }
