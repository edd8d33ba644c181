"""Which module of a user's own is replayed for what was read first wrong, and under which mistakes."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from moeverify.diagnose.first_divergence import Origin
from moeverify.diagnose.own.attributes import list_attribute_mistakes
from moeverify.diagnose.own.calls import LOSS, Call
from moeverify.diagnose.own.children import (
    list_child_mistakes,
    list_detached_children,
    list_gradient_mistakes,
)
from moeverify.diagnose.own.head_layouts import list_layout_mistakes
from moeverify.diagnose.own.merged_blocks import Positions, list_merge_mistakes
from moeverify.diagnose.own.replay import Candidate, ReadingPlace, Replay, Stage
from moeverify.diagnose.own.search import NARROW, RIGHT, Found, Judge, Search
from moeverify.diagnose.own.step_mistakes import (
    list_detached_mistakes,
    list_factor_mistakes,
    list_gradient_factors,
    list_number_mistakes,
    list_operand_mistakes,
    list_sites,
)
from moeverify.diagnose.own.sums import list_known
from moeverify.diagnose.own.tensors import (
    list_expert_mistakes,
    list_input_mistakes,
    list_parameter_mistakes,
)
from moeverify.diagnose.own.trace import Trace, trace_run
from moeverify.diagnose.wrong_tensor import WrongTensor
from moeverify.results.observation import End
from moeverify.results.own_module import Mistake
from moeverify.train.module_taps import FORWARD, name_arguments

MOST_ELEMENTS = 1 << 22
"""Elements of a tensor up to which its module is replayed: thousands of runs must stay a matter of seconds."""

_SECONDS, _SECONDS_AROUND = 6.0, 4.0
_TIMED = 3
_MOST_KEPT = 24
_MOST_RUNS, _LEAST_RUNS = 2048, 64


@dataclass(frozen=True)
class OwnModule:
    """The calls that may be replayed, one after another, until one explains.

    `matched` are the modules whose outputs ranks have right, and `sizes` those of the layout's axes.
    """

    record: Callable[[], Iterator[Call]]
    matched: frozenset[str]
    sizes: tuple[int, ...]

    def find(self, origin: Origin, tensor: WrongTensor, bound: float) -> Found | None:
        """Return the mistakes that explain; None where nothing gives what one device has when it is replayed."""
        judge, tried, is_known = Judge(tensor, bound), 0, False
        if not judge.is_clear or tensor.expected.numel() > MOST_ELEMENTS:
            return None
        for call in self.record():
            attempt = _Attempt(call, self, origin)
            found = attempt.find(Judge(tensor, bound), is_around=call.name != origin.culprit)
            if found is None:
                continue
            is_known, tried = True, tried + found.num_tried
            if found.mistakes:
                return replace(found, num_tried=tried, replayed=call.name)
        return Found(num_tried=tried) if is_known else None


class _Attempt:
    """The replay of one call for an origin."""

    def __init__(self, call: Call, own: OwnModule, origin: Origin) -> None:
        self.call, self.own = call, own
        self.tensor, self.positions = origin.tensor, Positions.of(origin.tensor)
        self.is_forward = origin.direction == FORWARD
        self.place = _find_place(call, origin)
        self.prefix = "" if call.name == LOSS else call.name
        self.right = sorted(origin.right)

    def find(self, judge: Judge, *, is_around: bool) -> Found | None:
        """Return the mistakes that explain; None where the call does not give what one device has."""
        if self.place is None:
            return None
        replay = Replay(self.call, self.place)
        trace = trace_run(replay)
        base = None if trace is None else judge.shape(trace.output)
        if trace is None or base is None:
            return None
        expected = judge.tensor.expected
        if float((base - expected).norm()) > RIGHT * float(expected.norm()):
            return None
        seconds = _SECONDS_AROUND if is_around else _SECONDS
        search = Search(replay, judge, base, _budget(replay, seconds))
        if self.is_forward and is_around:
            search.is_allowed = partial(self._keeps_others_right, replay, trace)
        if not self.is_forward:
            search.is_allowed = _RightGradients(self.call, self.right).are_kept
        return search.run(list(self._list_tiers(trace, is_around=is_around)))

    def _keeps_others_right(self, replay: Replay, trace: Trace, candidate: Candidate, number: float) -> bool:
        """Return whether the modules inside whose outputs are right on ranks still put these out."""
        other = trace_run(replay, candidate.plant, number)
        if other is None:
            return False
        for name, child in trace.children.items():
            made = other.children[name].made if name in other.children else None
            if not self._is_right(name) or child.made is None or made is None:
                continue
            if made.shape != child.made.shape or not torch.allclose(made, child.made, rtol=1e-9, atol=1e-12):
                return False
        return True

    def _is_right(self, name: str) -> bool:
        """Return whether ranks have the right output of a module inside, or of one around it there."""
        full = ".".join(each for each in (self.prefix, name) if each)
        return any(full == each or full.startswith(f"{each}.") for each in self.own.matched if each)

    def _list_tiers(self, trace: Trace, *, is_around: bool) -> Iterator[Iterable[Candidate]]:
        call, name, own = self.call, self.prefix, self.own
        leaves_out = self.is_forward and not is_around
        owners = self._list_owners(leaves_out)
        modules = [(each, owner) for each, owner in owners if isinstance(owner, nn.Module)]
        steps = list(trace.steps)
        if leaves_out:
            steps = [step for step in steps if not (step.module and self._is_right(step.module))]
        if call.name == LOSS:
            # Of the whole model with its loss, what the loss itself does is what nothing else has replayed.
            owners, modules = [], []
            steps = [step for step in steps if step.line and not step.module]
        sites, labels = list_sites(steps), name_arguments(call.module)
        is_loss = call.name == LOSS
        if not self.is_forward:
            yield list_detached_children(trace, name) if not is_loss else ()
            yield list_detached_mistakes(sites, name)
            yield list_gradient_mistakes(trace, name) if not is_loss else ()
            yield list_gradient_factors(sites, name) if not is_loss else ()
        yield [
            *list_attribute_mistakes(trace, owners, own.sizes),
            *list_parameter_mistakes(modules, call.old, call.root, own.sizes),
            *list_expert_mistakes(modules),
            *list_input_mistakes(name, call.args, call.named, labels, own.sizes),
            *(list_child_mistakes(trace, name) if not is_loss else ()),
        ]
        yield list_number_mistakes(sites, name)
        yield list_merge_mistakes(sites, trace.steps, name, self.positions, is_forward=self.is_forward)
        if self.is_forward and self.positions is not None:
            yield list_layout_mistakes(sites, name, self.tensor, trace.children)
        if is_loss:
            # A coefficient in its code says more than how often the gradient of a term counts.
            yield list_gradient_factors(sites, name)
        yield list_operand_mistakes(sites, name, own.sizes)
        if self.is_forward:
            yield self._list_sums(trace)
        yield list_factor_mistakes(sites, name)

    def _list_owners(self, leaves_out: bool) -> list[tuple[str, object]]:
        """Return the module, those inside whose outputs are not known to be right, and their configurations."""
        found: list[tuple[str, object]] = []
        for name, module in self.call.module.named_modules():
            if leaves_out and name and self._is_right(name):
                continue
            full = ".".join(each for each in (self.prefix, name) if each)
            found.append((full, module))
            config = vars(module).get("config")
            if config is not None and hasattr(config, "__dict__"):
                found.append((full, config))
        return found

    def _list_sums(self, trace: Trace) -> Iterator[Candidate]:
        """Yield known tensors that are added to what is read, some number of times."""
        inputs = [(label, value) for label, value in _list_inputs(self.call)]
        for name, values in list_known(trace, inputs):
            mistake = Mistake(part="sum", name=name, way="added", module=self.prefix)
            yield Candidate(mistake, _add(values), 0.0)


class _RightGradients:
    """The gradients at modules inside that ranks have right: a mistake backward must leave them as they are."""

    def __init__(self, call: Call, ends: Sequence[tuple[str, End]]) -> None:
        prefix = f"{call.name}." if call.name not in ("", LOSS) else ""
        inner = dict(call.root.named_modules())
        chosen = [(inner[name], end) for name, end in ends if name in inner and name.startswith(prefix)]
        places = [ReadingPlace("backward", module, end, "0") for module, end in chosen[:_MOST_KEPT]]
        replays = [Replay(call, place) for place in places]
        self._right = [(replay, right) for replay in replays if (right := replay.run()) is not None]

    def are_kept(self, candidate: Candidate, number: float) -> bool:
        """Return whether they come out right with a mistake."""
        for replay, right in self._right:
            found = replay.run(candidate.plant, number)
            if found is None or found.shape != right.shape:
                return False
            if float((found - right).norm()) > NARROW * float(right.norm()):
                return False
        return True


def _find_place(call: Call, origin: Origin) -> ReadingPlace | None:
    module = dict(call.root.named_modules()).get(origin.module)
    if module is None:
        return None
    return ReadingPlace(origin.direction, None if module is call.module else module, origin.end, origin.slot)


def _add(values: Tensor) -> Any:
    def plant(stage: Stage, number: float) -> None:
        stage.added = (values, number)

    return plant


def _list_inputs(call: Call) -> Iterator[tuple[str, Tensor]]:
    labels = name_arguments(call.module)
    for index, value in enumerate(call.args):
        if isinstance(value, Tensor) and value.is_floating_point():
            yield labels[index] if index < len(labels) else f"argument {index}", value
    for name, value in call.named.items():
        if isinstance(value, Tensor) and value.is_floating_point():
            yield name, value


def _budget(replay: Replay, seconds: float) -> int:
    """Return how many runs are made at most, a power of two: what fits into some seconds of a core."""
    begun = time.process_time()
    for _ in range(_TIMED):
        replay.run()
    each = max((time.process_time() - begun) / _TIMED, 1e-6)
    runs = max(int(seconds / each), 1)
    return max(_LEAST_RUNS, min(_MOST_RUNS, 1 << (runs.bit_length() - 1)))
