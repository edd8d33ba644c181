"""Steps of a computation that ranks make otherwise than one device, where all around them is the same."""

from __future__ import annotations

from typing import Literal

from moeverify.results.record import Record


class Term(Record):
    """A tensor by what made it: an end of a module, a parameter, or an operator of other terms.

    `end` is `input` or `output` of `module`, as read forward or, where it `is_gradient`, what came back to it; `slot`
    is the argument that has a name, such as positions. Of `parameters` those are meant that the step takes.
    `name` is a parameter or buffer. `operator` is that of torch, with its other numbers as `options`, and `line` is
    where it is called. With none of these it is a tensor that was there before the step.
    """

    module: str | None = None
    end: str = ""
    slot: str = ""
    is_gradient: bool = False
    name: str = ""
    operator: str = ""
    options: tuple[str, ...] = ()
    line: str = ""
    args: tuple[Term, ...] = ()


class OtherStep(Record):
    """One step: `right` as one device makes it, `wrong` as ranks do.

    `way` says what is otherwise: a number, the operator, one tensor that it takes, the order of the elements, or
    which of these it takes (`index`); or the step is left out, or one more is made; or several operators stand in the
    place of others. `ranks` are those that do so, where others do not. `factor` says how many times the right
    elements those are which stand in their place, where all are.
    """

    way: Literal["number", "function", "left-out", "added", "operand", "order", "index", "other"]
    ranks: tuple[int, ...] = ()
    factor: float | None = None
    right: Term | None = None
    wrong: Term | None = None


class OtherSteps(Record):
    """Ranks make what a module puts out, or passes back, as one device does, but for some steps.

    `num_ranks` are compared, over all micro-batches, operator by operator, from what is right on.
    """

    kind: Literal["other-steps"] = "other-steps"
    steps: tuple[OtherStep, ...]
    num_ranks: int
