"""What a module of a user's own would have to have otherwise to compute what ranks have."""

from __future__ import annotations

from typing import Literal

from moeverify.results.factor import Factor
from moeverify.results.record import Record

Part = Literal["attribute", "child", "parameter", "experts", "input", "step", "sum"]


class Mistake(Record):
    """One thing in a user's module that is otherwise than in the module that one device has.

    `part` is what it is: an attribute of the module or of its configuration, a module inside of it, a parameter or
    buffer, the weights of an expert, something that it is called with, a step of its computation such as a softmax,
    or a tensor that is added to what it puts out. `name` says which one, `module` in which module, and `line` where
    the step is in the source. `way` says how it is otherwise, `before` and `after` have the two values in words, and
    `number` is the one that was fitted or tried. `factor` names what that number equals.
    """

    part: Part
    name: str
    way: str
    module: str = ""
    line: str = ""
    before: str = ""
    after: str = ""
    number: float | None = None
    factor: Factor | None = None


class Mistaken(Record):
    """A user's own module, replayed with right inputs and one mistake, computes just what the wrong ranks have.

    `module` is what was replayed, which may be around the one that went wrong; "the loss" is the model with the loss.
    Any one of `mistakes` gives it. `ranks` are those that compute so where others do not; with `tokens` it holds of
    so many of so many tokens of these ranks alone.
    """

    kind: Literal["mistaken"] = "mistaken"
    module: str
    mistakes: tuple[Mistake, ...]
    ranks: tuple[int, ...] = ()
    tokens: tuple[int, int] | None = None
