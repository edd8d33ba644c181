"""The lines of a rank's file: one JSON object per line, appended while the script runs. No torch.

Tensor values are in the binary file beside it, in the order of the lines, aligned to 8 bytes. An
interrupted file is usable up to its last complete line.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Field, TypeAdapter

from moeverify.results.record import NumRanks, Rank, Record
from moeverify.train.calls.call import LoopCall

REDUCES = "reduces"
VERSION = 2  # since 2, each line has a checksum (`moeverify.checksum.seal_line`)


class Header(Record):
    """The first line: rank, number of ranks, host and script."""

    line: Literal["header"] = "header"
    version: int = VERSION
    rank: Rank
    world_size: NumRanks
    host: str = ""
    pid: int = 0
    script: str = ""
    torch: str = ""
    first: int
    last: int
    nudge: int | None = None
    nudge_dtype: str | None = None


class Span(Record):
    """The indices from `start` to `stop`, exclusive."""

    start: int
    stop: int


class ShardRegion(Record):
    """The region of a logical tensor: a span or single indices per dim, or a span of the flattened tensor."""

    shape: tuple[int, ...]
    dims: tuple[Span | tuple[int, ...], ...] = ()
    flat: Span | None = None


class Values(Record):
    """One tensor of one rank; `step` is -1 before the first recorded step.

    - `is_placed`: the region is known (DTensor or flat FSDP1 parameter). Otherwise the rank has a plain
      tensor of this shape, which may be a part of the logical tensor.
    - `is_absent`: the rank has no such tensor.
    - `offset`: of its bytes in the data file; None if the tensor is absent or only its `sketch` is stored.
    - `squares`: sum of squares of the elements. `bits`: hash of the elements.
    - `before`: norm of a gradient at the end of the last backward pass.
    - `own`: hash of the values of an initial weight before `--weights` or `--nudge` changed it; 0 if all its
      elements are equal.
    - `site`: file:line that calls the module of an initial weight.
    """

    line: Literal["values"] = "values"
    step: int
    kind: str
    name: str
    where: ShardRegion
    is_placed: bool = False
    is_absent: bool = False
    is_partial: bool = False
    dtype: str = ""
    offset: int | None = None
    squares: float = 0.0
    bits: int = 0
    sketch: tuple[float, ...] = ()
    before: float | None = None
    own: int = 0
    site: str = ""


class Options(Record):
    """The options and parameter names of a parameter group when its optimizer steps.

    `sites` has the file:line that last set an option.
    """

    line: Literal["options"] = "options"
    step: int
    optimizer: str
    number: int
    options: dict[str, float]
    names: tuple[str, ...]
    sites: dict[str, str] = Field(default_factory=dict)


class Rows(Record):
    """Hashes of the rows (dim 0) of an integer input of the model in one forward pass.

    `site` is the file:line that drew the batch.
    """

    line: Literal["rows"] = "rows"
    step: int
    forward: int = 0
    name: str
    shape: tuple[int, ...]
    rows: tuple[int, ...]
    site: str = ""


class Drawn(Record):
    """A tensor of the batch of a forward pass, or the state of a generator before it (`generator cpu`).

    `model` is the number of the model in the script. `site` is the file:line that drew an input.
    """

    line: Literal["drawn"] = "drawn"
    step: int
    forward: int
    model: int = 0
    name: str
    shape: tuple[int, ...]
    dtype: str
    offset: int
    bits: int
    site: str = ""


class Output(Record):
    """The input (`is_input`) or output of a module in its n-th `call` within a forward pass.

    `where` is the region of a tensor (rows, positions, ...). It has the same rows as the `Rows` of its
    forward pass. Of a tensor above the size limit only every `stride`-th position is stored.
    """

    line: Literal["output"] = "output"
    step: int
    forward: int
    name: str
    call: int = 1
    is_input: bool = False
    where: ShardRegion
    is_placed: bool = False
    stride: int = 1
    dtype: str
    offset: int
    bits: int


class ExecutedFile(Record):
    """Lines of a source file that a step executed.

    `checksum` is the CRC-32 of the file. `names` has the line of each assignment or function, the assigned name, and
    the values that can be compared. Of the functions in `skipped`, only the first lines were followed.
    """

    path: str
    checksum: int
    lines: tuple[int, ...]
    names: tuple[tuple[int, str, tuple[Any, ...]], ...] = ()
    skipped: tuple[tuple[int, int], ...] = ()


class ExecutedStep(Record):
    """The user code that ran after the previous step and up to the end of this one."""

    line: Literal["executed"] = "executed"
    step: int
    files: tuple[ExecutedFile, ...]


class Note(Record):
    """A fact for the comparison, such as `dropout`, `dtype`, `replay` or `stopped`, with a text.

    `bypass` names a class whose `forward` was called directly for the first time in `step`. `REDUCES` has the
    file:line at which an optimizer reduces its gradients within `step`.
    """

    line: Literal["note"] = "note"
    about: str
    text: str = ""
    step: int = -1


class ScriptEnd(Record):
    """The last line of a script that ended regularly or reached the last recorded step."""

    line: Literal["end"] = "end"
    num_steps: int


Line = Annotated[
    Header | LoopCall | Values | Options | Rows | Drawn | Output | ExecutedStep | Note | ScriptEnd,
    Field(discriminator="line"),
]
LINES: TypeAdapter[Line] = TypeAdapter(Line)
