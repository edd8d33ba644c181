"""Random programs, equivalent rewrites of them, and mutations: each line of a program is one operation."""

from __future__ import annotations

import linecache
import random
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from recordings import record_call
from torch import Tensor

from moeverify.explain.culprits import Culprits
from moeverify.explain.explain import Explainer
from moeverify.explain.program import Program
from moeverify.explain.record import Recorder
from moeverify.parallel.regions.region import Region
from moeverify.results.checks import Kind
from moeverify.results.culprit import Culprit, Operation

SIZE = 6
_UNARY = ("tanh", "sigmoid", "exp", "cos", "sin", "softmax", "norm")
_BINARY = ("add", "mul", "sub", "matmul")
_SOURCE: Mapping[str, str] = {
    "tanh": "torch.tanh({0})",
    "sigmoid": "torch.sigmoid({0})",
    "exp": "torch.exp({0} * 0.3)",
    "cos": "torch.cos({0})",
    "sin": "torch.sin({0})",
    "softmax": "torch.softmax({0}, -1)",
    "norm": "{0} / ({0}.norm() + 0.125)",
    "scale": "{0} * {number}",
    "add": "{0} + {1}",
    "mul": "{0} * {1}",
    "sub": "{0} - {1}",
    "matmul": "{0} @ {1}",
    # Rewrites that compute the same.
    "tanh'": "2 * torch.sigmoid(2 * {0}) - 1",
    "softmax'": "torch.exp({0} - torch.logsumexp({0}, -1, keepdim=True))",
    "mul'": "torch.cat([{0}[:2] * {1}[:2], {0}[2:] * {1}[2:]])",
    "matmul'": "torch.einsum('ik,kj->ij', {0}, {1})",
    "add'": "torch.stack([{0}, {1}]).sum(0)",
    "scale'": "({0}.T * {number}).T",
    "cos'": "torch.cos({0}.flatten()).view({0}.shape)",
}


@dataclass(frozen=True)
class Line:
    """One operation: its name in `_SOURCE`, its input lines (negative ones are inputs), and its number."""

    name: str
    operands: tuple[int, ...]
    number: float = 1.0


@dataclass(frozen=True)
class Generated:
    """A program whose last line is its result. `mutated` is the line changed by a mutation, or -1."""

    lines: tuple[Line, ...]
    mutated: int = -1

    def source(self) -> str:
        """Return the program as a function of inputs a and b, one operation per line."""
        text = ["def run(torch, a, b):"]
        for number, line in enumerate(self.lines):
            names = [f"v{each}" if each >= 0 else "ab"[-each - 1] for each in line.operands]
            text.append(f"    v{number} = " + _SOURCE[line.name].format(*names, number=line.number))
        return "\n".join([*text, f"    return v{len(self.lines) - 1}"])


def generate(rng: random.Random, length: int) -> Generated:
    """Return a program each of whose lines takes the one before it."""
    lines: list[Line] = []
    for number in range(length):
        last = number - 1 if number else -1
        kind = rng.random()
        if kind < 0.45:
            lines.append(Line(rng.choice(_UNARY), (last,)))
        elif kind < 0.6:
            lines.append(Line("scale", (last,), round(rng.uniform(0.3, 2.0), 3)))
        else:
            other = rng.randrange(-2, number) if number else -2
            lines.append(Line(rng.choice(_BINARY), (last, other)))
    return Generated(tuple(lines))


def rewrite(program: Generated, rng: random.Random) -> Generated:
    """Return an equivalent program with other operators in about half of the possible places."""
    lines = [
        replace(line, name=f"{line.name}'") if f"{line.name}'" in _SOURCE and rng.random() < 0.5 else line
        for line in program.lines
    ]
    return replace(program, lines=tuple(lines))


def mutate(program: Generated, rng: random.Random) -> Generated:
    """Return a program with one line that computes a different result."""
    place = rng.randrange(len(program.lines))
    line = program.lines[place]
    if line.name == "scale":
        other = replace(line, number=round(line.number + rng.choice((0.25, 0.5, 1.0)), 3))
    elif len(line.operands) == 1:
        other = replace(line, name=rng.choice([each for each in _UNARY if each != line.name]))
    elif rng.random() < 0.5:
        other = replace(line, name=rng.choice([each for each in _BINARY if each != line.name]))
    else:
        choices = [each for each in range(-2, place) if each not in line.operands]
        other = replace(line, operands=(line.operands[0], rng.choice(choices or [-1])))
    if other.operands == line.operands and other.name == line.name and other.number == line.number:
        other = replace(line, name="sub" if line.name != "sub" else "mul")
    return Generated((*program.lines[:place], other, *program.lines[place + 1 :]), place)


def record(program: Generated, name: str, inputs: Mapping[str, Tensor]) -> tuple[Program, Tensor]:
    """Return the recording of a program's step, with its result shown as the loss, and that result."""
    text = program.source()
    file = f"/generated/{name}.py"
    linecache.cache[file] = (len(text), None, text.splitlines(keepends=True), file)
    space: dict[str, Any] = {}
    exec(compile(text, file, "exec"), space)
    recorder = Recorder()
    recorder.name_tensors(inputs.items())
    with recorder.recording():
        recorder.begin_step(0)
        result = space["run"](torch, **inputs)
        recorder.observe(0, Kind.LOSS, "total", result, Region.whole(tuple(result.shape)))
    recorder.program.shares = [((0,), (0,))]
    return recorder.program, result


def explain(ranks: Program, one: Program, seconds: float = 60.0) -> list[Culprit]:
    """Return the operations whose result on a rank differs from that of one device."""
    explainer = Explainer([ranks], one, 0, [])
    culprits = Culprits(explainer)
    return [culprits.trace(culprits.make(cause), cause) for cause in explainer.explain(seconds)]


def make_inputs(seed: int) -> dict[str, Tensor]:
    """Return the inputs of all programs."""
    generator = torch.Generator().manual_seed(seed)
    return {name: torch.randn(SIZE, SIZE, generator=generator, dtype=torch.float64) for name in ("a", "b")}


def explain_call(
    ranks: Callable[..., Tensor], one: Callable[..., Tensor], /, **inputs: Tensor
) -> list[Culprit]:
    copies = {name: each.clone() for name, each in inputs.items()}
    return explain(record_call(ranks, None, **copies), record_call(one, None, **inputs))


def read(operation: Operation | None) -> str:
    assert operation is not None
    assert operation.line is not None
    return operation.line.expression


def expression_of(culprit: Culprit) -> str:
    return read(culprit.here)
