"""Route job: run one batch of a case and follow its tokens through a MoE layer.

The rank that computes a token is read off the experts' inputs and not derived from the layout. An expert's
input row equals the hidden vector of its token bit for bit, so a hash of the row identifies the token.

Letters: N tokens of this rank, k choices, M rows that this rank's experts compute, H hidden.
"""

from __future__ import annotations

import hashlib
import re
from collections import Counter, defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from moeverify.cases.axes.mesh import MeshPlan
from moeverify.cases.schema import Case
from moeverify.faults.injection import injected
from moeverify.model.dispatcher import Dispatcher, ExpertFunction
from moeverify.model.experts import Experts
from moeverify.model.moe import MoELayer
from moeverify.parallel.meshes import build_meshes
from moeverify.parallel.regions.local_shard import logical_name
from moeverify.parallel.regions.region import Region
from moeverify.parallel.regions.unseen import unseen
from moeverify.results.route import Choice, CombineCheck, RouteResult, TokenRoute
from moeverify.train.assemble import assemble_parallel
from moeverify.train.data import MicroBatch
from moeverify.train.loop import make_batches, run_micro_batches, train_step
from moeverify.train.objective import count_valid
from moeverify.train.program import StepInputs, TrainingProgram
from moeverify.train.routers import RouterView
from moeverify.train.state import TrainingState
from moeverify.verification.compare.gather import gather_on_first
from moeverify.verification.launch.world import find_node

_LAYER = re.compile(r"(?:^|\.)layers\.(\d+)\.moe$")
Key = tuple[int, str]
"""(expert, hash of a hidden vector)."""


@dataclass(frozen=True)
class _Token:
    """A token that this rank routes. `routed` (H) float64 is its combined output."""

    row: int
    position: int
    token: int
    is_padding: bool
    experts: tuple[int, ...]
    weights: tuple[float, ...]
    hash: str
    norm: float
    routed: Tensor

    @property
    def place(self) -> tuple[int, int]:
        return self.row, self.position


@dataclass
class _Sighting:
    """Observations of one rank: its tokens, and its experts' rows with their outputs (H) float64."""

    tokens: list[_Token] = field(default_factory=list)
    computed: list[Key] = field(default_factory=list)
    outputs: dict[Key, Tensor] = field(default_factory=dict)
    host: str = ""
    epsilon: float = 0.0


def follow_case(
    case: Case, device: torch.device, *, layer: int, step: int, num_shown: int, fault: str | None
) -> RouteResult | None:
    """Return on rank 0 the routes of the batch of `step` in a layer; None on the other ranks.

    The steps before `step` are trained. Collective: all ranks of the default process group, which has as
    many ranks as the layout.
    """
    # These options run a forward twice or hide modules from hooks. They do not change the routing.
    layout = case.layout.model_copy(update={"compile": "none", "graphs": "none", "recompute": False})
    with injected(fault):
        program = assemble_parallel(case.recipe, layout, build_meshes(layout, device.type), device)
        state = TrainingState.begin(case.recipe, program)
        for _ in range(step):
            train_step(state, _Unobserved())
        batches = make_batches(case.recipe, program, step)
        normalizers = count_valid(batches, program.sums, case.recipe.data.batch)
        program.engine.zero_grad()
        calls = _watch(program, layer, MeshPlan.of(layout).sparse.coordinates(dist.get_rank())["ep"])
        for _ in run_micro_batches(StepInputs(case.recipe, program, batches, normalizers, step)):
            pass
    seen = _Sighting(host=find_node())
    if calls is not None:
        _note_tokens(seen, calls, batches)
        _note_rows(seen, calls)
    _share_outputs(seen, num_shown, has_whole_experts=layout.expert_tp == 1)
    everything = gather_on_first(seen)
    return None if everything is None else _merge(case, everything, layer, step, num_shown)


class _Unobserved:
    """Observer that discards everything."""

    def observe(self, step: int, kind: str, name: str, local: Tensor | None, region: Region) -> None:
        """Do nothing."""

    def begin_step(self, step: int) -> None:
        """Do nothing."""


@dataclass
class _Calls:
    """Calls of one layer's dispatcher and experts in the forward passes of a step, in order."""

    router: RouterView
    experts: Experts
    ep_coordinate: int
    dispatched: list[tuple[Tensor, Tensor, Tensor, Tensor]] = field(default_factory=list)
    computed: list[tuple[Tensor, Tensor, Tensor]] = field(default_factory=list)


def _watch(program: TrainingProgram, layer: int, ep_coordinate: int) -> _Calls | None:
    """Record the calls of a layer's dispatcher and experts. None if this rank has no part of the layer."""
    for name, module in program.model.named_modules():
        found = _LAYER.search(logical_name(name))
        if found is None or int(found[1]) != layer or not isinstance(module, MoELayer):
            continue
        experts = next(each for each in module.modules() if isinstance(each, Experts))
        router = next(view for view in program.routers if view.module is module.router)
        calls = _Calls(router, experts, ep_coordinate)
        module.dispatcher = _WatchedDispatcher(module.dispatcher, calls)

        def note(_: object, args: tuple[Any, ...], output: Tensor, calls: _Calls = calls) -> None:
            calls.computed.append((args[0].detach(), args[1].detach(), output.detach()))

        experts.register_forward_hook(unseen(note))
        return calls
    return None


def _list_experts(calls: _Calls, num_here: int) -> Sequence[int]:
    """Return the model's index of each expert that is stacked on this rank."""
    if calls.experts.row_blocks:
        blocks = sorted(calls.experts.row_blocks, key=lambda block: block.start)
        return [index for block in blocks for index in block.indices]
    is_spread = num_here < calls.router.module.spec.num_experts
    start = calls.ep_coordinate * num_here if is_spread else 0
    return range(start, start + num_here)


class _WatchedDispatcher:
    """Dispatcher wrapper that records inputs and outputs."""

    def __init__(self, dispatcher: Dispatcher, calls: _Calls) -> None:
        self._dispatcher = dispatcher
        self._calls = calls

    def __call__(self, x: Tensor, ids: Tensor, weights: Tensor, experts: ExpertFunction) -> Tensor:
        output = self._dispatcher(x, ids, weights, experts)
        self._calls.dispatched.append((x.detach(), ids.detach(), weights.detach(), output.detach()))
        return output


def _note_tokens(seen: _Sighting, calls: _Calls, batches: Sequence[MicroBatch]) -> None:
    """Record each token that this rank routed, in the order of its micro-batches."""
    for batch, (x, ids, weights, routed) in zip(batches, calls.dispatched, strict=True):
        seen.epsilon = torch.finfo(x.dtype).eps
        positions = calls.router.positions(batch.share.positions)
        places = [(row, position) for row in batch.share.rows for position in positions]
        column = {position: at for at, position in enumerate(batch.share.positions)}
        tokens, valid = batch.tokens.tolist(), batch.valid.tolist()
        norms = x.to(torch.float64).norm(dim=-1).tolist()
        for index, (row, position) in enumerate(places):
            at = (index // len(positions), column[position])
            seen.tokens.append(
                _Token(
                    row=row,
                    position=position,
                    token=tokens[at[0]][at[1]],
                    is_padding=not valid[at[0]][at[1]],
                    experts=tuple(ids[index].tolist()),
                    weights=tuple(weights[index].to(torch.float64).tolist()),
                    hash=_hash(x[index]),
                    norm=norms[index],
                    routed=routed[index].to(torch.float64).cpu(),
                )
            )


def _note_rows(seen: _Sighting, calls: _Calls) -> None:
    """Record each row that an expert of this rank computed. Rows beyond the counts are buffer padding."""
    for x, counts, output in calls.computed:
        experts = _list_experts(calls, len(counts))
        numbers = [
            number for number, count in zip(experts, counts.tolist(), strict=True) for _ in range(count)
        ]
        for index, number in enumerate(numbers):
            key = (number, _hash(x[index]))
            seen.computed.append(key)
            seen.outputs[key] = output[index].to(torch.float64).cpu()


def _hash(vector: Tensor) -> str:
    raw = vector.contiguous().view(torch.uint8).cpu().numpy().tobytes()
    return hashlib.blake2b(raw, digest_size=8).hexdigest()


def _share_outputs(seen: _Sighting, num_shown: int, *, has_whole_experts: bool) -> None:
    """Keep the outputs of tokens that some rank shows; none if outputs are partial sums (expert TP)."""
    wanted: list[set[Key]] = [set()] * dist.get_world_size()
    shown = seen.tokens[:num_shown]
    mine = {(expert, token.hash) for token in shown for expert in token.experts}
    dist.all_gather_object(wanted, mine if has_whole_experts else set())
    everyone = set().union(*wanted)
    seen.outputs = {key: output for key, output in seen.outputs.items() if key in everyone}
    for index, token in enumerate(seen.tokens[num_shown:], num_shown):
        seen.tokens[index] = replace(token, routed=torch.empty(0))


def _merge(case: Case, ranks: Sequence[_Sighting], layer: int, step: int, num_shown: int) -> RouteResult:
    """Join the records of all ranks into the routes of all tokens."""
    sparse, moe = MeshPlan.of(case.layout).sparse, case.recipe.model.moe
    assert moe is not None
    etp = [sparse.coordinates(rank)["etp"] for rank in range(len(ranks))]
    groups = {rank: set(group) for group in sparse.groups("ep") for rank in group}
    owned = _list_once(ranks)
    # Ranks that shard an expert's hidden units compute the same rows: each must compute every copy once.
    matches = [
        _match(owned, {rank: seen.computed for rank, seen in enumerate(ranks) if etp[rank] == place}, groups)
        for place in sorted(set(etp))
    ]
    routes = matches[0][0]
    sent = [[0] * len(ranks) for _ in ranks]
    for rank, _, _, target in routes:
        if target is not None:
            sent[rank][target] += 1
    target_of = {(rank, token.place, expert): target for rank, token, expert, target in routes}
    tokens = [
        TokenRoute(
            rank=rank,
            row=token.row,
            position=token.position,
            token=token.token,
            is_padding=token.is_padding,
            choices=tuple(
                Choice(expert=expert, weight=weight, rank=target_of[rank, token.place, expert])
                for expert, weight in zip(token.experts, token.weights, strict=True)
            ),
            norm=token.norm,
            combined_norm=float(token.routed.norm()),
        )
        for rank, mine in owned.items()
        for token in mine[:num_shown]
    ]
    return RouteResult(
        layer=layer,
        step=step,
        num_experts=moe.num_experts,
        top_k=moe.top_k,
        num_tokens=sum(map(len, owned.values())),
        num_padding=sum(token.is_padding for mine in owned.values() for token in mine),
        tokens=tuple(tokens),
        sent=tuple(map(tuple, sent)),
        computed=tuple(dict(sorted(Counter(key[0] for key in seen.computed).items())) for seen in ranks),
        hosts=tuple(seen.host for seen in ranks),
        num_lost=sum(target is None for found, _ in matches for *_, target in found),
        num_surplus=sum(surplus for _, surplus in matches),
        combine=_check_combine(ranks, owned, num_shown) if case.layout.expert_tp == 1 else None,
    )


def _list_once(ranks: Sequence[_Sighting]) -> dict[int, list[_Token]]:
    """Return the tokens by rank, each token of the batch once: several TP ranks may route the same token."""
    known: set[tuple[int, int]] = set()
    owned: dict[int, list[_Token]] = {}
    for rank, seen in enumerate(ranks):
        owned[rank] = [token for token in seen.tokens if token.place not in known]
        known |= {token.place for token in owned[rank]}
    return owned


# List of (rank of the token, token, expert that it chose, rank that computed it or None).
_Routes = list[tuple[int, _Token, int, int | None]]


def _match(
    owned: dict[int, list[_Token]], computed: dict[int, list[Key]], groups: dict[int, set[int]]
) -> tuple[_Routes, int]:
    """Return the route of each copy, and the number of computed rows that match no copy.

    If hidden vectors are equal, a rank of the token's own EP group is preferred.
    """
    at: dict[Key, list[int]] = defaultdict(list)
    for rank, keys in computed.items():
        for key in keys:
            at[key].append(rank)
    routes: _Routes = []
    for rank, tokens in owned.items():
        for token in tokens:
            for expert in token.experts:
                places = at[expert, token.hash]
                near = next((place for place in places if place in groups[rank]), None)
                target = near if near is not None else (places[0] if places else None)
                if target is not None:
                    places.remove(target)
                routes.append((rank, token, expert, target))
    return routes, sum(map(len, at.values()))


def _check_combine(
    ranks: Sequence[_Sighting], owned: dict[int, list[_Token]], num_shown: int
) -> CombineCheck | None:
    """Return the largest error of the shown tokens' combined outputs, relative to its bound.

    The reference is the weighted sum of the experts' outputs. The bound of an element is (k + 2) eps sum |w
    y|: k products, k - 1 additions and the rounding to the output's dtype.
    """
    outputs = {key: output for seen in ranks for key, output in seen.outputs.items()}
    epsilon = max(seen.epsilon for seen in ranks)
    worst: tuple[float, float, float] = (-1.0, 0.0, 0.0)
    num_tokens = 0
    for tokens in owned.values():
        for token in tokens[:num_shown]:
            parts = [outputs.get((expert, token.hash)) for expert in token.experts]
            terms = [
                weight * part for weight, part in zip(token.weights, parts, strict=True) if part is not None
            ]
            num_tokens += 1
            zero = torch.zeros_like(token.routed)
            errors = (token.routed - sum(terms, zero)).abs()
            bounds = (len(parts) + 2) * epsilon * sum((term.abs() for term in terms), zero)
            ratios = torch.where(errors == 0, 0.0, errors / bounds).nan_to_num(torch.inf, torch.inf)
            index = int(ratios.argmax())
            worst = max(worst, (float(ratios[index]), float(errors[index]), float(bounds[index])))
    return CombineCheck(num_tokens=num_tokens, error=worst[1], bound=worst[2]) if num_tokens else None
