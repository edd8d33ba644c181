"""Choices near a tie in a user's model: a golden keeps them, and other runs of its recipe repeat them.

A router chooses the experts of a token by `topk`. Where two scores are closer than the rounding of a narrow
precision, the choice is arbitrary, and everything after it depends on it. The golden keeps the rows of scores
near a tie, with its choices. A run in the narrow precision looks its own rows near a tie up among them and makes
the choice of the same row. The values identify a row, so the rows may be in any order and on any rank. Among rows
that are alike up to rounding, as many rows of few scores are, the rows before and after it decide.

Only a choice within rounding of a run's own one is replaced: a wrong choice stays wrong.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import pad

from moeverify.cases.schema import CustomModel, Recipe
from moeverify.parallel.regions.observer import Observer
from moeverify.parallel.regions.region import Region
from moeverify.results.checks import Kind
from moeverify.train.pass_mode import PassMode
from moeverify.train.program import NearTieCounts, ReadableState, compute_dtype_of
from moeverify.train.selections import Selection, read_selection, replace_choice

# Units of rounding, relative to its largest number, by which a row may be off the same row of the golden.
# Rounding accumulates from layer to layer. In bfloat16 it is 12.5 %; after two layers 8 % have been seen.
_LIMIT = 16.0

# Maximum number of values in the rows that a golden keeps of a step: 32 MiB in float64.
_MOST_ELEMENTS = 1 << 22

# Maximum number of values among which choices are followed: 131,072 tokens of 64 experts, in float64 64 MiB.
# Logits of a vocabulary are not routed by, and would take gigabytes.
_MOST_VALUES = 1 << 23

# Maximum number of values that a search compares, about a second on one core; beyond it a choice stays.
_MOST_COMPARED = 1 << 30

# Rows that are searched together.
_AT_ONCE = 1024

# Number of rows before and after a row that distinguish similar rows of the golden.
_NEIGHBORS = 4


class _KnownRows(NamedTuple):
    """The golden's rows near a tie in a step: numbers (G) in ascending order, scores (G, n) and choices (G, k).

    A number counts all rows of the step, so that rows one after another have successive numbers.
    """

    numbers: Tensor
    rows: Tensor
    chosen: Tensor


class NearTies(PassMode):
    """A context around passes of a model: repeats the golden's choices near a tie; without `golden` keeps them.

    One object serves all steps: torch compiles functions again under another one.
    """

    def __init__(self, recipe: Recipe, golden: ReadableState | None, counts: NearTieCounts) -> None:
        super().__init__()
        self._counts = counts
        self._unit = torch.finfo(compute_dtype_of(recipe.precision)).eps
        self._golden = golden
        self._known: dict[str, _KnownRows | None] = {}
        self._kept: dict[str, list[Tensor]] = {}
        self._num_seen: dict[str, int] = {}
        self._room = _MOST_ELEMENTS
        self._step = 0

    def begin_step(self, step: int) -> None:
        """Begin a step: its choices come from the same step of the golden."""
        self._step, self._room = step, _MOST_ELEMENTS
        self._known, self._kept, self._num_seen = {}, {}, {}

    def show(self, observer: Observer) -> None:
        """Report the choices that were kept in the step; none if they are repeated."""
        for name, rows in self._kept.items():
            found = torch.cat(rows)
            observer.observe(self._step, Kind.NEAR_TIES, name, found, Region.whole(found.shape))

    def finish(self, func: Any, args: Sequence[Any], kwargs: Mapping[str, Any], result: Any) -> Any:
        """Keep the choice of an operator, or replace it."""
        made = None if _is_captured() else read_selection(func, args, kwargs, result)
        values: Any = args[0] if args else kwargs.get("input")
        if made is None or not _has_rows(values, made):
            return result
        if self._golden is None:
            self._keep(values, made)
            return result
        repeated = self._find(values, made)
        return result if repeated is None else replace_choice(result, values, repeated)

    @torch.no_grad()
    def _keep(self, values: Tensor, made: Selection) -> None:
        rows, chosen = _flatten(values, made)
        # Another run's row may be nearer to a tie by twice the limit, and is searched if it is near itself.
        near = _is_near(rows, chosen, 4 * _LIMIT * self._unit).nonzero()
        at, name = near.squeeze(1), _name(made.operator, rows, chosen)
        before = self._num_seen.get(name, 0)
        self._num_seen[name] = before + len(rows)
        found = torch.cat([before + near, rows[at], chosen[at]], dim=1)
        self._room -= found.numel()
        if len(found) and self._room >= 0:
            self._kept.setdefault(name, []).append(found.cpu())

    @torch.no_grad()
    def _find(self, values: Tensor, made: Selection) -> Selection | None:
        """Return the choice with the golden's indices near a tie, or None if nothing changes.

        A row that is off by d in each number may rank two numbers differently that are 2 d apart. A choice that
        is further behind is not due to rounding, and stays.
        """
        rows, chosen = _flatten(values, made)
        known = self._read(_name(made.operator, rows, chosen), rows.shape[1], rows.device)
        if known is None:
            return None
        near = _is_near(rows, chosen, 2 * _LIMIT * self._unit).nonzero().squeeze(1)
        if not len(near) or len(near) * known.rows.numel() > _MOST_COMPARED:
            return None
        # Masked scores are often -inf: they must not decide a distance.
        own, made_near = rows[near].nan_to_num(0.0, 0.0, 0.0), chosen[near]
        sizes = own.abs().amax(dim=1)
        distances, found = _find_rows(near, own, known, _LIMIT * self._unit * sizes)
        held = known.chosen[found]
        behind = (own.gather(1, made_near) - own.gather(1, held)).abs().amax(dim=1)
        # The last unit is the rounding of the two scores themselves.
        is_same = (distances <= _LIMIT * self._unit * sizes) & (behind <= 2 * distances + self._unit * sizes)
        is_changed = is_same & (held != made_near).any(dim=1)
        self._counts.num_rows += len(near)
        self._counts.num_changed += int(is_changed.sum())
        self._counts.num_free += int((~is_same & (held != made_near).any(dim=1)).sum())
        if not is_changed.any():
            return None
        repeated, allowed = chosen.clone(), torch.zeros(len(rows), dtype=torch.float64, device=rows.device)
        repeated[near[is_changed]] = held[is_changed]
        allowed[near[is_changed]] = behind[is_changed]
        return replace(
            made,
            indices=repeated.reshape(made.indices.shape),
            behind=allowed.reshape(*values.shape[:-1], 1),
        )

    def _read(self, name: str, width: int, device: torch.device) -> _KnownRows | None:
        """Return the golden's rows near a tie, if it has any of this name in the step."""
        assert self._golden is not None
        if name not in self._known:
            found = self._golden.find(self._step, Kind.NEAR_TIES, name)
            self._known[name] = None
            if found is not None:
                numbers, rows, chosen = torch.tensor_split(found.to(device), (1, 1 + width), dim=1)
                values = rows.to(torch.float64).nan_to_num(0.0, 0.0, 0.0)
                self._known[name] = _KnownRows(
                    numbers.squeeze(1).to(torch.int64), values, chosen.to(torch.int64)
                )
        return self._known[name]


def _is_captured() -> bool:
    """Return whether a compiler or a CUDA graph records the operators, so that no value may be read."""
    if torch.compiler.is_compiling():
        return True
    return torch.cuda.is_available() and torch.cuda.is_current_stream_capturing()


def _has_rows(values: Tensor, made: Selection) -> bool:
    """Return whether a choice is among the last dim of (tokens, n) or (rows, positions, n).

    Attention scores have four dims. Their largest number serves as an offset, and its index is of no use.
    """
    is_last = made.dim in (-1, values.ndim - 1) and values.ndim in (2, 3)
    return is_last and values.shape[-1] > 1 and 0 < made.indices.numel() <= values.numel() <= _MOST_VALUES


def _find_rows(at: Tensor, rows: Tensor, known: _KnownRows, limits: Tensor) -> tuple[Tensor, Tensor]:
    """Return the distance (R) of each row (R, n) to the same row of the golden, and its index there (R).

    `at` (R) is the place of each row among the rows of its operator. Rows mostly keep their order in runs, and
    in a run the nearest rows of the golden are shifted by the same number. So of the shifts of the rows around
    a row, the most frequent one that leads to a row within the limit (R) is taken, then the nearest row.
    """
    parts = torch.split(rows, _AT_ONCE)
    # p = inf: rounding is limited in each number, not in their sum.
    nearest = torch.cat([torch.cdist(part, known.rows, p=torch.inf).argmin(dim=1) for part in parts])
    none = torch.iinfo(torch.int64).min // 2
    # Rows at the ends have fewer neighbors: the padding is a shift that no row has.
    shifts = pad(known.numbers[nearest] - at, (_NEIGHBORS, _NEIGHBORS), value=none)
    around = shifts.unfold(0, 2 * _NEIGHBORS + 1, 1).contiguous()
    numbers = at[:, None] + around
    # (R, 2 * _NEIGHBORS + 1): the golden's row with each of these numbers, where it has one.
    places = torch.searchsorted(known.numbers, numbers).clamp(max=len(known.numbers) - 1)
    off = torch.stack([(rows - known.rows[place]).abs().amax(dim=1) for place in places.unbind(1)], dim=1)
    fits = (known.numbers[places] == numbers) & (off <= limits[:, None])
    # How many neighbors of a row have each shift.
    support = (around[:, :, None] == around[:, None, :]).sum(dim=2).where(fits, 0)
    is_best = support == support.amax(dim=1, keepdim=True)
    best = off.where(is_best, torch.inf).min(dim=1, keepdim=True)
    return best.values.squeeze(1), places.gather(1, best.indices).squeeze(1)


def _flatten(values: Tensor, made: Selection) -> tuple[Tensor, Tensor]:
    """Return the rows of numbers (R, n) in float64, and the indices (R, k) chosen in each."""
    rows = values.detach().reshape(-1, values.shape[-1]).to(torch.float64)
    return rows, made.indices.reshape(len(rows), -1)


def _name(operator: str, rows: Tensor, chosen: Tensor) -> str:
    return f"{operator} {chosen.shape[1]} of {rows.shape[1]}"


def _is_near(rows: Tensor, chosen: Tensor, limit: float) -> Tensor:
    """Return whether two chosen numbers of a row, or a chosen one and another, are closer than a limit (R)."""
    count = chosen.shape[1]
    # `topk` with `largest=False` chooses from the other end.
    is_descending = bool((rows.gather(1, chosen[:, :1]) >= rows.mean(dim=1, keepdim=True)).all())
    ordered = rows.sort(dim=1, descending=is_descending).values[:, : count + 1]
    gaps = ordered.diff(dim=1).abs().nan_to_num(torch.inf, torch.inf)
    sizes = rows.masked_fill(~rows.isfinite(), 0.0).abs().amax(dim=1)
    return (gaps <= limit * sizes[:, None]).any(dim=1)


def follow_near_ties(recipe: Recipe, golden: ReadableState | None, counts: NearTieCounts) -> NearTies | None:
    """Return the context of a run's steps; None in float64, and for models whose routing is replayed whole."""
    if not isinstance(recipe.model, CustomModel) or recipe.precision == "float64":
        return None
    return NearTies(recipe, golden, counts)
