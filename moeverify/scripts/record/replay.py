"""Batches and generator states that the ranks of a recorded run drew, for a run of one device."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import FrameType

import torch
from torch import Tensor

from moeverify.errors import FormatError
from moeverify.scripts.record.draw import find_draw, is_input
from moeverify.scripts.record.lines import Drawn
from moeverify.scripts.record.rank_file import RankFile
from moeverify.scripts.record.read import RankRecord, RecordedRun
from moeverify.verification.compare.difference import fingerprint_bits

_GENERATOR = "generator "
_Key = tuple[int, int, str]  # step, number of the model, name of the tensor


@dataclass(frozen=True)
class Pass:
    """A forward pass of a model: its step, its number in the step, and the number of the model."""

    step: int
    forward: int
    model: int


def keep_batch(
    file: RankFile, limit: int, place: Pass, batch: Mapping[str, Tensor], frame: FrameType | None
) -> None:
    """Write the tensors of a batch up to `limit` bytes, and the states of torch's generators.

    `frame` is a frame below the script's call of the model.

    Raises: OSError when writing fails.
    """
    states = {f"{_GENERATOR}{name}": state for name, state in _read_generators().items()} if batch else {}
    for name, tensor in (*batch.items(), *states.items()):
        if tensor.numel() * tensor.element_size() <= limit:
            line = {"step": place.step, "forward": place.forward, "model": place.model, "name": name}
            line |= {"site": find_draw(frame, tensor) if is_input(name) else ""}
            line |= {"shape": tuple(tensor.shape), "dtype": str(tensor.dtype).removeprefix("torch.")}
            bits = int(fingerprint_bits(tensor)) if tensor.numel() else 0
            file.add(Drawn.model_validate({**line, "offset": file.keep(tensor), "bits": bits}))


class Replay:
    """The batches of all ranks in the order of their forward passes, and in a pass in the order of ranks.

    Ranks with equal batches work on one batch together, which is replayed once. `has_mixed_passes` is
    whether a pass had the rows of several recorded ones, whose generators cannot be replayed.
    """

    def __init__(self, folder: Path) -> None:
        self.run = RecordedRun.read(folder)
        self.has_mixed_passes = False
        self._left: dict[_Key, list[tuple[RankRecord, Drawn, int]]] = {}
        for step in self.run.steps:
            self._left |= _list_sources(self.run, step)

    def describe(self) -> str:
        """Return the ranks and the lines of the script that drew the batches."""
        found = {rows.site for rank in self.run.ranks for rows in rank.rows}
        found |= {line.site for rank in self.run.ranks for line in rank.drawn}
        lines = sorted(filter(None, found))
        num_ranks = self.run.world_size
        return f"{num_ranks} ranks of {self.run.folder.name} drew{' at ' if lines else ''}{', '.join(lines)}"

    @torch.no_grad()
    def replace(self, place: Pass, batch: Mapping[str, Tensor]) -> None:
        """Give the next rows of the ranks to the tensors of a batch, and a pass its generator states.

        Every tensor gets new memory, since the old memory may hold a whole dataset.

        Raises: FormatError if the ranks drew too few rows, or rows of another shape.
        """
        new: list[tuple[Tensor, Tensor]] = []
        sources: set[tuple[int, int]] = set()
        for name, tensor in batch.items():
            taken = list(self._take(place, name, tensor))
            if not taken:
                continue  # a variable that the ranks did not have
            is_whole = len(taken) == 1 and len(taken[0][2]) == taken[0][1].shape[0]
            sources |= {(rank.rank, line.forward) if is_whole else (-1, -1) for rank, line, _ in taken}
            values = torch.cat([rows for _, _, rows in taken])
            new.append((tensor, values.to(tensor.device, tensor.dtype)))
        for tensor, values in new:
            tensor.data = values
        if len(sources) == 1 and (-1, -1) not in sources:
            self._set_generators(place, *next(iter(sources)))
        elif sources:
            self.has_mixed_passes = True

    def _take(self, place: Pass, name: str, tensor: Tensor) -> Iterator[tuple[RankRecord, Drawn, Tensor]]:
        """Yield the next `len(tensor)` rows of a tensor; nothing for a variable with too few rows."""
        left = self._left.get((place.step, place.model, name), [])
        wanted = len(tensor)
        num_left = sum(line.shape[0] - start for _, line, start in left)
        has_shape = all(line.shape[1:] == tuple(tensor.shape[1:]) for _, line, _ in left)
        if num_left < wanted or not has_shape:
            if is_input(name):
                raise _explain(self.run, place, name, tensor, left)
            return
        while wanted:
            rank, line, start = left.pop(0)
            stop = min(start + wanted, line.shape[0])
            yield rank, line, rank.read_drawn(line)[start:stop]
            wanted -= stop - start
            if stop < line.shape[0]:
                left.insert(0, (rank, line, stop))

    def _set_generators(self, place: Pass, rank: int, forward: int) -> None:
        for line in self.run.ranks[rank].drawn:
            if (line.step, line.forward, line.model) == (place.step, forward, place.model):
                device = line.name.removeprefix(_GENERATOR) if line.name.startswith(_GENERATOR) else ""
                if device == "cpu":
                    torch.set_rng_state(self.run.ranks[rank].read_drawn(line).clone())
                elif device and torch.get_device_module(device).is_available():
                    state = self.run.ranks[rank].read_drawn(line).clone()
                    torch.get_device_module(device).set_rng_state(state)


def _list_sources(run: RecordedRun, step: int) -> dict[_Key, list[tuple[RankRecord, Drawn, int]]]:
    """Return the recorded tensors of a step by name, in the order of passes and ranks, with a start of 0."""
    batches: dict[object, tuple[RankRecord, list[Drawn]]] = {}
    for rank in run.ranks:
        lines = [each for each in rank.drawn if each.step == step and not each.name.startswith(_GENERATOR)]
        batches.setdefault(tuple((each.name, each.bits) for each in lines), (rank, lines))
    found: dict[_Key, list[tuple[RankRecord, Drawn, int]]] = defaultdict(list)
    for rank, lines in batches.values():
        for line in lines:
            found[step, line.model, line.name].append((rank, line, 0))
    for sources in found.values():
        sources.sort(key=lambda source: (source[1].forward, source[0].rank))
    return dict(found)


def _explain(
    run: RecordedRun, place: Pass, name: str, tensor: Tensor, left: Sequence[tuple[RankRecord, Drawn, int]]
) -> FormatError:
    if place.step not in run.steps:
        return FormatError(f"{run.folder} has no step {place.step} to replay", "record the same --steps")
    num_left = sum(line.shape[0] - start for _, line, start in left)
    shapes = " or ".join(sorted({str(line.shape[1:]) for _, line, _ in left})) or str(tuple(tensor.shape[1:]))
    return FormatError(
        f"replay: step {place.step} asks for {len(tensor)} rows {tuple(tensor.shape[1:])} of {name}, and {num_left} "
        f"rows {shapes} are left of those that the ranks of {run.folder} drew",
        "give one device as many rows in a step as all ranks together",
    )


def _read_generators() -> dict[str, Tensor]:
    states = {"cpu": torch.get_rng_state()}
    if torch.accelerator.is_available():
        device = torch.accelerator.current_accelerator()
        module = torch.get_device_module(device)
        if device is not None and getattr(module, "is_initialized", lambda: True)():
            states[device.type] = module.get_rng_state()
    return states
