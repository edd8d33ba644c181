"""A user's own model as the subject of a run, built by a factory and optionally with its own loss."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import reduce
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from moeverify.cases.schema import CustomModel, Recipe
from moeverify.errors import CaseError, Problem
from moeverify.train.data import IGNORED, MicroBatch, Share, make_batch
from moeverify.train.forward import cross_entropy
from moeverify.train.gradient_parts import differentiate
from moeverify.train.initial_weights import load_named
from moeverify.train.objective import Losses, Normalizers
from moeverify.train.program import dtype_of
from moeverify.train.subject import Run, Vector
from moeverify.train.target import describe_error, resolve
from moeverify.train.wide_operators import WideOperators

LM, TOTAL = "lm", "total"
# torch's names for float64 in errors about a missing kernel or mismatched dtypes: `Double`, `float64`.
_REFUSED = re.compile(r"\b(c10::)?(double|float64)\b", re.IGNORECASE)
_COMPLEX = {torch.float64: torch.complex128, torch.float32: torch.complex64, torch.bfloat16: torch.complex64}


def call_factory(factory: Callable[..., Any], arguments: Mapping[str, Any]) -> Any:
    """Return the result of a factory, or of the `build()` of a configuration that it returns."""
    found = factory(**arguments)
    return found.build() if hasattr(found, "build") and not isinstance(found, nn.Module) else found


class CustomSubject:
    """A model built by `factory(**arguments)`; see `moeverify.train.subject.TestedModel`.

    Its routers are unknown, so their routing is not replayed; see `moeverify.train.near_ties`.
    """

    can_replay = False

    def __init__(self, recipe: Recipe, model: CustomModel) -> None:
        self.recipe = recipe
        self.model = model

    def build(self, device: torch.device, dtype: torch.dtype, *, experts: str = "loop") -> nn.Module:
        """Return the model that the factory builds under the recipe's seed, in the recipe's precision.

        Raises: CaseError when the factory raises or does not return a module.
        """
        factory = resolve(self.model.factory, "recipe.model.factory")
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(self.recipe.seed)
            try:
                built = call_factory(factory, self.model.arguments)
            except Exception as error:
                message = f"`{self.model.factory}` failed: {describe_error(error)}"
                raise CaseError([Problem(message, path="recipe.model.factory")]) from error
        if not isinstance(built, nn.Module):
            message = f"`{self.model.factory}` returned {type(built).__name__} and not a module"
            raise CaseError([Problem(message, path="recipe.model.factory", remedy="return the model")])
        if self.model.weights is not None:
            load_named(built, self.model.weights)
        rounded = cast(built.to(device), dtype_of(self.recipe.precision)).train()
        return cast(rounded, dtype)

    def make_batch(self, step: int, share: Share, device: torch.device) -> MicroBatch:
        """Return a share of the synthetic batch."""
        return make_batch(self.recipe.data, self.model.vocab_size, self.recipe.seed, step, share, device)

    def compute_losses(
        self, run: Run, batch: MicroBatch, normalizers: Normalizers
    ) -> tuple[Losses, Tensor | None]:
        """Return the user's loss as `lm` with its named terms, and the loss per token if available."""
        terms = self.compute_own_terms(run, batch, batch.targets)
        sums = {name: term.sum() / normalizers.num_valid for name, term in terms.items()}
        lm = reduce(torch.add, sums.values())
        zero = torch.zeros_like(lm)
        by_token = all(term.shape == batch.targets.shape for term in terms.values())
        token_loss = reduce(torch.add, terms.values()).detach() if by_token else None
        return Losses(lm, zero, zero, {} if set(sums) == {LM} else sums), token_loss

    def count_experts(self, name: str, shape: Sequence[int]) -> int:
        """Return 0: a user's model may name its experts in any way."""
        return 0

    def surround(self) -> AbstractContextManager[object]:
        """Return the context in which torch's operators accept the float64 of a golden."""
        return WideOperators()

    def split_gradient(self, run: Run, batch: MicroBatch) -> CustomParts:
        """Return the parts of the gradient by the loss's named terms, or one part `lm` without names."""
        return CustomParts(self, run, batch)

    def compute_own_terms(self, run: Run, batch: MicroBatch, targets: Tensor) -> dict[str, Tensor]:
        """Return the loss terms by name: per token (M, s), or summed over the valid tokens, ()."""
        with self._named_precision():
            return self._compute_own_terms(run, batch, targets)

    def _compute_own_terms(self, run: Run, batch: MicroBatch, targets: Tensor) -> dict[str, Tensor]:
        if self.model.loss is None:
            logits = _read_logits(run.model(batch.tokens), batch)
            if isinstance(logits, DTensor) and run.loss_context is nullcontext:
                logits = (
                    logits.full_tensor()
                )  # torch accepts a sharded vocabulary only inside its loss_parallel context
            return {LM: cross_entropy(logits, targets)}
        found = resolve(self.model.loss, "recipe.model.loss")(run.model, batch.tokens, targets)
        if not isinstance(found, dict):
            return {LM: self._check_term(found, targets, "")}
        if not found or TOTAL in found:
            message = f"`{self.model.loss}` returned a dict of {', '.join(found) or 'nothing'}"
            raise _shape_error(message, f"return the terms by name, and call none of them {TOTAL}")
        return {name: self._check_term(term, targets, f" for {name}") for name, term in found.items()}

    def _check_term(self, term: Any, targets: Tensor, of_term: str) -> Tensor:
        whole = term.full_tensor() if isinstance(term, DTensor) else term
        if not isinstance(whole, Tensor):
            message = f"`{self.model.loss}` returned {type(whole).__name__}{of_term}"
            raise _shape_error(message, "return a tensor, or a dict of tensors by the names of the terms")
        if whole.shape != targets.shape and whole.numel() != 1:
            message = f"`{self.model.loss}` returned shape {tuple(whole.shape)}{of_term}"
            raise _shape_error(message, "return a sum, or a loss a token")
        return whole

    @contextmanager
    def _named_precision(self) -> Iterator[None]:
        """Convert an operator's error about float64, such as an error of grouped_mm, into advice on precision."""
        try:
            yield
        except (RuntimeError, NotImplementedError, TypeError, ValueError) as error:
            if self.recipe.precision != "float64" or not _REFUSED.search(str(error)):
                raise
            message = f"the model does not compute in float64: {describe_error(error)}"
            remedy = "write precision: float32, or use operators that compute in float64"
            raise CaseError([Problem(message, path="recipe.precision", remedy=remedy)]) from error


class CustomParts:
    """The parts of a custom model's gradient; see `moeverify.train.subject.GradientParts`."""

    def __init__(self, subject: CustomSubject, run: Run, batch: MicroBatch) -> None:
        self.subject = subject
        self.run = run
        self.batch = batch

    def gradients(self, mask: Tensor) -> dict[str, Vector]:
        """Return the gradient of the loss over the valid tokens of a mask (B, S)."""
        if not bool(mask.any()):  # a user's loss may not support zero tokens
            return {}
        targets = self.batch.targets.masked_fill(~mask, IGNORED)
        found: dict[str, Vector] = {}
        with self.subject.surround():
            terms = self.subject.compute_own_terms(self.run, self.batch, targets)
            num_valid = self.batch.valid.sum()
            for name, term in terms.items():
                found[name] = differentiate(term.sum() / num_valid, self.run.shards)
        return found


def cast(model: nn.Module, dtype: torch.dtype) -> nn.Module:
    """Return the model with its floating-point and complex tensors in the precision of `dtype`."""

    def convert(tensor: Tensor) -> Tensor:
        if tensor.is_complex():
            return tensor.to(_COMPLEX[dtype])
        return tensor.to(dtype) if tensor.is_floating_point() else tensor

    converted: nn.Module = model._apply(convert)  # type: ignore[no-untyped-call]  # `to` drops imaginary parts
    return converted


def _read_logits(output: Any, batch: MicroBatch) -> Tensor:
    """Return the logits (M, s, V) from a user's model: its output, or the output's `logits` attribute."""
    logits = getattr(output, "logits", output)
    if not isinstance(logits, Tensor):
        message = f"the model returned {type(output).__name__}, which is no tensor and has no `logits`"
        raise _shape_error(message, "return logits, or name a function with `loss`")
    if logits.ndim != 3 or logits.shape[:2] != batch.targets.shape:
        rows, positions = batch.targets.shape
        message = f"the model returned shape {tuple(logits.shape)} for {rows} rows of {positions} tokens"
        raise _shape_error(message, f"return logits of shape ({rows}, {positions}, vocab_size)")
    return logits


def _shape_error(message: str, remedy: str) -> CaseError:
    return CaseError([Problem(message, path="recipe.model", remedy=remedy)])
