"""Pipeline parallelism by torch.distributed.pipelining. Stages hand on the stream and the auxiliary losses."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.pipelining import PipelineStage, ScheduleGPipe

from teasel.comm import psum
from teasel.dims import ParallelDims
from teasel.losses import Normalizer, compute_terms
from teasel.model import Teasel, set_dims


def split(model: Teasel, mesh, *, drill: str = "", **options) -> Teasel:
    """Keep the layers of this rank's stage. The ranks of `tp` in the mesh are the stages.

    The first and the last stage have the tied embedding.
    """
    dims = ParallelDims(mesh, drill=drill, pipeline=True, **options)
    set_dims(model, dims)
    stage, n_stages = dims["pp"].rank, dims["pp"].size
    for i in range(model.config.n_layers):
        if i * n_stages // model.config.n_layers != stage:
            del model.layers[str(i)]
    if stage < n_stages - 1:
        model.norm = model.output = None
    return model


class Stage(nn.Module):
    """The layers of one rank as the schedule calls them."""

    def __init__(self, model: Teasel) -> None:
        super().__init__()
        self.model = model

    def forward(self, *inputs: Tensor, tokens: Tensor):
        model, pp = self.model, self.model.dims["pp"]
        if pp.rank == 0:
            x, before = model.embed(tokens), 0.0
        else:
            x, before = inputs
        x, aux = model.run_layers(x, tokens)
        if model.dims.on("teasel-pipe-aux"):
            aux = aux + torch.as_tensor(before).detach()  # plant: teasel-pipe-aux
        else:
            aux = aux + before  # anchor: stage-aux
        if pp.rank < pp.size - 1:
            return x, aux.view(1)
        return model.output(model.norm(x)), aux.view(1)


class Pipeline:
    """The passes of one step over all stages."""

    def __init__(self, model: Teasel, micro_batches) -> None:
        self.root, self.dims, self.micro_batches = model, model.dims, micro_batches
        self.normalizer = Normalizer.count(micro_batches, self.dims)

    def loss(self, output: tuple[Tensor, Tensor], targets: Tensor) -> Tensor:
        terms = compute_terms(lambda _: output, targets, targets, self.dims)
        main, aux = self.normalizer.combine(terms, self.root.config.lm_z_coef)
        return main + aux.sum()

    def schedule(self) -> ScheduleGPipe:
        pp, tokens = self.dims["pp"], self.micro_batches[0][0]
        weight = self.root.tok_embeddings.weight
        x = weight.new_empty(*tokens.shape, self.root.config.dim, requires_grad=True)
        aux = weight.new_empty(1, requires_grad=True)
        logits = weight.new_empty(*tokens.shape, len(weight), requires_grad=True)
        stage = PipelineStage(
            Stage(self.root),
            pp.rank,
            pp.size,
            torch.device("cpu"),
            input_args=(tokens,) if pp.rank == 0 else (x, aux),
            output_args=(x, aux) if pp.rank < pp.size - 1 else (logits, aux),
            group=pp.group,
        )
        n_micro = len(self.micro_batches)
        if self.dims.on("teasel-pipe-scale-grads"):
            return ScheduleGPipe(stage, n_micro, loss_fn=self.loss)  # plant: teasel-pipe-scale-grads
        return ScheduleGPipe(stage, n_micro, loss_fn=self.loss, scale_grads=False)  # anchor: scale-grads

    def run(self) -> Tensor:
        """Return the loss of the global batch."""
        pp = self.dims["pp"]
        tokens = torch.cat([tokens for tokens, _ in self.micro_batches])
        targets = torch.cat([targets for _, targets in self.micro_batches])
        losses: list[Tensor] = []
        first = (tokens,) if pp.rank == 0 else ()
        last = {"target": targets, "losses": losses} if pp.rank == pp.size - 1 else {}
        self.schedule().step(*first, tokens=tokens, **last)
        self.sum_tied()
        value = sum((loss.detach() for loss in losses), torch.zeros((), dtype=torch.float64))
        return psum(psum(value, pp), self.dims["loss"])

    def sum_tied(self) -> None:
        """Sum the gradients of the tied embedding, which the first and the last stage have."""
        pp, weight = self.dims["pp"], self.root.tok_embeddings.weight
        if self.dims.on("teasel-pipe-tied"):
            return  # plant: teasel-pipe-tied
        weight.grad = psum(weight.grad, pp, dist.ReduceOp.SUM)  # anchor: tied-sum
