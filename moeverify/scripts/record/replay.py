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
from moeverify.scripts.record.mixed_draws import MixedDraws, States, read_states, set_states
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
    states = {f"{_GENERATOR}{name}": state for name, state in read_states().items()} if batch else {}
    for name, tensor in (*batch.items(), *states.items()):
        if tensor.numel() * tensor.element_size() <= limit:
            line = {"step": place.step, "forward": place.forward, "model": place.model, "name": name}
            line |= {"site": find_draw(frame, tensor) if is_input(name) else ""}
            line |= {"shape": tuple(tensor.shape), "dtype": str(tensor.dtype).removeprefix("torch.")}
            bits = int(fingerprint_bits(tensor)) if tensor.numel() else 0
            file.add(Drawn.model_validate({**line, "offset": file.keep(tensor), "bits": bits}))


class Replay:
    """The batches of all ranks in the order of their forward passes, and in a pass in the order of ranks.

    Ranks with equal batches work on one batch together, which is replayed once. `draws` is the mode for a
    pass with the rows of several recorded ones. `has_mixed_passes` is whether a pass had only parts of
    recorded ones, so that its generators cannot be replayed, or drew other numbers than for its rows. Without
    `mixes` there is no such mode, for a pass within another mode.
    """

    def __init__(self, folder: Path, *, mixes: bool = True) -> None:
        self._mixes = mixes
        self.run = RecordedRun.read(folder)
        self.has_mixed_passes = False
        self.draws: MixedDraws | None = None
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
        sources: set[tuple[tuple[int, int], ...]] = set()
        sizes: list[int] = []
        for name, tensor in batch.items():
            taken = list(self._take(place, name, tensor))
            if not taken:
                continue  # a variable that the ranks did not have
            is_whole = all(len(rows) == line.shape[0] for _, line, rows in taken)
            sources.add(tuple((rank.rank, line.forward) for rank, line, _ in taken) if is_whole else ())
            sizes = sizes or [len(rows) for _, _, rows in taken]
            values = torch.cat([rows for _, _, rows in taken])
            new.append((tensor, values.to(tensor.device, tensor.dtype)))
        for tensor, values in new:
            tensor.data = values
        if len(sources) != 1 or () in sources:
            self.has_mixed_passes |= bool(sources)
            return
        states = [self._read_states(place, *each) for each in sources.pop()]
        if len(states) == 1:
            set_states(states[0])
        elif not self._mixes:
            self.has_mixed_passes = True
        else:
            self.draws = MixedDraws(sizes, states)
            self.draws.__enter__()  # type: ignore[no-untyped-call]

    def leave_model(self) -> None:
        """End the mode of a pass."""
        if self.draws is not None:
            self.draws.__exit__(None, None, None)  # type: ignore[no-untyped-call]
            self.has_mixed_passes |= self.draws.has_others
            self.draws = None

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

    def _read_states(self, place: Pass, rank: int, forward: int) -> States:
        lines = (
            line
            for line in self.run.ranks[rank].drawn
            if (line.step, line.forward, line.model) == (place.step, forward, place.model)
        )
        return {
            line.name.removeprefix(_GENERATOR): self.run.ranks[rank].read_drawn(line)
            for line in lines
            if line.name.startswith(_GENERATOR)
        }


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
