"""Denominators of the loss: tokens counted on one rank, a mean of means, a factor of a mesh axis.

Class G. The right divisor is the number of valid tokens of the global batch, for any split over ranks and
micro-batches.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from moeverify.faults.fault import fault
from moeverify.faults.patch import Original, Patch
from moeverify.faults.setting import make_case
from moeverify.results.benchmark import At
from moeverify.results.cause import Cause
from moeverify.results.place import Stage

if TYPE_CHECKING:
    import torch
    from torch import Tensor, nn
    from torch.distributed import ProcessGroup

    from moeverify.cases.schema import Layout, MoE, Recipe
    from moeverify.model.router import RouterStats
    from moeverify.model.transformer import Transformer
    from moeverify.parallel.ddp import Accumulate
    from moeverify.parallel.meshes import Meshes
    from moeverify.parallel.plan import Parallelized
    from moeverify.train.data import MicroBatch
    from moeverify.train.objective import GroupSums, Losses, Normalizers
    from moeverify.train.program import TrainingProgram


def divide_by(patch: Patch, count: Callable[[TrainingProgram, MicroBatch, Normalizers], Tensor]) -> None:
    """Divide the losses of each micro-batch by `count` tokens () instead of the global batch's tokens."""
    from moeverify.train.forward import compute_losses
    from moeverify.train.objective import Normalizers

    @patch.wrap(compute_losses)
    def divided(
        original: Original[tuple[Losses, Tensor | None]],
        recipe: Recipe,
        program: TrainingProgram,
        batch: MicroBatch,
        normalizers: Normalizers,
    ) -> tuple[Losses, Tensor | None]:
        chosen = Normalizers(count(program, batch, normalizers), normalizers.num_rows)
        return original(recipe, program, batch, chosen)


def multiply(patch: Patch, choose: Callable[[TrainingProgram], float]) -> None:
    """Multiply all losses of each micro-batch by a factor."""
    from moeverify.train.forward import compute_losses
    from moeverify.train.objective import Losses

    @patch.wrap(compute_losses)
    def multiplied(
        original: Original[tuple[Losses, Tensor | None]],
        recipe: Recipe,
        program: TrainingProgram,
        batch: MicroBatch,
        normalizers: Normalizers,
    ) -> tuple[Losses, Tensor | None]:
        losses, token_loss = original(recipe, program, batch, normalizers)
        factor = choose(program)
        return Losses(losses.lm * factor, losses.balance * factor, losses.z * factor), token_loss


def count_own_tokens(patch: Patch) -> None:
    """Divide by the tokens of this rank, times the number of averaged ranks: a mean of means."""
    import torch

    from moeverify.train.objective import Normalizers, count_valid

    @patch.replace(count_valid)
    def count_own(batches: Sequence[MicroBatch], sums: GroupSums, num_rows: int) -> Normalizers:
        own = torch.stack([batch.valid.sum() for batch in batches]).sum()
        return Normalizers(own * sums.over_batch(torch.ones_like(own)), num_rows)


def change_parallelized(patch: Patch, change: Callable[[Parallelized, Layout, Meshes], Parallelized]) -> None:
    """Replace the divided model by `change(parallelized, layout, meshes)`."""
    from moeverify.parallel.plan import parallelize

    @patch.wrap(parallelize)
    def changed(
        original: Original[Parallelized],
        model: Transformer,
        layout: Layout,
        meshes: Meshes,
        *args: Any,
        **named: Any,
    ) -> Parallelized:
        return change(original(model, layout, meshes, *args, **named), layout, meshes)


@fault(
    "G01",
    title="gradient accumulation averages the means of micro-batches",
    source="huggingface/transformers PR #34191, PR #34198",
    mechanism="the mean of micro-batch means is not the mean over all tokens where their counts differ",
    trigger="gradient accumulation over micro-batches of unequal token counts",
    case=make_case("g01", preset="tiny-gpt", dp_shard=2, micro_batches=2),
    where=(At(share="micro_batch"),),
    causes=(Cause.SHARE_WEIGHTS,),
    is_moe=False,
)
def g01_mean_of_micro_batch_means(patch: Patch) -> None:
    """Divide a micro-batch by its own tokens on all ranks, times the number of micro-batches."""
    divide_by(
        patch,
        lambda program, batch, normalizers: (
            program.sums.over_batch(batch.valid.sum()) * program.num_micro_batches
        ),
    )


@fault(
    "G02",
    title="each data-parallel rank normalizes by its own tokens",
    source="huggingface/transformers PR #34373",
    mechanism="the tokens of a step are counted on each device alone, and the means of devices are averaged",
    trigger="data parallelism over rows of unequal token counts",
    case=make_case("g02", preset="tiny-gpt", dp_replicate=2, data_parallel="ddp"),
    where=(At(share="data_rank"),),
    causes=(Cause.SHARE_WEIGHTS,),
    is_moe=False,
)
def g02_local_denominators(patch: Patch) -> None:
    """Count the tokens of this rank only, times the number of averaged ranks."""
    count_own_tokens(patch)


@fault(
    "G03",
    title="loss and gradients are tp times too large",
    source="huggingface/transformers #39648, PR #39674",
    mechanism="to undo the average over data ranks the loss is multiplied by all processes, those of tp included",
    trigger="tp or cp under a trainer that averages tokens over devices",
    case=make_case("g03", preset="tiny-gpt", tp=2),
    where=(At(axis="tp"),),
    causes=(Cause.SCALE,),
    is_moe=False,
)
def g03_loss_times_world(patch: Patch) -> None:
    """Multiply the losses such that the total factor, with the loss ranks, is the world size."""
    import torch.distributed as dist

    multiply(patch, lambda program: dist.get_world_size() / program.scale)


@fault(
    "G05",
    title="gradients are tp times too small after their rescale",
    source="meta-pytorch/torchtune #2641, PR #2687",
    mechanism="tokens are counted over all ranks, gradients rescaled by the data ranks instead of the world's",
    trigger="tp, with gradients rescaled after accumulation",
    case=make_case("g05", preset="tiny-gpt", tp=2),
    where=(At(axis="tp"),),
    causes=(Cause.SCALE,),
    is_moe=False,
)
def g05_gradients_scaled_by_data_ranks(patch: Patch) -> None:
    """Scale the finished gradients by dp / world."""

    def rescale(done: Parallelized, layout: Layout, meshes: Meshes) -> Parallelized:
        def finalize() -> None:
            done.finalize()
            for shard in done.shards:
                if shard.tensor.grad is not None:
                    shard.local(shard.tensor.grad).mul_(meshes.size("loss") / layout.world_size)

        return replace(done, finalize=finalize)

    change_parallelized(patch, rescale)


@fault(
    "G06",
    title="each rank of dp and cp normalizes by its own tokens",
    source="PrimeIntellect-ai/prime-rl PR #2562 (1d9ca9255)",
    mechanism="the loss scale is the token count of one rank instead of that of the dp and cp ranks together",
    trigger="data and context parallelism over unequal token counts",
    case=make_case("g06", preset="tiny-gpt", dp_shard=2, cp=2),
    where=(At(share="context_rank"),),
    causes=(Cause.SHARE_WEIGHTS,),
    is_moe=False,
)
def g06_local_denominators_of_cp(patch: Patch) -> None:
    """Count the tokens of this rank only, times the number of averaged ranks: G02 in another layout."""
    count_own_tokens(patch)


@fault(
    "G07",
    title="loss and gradients are cp times too small under Ulysses",
    source="ByteDance-Seed/VeOmni PR #338; volcengine/verl PR #3691",
    mechanism="the denominator is all-reduced over dp * sp ranks, the numerator multiplied by dp only",
    trigger="sequence parallelism by all-to-all",
    case=make_case("g07", preset="tiny-gpt", cp=2, context_parallel="alltoall"),
    where=(At(axis="cp"),),
    causes=(Cause.SCALE,),
    is_moe=False,
)
def g07_loss_without_sequence_ranks(patch: Patch) -> None:
    """Divide the losses by the number of ranks that share a sequence, which here are all ranks."""
    multiply(patch, lambda program: 1 / program.scale)


@fault(
    "G08",
    title="means of micro-batches are added up and not divided",
    source="verl-project/verl issues #5625, #2857; PR #3332",
    mechanism="the mean over the tokens of each micro-batch is not divided by their number before the backward pass",
    trigger="gradient accumulation over rows of unequal token counts",
    case=make_case("g08", preset="tiny-gpt", dp_shard=2, micro_batches=4),
    where=(At(share="micro_batch"),),
    causes=(Cause.SHARE_WEIGHTS,),
    is_moe=False,
)
def g08_sum_of_micro_batch_means(patch: Patch) -> None:
    """Divide by the tokens of this rank's micro-batch, times the number of averaged ranks."""
    divide_by(patch, lambda program, batch, normalizers: batch.valid.sum() * int(program.scale))


@fault(
    "G09",
    title="the loss depends on the micro-batch size",
    source="NVIDIA-NeMo/Speech #8343",
    mechanism="the masked loss is averaged over the tokens of one micro-batch on one rank, and those means averaged",
    trigger="more than one row in a micro-batch, rows of unequal token counts",
    case=make_case("g09", preset="tiny-gpt", dp_shard=2, micro_batches=2),
    where=(At(share="micro_batch"),),
    causes=(Cause.SHARE_WEIGHTS,),
    is_moe=False,
)
def g09_mean_of_each_micro_batch(patch: Patch) -> None:
    """Divide by the tokens of this rank's micro-batch, times the number of micro-batches on all ranks."""
    divide_by(
        patch,
        lambda program, batch, normalizers: (
            batch.valid.sum() * program.num_micro_batches * int(program.scale)
        ),
    )


@fault(
    "G10",
    title="micro-batches count by rows instead of tokens",
    source="mosaicml/composer PR #3273; mosaicml/llm-foundry PR #1595",
    mechanism="the mean loss of a micro-batch is weighted by its number of samples; padding makes tokens unequal",
    trigger="gradient accumulation over padded rows",
    case=make_case("g10", preset="tiny-gpt", dp_replicate=2, data_parallel="ddp", micro_batches=4),
    where=(At(share="micro_batch"),),
    causes=(Cause.SHARE_WEIGHTS,),
    is_moe=False,
)
def g10_micro_batches_weighted_by_rows(patch: Patch) -> None:
    """Weight the mean of a micro-batch by its share of the rows of the global batch."""
    divide_by(
        patch,
        lambda program, batch, normalizers: (
            batch.valid.sum() / (len(batch.share.rows) / normalizers.num_rows)
        ),
    )


@fault(
    "G11",
    title="gradients are cp times too large",
    source="NVIDIA/Megatron-LM #673, #906, !2756",
    mechanism="the loss is multiplied by the size of cp, which the division of the gradients does not undo",
    trigger="context parallelism",
    case=make_case("g11", preset="tiny-gpt", cp=2),
    where=(At(axis="cp"),),
    causes=(Cause.SCALE,),
    is_moe=False,
)
def g11_loss_times_cp(patch: Patch) -> None:
    """Scale the loss by cp a second time before the backward pass."""
    change_parallelized(
        patch,
        lambda done, layout, meshes: replace(done, num_loss_ranks=done.num_loss_ranks * meshes.size("cp")),
    )


@fault(
    "G12",
    title="a second loss is a mean of the means of the data ranks",
    source="NVIDIA/Megatron-LM issue #7452, item 3",
    mechanism="the term of multi-token prediction is scaled by local over global tokens",
    trigger="data parallelism over unequal token counts",
    case=make_case("g12", dp_shard=2),
    where=(At(term="z"),),
    causes=(Cause.SHARE_WEIGHTS,),
    notes="the reference model predicts one token; its z loss takes the place of the second term",
)
def g12_term_of_own_tokens(patch: Patch) -> None:
    """Divide the z loss by the tokens of this rank, times the number of averaged ranks."""
    import torch

    from moeverify.train.objective import router_losses

    @patch.wrap(router_losses)
    def divide_by_own(
        original: Original[tuple[Tensor, Tensor]],
        spec: MoE,
        routers: Sequence[RouterStats],
        batch: MicroBatch,
        normalizers: Normalizers,
        sums: GroupSums,
    ) -> tuple[Tensor, Tensor]:
        balance, z = original(spec, routers, batch, normalizers, sums)
        own = batch.valid.sum()
        ranks = sums.over_batch(torch.ones_like(own))
        return balance, z * normalizers.num_valid / (own * ranks)


@fault(
    "G13",
    title="masked tokens stay in the denominator of the loss",
    source="pytorch/torchtitan PR #4174",
    mechanism="tokens are removed from the mask of the numerator, the denominator is counted before that",
    trigger="any, with tokens that do not count",
    case=make_case("g13", preset="tiny-gpt", dp_shard=2),
    where=(At(stage=Stage.BACKWARD),),
    causes=(Cause.SCALE,),
    is_moe=False,
    notes="upstream removed non-finite tokens of a policy loss; here the removed tokens are padding",
)
def g13_denominator_of_all_tokens(patch: Patch) -> None:
    """Divide by all tokens, including masked ones."""
    import torch

    from moeverify.train.objective import Normalizers, count_valid

    @patch.replace(count_valid)
    def count_all(batches: Sequence[MicroBatch], sums: GroupSums, num_rows: int) -> Normalizers:
        local = torch.tensor(sum(batch.valid.numel() for batch in batches), device=batches[0].valid.device)
        return Normalizers(sums.over_batch(local), num_rows)


@fault(
    "G14",
    title="only the last micro-batch counts",
    source="pytorch/torchtitan PR #3575 (da230bbb2)",
    mechanism="zero_grad inside the loop over micro-batches",
    trigger="gradient accumulation",
    case=make_case("g14", preset="tiny-gpt", tp=2, micro_batches=4),
    where=(At(share="micro_batch"),),
    causes=(Cause.SHARE_WEIGHTS,),
    is_moe=False,
)
def g14_gradients_of_last_micro_batch(patch: Patch) -> None:
    """Drop the accumulated gradients before each forward pass."""
    from moeverify.train.forward import compute_losses

    @patch.wrap(compute_losses)
    def forget_gradients(
        original: Original[tuple[Losses, Tensor | None]],
        recipe: Recipe,
        program: TrainingProgram,
        batch: MicroBatch,
        normalizers: Normalizers,
    ) -> tuple[Losses, Tensor | None]:
        program.engine.zero_grad()
        return original(recipe, program, batch, normalizers)


@fault(
    "G15",
    title="the last micro-batch is not reduced by DDP",
    source="karpathy/build-nanogpt PR #30",
    mechanism="the forward pass arms the reduction by the flag of the micro-batch before; the backward does not look",
    trigger="DDP with gradient accumulation",
    case=make_case("g15", preset="tiny-gpt", dp_replicate=2, data_parallel="ddp", micro_batches=2),
    where=(At(axis="dp_replicate"), At(share="micro_batch")),
    causes=(Cause.MISSING_REDUCTION,),
    is_moe=False,
)
def g15_sync_flag_after_forward(patch: Patch) -> None:
    """Set the flag between forward and backward instead of around both."""
    from moeverify.parallel.ddp import apply_ddp

    @patch.wrap(apply_ddp)
    def set_flag_late(
        original: Original[tuple[nn.Module, Accumulate]],
        model: nn.Module,
        group: ProcessGroup,
        device: torch.device,
        **options: Any,
    ) -> tuple[nn.Module, Accumulate]:
        wrapped, _ = original(model, group, device, **options)
        wanted = [True]

        def toggle(module: Any, inputs: Any, output: Any) -> None:
            module.require_backward_grad_sync = wanted[0]

        @contextmanager
        def accumulate(last: bool) -> Iterator[None]:
            wanted[0] = last
            yield

        wrapped.register_forward_hook(toggle)
        return wrapped, accumulate


@fault(
    "G16",
    title="the optimizer steps on each micro-batch",
    source="huggingface/accelerate PR #2790",
    mechanism="one flag means both `synchronize gradients` and `step now`",
    trigger="gradient accumulation",
    case=make_case("g16", preset="tiny-gpt", tp=2, micro_batches=2, optimizer="adamw"),
    where=(At(name="embed*"),),
    causes=(Cause.STATE, Cause.STALE),
    is_moe=False,
)
def g16_step_for_each_micro_batch(patch: Patch) -> None:
    """Step before each micro-batch except the first: the flag for `synchronize` also means `step`."""
    from moeverify.train.forward import compute_losses

    @patch.wrap(compute_losses)
    def step_early(
        original: Original[tuple[Losses, Tensor | None]],
        recipe: Recipe,
        program: TrainingProgram,
        batch: MicroBatch,
        normalizers: Normalizers,
    ) -> tuple[Losses, Tensor | None]:
        if batch.share.rows[0] != program.share.rows[0]:
            program.finalize()
            program.engine.step()
            program.engine.zero_grad()
        return original(recipe, program, batch, normalizers)
