"""On every rank: train under one layout and save, or load under another, compare bit for bit, and train on.

The saving layout also writes what it holds by a way of its own (`Held`), which has nothing of the checkpoint's
code: gathered piece by piece on rank 0 into whole tensors. That is what a load is compared with.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from moeverify.case.schema import Case
from moeverify.checkpoint.load import load, read_facts
from moeverify.checkpoint.save import save, save_async
from moeverify.checks.identity import hash_experts, merge_hashes
from moeverify.compare.comparison import Comparison
from moeverify.compare.difference import fingerprint_bits
from moeverify.errors import FormatError
from moeverify.faults.injection import injected
from moeverify.golden.store import GoldenWriter, StoredGolden
from moeverify.launch.plan import write_atomically
from moeverify.layout.local_shard import LocalShard
from moeverify.layout.region import Region
from moeverify.parallel.meshes import build_meshes
from moeverify.train.assemble import assemble_parallel
from moeverify.train.loop import train_step
from moeverify.train.optimizer import optimizer_state
from moeverify.train.random import PREFIX, read_generators, seed_generators, write_generators
from moeverify.train.state import TrainingState
from moeverify.train.subjects import subject_of
from moeverify.worker.reload import Loaded, conclude_load, judge_load
from moeverify.worker.verify import BitRecorder, gather_on_first, replays_routing

_OTHER_SEED = 1 << 20
"""Added to the seed of a model that is loaded into, so that what was not loaded shows."""

_BATCH_BYTES = 1 << 26
"""How much rank 0 is sent at a time; a collective for each tensor would take longer than the training."""

SCALAR = Region.whole(())


def save_case(
    case: Case, golden: StoredGolden, device: torch.device, folder: Path, fault: str | None
) -> dict[str, Any] | None:
    """Train, save after the case's step, train on to the end; leave everything in `folder`.

    Collective: all ranks of the default process group, which has as many ranks as the layout.
    """
    with injected(fault):
        seed_generators(case.recipe.seed, 0, dist.get_rank())
        state = _begin(case, device)
        recorder = BitRecorder()
        while state.step < case.checkpoint.after:
            _step(case, state, golden, recorder)
        facts = {**state.facts(), "layout": describe(case), "ranks": dist.get_world_size()}
        generators = read_generators(dist.get_rank(), device)
        _keep(folder / "held", state, generators)
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
    return {"checks": [], "findings": [], "losses": []} if dist.get_rank() == 0 else None


def describe(case: Case) -> str:
    """Return what a rank's generators belong to: the layout, with its defaults left out."""
    return json.dumps(case.layout.model_dump(mode="json", exclude_defaults=True), sort_keys=True)


def _begin(case: Case, device: torch.device, seed: int | None = None) -> TrainingState:
    """Return the state before the first step; with `seed` of a model whose initial values are others."""
    recipe = case.recipe if seed is None else case.recipe.model_copy(update={"seed": seed})
    program = assemble_parallel(recipe, case.layout, build_meshes(case.layout, device.type), device)
    program.subject = subject_of(case.recipe)  # whose batches are those of the case's seed, not of the other
    return TrainingState.begin(case.recipe, program)


@torch.no_grad()
def _spoil(state: TrainingState) -> None:
    """Change all that a load must restore: of a fresh state much is as it was saved, and would need no load."""
    for held in state.tensors():
        held.local().add_(1)
    for group in state.optimizer.param_groups:
        for key in ("lr", "weight_decay", "initial_lr"):
            group[key] = 3.0 * group[key] + 1.0
    state.schedule.base_lrs = [group["initial_lr"] for group in state.optimizer.param_groups]


def _step(case: Case, state: TrainingState, golden: StoredGolden, observer: Any) -> None:
    train_step(state, observer, golden if replays_routing(case) else None)
    torch.rand(())  # what dropout would do: the state of the generator says how many steps it has seen


def list_state(
    state: TrainingState, generators: Sequence[LocalShard] = ()
) -> Iterator[tuple[str, Tensor, Region]]:
    """Yield (name, local values, region) of everything that a checkpoint must restore.

    A list of its own: what a checkpoint's list forgets is missed here.
    """
    for kind, listed in (("weight", state.program.shards), ("buffer", state.program.buffers)):
        for held in listed:
            yield f"{kind}/{held.name}", held.local(), held.region
    for name, local, region in optimizer_state(state.optimizer, state.program.shards):
        yield f"optimizer/{name}", local, region
    for held in generators:
        yield held.name, held.local(), held.region
    for name, value in state.numbers().items():
        yield name, torch.tensor(value, dtype=torch.float64), SCALAR


def _keep(folder: Path, state: TrainingState, generators: Sequence[LocalShard]) -> None:
    """Write all whole tensors and numbers as they are now, on rank 0. Collective: all ranks."""
    mine = {name: (region, local.cpu()) for name, local, region in list_state(state, generators)}
    sizes = {name: local.nbytes for name, (_, local) in mine.items()}
    known: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(known, sizes)
    shares = gather_on_first(_hash_all(state))
    with GoldenWriter(folder) as writer:
        for names in _fill_batches(known):
            # Copies: a view would take all of its storage along, under FSDP1 the whole flat parameter.
            sent = {name: (mine[name][0], mine[name][1].clone()) for name in names if name in mine}
            for found in gather_on_first(sent) or ():
                for name, (region, local) in found.items():
                    writer.observe(state.step - 1, "loaded", name, local.reshape(region.local_shape), region)
        if shares is not None:
            writer.finish({}, {"experts": merge_hashes(shares)})
    dist.barrier()


def _fill_batches(known: Sequence[dict[str, int]]) -> Iterator[list[str]]:
    """Yield the names of all ranks, so many at a time that rank 0 gets a bounded number of bytes."""
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


def _hash_all(state: TrainingState) -> dict[str, tuple[str, list[int]]]:
    """Return this rank's share of the hash of each expert, of weights and moments."""
    subject = state.program.subject
    return {
        name: (region.key, hash_experts(local, region).tolist())
        for name, local, region in list_state(state)
        if subject.count_experts(name, region.shape) and region.numel
    }


def load_case(
    case: Case, golden: StoredGolden, device: torch.device, folder: Path, fault: str | None
) -> dict[str, Any] | None:
    """Load what another case has left in `folder`, compare it, train on to the end, and judge all on rank 0.

    Collective: all ranks of the default process group, which has as many ranks as the layout.
    """
    rank = dist.get_rank()
    with injected(fault):
        state = _begin(case, device, seed=case.recipe.seed + _OTHER_SEED)
        state.materialize()
        _spoil(state)
        seed_generators(case.recipe.seed + _OTHER_SEED, 0, rank)
        before = {name: local.clone() for name, local, _ in list_state(state)}
        try:
            facts, states = resume(state, folder / "checkpoint", describe(case), device)
        except FormatError as error:
            return {"error": f"not loaded: {error}"}
        same = facts["layout"] == describe(case)
        held = StoredGolden(folder / "held")
        comparison = Comparison(held)
        others: list[tuple[int, str, str]] = []
        generators = read_generators(rank, device) if same else []
        loaded = [(name, local.clone(), region) for name, local, region in list_state(state, generators)]
        for name, local, region in loaded:
            comparison.observe(case.checkpoint.after - 1, "loaded", name, local, region)
            wanted = held.read(case.checkpoint.after - 1, "loaded", name, region)
            if wanted is not None and region.numel and not _same_bits(wanted, local):
                others.append((case.checkpoint.after - 1, "loaded", name))
        shares = _hash_all(state)
        before |= {generator.name: generator.local() for generator in states}
        further = Comparison(golden)
        while state.step < case.recipe.steps and state.step >= case.checkpoint.after:
            _step(case, state, golden, further)
    entries = [*comparison.entries(), *further.entries()]
    resumed = _compare_further(folder / f"further-{rank}.json", entries) if same else None
    gathered = gather_on_first(Loaded(entries, others, resumed, shares))
    judgement = None if gathered is None else judge_load(case, golden, held, gathered)
    findings = conclude_load(case, golden, held, judgement, loaded, before)
    if judgement is None:
        return None
    return {
        "checks": [check.model_dump(mode="json") for check in judgement.checks],
        "findings": [finding.model_dump(mode="json") for finding in findings],
        "losses": [
            (entry.difference.expected_at, entry.difference.actual_at)
            for entry in entries
            if entry.kind == "loss" and entry.name == "total"
        ],
    }


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


def _same_bits(wanted: Tensor, local: Tensor) -> bool:
    actual = local.cpu().reshape(wanted.shape)
    return wanted.dtype == actual.dtype and bool(fingerprint_bits(wanted) == fingerprint_bits(actual))


def _compare_further(path: Path, entries: Sequence[Any]) -> list[tuple[int, str, str]]:
    """Return what came out with other bits than in the run that was not interrupted, on this rank."""
    known = [(tuple(key), bits) for *key, bits in json.loads(path.read_text())]
    shown = [entry for entry in entries if entry.kind != "loaded"]
    if len(known) != len(shown):
        return [(-1, "step", "number of steps")]
    return [
        (entry.step, entry.kind, entry.name)
        for (_, bits), entry in zip(known, shown, strict=True)
        if bits is not None and entry.state != "absent" and bits != entry.bits
    ]
