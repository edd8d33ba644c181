"""Trial of a user's factory for `moeverify init`, in a process of its own.

The controller runs `python -m moeverify.verification.worker.probes.factory FACTORY PARALLELIZE FILE`. It
writes a `TriedModel` or a `Refused` as JSON.
"""

from __future__ import annotations

import inspect
import re
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor, nn

from moeverify.cases.schema import CustomModel, Data, Optimizer, Recipe
from moeverify.cases.shrink import shrink
from moeverify.errors import CaseError, MoeverifyError, Problem
from moeverify.parallel.regions.region import Region
from moeverify.results.factory import POSITIONS, ROWS, Refused, TriedModel
from moeverify.stacks import configured
from moeverify.stacks.configured import build_on_meta, find_configuration, find_logits
from moeverify.train.assemble import assemble_single
from moeverify.train.forward import cross_entropy
from moeverify.train.loop import train
from moeverify.train.target import describe_error, resolve

BUDGET = 200_000
"""The parameters that are left for verification. A step of such a model takes milliseconds."""

_MOST_TRIED = 20_000_000
_SECOND = 1.0
_FACTORY = "recipe.model.factory"
_FRAMEWORKS = ("transformers", "torchtitan", "megatron", "lightning", "pytorch_lightning", "deepspeed")
_EXPERT_DEGREE = re.compile("ep|ep_|expert_(model_)?parallel")

Loss = Callable[[nn.Module, Tensor, Tensor], Tensor]


def try_model(factory: str, parallelize: str) -> TriedModel:
    """Return a model that is small enough to verify, and the names for its recipe.

    Raises: CaseError when no step of the model works on one device.
    """
    trial = Trial(factory)
    framework = find_framework(trial.whole)
    if framework not in ("", "transformers"):
        message = (
            f"{type(trial.whole).__name__} is a model of {framework}, which builds it from its own settings"
        )
        remedy = (
            f"write them into a recipe like those of examples/stacks/{framework.removeprefix('pytorch_')}"
        )
        raise CaseError([Problem(message, path=_FACTORY, remedy=remedy)])
    sizes = shrink(trial.configuration.sizes, trial.count, BUDGET)
    left = trial.count(sizes)
    if left is None or left > _MOST_TRIED:
        message = (
            f"the model has {left} parameters, and no argument or field of a configuration makes it smaller"
        )
        remedy = "name a function whose arguments are the sizes of the model"
        raise trial.error if left is None else CaseError([Problem(message, path=_FACTORY, remedy=remedy)])
    changes = {**trial.rates, **sizes}
    made, arguments = trial.configuration.name(changes)
    model = CustomModel(
        factory=made, arguments=arguments, loss=trial.loss or None, vocab_size=trial.vocab_size
    )
    precision, seconds = time_step(model)
    original = {**trial.configuration.sizes, **trial.configuration.rates}
    divides = find_parallelize(factory, parallelize)
    return TriedModel(
        title=type(trial.whole).__name__,
        framework=framework,
        factory=made,
        arguments=arguments,
        loss=trial.loss,
        vocab_size=trial.vocab_size,
        precision=precision,
        changes={name: (original[name], value) for name, value in changes.items()},
        parameters=(count_parameters(trial.whole), left),
        seconds=seconds,
        notes=tuple(list_notes(trial.loss, left, seconds)),
        parallelize=divides,
        expert_degrees=tuple(list_expert_degrees(divides)),
    )


class Trial:
    """Steps of one model under different sizes, and the first loss that works."""

    def __init__(self, factory: str) -> None:
        self.configuration = find_configuration(factory)
        self.rates = dict.fromkeys(self.configuration.rates, 0.0)
        self.whole = build_on_meta(lambda: self.configuration.build({}))
        self.losses = list_losses(factory)
        self.loss = ""
        self.vocab_size = 0
        self.error = CaseError([Problem("no step of the model works", path=_FACTORY)])

    def count(self, sizes: Mapping[str, int]) -> int | None:
        """Return the number of parameters under changed sizes, or None if no step works.

        Large models are counted and not tried, since they may not fit into memory.
        """
        try:
            found = count_parameters(build_on_meta(lambda: self._build(sizes)))
            if found <= _MOST_TRIED:
                self._step(self._build(sizes))
        except CaseError as error:
            self.error = error
            return None
        except Exception as error:  # whatever the user's code raises for these sizes
            self.error = CaseError(
                [Problem(f"no step of the model works: {describe_error(error)}", path=_FACTORY)]
            )
            return None
        return found

    def _build(self, sizes: Mapping[str, int]) -> nn.Module:
        torch.manual_seed(0)
        return self.configuration.build({**self.rates, **sizes})

    def _step(self, model: nn.Module) -> None:
        """Make a forward and a backward pass with the first loss that works, and keep its name.

        Raises: Exception of the first loss when none works.
        """
        tokens = (torch.arange(ROWS * POSITIONS) % 2).view(ROWS, POSITIONS)  # valid in any vocabulary
        first: Exception | None = None
        for name, loss in self.losses.items():
            try:
                loss(model, tokens, tokens).sum().backward()  # type: ignore[no-untyped-call]
            except Exception as error:
                first = first or error
                continue
            self.loss, self.vocab_size = name, find_vocabulary(model, tokens)
            return
        assert first is not None
        raise first


def list_losses(factory: str) -> dict[str, Loss]:
    """Return the losses to try by the name in a recipe: those beside the factory, then those of usual outputs."""
    module = sys.modules[factory.partition(":")[0]]
    own = {
        f"{module.__name__}:{name}": found
        for name, found in vars(module).items()
        if "loss" in name and inspect.isfunction(found) and found.__module__ == module.__name__
        if len(_list_required(found)) == 3
    }
    usual = {
        f"{configured.__name__}:{each.__name__}": each
        for each in (configured.loss_of_first, configured.loss_with_targets)
    }
    return {**own, "": _built_in_loss, **usual}


def _built_in_loss(model: nn.Module, tokens: Tensor, targets: Tensor) -> Tensor:
    output = model(tokens)
    logits = getattr(output, "logits", output)
    if not isinstance(logits, Tensor):
        message = f"the model returned {type(output).__name__}, which is no tensor and has no `logits`"
        raise CaseError(
            [Problem(message, path=_FACTORY, remedy="write a `loss(model, tokens, targets)` beside it")]
        )
    return cross_entropy(find_logits(logits, tokens), targets)


def find_vocabulary(model: nn.Module, tokens: Tensor) -> int:
    """Return the number of tokens: the rows of the first embedding, at most the width of the logits."""
    rows = [each.num_embeddings for each in model.modules() if isinstance(each, nn.Embedding)][:1]
    for call in (lambda: model(tokens), lambda: model(tokens, tokens)):
        try:
            output = call()
            rows.append(find_logits(getattr(output, "logits", output), tokens).shape[-1])
            break
        except Exception:  # an own loss may call the model in another way
            continue
    if not rows:
        message = "the size of the vocabulary is not known: no `nn.Embedding`, and no logits"
        raise CaseError(
            [Problem(message, path=_FACTORY, remedy="write the recipe by hand, with `vocab_size`")]
        )
    return min(rows)


class _Nothing:
    """An observer that ignores every tensor."""

    def observe(self, step: int, kind: str, name: str, local: Tensor | None, region: Region) -> None:
        """Ignore a tensor."""

    def begin_step(self, step: int) -> None:
        """Ignore the start of a step."""


def time_step(model: CustomModel) -> tuple[Literal["float64", "float32"], float]:
    """Return the widest precision in which the model computes, and the seconds of a step there.

    Raises: CaseError when no step works in float32 either.
    """
    precisions: tuple[Literal["float64", "float32"], ...] = ("float64", "float32")
    for precision in precisions:
        recipe = Recipe(
            name="init",
            model=model,
            data=Data(batch=ROWS, seq_len=POSITIONS, min_valid=0.5),
            optimizer=Optimizer(),
            precision=precision,
        )
        try:
            program = assemble_single(recipe, torch.device("cpu"))
            begun = time.perf_counter()
            train(recipe, program, _Nothing(), num_steps=1)
            return precision, time.perf_counter() - begun
        except CaseError as error:
            if precision == "float32" or error.problems[0].path != "recipe.precision":
                raise
    raise AssertionError


def find_framework(model: nn.Module) -> str:
    """Return the framework that the class of a model is from, or an empty text."""
    packages = [kind.__module__.partition(".")[0] for kind in type(model).__mro__]
    return next((name for name in packages if name in _FRAMEWORKS), "")


def count_parameters(model: nn.Module) -> int:
    """Return the number of elements of all parameters."""
    return sum(each.numel() for each in model.parameters())


def find_parallelize(factory: str, given: str) -> str:
    """Return the function that divides the model: the given one, or `parallelize` beside the factory.

    Raises: CaseError when the given one cannot be imported.
    """
    if given:
        resolve(given, "layout.parallelize")
        return given
    module = sys.modules[factory.partition(":")[0]]
    beside = getattr(module, "parallelize", None)
    return f"{module.__name__}:parallelize" if inspect.isfunction(beside) else ""


def list_expert_degrees(parallelize: str) -> Iterator[str]:
    """Yield the arguments of a user's `parallelize` that are degrees of expert parallelism, by their names."""
    if parallelize:
        names = list(inspect.signature(resolve(parallelize, "layout.parallelize")).parameters)[2:]
        yield from (name for name in names if _EXPERT_DEGREE.match(name))


def list_notes(loss: str, parameters: int, seconds: float) -> Iterator[str]:
    """Yield what a reader should know about the trial."""
    if loss.endswith(configured.loss_of_first.__name__):
        yield "only the logits are in the loss: for other outputs write a `loss(model, tokens, targets)` beside it"
    if parameters > BUDGET:
        yield f"{parameters} parameters are left: no argument or field of a configuration makes the model smaller"
    if seconds > _SECOND:
        yield f"a step takes {seconds:.1f} s: a factory with sizes as arguments would be made smaller"


def _list_required(function: Callable[..., Any]) -> list[str]:
    parameters = inspect.signature(function).parameters.values()
    return [each.name for each in parameters if each.default is each.empty]


def main(factory: str, parallelize: str, file: Path) -> None:
    """Write what was found about a model, or why it is refused."""
    found: TriedModel | Refused
    try:
        found = try_model(factory, parallelize)
    except CaseError as error:
        found = Refused(message=error.problems[0].message, remedy=error.problems[0].remedy)
    except MoeverifyError as error:
        found = Refused(message=str(error))
    file.write_text(found.model_dump_json())


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], Path(sys.argv[3]))
