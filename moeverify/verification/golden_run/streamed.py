"""A training run in the memory of one layer, for the golden of a model that no device holds.

The run is a list of visits, each of one unit of the model (`streamed_unit`). A visit reads the results of earlier
visits from a folder and writes its own: hidden states or their gradients at the end of the unit, and the
sketches of the tensors that it has seen. An interrupted run goes on after its last visit.

In a step, layers are visited in order for the forward pass, and in reverse order for the backward pass. Rows of
the batch are computed one by one. Weights and the optimizer's state are never stored: a visit in step s computes
the unit's first s backward passes again. Memory is constant in the number of layers; time is linear in it, and
grows with the square of the number of steps.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

import torch
from safetensors.torch import save_file
from torch import Tensor

from moeverify.cases.schema import Recipe
from moeverify.model.transformer import ModelOutput
from moeverify.parallel.regions.observer import INITIAL, Observer
from moeverify.results.checks import Kind
from moeverify.train.clipping import clip_coefficient
from moeverify.train.data import MicroBatch, Share
from moeverify.train.forward import cross_entropy
from moeverify.train.loop import SCALAR
from moeverify.train.objective import GroupSums, Losses, Normalizers, count_valid, router_losses
from moeverify.train.program import ReadableState
from moeverify.train.routing import observe_routing, replay
from moeverify.train.subjects import subject_of
from moeverify.verification.checks.observers import Unseen
from moeverify.verification.golden.mapped import MappedFile
from moeverify.verification.golden.sketched import SketchRecorder
from moeverify.verification.golden_run.streamed_unit import ENDS, Numerics, Unit

_SEEN = "seen/"
_SHAPE = "shape/"

Results = dict[str, Tensor]


@dataclass(frozen=True)
class StreamVisit:
    """One visit: `stage` is embed, forward, head, backward, ends, total or update."""

    step: int
    stage: str
    layer: int = ENDS

    @property
    def name(self) -> str:
        """Return the name of the file with the results."""
        return f"{self.step}.{self.stage}.{self.layer}"


def list_visits(num_layers: int, num_steps: int) -> Iterator[StreamVisit]:
    """Yield the visits of a run in order."""
    for step in range(num_steps):
        yield StreamVisit(step, "embed")
        yield from (StreamVisit(step, "forward", layer) for layer in range(num_layers))
        yield StreamVisit(step, "head")
        yield from (StreamVisit(step, "backward", layer) for layer in reversed(range(num_layers)))
        yield StreamVisit(step, "ends")
        yield StreamVisit(step, "total")
    yield from (StreamVisit(num_steps, "update", layer) for layer in (ENDS, *range(num_layers)))


@dataclass
class StreamedRun:
    """A run of a recipe; `ids` replaces the routers' choice by the choice of a golden.

    `on_visit` gets each visit with its seconds when it has ended; 0 for a visit of an earlier process.
    """

    recipe: Recipe
    numerics: Numerics
    device: torch.device
    folder: Path
    recorder: SketchRecorder = field(default_factory=SketchRecorder)
    ids: ReadableState | None = None
    on_visit: Callable[[StreamVisit, float], None] = lambda visit, seconds: None

    def __post_init__(self) -> None:
        """Read the reference model of the recipe."""
        spec = self.recipe.model.reference
        assert spec is not None
        self._spec, self._moe = spec, spec.moe
        self._files: dict[str, MappedFile] = {}
        self._observer: Observer = Unseen()

    def run(self) -> None:
        """Make all visits that the folder has no results of."""
        self.folder.mkdir(parents=True, exist_ok=True)
        for visit in list_visits(self._spec.num_layers, self.recipe.steps):
            path = self.folder / f"{visit.name}.safetensors"
            if path.exists():
                self._restore(MappedFile(path))
                self.on_visit(visit, 0.0)
                continue
            began = time.monotonic()
            self._observer = self.recorder
            found = getattr(self, f"_{visit.stage}")(visit)
            for key, tensor in self.recorder.take_new().items():
                found[_SEEN + key] = tensor
                shape = self.recorder.shapes.get(key.partition("/")[2])
                if shape is not None:
                    found[_SHAPE + key] = torch.tensor(shape, dtype=torch.int64)
            partial = path.with_suffix(f".{os.getpid()}")
            save_file({key: tensor.detach().cpu().contiguous() for key, tensor in found.items()}, partial)
            partial.replace(path)
            self.on_visit(visit, time.monotonic() - began)

    def _restore(self, file: MappedFile) -> None:
        keys = file.keys()
        found = {key: file.whole(key).clone() for key in keys}
        seen = {key.removeprefix(_SEEN): each for key, each in found.items() if key.startswith(_SEEN)}
        sizes = {key.removeprefix(_SHAPE): each for key, each in found.items() if key.startswith(_SHAPE)}
        shapes = {key.partition("/")[2]: tuple(each.tolist()) for key, each in sizes.items()}
        self.recorder.restore(seen, shapes)

    def _read(self, visit: StreamVisit, key: str, row: int | None = None) -> Tensor:
        """Return a result of an earlier visit, or one row of it, on the device."""
        if visit.name not in self._files:
            self._files[visit.name] = MappedFile(self.folder / f"{visit.name}.safetensors")
        tensor = self._files[visit.name].whole(key)
        return (tensor if row is None else tensor[row : row + 1]).to(self.device)

    def _input(self, visit: StreamVisit) -> StreamVisit:
        """Return the visit with the hidden states that enter the unit of a visit in its step."""
        layer = self._spec.num_layers - 1 if visit.layer == ENDS else visit.layer - 1
        return StreamVisit(visit.step, "embed" if layer < 0 else "forward", layer)

    def _output(self, visit: StreamVisit) -> StreamVisit:
        """Return the visit with the gradient of the hidden states that leave the unit of a visit."""
        layer = 0 if visit.layer == ENDS else visit.layer + 1
        return (
            StreamVisit(visit.step, "head")
            if layer == self._spec.num_layers
            else StreamVisit(visit.step, "backward", layer)
        )

    def _batches(self, step: int) -> Iterator[MicroBatch]:
        """Yield the rows of the batch, one by one."""
        subject, positions = subject_of(self.recipe), range(self.recipe.data.seq_len)
        for row in range(self.recipe.data.batch):
            yield subject.make_batch(step, Share(range(row, row + 1), positions), self.device)

    def _normalizers(self, step: int) -> Normalizers:
        return count_valid(list(self._batches(step)), GroupSums(), self.recipe.data.batch)

    def _unit(self, visit: StreamVisit) -> Unit:
        """Return the unit of a visit in its state before the step of the visit.

        The first visit after a step shows the results of that step.
        """
        unit = Unit(self.recipe, visit.layer, self.numerics, self.device)
        is_first = visit.stage in ("embed", "forward", "update")
        if is_first and visit.step == 0:
            unit.show_initial(self.recorder, INITIAL)
        for step in range(visit.step):
            past = StreamVisit(step, "ends" if visit.layer == ENDS else "backward", visit.layer)
            self._observer = Unseen()
            self._add_gradients(unit, past)
            shown: Observer = self.recorder if is_first and step == visit.step - 1 else Unseen()
            total = StreamVisit(step, "total")
            unit.update(self._read(total, "norm"), self._counts(past), shown)
        self._observer = self.recorder
        return unit

    def _counts(self, visit: StreamVisit) -> list[Tensor]:
        """Return the counts (E) of the router of a layer in a step; empty without a router."""
        has_router = (
            visit.layer != ENDS and self._moe is not None and visit.layer >= self._spec.num_dense_layers
        )
        return [self._read(StreamVisit(visit.step, "forward", visit.layer), "counts")] if has_router else []

    def _pass(self, unit: Unit, batch: MicroBatch, x: Tensor, step: int) -> ModelOutput:
        if self.ids is not None:
            replay(self.recipe, unit.program.routers, batch, self.ids, step, self.device)
        output: ModelOutput = unit.stage(x, batch.positions, batch.valid)
        return output

    def _embed(self, visit: StreamVisit) -> Results:
        module = self._unit(visit).embedding()
        with torch.no_grad():
            return {
                "x": torch.cat([module(batch.tokens).logits.cpu() for batch in self._batches(visit.step)])
            }

    def _forward(self, visit: StreamVisit) -> Results:
        unit = self._unit(visit)
        rows: list[Tensor] = []
        counts: list[Tensor] = []
        for number, batch in enumerate(self._batches(visit.step)):
            x = self._read(self._input(visit), "x", number)
            with torch.no_grad():
                rows.append(self._pass(unit, batch, x, visit.step).logits.cpu())
            seen = observe_routing(self.recipe, unit.program, batch, self.recorder, visit.step, self.ids)
            counts = [old + new for old, new in zip(counts, seen, strict=True)] if counts else seen
        found = {"x": torch.cat(rows)}
        return found | ({"counts": counts[0]} if counts else {})

    def _head(self, visit: StreamVisit) -> Results:
        """Compute the losses of the tokens, and the gradient of the hidden states that enter the head."""
        unit = self._unit(visit)
        for shard in unit.program.shards:
            shard.tensor.requires_grad_(False)
        normalizers = self._normalizers(visit.step)
        total = torch.zeros((), dtype=torch.float64)
        rows = []
        for number, batch in enumerate(self._batches(visit.step)):
            x = self._read(self._input(visit), "x", number).requires_grad_()
            token_loss = cross_entropy(unit.stage(x).logits, batch.targets)
            loss = token_loss.sum() / normalizers.num_valid
            torch.autograd.backward(loss)
            assert x.grad is not None
            rows.append(x.grad.cpu())
            total += loss.detach().to(torch.float64).cpu()
            region = batch.share.region(self.recipe.data)
            self.recorder.observe(visit.step, Kind.TOKEN_LOSS, "lm", token_loss, region)
        return {"dx": torch.cat(rows), "lm": total}

    def _backward(self, visit: StreamVisit) -> Results:
        unit = self._unit(visit)
        found = self._add_gradients(unit, visit)
        return found | {"squares": unit.show_gradients(self.recorder, visit.step)}

    _ends = _backward

    def _add_gradients(self, unit: Unit, visit: StreamVisit) -> Results:
        """Add the gradients of a step to a unit; return that of its input, and the router's losses."""
        if visit.layer == ENDS:
            return self._add_gradients_of_ends(unit, visit)
        rows, sums = [], torch.zeros(2, dtype=torch.float64)
        normalizers = self._normalizers(visit.step)
        counts = self._counts(visit)
        for number, batch in enumerate(self._batches(visit.step)):
            x = self._read(self._input(visit), "x", number).requires_grad_()
            output = self._pass(unit, batch, x, visit.step)
            tensors, gradients = [output.logits], [self._read(self._output(visit), "dx", number)]
            if output.routers and self._moe is not None:
                whole = GroupSums(over_batch=counts[0].view_as)
                losses = router_losses(self._moe, output.routers, batch, normalizers, whole)
                tensors.append(sum(losses, torch.zeros_like(losses[0])))
                gradients.append(torch.ones_like(tensors[1]))
                sums += torch.stack([loss.detach() for loss in losses]).to(torch.float64).cpu()
            torch.autograd.backward(tensors, gradients)
            assert x.grad is not None
            rows.append(x.grad.cpu())
        return {"dx": torch.cat(rows), "balance": sums[0].clone(), "z": sums[1].clone()}

    def _add_gradients_of_ends(self, unit: Unit, visit: StreamVisit) -> Results:
        normalizers = self._normalizers(visit.step)
        for number, batch in enumerate(self._batches(visit.step)):
            x = self._read(self._input(visit), "x", number)
            loss = cross_entropy(unit.stage(x).logits, batch.targets).sum() / normalizers.num_valid
            torch.autograd.backward(loss)
            embedded = unit.embedding()(batch.tokens).logits
            embedded.backward(self._read(self._output(visit), "dx", number))
        return {}

    def _total(self, visit: StreamVisit) -> Results:
        """Add up the losses and the norm of all gradients."""
        step = visit.step
        layers = [StreamVisit(step, "backward", layer) for layer in range(self._spec.num_layers)]
        squares = [self._read(each, "squares").cpu() for each in (StreamVisit(step, "ends"), *layers)]
        lm = self._read(StreamVisit(step, "head"), "lm").cpu()
        balance, z = (
            torch.stack([self._read(each, key).cpu() for each in layers]).sum() for key in ("balance", "z")
        )
        for name, value in Losses(lm, balance, z).named().items():
            self.recorder.observe(step, Kind.LOSS, name, value, SCALAR)
        norm = torch.stack(squares).sum().sqrt()
        self.recorder.observe(step, Kind.GRADIENT_NORM, "total", norm, SCALAR)
        if self.recipe.optimizer.clip_norm is not None:
            coefficient = clip_coefficient(norm, self.recipe.optimizer.clip_norm)
            self.recorder.observe(step, Kind.GRADIENT_NORM, "clip_coefficient", coefficient, SCALAR)
        return {"norm": norm}

    def _update(self, visit: StreamVisit) -> Results:
        self._unit(visit)
        return {"done": torch.ones(())}
