"""Save and load jobs: train under one layout and save; load under another, compare bit for bit and train on.

The saving layout also writes its state through `_keep`, which shares no code with the checkpoint: it
gathers each tensor on rank 0 into a whole tensor. Loads are compared with this copy, so that a fault of the
checkpoint code cannot affect both sides.
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

from moeverify.cases.schema import Case
from moeverify.errors import FormatError
from moeverify.faults.injection import injected
from moeverify.parallel.meshes import build_meshes
from moeverify.parallel.regions.local_shard import LocalShard
from moeverify.parallel.regions.observer import INITIAL, Named, Observer, show_all
from moeverify.parallel.regions.region import Region
from moeverify.results.checks import CheckName, Kind
from moeverify.tools.checkpoint.load import load, read_facts
from moeverify.tools.checkpoint.save import save, save_async
from moeverify.train.assemble import assemble_parallel
from moeverify.train.loop import train_step
from moeverify.train.near_ties import follow_near_ties
from moeverify.train.optimizer import optimizer_state
from moeverify.train.random import PREFIX, read_generators, seed_generators, write_generators
from moeverify.train.state import TrainingState
from moeverify.train.subjects import replays_routing, subject_of
from moeverify.verification.checks.base import RankLoad, ShownTensors
from moeverify.verification.checks.bounds import Bounds
from moeverify.verification.checks.experts import hash_state, merge_hashes
from moeverify.verification.checks.rebound import ReboundWatch
from moeverify.verification.checks.registry import KIND_ORDER, choose_checks
from moeverify.verification.checks.repeat import BitRecorder
from moeverify.verification.compare.assembled import Key, assemble
from moeverify.verification.compare.comparison import ComparedShard, Comparison
from moeverify.verification.compare.gather import gather_on_first
from moeverify.verification.golden.store import GoldenWriter, StoredGolden
from moeverify.verification.jobs import Refusal, VerifyResult
from moeverify.verification.launch.plan import write_atomically
from moeverify.verification.worker.observed import list_coordinates
from moeverify.verification.worker.reload import explain_load
from moeverify.verification.worker.verify import Reports, judge_all, list_names, list_numbers

# Added to the seed of the model that loads, so that parts that are not loaded differ.
_OTHER_SEED = 1 << 20

# Number of bytes that rank 0 gathers at a time; one collective per tensor would be slower than training.
_BATCH_BYTES = 1 << 26

SCALAR = Region.whole(())


def save_case(
    case: Case, golden: StoredGolden, device: torch.device, folder: Path, fault: str | None
) -> VerifyResult | None:
    """Train, save after the case's step, train on to the end and leave all files in `folder`.

    Return the verdicts on rank 0, None elsewhere. Collective: all ranks of the default process group, which
    has as many ranks as the layout.
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
    """Observer that compares steps with the golden.

    In the last step before the save it compares the saved buffers instead of the shown ones.
    """

    def __init__(self, comparison: Comparison, state: TrainingState, last: int) -> None:
        self._comparison, self._state, self._last = comparison, state, last

    def begin_step(self, step: int) -> None:
        """Forward to the comparison; see `Observer`."""
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
    case: Case, golden: StoredGolden, entries: Sequence[ComparedShard], rebound: ReboundWatch
) -> VerifyResult | None:
    """Judge the steps up to the save. Return the verdicts on rank 0. Collective: all ranks."""
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
    """Return a key of the layout that random generator states belong to, after some steps.

    The key is JSON of the layout without its defaults. If experts were exchanged by then, it lists the
    exchanges: these experts are not where the layout initially places them, and so not where a load puts
    them.
    """
    fields = case.layout.model_dump(mode="json", exclude_defaults=True)
    done = [after for after in case.layout.exchange if int(after) <= step]
    if case.layout.rebalance is not None:
        done += map(str, range(case.layout.rebalance.every, step + 1, case.layout.rebalance.every))
    return json.dumps({**fields, "exchanged": done} if done else fields, sort_keys=True)


def _begin(case: Case, device: torch.device, seed: int | None = None) -> TrainingState:
    """Return the state before the first step; with `seed`, of a model with other initial values."""
    recipe = case.recipe if seed is None else case.recipe.model_copy(update={"seed": seed})
    program = assemble_parallel(recipe, case.layout, build_meshes(case.layout, device.type), device)
    program.subject = subject_of(case.recipe)  # make batches with the case's own seed
    return TrainingState.begin(case.recipe, program)


@torch.no_grad()
def _spoil(state: TrainingState) -> None:
    """Change everything that a load must restore, since much of a fresh state equals the saved state."""
    for shard in state.tensors():
        shard.local().add_(1)
    for group in state.optimizer.param_groups:
        for key in ("lr", "weight_decay", "initial_lr"):
            group[key] = 3.0 * group[key] + 1.0
    state.schedule.base_lrs = [group["initial_lr"] for group in state.optimizer.param_groups]


def _order_buckets(case: Case, state: TrainingState, golden: StoredGolden) -> None:
    """Train one step that the load undoes, so that DDP has the bucket order of a running job.

    DDP reorders its buckets after the first backward pass, by the time at which gradients were ready. A sum
    over more than two ranks adds in an order that depends on the place in the bucket. Without this step, a
    resumed run and an uninterrupted run would differ in the last bits. Source: `rebuild_buckets` in
    torch/csrc/distributed/c10d/reducer.cpp.
    """
    _step(case, state, golden, BitRecorder())
    state.step = state.position = 0


def _step(case: Case, state: TrainingState, golden: StoredGolden, observer: Observer) -> None:
    ids = golden if replays_routing(case.recipe) else None
    train_step(state, observer, ids, follow_near_ties(case.recipe, golden, state.program.near_ties))
    torch.rand(())  # advance the generator as dropout would: its state then encodes the number of steps


def list_state(
    state: TrainingState, generators: Sequence[LocalShard] = ()
) -> Iterator[tuple[str, Tensor, Region]]:
    """Yield (name, local values, region) of everything that a checkpoint must restore.

    This list is independent of the checkpoint's own list and so reveals omissions there. It reads weights
    and buffers from the modules, even where these are bound to other tensors than the checkpoint's.
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
    """Write the current whole tensors and numbers on rank 0. Collective: all ranks."""
    mine: dict[str, list[tuple[Region, Tensor]]] = {}
    for name, local, region in list_state(state, generators):
        mine.setdefault(name, []).append((region, local.cpu()))
    sizes = {name: sum(local.nbytes for _, local in parts) for name, parts in mine.items()}
    known: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(known, sizes)
    shares = gather_on_first(hash_state(case, list_state(state)))
    with GoldenWriter(folder) as writer:
        for names in _fill_batches(known):
            # Clone: pickling a view sends its whole storage, which under FSDP1 is the entire flat parameter.
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
    """Yield batches of the names of all ranks, each of a bounded number of bytes on rank 0."""
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
    """Comparisons and check reports that one rank sends to rank 0 after a save or a load."""

    entries: Sequence[ComparedShard]
    reports: Reports


def load_case(
    case: Case, golden: StoredGolden, device: torch.device, folder: Path, fault: str | None
) -> VerifyResult | Refusal | None:
    """Load the state that another case saved in `folder`, compare it, train on and judge on rank 0.

    Return a Refusal if the checkpoint cannot be loaded, and None on other ranks. Collective: all ranks of
    the default process group, which has as many ranks as the layout.
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
    case: Case, golden: StoredGolden, saved: StoredGolden, by_rank: Sequence[Sequence[ComparedShard]]
) -> ShownTensors:
    """Return the tensors of all ranks. Expected names: everything saved, and the golden's further steps."""
    after = case.checkpoint.after
    names = list_names(case, golden, range(after, case.recipe.steps))
    pairs = (key.split("/", 1) for key in saved.keys(after - 1))
    # A generator's state belongs to one rank of one layout; another layout cannot use it.
    names[after - 1] = {(kind, name) for kind, name in pairs if not name.startswith(PREFIX)}
    return _show(case, golden, by_rank, names, saved)


def _show(
    case: Case,
    golden: StoredGolden,
    by_rank: Sequence[Sequence[ComparedShard]],
    names: Mapping[int, set[tuple[str, str]]],
    saved: StoredGolden | None = None,
) -> ShownTensors:
    return ShownTensors(
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
    """Load a checkpoint into a state. Return its facts, and the generators' states before the load.

    Raises: FormatError on all ranks if the checkpoint does not fit on any rank. Collective: all ranks.
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
    if any(problems):  # every rank raises, so that none continues alone
        raise FormatError(f"{checkpoint}: {next(filter(None, problems))}")
    if states:
        write_generators(states, device)
    else:
        seed_generators(state.recipe.seed, state.step, rank)
    return facts, before


def _read_bits(path: Path) -> list[tuple[Key, int | None]]:
    """Return the keys of the tensors that a rank observed after the save, with the hashes of their bits."""
    return [((step, kind, name), bits) for step, kind, name, bits in json.loads(path.read_text())]
