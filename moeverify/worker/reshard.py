"""On every rank: train under one layout and save, or load under another, compare bit for bit, and train on.

The saving layout also writes its state by a way of its own (`_keep`), which has nothing of the checkpoint's code:
gathered tensor by tensor on rank 0 into whole tensors. That is what a load is compared with, so that a fault of the
checkpoint's code cannot hide in both.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from moeverify.case.schema import Case
from moeverify.checkpoint.load import load, read_facts
from moeverify.checkpoint.save import save, save_async
from moeverify.checks.base import RankLoad, Shown
from moeverify.checks.bounds import Bounds
from moeverify.checks.experts import hash_state, merge_hashes
from moeverify.checks.rebound import ReboundWatch
from moeverify.checks.registry import KIND_ORDER, choose_checks
from moeverify.checks.repeat import BitRecorder
from moeverify.compare.assembled import Key, assemble
from moeverify.compare.comparison import Comparison, Entry
from moeverify.compare.gather import gather_on_first
from moeverify.errors import FormatError
from moeverify.faults.injection import injected
from moeverify.golden.store import GoldenWriter, StoredGolden
from moeverify.jobs import Refusal, VerifyResult
from moeverify.launch.plan import write_atomically
from moeverify.layout.local_shard import LocalShard
from moeverify.layout.observer import INITIAL, Named, Observer, show_all
from moeverify.layout.region import Region
from moeverify.parallel.meshes import build_meshes
from moeverify.results.checks import CheckName, Kind
from moeverify.train.assemble import assemble_parallel
from moeverify.train.loop import train_step
from moeverify.train.optimizer import optimizer_state
from moeverify.train.random import PREFIX, read_generators, seed_generators, write_generators
from moeverify.train.state import TrainingState
from moeverify.train.subjects import replays_routing, subject_of
from moeverify.worker.observed import list_coordinates
from moeverify.worker.reload import explain_load
from moeverify.worker.verify import Reports, judge_all, list_names, list_numbers

_OTHER_SEED = 1 << 20
"""Added to the seed of the model that loads, so that parts which were not loaded differ."""

_BATCH_BYTES = 1 << 26
"""How much rank 0 is sent at a time; a collective for each tensor would take longer than the training."""

SCALAR = Region.whole(())


def save_case(
    case: Case, golden: StoredGolden, device: torch.device, folder: Path, fault: str | None
) -> VerifyResult | None:
    """Train, save after the case's step, train on to the end; leave everything in `folder`.

    Collective: all ranks of the default process group, which has as many ranks as the layout.
    """
    with injected(fault):
        seed_generators(case.recipe.seed, 0, dist.get_rank())
        state = _begin(case, device)
        comparison, rebound = Comparison(golden), ReboundWatch(state.program, saves=True)
        _show_initial(state, comparison)
        while state.step < case.checkpoint.after:
            rebound.begin_step(state.step)
            _step(case, state, golden, _SavedStep(comparison, state, case.checkpoint.after - 1))
        rebound.close()
        facts = {**state.facts(), "layout": describe(case, state.step), "ranks": dist.get_world_size()}
        generators = read_generators(dist.get_rank(), device)
        _keep(case, folder / "saved", state, generators)
        tensors = [*state.tensors(), *generators]
        saving = None
        if case.checkpoint.asynchronous:
            saving = save_async(folder / "checkpoint", tensors, facts, dist.new_group(backend="gloo"))
        else:
            save(folder / "checkpoint", tensors, facts)
        recorder = BitRecorder()
        while state.step < case.recipe.steps:
            _step(case, state, golden, recorder)
        if saving is not None:
            saving.wait()
    further = [[*key, bits] for key, bits in recorder.hashes()]
    write_atomically(folder / f"further-{dist.get_rank()}.json", json.dumps(further))
    return _judge_save(case, golden, list(comparison.entries()), rebound)


class _SavedStep:
    """Compares steps with the golden, and in the last step before the save the buffers as they are saved."""

    def __init__(self, comparison: Comparison, state: TrainingState, last: int) -> None:
        self._comparison, self._state, self._last = comparison, state, last

    def begin_step(self, step: int) -> None:
        """Pass it on; see `Observer`."""
        self._comparison.begin_step(step)

    def observe(self, step: int, kind: str, name: str, local: Tensor | None, region: Region) -> None:
        """Compare one shard; see `Observer`."""
        self.observe_all(step, kind, [(name, local, region)])

    def observe_all(self, step: int, kind: str, shown: Sequence[Named]) -> None:
        """Compare the shards of one kind; see `BulkObserver`."""
        if (step, kind) == (self._last, Kind.BUFFER):
            shown = _name(self._state.program.buffers)
        self._comparison.observe_all(step, kind, shown)


def _name(shards: Sequence[LocalShard]) -> list[Named]:
    return [(shard.name, shard.local(), shard.region) for shard in shards]


def _show_initial(state: TrainingState, observer: Observer) -> None:
    show_all(observer, INITIAL, Kind.INITIAL_WEIGHT, _name(state.program.shards))
    show_all(observer, INITIAL, Kind.INITIAL_BUFFER, _name(state.program.buffers))


def _judge_save(
    case: Case, golden: StoredGolden, entries: Sequence[Entry], rebound: ReboundWatch
) -> VerifyResult | None:
    """Return on rank 0 whether what was saved is the golden's. Collective: all ranks."""
    reports: Reports = {CheckName.REBOUND: rebound.report()}
    gathered = gather_on_first(_Compared(entries, reports))
    if gathered is None:
        return None
    by_rank = [each.entries for each in gathered]
    names = list_names(case, golden, range(INITIAL, case.checkpoint.after))
    shown = _show(case, golden, by_rank, names)
    checks = choose_checks(skip=case.checks.skip)
    judgement = judge_all(checks, shown, [each.reports for each in gathered])
    return VerifyResult(
        checks=judgement.checks,
        findings=judgement.findings,
        losses=tuple(list_numbers(by_rank, Kind.LOSS)),
        gradient_norms=tuple(list_numbers(by_rank, Kind.GRADIENT_NORM)),
    )


def describe(case: Case, step: int = 0) -> str:
    """Return what a rank's generators belong to after some steps: the layout, with its defaults left out.

    Experts that were exchanged are not where the layout has them in the beginning, and so where a load puts them.
    """
    fields = case.layout.model_dump(mode="json", exclude_defaults=True)
    done = [after for after in case.layout.exchange if int(after) <= step]
    if case.layout.rebalance is not None:
        done += map(str, range(case.layout.rebalance.every, step + 1, case.layout.rebalance.every))
    return json.dumps({**fields, "exchanged": done} if done else fields, sort_keys=True)


def _begin(case: Case, device: torch.device, seed: int | None = None) -> TrainingState:
    """Return the state before the first step; with a `seed`, of a model with other initial values."""
    recipe = case.recipe if seed is None else case.recipe.model_copy(update={"seed": seed})
    program = assemble_parallel(recipe, case.layout, build_meshes(case.layout, device.type), device)
    program.subject = subject_of(case.recipe)  # the batches are those of the case's seed
    return TrainingState.begin(case.recipe, program)


@torch.no_grad()
def _spoil(state: TrainingState) -> None:
    """Change everything that a load must restore, since much of a fresh state equals what was saved."""
    for shard in state.tensors():
        shard.local().add_(1)
    for group in state.optimizer.param_groups:
        for key in ("lr", "weight_decay", "initial_lr"):
            group[key] = 3.0 * group[key] + 1.0
    state.schedule.base_lrs = [group["initial_lr"] for group in state.optimizer.param_groups]


def _order_buckets(case: Case, state: TrainingState, golden: StoredGolden) -> None:
    """Train a step that the load undoes, so that DDP's buckets are those of a run that has begun.

    DDP orders its buckets anew after its first backward pass, by when gradients were ready. A sum over more than
    two ranks adds in an order that depends on the place in the bucket: a run that goes on and a run that has just
    been started differ in the last bits. Source: `rebuild_buckets` in torch/csrc/distributed/c10d/reducer.cpp.
    """
    _step(case, state, golden, BitRecorder())
    state.step = state.position = 0


def _step(case: Case, state: TrainingState, golden: StoredGolden, observer: Observer) -> None:
    train_step(state, observer, golden if replays_routing(case.recipe) else None)
    torch.rand(())  # what dropout would do: the state of the generator says how many steps it has seen


def list_state(
    state: TrainingState, generators: Sequence[LocalShard] = ()
) -> Iterator[tuple[str, Tensor, Region]]:
    """Yield (name, local values, region) of everything that a checkpoint must restore.

    It is not the checkpoint's own list, and shows what that forgets. Weights and buffers are those that the modules
    have, also where they were bound to other tensors than a checkpoint has.
    """
    for kind, listed in (("weight", state.program.live_shards()), ("buffer", state.program.live_buffers())):
        for shard in listed:
            yield f"{kind}/{shard.name}", shard.local(), shard.region
    for name, local, region in optimizer_state(state.optimizer, state.program.shards):
        yield f"optimizer/{name}", local, region
    for shard in generators:
        yield shard.name, shard.local(), shard.region
    for name, value in state.numbers().items():
        yield name, torch.tensor(value, dtype=torch.float64), SCALAR


def _keep(case: Case, folder: Path, state: TrainingState, generators: Sequence[LocalShard]) -> None:
    """Write all whole tensors and numbers as they are now, on rank 0. Collective: all ranks."""
    mine: dict[str, list[tuple[Region, Tensor]]] = {}
    for name, local, region in list_state(state, generators):
        mine.setdefault(name, []).append((region, local.cpu()))
    sizes = {name: sum(local.nbytes for _, local in parts) for name, parts in mine.items()}
    known: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(known, sizes)
    shares = gather_on_first(hash_state(case, list_state(state)))
    with GoldenWriter(folder) as writer:
        for names in _fill_batches(known):
            # Copies: a view would take all of its storage along, under FSDP1 the whole flat parameter.
            sent = [(name, region, local.clone()) for name in names for region, local in mine.get(name, ())]
            for found in gather_on_first(sent) or ():
                for name, region, local in found:
                    writer.observe(
                        state.step - 1, Kind.LOADED, name, local.reshape(region.local_shape), region
                    )
        if shares is not None:
            writer.finish({}, {CheckName.EXPERTS: merge_hashes(shares)})
    dist.barrier()


def _fill_batches(known: Sequence[dict[str, int]]) -> Iterator[list[str]]:
    """Yield batches of the names of all ranks, so that rank 0 gets a bounded number of bytes at a time."""
    totals: dict[str, int] = {}
    for sizes in known:
        for name, size in sizes.items():
            totals[name] = totals.get(name, 0) + size
    batch: list[str] = []
    room = _BATCH_BYTES
    for name, size in totals.items():
        if batch and size > room:
            yield batch
            batch, room = [], _BATCH_BYTES
        batch.append(name)
        room -= size
    yield batch


@dataclass(frozen=True)
class _Compared:
    """What rank 0 gets of one rank after a save or a load: its comparisons, and the reports of the checks."""

    entries: Sequence[Entry]
    reports: Reports


def load_case(
    case: Case, golden: StoredGolden, device: torch.device, folder: Path, fault: str | None
) -> VerifyResult | Refusal | None:
    """Load what another case has left in `folder`, compare it, train on to the end, and judge all on rank 0.

    Collective: all ranks of the default process group, which has as many ranks as the layout.
    """
    rank, saved_step = dist.get_rank(), case.checkpoint.after - 1
    with injected(fault):
        state = _begin(case, device, seed=case.recipe.seed + _OTHER_SEED)
        if case.layout.data_parallel == "ddp" and case.checkpoint.after > 0:
            _order_buckets(case, state, golden)
        state.materialize()
        _spoil(state)
        seed_generators(case.recipe.seed + _OTHER_SEED, 0, rank)
        before = {(name, region.key): local.clone() for name, local, region in list_state(state)}
        try:
            facts, states = resume(state, folder / "checkpoint", describe(case), device)
        except FormatError as error:
            return Refusal(error=f"not loaded: {error}")
        is_same_layout = facts["layout"] == describe(case)
        saved = StoredGolden(folder / "saved")
        comparison = Comparison(saved)
        generators = read_generators(rank, device) if is_same_layout else []
        loaded = [(name, local.clone(), region) for name, local, region in list_state(state, generators)]
        for name, local, region in loaded:
            comparison.observe(saved_step, Kind.LOADED, name, local, region)
        before |= {(each.name, each.region.key): each.local() for each in states}
        further = Comparison(golden)
        while state.step < case.recipe.steps and state.step >= case.checkpoint.after:
            _step(case, state, golden, further)
    entries = [*comparison.entries(), *further.entries()]
    uninterrupted = _read_bits(folder / f"further-{rank}.json") if is_same_layout else None
    seen = RankLoad(case, loaded, saved, entries, uninterrupted)
    checks = choose_checks(skip=case.checks.skip)
    reports: Reports = {check.name: report for check in checks if (report := check.inspect(seen)) is not None}
    gathered = gather_on_first(_Compared(entries, reports))
    judgement = None
    if gathered is not None:
        shown = _show_load(case, golden, saved, [each.entries for each in gathered])
        judgement = judge_all(checks, shown, [each.reports for each in gathered])
    findings = explain_load(case, golden, saved, judgement, loaded, before)
    if judgement is None:
        return None
    return VerifyResult(
        checks=judgement.checks,
        findings=tuple(findings),
        losses=tuple(list_numbers([entries], Kind.LOSS)),
        gradient_norms=tuple(list_numbers([entries], Kind.GRADIENT_NORM)),
    )


def _show_load(
    case: Case, golden: StoredGolden, saved: StoredGolden, by_rank: Sequence[Sequence[Entry]]
) -> Shown:
    """Return what the ranks have shown; they must show all that was saved, and the golden's further steps."""
    after = case.checkpoint.after
    names = list_names(case, golden, range(after, case.recipe.steps))
    pairs = (key.split("/", 1) for key in saved.keys(after - 1))
    # The state of a generator belongs to a rank of a layout, and another layout cannot use it.
    names[after - 1] = {(kind, name) for kind, name in pairs if not name.startswith(PREFIX)}
    return _show(case, golden, by_rank, names, saved)


def _show(
    case: Case,
    golden: StoredGolden,
    by_rank: Sequence[Sequence[Entry]],
    names: Mapping[int, set[tuple[str, str]]],
    saved: StoredGolden | None = None,
) -> Shown:
    return Shown(
        case=case,
        coordinates=list_coordinates(case),
        tensors=assemble(by_rank, KIND_ORDER),
        bounds=Bounds(case.checks.tolerance, case.recipe.precision, golden.noise),
        golden_names=dict(sorted(names.items())),
        saved=saved,
        own_results=golden.own_results,
    )


def resume(
    state: TrainingState, checkpoint: Path, layout: str, device: torch.device
) -> tuple[dict[str, Any], list[LocalShard]]:
    """Load a checkpoint into a state; return its facts, and the generators' states as they were before.

    Raises: FormatError. Collective: all ranks.
    """
    rank = dist.get_rank()
    facts = dict(read_facts(checkpoint))
    before = read_generators(rank, device)
    states = read_generators(rank, device) if facts["layout"] == layout else []
    load(
        checkpoint,
        [*state.tensors(), *states],
        recipe=state.recipe.fingerprint(),
        optional=PREFIX,
    )
    problem = ""
    try:
        state.restore(facts)
    except FormatError as error:
        problem = str(error)
    problems: list[str] = [""] * dist.get_world_size()
    dist.all_gather_object(problems, problem)
    if any(problems):  # on every rank, so that none goes on alone
        raise FormatError(f"{checkpoint}: {next(filter(None, problems))}")
    if states:
        write_generators(states, device)
    else:
        seed_generators(state.recipe.seed, state.step, rank)
    return facts, before


def _read_bits(path: Path) -> list[tuple[Key, int | None]]:
    """Return what a rank has observed after the save, with the hashes of its bits."""
    return [((step, kind, name), bits) for step, kind, name, bits in json.loads(path.read_text())]
