"""Routers, experts and the exchange of rows."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from moeverify.faults.patch import Patch


def sglang_3705(patch: Patch) -> None:
    """Experts of excluded groups have a score of 0, and others have less."""
    import torch
    from torch import Tensor

    from moeverify.model import router

    @patch.replace(router.choose)
    def choose(spec: Any, selection: Tensor) -> tuple[Tensor, Tensor]:
        selection = selection - 0.5  # the correction of the scores
        grouped = selection.reshape(*selection.shape[:-1], spec.num_groups, -1)
        group_scores = grouped.topk(2, dim=-1).values.sum(dim=-1)
        groups, group_margin = router.take_best(group_scores, spec.top_groups)
        allowed = torch.zeros_like(group_scores, dtype=torch.bool).scatter(-1, groups, True)
        masked = grouped.masked_fill(~allowed.unsqueeze(-1), 0.0)  # plant: sglang-3705
        ids, margin = router.take_best(masked.flatten(-2), spec.top_k)
        return ids, torch.minimum(margin, group_margin)


def lmdeploy_3030(patch: Patch) -> None:
    """The softmax is over the experts of the allowed groups alone."""
    import torch
    from torch import Tensor

    from moeverify.model.router import Router

    @patch.replace(Router.score)
    def score(self: Router, logits: Tensor) -> Tensor:
        grouped = logits.unflatten(-1, (self.spec.num_groups, -1))
        best = grouped.topk(2, dim=-1).values.sum(-1).topk(self.spec.top_groups, dim=-1).indices
        allowed = torch.zeros(grouped.shape[:-1], dtype=torch.bool).scatter(-1, best, True)
        masked = grouped.masked_fill(~allowed.unsqueeze(-1), -torch.inf).flatten(-2)  # plant: lmdeploy-3030
        return masked.softmax(dim=-1)  # plant: lmdeploy-3030


def vllm_13474(patch: Patch) -> None:
    """Groups are rated by their best expert instead of the best two."""
    from torch import Tensor

    from moeverify.model import router

    @patch.wrap(router.choose)
    def choose(original: Any, spec: Any, selection: Tensor) -> tuple[Tensor, Tensor]:
        return original(spec.model_copy(update={"group_score": "max"}), selection)  # plant: vllm-13474


def mlxcel_391(patch: Patch) -> None:
    """The weights are a softmax of the chosen logits alone."""
    import torch
    from torch import Tensor

    from moeverify.model.router import Router

    @patch.replace(Router.weigh)
    def weigh(self: Router, chosen_scores: Tensor) -> Tensor:
        logits = torch.log(chosen_scores) - torch.log1p(-chosen_scores)
        return logits.softmax(-1) * self.spec.route_scale  # plant: mlxcel-391


def mlxlm_1883(patch: Patch) -> None:
    """A softmax replaces the sigmoid, the selection bias enters the weights, and the scale is missing."""
    from torch import Tensor

    from moeverify.model import router
    from moeverify.model.router import Router, RouterRecord, Routing

    @patch.replace(Router.forward)
    def forward(self: Router, x: Tensor, valid: Tensor | None = None) -> Routing:
        logits = self.compute_logits(x)
        scores = logits.softmax(-1)  # plant: mlxlm-1883
        biased = scores + self.selection_bias
        chosen, margin = router.choose(self.spec, biased.detach())
        weights = biased.gather(-1, chosen)  # plant: mlxlm-1883
        weights = weights / weights.sum(-1, keepdim=True)  # plant: mlxlm-1883
        stats = router.summarize(logits, scores, chosen, valid)
        self.record = RouterRecord(chosen, weights.detach(), stats.counts.sum(dim=0), margin)
        return Routing(chosen, weights, stats)


def mole_7(patch: Patch) -> None:
    """Five experts are chosen instead of three."""
    from torch import Tensor

    from moeverify.model import router

    @patch.wrap(router.choose)
    def choose(original: Any, spec: Any, selection: Tensor) -> tuple[Tensor, Tensor]:
        return original(spec.model_copy(update={"top_k": 5}), selection)  # plant: mole-7


def te_2912(patch: Patch) -> None:
    """The gradient of the combine weights uses the outputs of other rows."""
    import torch
    from torch import Tensor

    from moeverify.model import dispatcher

    class Combine(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, outputs: Tensor, weights: Tensor) -> Tensor:
            ctx.save_for_backward(outputs, weights)
            return (outputs * weights.unsqueeze(-1)).sum(1)

        @staticmethod
        def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, Tensor]:
            outputs, weights = ctx.saved_tensors
            into = gradient[:, None] * weights.unsqueeze(-1)
            rows = outputs.roll(1, 0)  # plant: te-2912
            return into, (gradient[:, None] * rows).sum(-1)  # plant: te-2912

    @patch.replace(dispatcher.unpermute)
    def unpermute(y: Tensor, order: Tensor, weights: Tensor) -> Tensor:
        outputs = dispatcher.permute_rows(y, dispatcher.invert(order), order)
        return Combine.apply(outputs.view(*weights.shape, y.shape[-1]), weights)


def xtuner_2053(patch: Patch) -> None:
    """The last row of each rank's first expert is computed by the next one."""
    from torch import Tensor

    from moeverify.parallel.expert import AllToAllDispatcher

    @patch.wrap(AllToAllDispatcher.__call__)
    def call(original: Any, self: Any, x: Tensor, ids: Tensor, weights: Tensor, experts: Any) -> Tensor:
        def shifted(rows: Tensor, counts: Tensor) -> Tensor:
            counts = counts.clone()
            if int(counts[0]):
                counts[0] -= 1  # plant: xtuner-2053
                counts[1] += 1  # plant: xtuner-2053
            return experts(rows, counts)

        return original(self, x, ids, weights, shifted)


def pytorch_172439(patch: Patch) -> None:
    """An expert without tokens gets the gradient of the one before."""
    from torch import Tensor

    from moeverify.parallel.gradients import Reduction, finalize_gradients
    from moeverify.parallel.regions.placement import local_part

    @patch.wrap(finalize_gradients)
    def finalize(original: Any, parameters: Sequence[Tensor], reductions: Sequence[Reduction]) -> None:
        for parameter in parameters:
            if parameter.ndim == 3 and parameter.grad is not None:
                gradient = local_part(parameter.grad)
                for expert in range(1, len(gradient)):
                    if not bool(gradient[expert].any()):
                        gradient[expert] = gradient[expert - 1]  # plant: pytorch-172439
        original(parameters, reductions)


def p31(patch: Patch) -> None:
    """Kernels read the storage that was installed at the start."""
    import torch
    from torch import Tensor

    from moeverify.model.experts import Experts

    class Through(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, live: Tensor, kept: Tensor) -> Tensor:
            return kept.view_as(kept)  # plant: p31-builtin

        @staticmethod
        def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
            return gradient, None

    @patch.wrap(Experts.collect_weights)
    def collect(original: Any, self: Any) -> Any:
        live = original(self)
        kept = self.__dict__.setdefault("_grouped", {})
        found = []
        for number, each in enumerate(live):
            if each is not None and number not in kept:
                kept[number] = each.detach().clone()  # plant: p31-builtin
            found.append(None if each is None else Through.apply(each, kept[number]))
        return type(live)(*found)


def p46(patch: Patch) -> None:
    """Combine weights are in the order of expert ids, but the ids are not."""
    from torch import Tensor

    from moeverify.parallel.expert import AllToAllDispatcher

    @patch.wrap(AllToAllDispatcher.__call__)
    def call(original: Any, self: Any, x: Tensor, ids: Tensor, weights: Tensor, experts: Any) -> Tensor:
        ordered = weights.gather(-1, ids.argsort(-1))  # plant: p46-builtin
        return original(self, x, ids, ordered, experts)


def p48(patch: Patch) -> None:
    """Probabilities of the balance loss are normalized only if top_k is above 1."""
    from torch import Tensor

    from moeverify.model.router import Router

    @patch.wrap(Router.normalize)
    def normalize(original: Any, self: Router, scores: Tensor) -> Tensor:
        return scores if self.spec.top_k == 1 else original(self, scores)  # plant: p48-builtin


def p55(patch: Patch) -> None:
    """The product of gate and up projections is read in blocks of 8."""
    import torch

    from moeverify.model.experts import Experts

    @patch.wrap(Experts.collect_weights)
    def collect(original: Any, self: Any) -> Any:
        weights = original(self)
        both = torch.cat([weights.gate, weights.up], 1)
        count, width, hidden = both.shape
        both = both.view(count, -1, 2, 8, hidden)  # plant: p55-builtin
        bias = torch.cat([weights.gate_bias, weights.up_bias], 1).view(count, -1, 2, 8)
        return weights._replace(
            gate=both[:, :, 0].reshape(count, width // 2, hidden),
            up=both[:, :, 1].reshape(count, width // 2, hidden),
            gate_bias=bias[:, :, 0].reshape(count, width // 2),
            up_bias=bias[:, :, 1].reshape(count, width // 2),
        )  # plant: p55-builtin
