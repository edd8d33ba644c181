"""Trial of a user's factory for `moeverify init`, in a process of its own.

The controller runs `python -m moeverify.verification.worker.probes.factory FACTORY PARALLELIZE FIELDS FILE`.
It writes a `TriedModel` or a `Refused` as JSON.
"""

from __future__ import annotations

import importlib
import inspect
import json
import re
import sys
import time
from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from types import ModuleType
from typing import Any, Literal

import torch
from torch import Tensor, nn

from moeverify.cases.schema import CustomModel, Data, Recipe
from moeverify.cases.shrink import shrink
from moeverify.errors import CaseError, MoeverifyError, Problem
from moeverify.parallel.regions.region import Region
from moeverify.results.factory import POSITIONS, ROWS, Refused, TriedModel
from moeverify.stacks import configured
from moeverify.stacks.configuration import DROPOUT, build_on_meta, find_configuration
from moeverify.stacks.configured import VOCABULARY, AroundLayer, find_logits, list_dropouts
from moeverify.train.assemble import assemble_single
from moeverify.train.loop import train
from moeverify.train.target import describe_error, resolve

BUDGET = 200_000
"""The parameters that are left for verification. A step of such a model takes milliseconds."""

_MOST_TRIED = 20_000_000
_SECOND = 1.0
_FACTORY = "recipe.model.factory"
_FRAMEWORKS = ("transformers", "torchtitan", "megatron", "lightning", "pytorch_lightning", "deepspeed")
_REMEDY = (
    "the model is called with token ids of shape (rows, positions); write a `loss(model, tokens, targets)` beside "
    "the factory to call it in another way"
)
_EXPERT_DEGREE = re.compile("ep$|ep_|expert_(model_)?parallel")
_Wide = Literal["float64", "float32"]
_WIDTH = re.compile("dim|width|embd|embed|hidden|d_model|channels", re.IGNORECASE)
_LOSS_OF_IMAGES = f"{configured.__name__}:loss_of_images"
_LOSS_OF_MODEL = f"{configured.__name__}:loss_of_model"
_ONLY_NARROW = "a golden is made in float64: let the type of all tensors follow that of the weights"


def try_model(factory: str, parallelize: str, fields: Mapping[str, Any]) -> TriedModel:
    """Return a model that is small enough to verify, and the names for its recipe.

    Raises: CaseError when no step of the model works on one device.
    """
    factory, fields = adapt(factory, fields)
    trial = Trial(factory, fields)
    framework = find_framework(trial.whole)
    sizes, left = trial.shrink()
    trial.find_rates(sizes)
    if left is None or left > _MOST_TRIED:
        if trial.error is None:
            raise _refuse_size(left or 0)
        raise _advise(trial.explain_error(trial.error), framework)
    original = {**trial.configuration.sizes, **trial.configuration.rates}
    model, module = trial.model, sys.modules[factory.partition(":")[0]]
    divides = parallelize or find_parallelize(module)
    return TriedModel(
        title=type(trial.whole).__name__,
        framework=framework,
        factory=model.factory,
        arguments=model.arguments,
        loss=model.loss or "",
        vocab_size=model.vocab_size,
        min_valid=find_min_valid(model.loss),
        changes={name: (original[name], value) for name, value in {**trial.rates, **sizes}.items()},
        guessed={name: value for name, value in trial.configuration.guessed.items() if name not in sizes},
        parameters=(count_parameters(trial.whole), left),
        seconds=trial.seconds,
        notes=tuple(list_notes(trial, left)),
        parallelize=divides,
        expert_degrees=tuple(list_expert_degrees(divides, trial.whole)),
    )


def adapt(factory: str, fields: Mapping[str, Any]) -> tuple[str, Mapping[str, Any]]:
    """Return the factory of an adapter with its arguments for a model of torchtitan, else the given ones."""
    if factory.partition(".")[0] != "torchtitan":
        return factory, fields
    adapter = importlib.import_module("moeverify.stacks.torchtitan")
    return f"{adapter.__name__}:make", adapter.find_arguments(factory, fields)


class Trial:
    """Steps of one model under different sizes; `model` and `seconds` are of the last that worked.

    `width` names the size that is the width of the layer, if the factory makes a layer instead of a model.
    `error` is the last one, or None; `last` has the fields of the step that was tried last.
    """

    model: CustomModel
    seconds: float
    has_dropout: bool
    draws = False
    """Whether the last step drew random numbers."""

    def __init__(self, factory: str, fields: Mapping[str, Any]) -> None:
        self.target, self.fields = factory, fields
        self.configuration = find_configuration(factory, fields)
        self.rates = {name: 0.0 for name in self.configuration.rates if DROPOUT.search(name)}
        self.whole = build_on_meta(lambda: self.configuration.build({}))
        self.losses = [*list_losses(sys.modules[factory.partition(":")[0]])]
        self.error: CaseError | None = None
        self.last: Mapping[str, float] = {}
        self.width, self.has_images = "", False

    def shrink(self) -> tuple[dict[str, int], int | None]:
        """Return the changed sizes and the number of parameters that are left, or None if no step works.

        If no step works and the model has no embedding, the factory is tried as one of a layer, then of an
        image classifier.
        """
        own = self.configuration.sizes
        open_sizes = {name: size for name, size in own.items() if name not in self.configuration.guessed}
        sizes = shrink(open_sizes, self.count, BUDGET)
        left = self.count(sizes)
        is_model = any(isinstance(each, nn.Embedding) for each in self.whole.modules())
        if left is not None or is_model:
            return sizes, left
        error, losses = self.error, self.losses
        for name in [*filter(_WIDTH.search, {**own, **self.fields}), ""]:
            self.width, self.has_images = name, not name
            self.losses = losses if name else [_LOSS_OF_IMAGES]
            sizes = shrink(open_sizes, self.count, BUDGET)
            left = self.count(sizes)
            if left is not None:
                return sizes, left
        self.losses, self.has_images, self.error = losses, False, error
        return sizes, None

    def find_rates(self, sizes: Mapping[str, int]) -> None:
        """Set to zero the rates that make the model draw random numbers, whatever their names."""
        if not self.draws:
            return
        before = self.rates
        self.rates = dict.fromkeys(self.configuration.rates, 0.0)
        if not self._is_quiet(sizes):
            self.rates = before
        for name in [each for each in self.rates if each not in before]:
            chosen = self.rates
            self.rates = {other: rate for other, rate in chosen.items() if other != name}
            if not self._is_quiet(sizes):
                self.rates = chosen
        self.count(sizes)

    def _is_quiet(self, sizes: Mapping[str, int]) -> bool:
        return self.count(sizes) is not None and not self.draws

    def count(self, sizes: Mapping[str, int]) -> int | None:
        """Return the number of parameters under changed sizes, or None if no step works.

        Large models are counted and not tried, since they may not fit into memory.
        """
        changes = {**self.rates, **sizes}
        try:
            found = count_parameters(build_on_meta(lambda: self._build(changes)))
            if found <= _MOST_TRIED:
                self._step(changes)
                self.error = None
        except CaseError as error:
            self.error = error
            return None
        except Exception as error:  # whatever the user's code raises for these sizes
            message = f"no step of the model works: {describe_error(error)}"
            self.error = CaseError([Problem(message, path=_FACTORY)])
            return None
        return found

    def explain_error(self, error: CaseError) -> CaseError:
        """Return another error if the step that failed last works in float32."""
        try:
            self._step(self.last, "float32")
        except Exception:  # it does not work in float32 either
            return error
        problem = error.problems[0]
        message = problem.message.replace("no step of the model works", "the model computes in float32 only")
        return CaseError([replace(problem, message=message, remedy=_ONLY_NARROW)])

    def _find_width(self, changes: Mapping[str, Any]) -> int:
        return int({**self.configuration.sizes, **self.fields, **changes}[self.width]) if self.width else 0

    def _build(self, changes: Mapping[str, Any]) -> nn.Module:
        built = self.configuration.build(changes)
        return AroundLayer(built, self._find_width(changes)) if self.width else built

    def _step(self, changes: Mapping[str, float], precision: _Wide = "float64") -> None:
        """Train a step with the first loss that works.

        Raises: Exception of the first loss when none works.
        """
        self.last = changes
        factory, arguments = self.configuration.name(changes)
        built = self._build(changes)
        self.has_dropout = bool(list_dropouts(built))
        if self.has_dropout or self.width:  # no argument switches dropout off, or makes a model of a layer
            factory = f"{configured.__name__}:make"
            fields = {**self.fields, **self.configuration.guessed, **changes}
            width = {"width": self._find_width(changes)} if self.width else {}
            arguments = {"model": self.target, "fields": fields, **width}
        vocab_size = VOCABULARY if self.width or self.has_images else find_vocabulary(built)
        first: Exception | None = None
        for loss in self.losses:
            model = CustomModel(factory=factory, arguments=arguments, loss=loss, vocab_size=vocab_size)
            data = Data(batch=ROWS, seq_len=POSITIONS, min_valid=find_min_valid(loss))
            recipe = Recipe(name="init", model=model, data=data, precision=precision)
            try:
                program = assemble_single(recipe, torch.device("cpu"))
                begun, before = time.perf_counter(), torch.get_rng_state()
                train(recipe, program, _Nothing(), num_steps=1)
            except Exception as error:
                first = first or error
                continue
            self.model, self.losses = model, [loss]
            self.seconds = time.perf_counter() - begun
            self.draws = not torch.equal(before, torch.get_rng_state())
            return
        assert first is not None
        raise first


class _Nothing:
    """An observer that ignores every tensor."""

    def observe(self, step: int, kind: str, name: str, local: Tensor | None, region: Region) -> None:
        """Ignore a tensor."""

    def begin_step(self, step: int) -> None:
        """Ignore the start of a step."""


def list_losses(module: ModuleType) -> Iterator[str | None]:
    """Yield the losses to try: losses beside the factory, the built-in loss, and losses of common outputs."""
    for name, found in vars(module).items():
        if "loss" in name and inspect.isfunction(found) and found.__module__ == module.__name__:
            parameters = inspect.signature(found).parameters.values()
            if sum(each.default is each.empty for each in parameters) == 3:
                yield f"{module.__name__}:{name}"
    yield None
    yield from (f"{configured.__name__}:{name}" for name in ("loss_of_first", "loss_with_targets"))
    yield _LOSS_OF_MODEL


def find_min_valid(loss: str | None) -> float:
    """Return the least fraction of valid targets per row that a loss supports; a model's own loss needs all."""
    return 1.0 if loss == _LOSS_OF_MODEL else 0.5


def find_vocabulary(model: nn.Module) -> int:
    """Return the number of tokens: the rows of the first embedding, at most the width of the logits.

    Raises: Exception of the first call when the model has no embedding, and returns no logits.
    """
    tokens = (torch.arange(ROWS * POSITIONS) % 2).view(ROWS, POSITIONS)  # valid in any vocabulary
    found = [each.num_embeddings for each in model.modules() if isinstance(each, nn.Embedding)][:1]
    errors: list[Exception] = []
    for inputs in ((tokens,), (tokens, tokens)):
        try:
            output = model(*inputs)
            found.append(find_logits(getattr(output, "logits", output), tokens).shape[-1])
            break
        except Exception as error:  # a loss of the user's may call the model in another way
            errors.append(error)
    if not found:
        raise errors[0]
    return min(found)


def find_framework(model: nn.Module) -> str:
    """Return the framework that the class of a model is from, or an empty text."""
    packages = [kind.__module__.partition(".")[0] for kind in type(model).__mro__]
    return next((name for name in packages if name in _FRAMEWORKS), "")


def _refuse_size(parameters: int) -> CaseError:
    message = (
        f"the model has {parameters} parameters, and no argument or field of a configuration makes it smaller"
    )
    remedy = "name a function whose arguments are the sizes of the model"
    return CaseError([Problem(message, path=_FACTORY, remedy=remedy)])


def _advise(error: CaseError, framework: str) -> CaseError:
    """Return the error with the remedy for a model of a framework, which may need more than a factory."""
    if framework in ("", "transformers", "torchtitan"):
        return error
    remedy = f"name the function that makes the plain model inside the model of {framework}"
    if framework == "megatron":
        remedy = "write its settings into a recipe like those of examples/stacks/megatron"
    return CaseError([replace(error.problems[0], remedy=remedy)])


def count_parameters(model: nn.Module) -> int:
    """Return the number of elements of all parameters."""
    return sum(each.numel() for each in model.parameters())


def find_parallelize(module: ModuleType) -> str:
    """Return the function `parallelize` of a module, or an empty text."""
    return f"{module.__name__}:parallelize" if inspect.isfunction(vars(module).get("parallelize")) else ""


def list_expert_degrees(parallelize: str, model: nn.Module) -> Iterator[str]:
    """Yield the arguments of a `parallelize` that are degrees of expert parallelism, by their names.

    An adapter of a framework has them for models with and without experts.
    """
    is_adapter = parallelize.startswith("moeverify.")
    has_experts = any("expert" in name.lower() for name, _ in model.named_modules())
    if parallelize and (has_experts or not is_adapter):
        names = list(inspect.signature(resolve(parallelize, "layout.parallelize")).parameters)[2:]
        yield from (name for name in names if _EXPERT_DEGREE.match(name))


def list_notes(trial: Trial, parameters: int) -> Iterator[str]:
    """Yield notes on the trial for the reader."""
    if trial.has_dropout:
        yield "the dropout modules of the model are switched off"
    if (trial.model.loss or "").endswith("loss_of_first"):
        yield "only the logits are in the loss: for other outputs write a `loss(model, tokens, targets)` beside it"
    if trial.model.loss == _LOSS_OF_MODEL:
        yield "the loss is that of the model, which must be a mean over all tokens; every target is valid"
    if hasattr(trial.whole, "configure_optimizers"):
        yield "`configure_optimizers` is not called: the optimizer is that of the recipe"
    if trial.has_images:
        yield "images are made of tokens, 64 by 64 pixels, with one class an image"
    if trial.width:
        yield f"it is a layer: an embedding is before it and a head behind it, as wide as `{trial.width}`"
    if parameters > BUDGET:
        yield f"{parameters} parameters are left: no other argument or field of a configuration makes it smaller"
    if trial.seconds > _SECOND:
        yield f"a step takes {trial.seconds:.1f} s: a factory with sizes as arguments would be made smaller"


def main(factory: str, parallelize: str, fields: Mapping[str, Any], file: Path) -> None:
    """Write the result of a trial to a file."""
    found: TriedModel | Refused
    try:
        found = try_model(factory, parallelize, fields)
    except CaseError as error:
        problem = error.problems[0]
        usual = _ONLY_NARROW if "dtype" in problem.message else _REMEDY
        path = problem.path if problem.path.startswith("--") else ""
        found = Refused(message=problem.message, path=path, remedy=problem.remedy or usual)
    except MoeverifyError as error:
        found = Refused(message=str(error))
    file.write_text(found.model_dump_json())


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], json.loads(sys.argv[3]), Path(sys.argv[4]))
