"""The lines of a rank's file: one JSON object a line, appended as the script runs. No torch.

The values of tensors are in the binary file beside it, in the order of their lines; each begins at a multiple of
8 bytes. A file that was cut off is usable up to its last whole line.
"""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field, TypeAdapter

from moeverify.calls.call import Call
from moeverify.results.record import Record

VERSION = 1


class Header(Record):
    """The first line: which rank of how many, and on what it runs."""

    line: Literal["header"] = "header"
    version: int = VERSION
    rank: int
    world_size: int
    host: str = ""
    pid: int = 0
    script: str = ""
    torch: str = ""
    first: int
    last: int
    nudge: int | None = None
    nudge_dtype: str | None = None


class Span(Record):
    """The indices from `start` up to `stop`, which is not among them."""

    start: int
    stop: int


class Where(Record):
    """The region of a logical tensor: a span or single indices by dim, or a span of the flattened tensor."""

    shape: tuple[int, ...]
    dims: tuple[Span | tuple[int, ...], ...] = ()
    flat: Span | None = None


class Values(Record):
    """One tensor of one rank, `step` -1 for what is there before the first recorded step.

    `is_placed` says that the region is known (a DTensor, a flat parameter of FSDP1), and not only that the rank has
    a plain tensor of this shape. `offset` is that of its bytes in the data file; None where only `sketch` is kept, or
    where the rank has no such tensor (`is_absent`). `squares` is the sum of the squares of its elements, `bits` a
    hash of them. `before` is the norm that a gradient had when the last backward pass ended.
    """

    line: Literal["values"] = "values"
    step: int
    kind: str
    name: str
    where: Where
    is_placed: bool = False
    is_absent: bool = False
    is_partial: bool = False
    dtype: str = ""
    offset: int | None = None
    squares: float = 0.0
    bits: int = 0
    sketch: tuple[float, ...] = ()
    before: float | None = None


class Options(Record):
    """The options of one parameter group when its optimizer steps, and the parameters in it."""

    line: Literal["options"] = "options"
    step: int
    optimizer: str
    number: int
    options: dict[str, float]
    names: tuple[str, ...]


class Rows(Record):
    """Hashes of the rows (dim 0) of an integer input of the model, in one forward pass of the step."""

    line: Literal["rows"] = "rows"
    step: int
    forward: int = 0
    name: str
    shape: tuple[int, ...]
    rows: tuple[int, ...]


class Output(Record):
    """What went into a module (`is_input`), or came out of it, in its n-th `call` within a forward pass.

    `where` is the region of a tensor (rows, positions, ...) whose rows are those of the `Rows` of that pass. Where
    the tensor was too large, only every `stride`-th position was kept.
    """

    line: Literal["output"] = "output"
    step: int
    forward: int
    name: str
    call: int = 1
    is_input: bool = False
    where: Where
    is_placed: bool = False
    stride: int = 1
    dtype: str
    offset: int
    bits: int


class Note(Record):
    """Something that a comparison has to know: `dropout`, `dtype`, `stopped`, ... with what it is about."""

    line: Literal["note"] = "note"
    about: str
    text: str = ""


class End(Record):
    """The last line of a script that came to its end, or to that of the recorded steps."""

    line: Literal["end"] = "end"
    num_steps: int


Line = Annotated[Header | Call | Values | Options | Rows | Output | Note | End, Field(discriminator="line")]
LINES: TypeAdapter[Line] = TypeAdapter(Line)
