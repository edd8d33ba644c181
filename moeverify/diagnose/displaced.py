"""Which wrong tensors of a step have values of other ones, and how these came there: all of them together.

What one rank adds to a mean of all is seen too: the right share of each rank is known, and what the wrong mean has in
the place of one rank's is compared with that rank's shares of all parameters.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from moeverify.diagnose.families import split_moment
from moeverify.diagnose.inputs import DiagnosisInputs
from moeverify.diagnose.slots import Flat
from moeverify.diagnose.wrong_tensor import RankShard, WrongTensor
from moeverify.results.explanation import Quantity
from moeverify.results.part import Tokens
from moeverify.results.slots import Displaced, Flattening, Piece

_MOST_ELEMENTS = 1 << 23
_LEAST, _DISTINCT = 8, 0.5
"""Elements of a tensor that are told from others, and the share of them that are different numbers."""

_FEWEST_MOVED = 3  # tensors: of fewer each is told by itself
_MOST_WAYS = 2  # orders that give the same, as far as is seen
_MOST_PIECES = 4


@dataclass(frozen=True)
class Way:
    """Of which tokens the values stand elsewhere, those of all where there are none, and whether beside their own."""

    tokens: Tokens | None = None
    added: bool = False


@dataclass(frozen=True)
class Slot:
    """What a rank has in the slot of a tensor, of what a way is about, and what it should have there. Shapes: (n)."""

    tensor: WrongTensor
    rank: int
    target: Tensor
    own: Tensor
    flat: Flat
    name: str
    allowed: float

    @property
    def is_telling(self) -> bool:
        """Return whether its values are told from others: not all of them are a few numbers."""
        if len(self.target) < _LEAST or not self.allowed > 0.0:
            return False
        distinct = torch.unique((self.target / self.allowed).round())
        return len(distinct) > _DISTINCT * len(self.target)

    def has(self, values: Tensor | None) -> bool:
        """Return whether these are its values, which are not its own."""
        return values is not None and bool(((self.target - values).abs() <= self.allowed).all())


class DisplacedSearch:
    """Looks at all wrong tensors of one quantity; those of another moment of an optimizer are not with them."""

    def __init__(self, tensors: Sequence[WrongTensor], inputs: DiagnosisInputs) -> None:
        self._tensors = tensors
        self._inputs = inputs
        self._flats: dict[tuple[int, str], Flat | None] = {}

    def run(self) -> dict[int, Displaced]:
        """Return what is known of tensors by their identity."""
        for way in self._list_ways():
            found = self._search(way)
            if found:
                return found
        return {}

    def _list_ways(self) -> Iterator[Way]:
        """Yield all of each tensor, then what single ranks and micro-batches bring to a gradient."""
        yield Way()
        inputs = self._inputs
        if self._tensors[0].quantity is not Quantity.GRADIENT or inputs.components is None:
            return
        cells = [cell.tokens for cell in inputs.components().cells]
        if len(cells) < 2:
            return
        places = [Tokens(data_rank=each.data_rank, context_rank=each.context_rank) for each in cells]
        micro = [Tokens(micro_batch=each.micro_batch) for each in cells]
        for tokens in dict.fromkeys([*places, *micro, *cells]):
            if tokens != Tokens():
                yield Way(tokens)
                yield Way(tokens, added=True)

    def _search(self, way: Way) -> dict[int, Displaced]:
        slots = {id(tensor): self._list_slots(tensor, way) for tensor in self._tensors}
        telling = {key: members for key, members in slots.items() if any(each.is_telling for each in members)}
        moved = {
            key: members
            for key, members in telling.items()
            if all(each.flat.has(each.target, each.allowed) for each in members)
        }
        if not moved:
            return {}
        cut = {key: [_cut(each) for each in members] for key, members in moved.items()}
        common = _find_common(list(moved.values()), list(cut.values()))
        found: dict[int, Displaced] = {}
        for key, members in slots.items():
            if members and common is not None and all(_has(each, common) for each in members):
                found[key] = _describe(way, members, common)
            elif key in moved and (operation := _describe_alone(members, cut[key], moved)) is not None:
                found[key] = _describe(way, members, operation)
        return found

    def _list_slots(self, tensor: WrongTensor, way: Way) -> list[Slot]:
        """Return what each wrong rank has; nothing where that cannot be asked."""
        allowed = tensor.exact * float(tensor.expected.abs().max()) if tensor.expected.numel() else 0.0
        slots: list[Slot] = []
        for shard in tensor.shards:
            if shard.local is None or not bool(shard.values().isfinite().all()):
                return []
            error = (shard.values() - tensor.expected_of(shard)).reshape(-1)
            if not len(error) or not bool((error.abs() > allowed).any()):
                continue
            slot = self._make_slot(tensor, shard, way, allowed)
            if slot is None:
                return []
            slots.append(slot)
        return slots

    def _make_slot(self, tensor: WrongTensor, shard: RankShard, way: Way, allowed: float) -> Slot | None:
        name = split_moment(tensor.name)[0] if tensor.quantity is Quantity.OPTIMIZER_STATE else tensor.name
        flat = self._flatten(shard.rank, tensor, way.tokens)
        if flat is None or name not in flat.sizes or flat.sizes[name] != shard.region.numel:
            return None
        own, actual = flat.of(name), shard.values().reshape(-1)
        if way.tokens is not None:
            actual = actual - tensor.expected_of(shard).reshape(-1) + (0.0 if way.added else own)
        return Slot(tensor, shard.rank, actual, own, flat, name, allowed)

    def _flatten(self, rank: int, tensor: WrongTensor, tokens: Tokens | None) -> Flat | None:
        """Return the right values of all parameters that a rank has, or what some tokens add to them."""
        moment = split_moment(tensor.name)[1] if tensor.quantity is Quantity.OPTIMIZER_STATE else ""
        key = rank, f"{moment} {tokens}"
        if key not in self._flats:
            self._flats[key] = self._make_flat(rank, tensor.key[1], moment, tokens)
        return self._flats[key]

    def _make_flat(self, rank: int, kind: str, moment: str, tokens: Tokens | None) -> Flat | None:
        values: dict[str, Tensor] = {}
        for name, regions in self._inputs.regions.items():
            if rank not in regions or not regions[rank].numel:
                continue
            full = f"{name}.{moment}" if moment else name
            value = self._inputs.golden(kind, full, 0) if tokens is None else self._take_share(tokens, name)
            if value is not None and tuple(value.shape) == tuple(regions[rank].shape):
                values[name] = regions[rank].take(value)
        count = sum(value.numel() for value in values.values())
        return Flat(values) if 0 < count <= _MOST_ELEMENTS else None

    def _take_share(self, tokens: Tokens, name: str) -> Tensor | None:
        """Return what some tokens add to a gradient."""
        assert self._inputs.components is not None
        components = self._inputs.components()
        if name not in components.names:
            return None
        numbers = [number for number, cell in enumerate(components.cells) if _is_of(cell.tokens, tokens)]
        return torch.stack([components.share(number, name) for number in numbers]).sum(dim=0)


def _is_of(cell: Tokens, tokens: Tokens) -> bool:
    wanted = tokens.model_dump(exclude_none=True)
    return all(getattr(cell, field) == value for field, value in wanted.items())


def _cut(slot: Slot) -> list[Piece]:
    return slot.flat.cut(slot.flat.locate(slot.target, slot.allowed))


def _has(slot: Slot, common: Displaced) -> bool:
    """Return whether a slot has what stands there where all of a buffer is moved, or written in another order."""
    if common.flattening is not None:
        return slot.has(slot.flat.take(common.flattening, slot.name))
    return any(slot.has(slot.flat.take_at(slot.name, common.offset, wraps=wraps)) for wraps in (False, True))


def _find_common(
    moved: Sequence[Sequence[Slot]], cut: Sequence[Sequence[Sequence[Piece]]]
) -> Displaced | None:
    """Return what gives most of what is moved: one offset, or the order of a buffer; None where none or many do."""
    offsets = Counter(
        offset
        for members, of_ranks in zip(moved, cut, strict=True)
        for offset in {_find_offset(slot, pieces) for slot, pieces in zip(members, of_ranks, strict=True)}
        if offset
    )
    offset, count = offsets.most_common(1)[0] if offsets else (0, 0)
    if count >= _FEWEST_MOVED and 2 * count > len(moved):
        return Displaced(offset=offset)
    best: list[tuple[int, Flattening]] = []
    for flattening in moved[0][0].flat.list_flattenings():
        way = Displaced(flattening=flattening)
        count = sum(all(_has(each, way) for each in members) for members in moved)
        if count >= _FEWEST_MOVED:
            best.append((count, flattening))
    most = max((count for count, _ in best), default=0)
    named = [flattening for count, flattening in best if count == most]
    return Displaced(flattening=named[0]) if 2 * most > len(moved) and len(named) <= _MOST_WAYS else None


def _describe_alone(
    members: Sequence[Slot], cut: Sequence[Sequence[Piece]], moved: Mapping[int, Sequence[Slot]]
) -> Displaced | None:
    """Return where the values of a slot on each wrong rank stand; None where that is not clear."""
    if not all(cut) or all(piece.tensor in ("", members[0].name) for pieces in cut for piece in pieces):
        return None
    sources = {_find_source(slot, pieces) for slot, pieces in zip(members, cut, strict=True)}
    if len(sources) == 1 and (source := sources.pop()):
        return Displaced(source=source, exchanged=_is_exchanged(members[0].name, source, moved))
    worst = max(range(len(members)), key=lambda at: float((members[at].target - members[at].own).norm()))
    return Displaced(pieces=tuple(cut[worst][:_MOST_PIECES]), num_pieces=len(cut[worst]))


def _find_source(slot: Slot, pieces: Sequence[Piece]) -> str:
    """Return the parameter that all of the values are, nothing where they are not those of one."""
    (piece, *others) = pieces
    is_whole = not others and piece.tensor and piece.count == slot.flat.sizes[piece.tensor]
    return piece.tensor if is_whole and piece.tensor != slot.name else ""


def _find_offset(slot: Slot, pieces: Sequence[Piece]) -> int | None:
    """Return by how many elements all values stand further on than they should, None where it is not one number."""
    starts = slot.flat.starts
    offsets = {
        starts[each.tensor] + each.start - starts[slot.name] - each.at for each in pieces if each.tensor
    }
    return offsets.pop() if len(offsets) == 1 else None


def _is_exchanged(name: str, source: str, moved: Mapping[int, Sequence[Slot]]) -> bool:
    """Return whether the tensor that these values are of has those of the one that has them."""
    others = [members for members in moved.values() if members[0].name == source]
    return any(
        each.flat.sizes[name] == len(each.target) and each.has(each.flat.of(name))
        for members in others
        for each in members[:1]
    )


def _describe(way: Way, members: Sequence[Slot], operation: Displaced) -> Displaced:
    """Return an operation with the tokens that it is about, or the ranks that alone have it so."""
    held = {shard.rank for shard in members[0].tensor.shards if shard.region.numel}
    ranks = tuple(sorted({each.rank for each in members}))
    where = () if set(ranks) == held else ranks
    return operation.model_copy(update={"tokens": way.tokens, "added": way.added, "ranks": where})
