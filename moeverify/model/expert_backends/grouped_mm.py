"""The grouped matrix product of torch, which has no float64."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING

from moeverify.cases.rule import blame, experts, own_model, reading, round_up
from moeverify.cases.schema import Case
from moeverify.errors import CaseError, Problem
from moeverify.model.expert_backends import ExpertBackend

if TYPE_CHECKING:
    import torch
    from torch import Tensor

    from moeverify.model.expert_backends import Multiply
    from moeverify.model.expert_weights import ExpertWeights

    Product = Callable[[Tensor, Tensor, Tensor], Tensor]
    """product(rows (M, H), matrices (E, F, H), end of each matrix's rows (E)) -> (M, F)."""

_ROW_BYTES = 16  # row sizes of a grouped product must be multiples of it
_BYTES = {"bfloat16": 2, "float32": 4, "mixed": 2}
_TILE = 128  # rows; see `count_spare_rows`


@reading("layout.experts", "recipe.precision", "recipe.model.moe")
def narrow_precision(case: Case) -> Iterator[Problem]:
    """Reject float64, which torch's grouped matrix product does not support."""
    if case.recipe.precision == "float64" and experts(case) is not None:
        remedy = "write `experts: loop`, or set recipe.precision to float32 or bfloat16"
        yield blame("layout.experts", "grouped_mm cannot compute in float64", remedy)


@reading(
    *(f"layout.{name}" for name in ("experts", "etp", "tp", "ep", "parallelize")),
    "recipe.precision",
    "recipe.model.hidden",
    "recipe.model.moe.expert_hidden",
)
def aligned_rows(case: Case) -> Iterator[Problem]:
    """Require rows with a multiple of 16 bytes, as torch's grouped matrix product does."""
    moe, model = experts(case), own_model(case)
    if moe is None or model is None or case.recipe.precision == "float64":
        return
    unit = _ROW_BYTES // _BYTES[case.recipe.precision]
    for name, value, shares in (
        ("model.hidden", model.hidden, 1),
        ("model.moe.expert_hidden", moe.expert_hidden, case.layout.expert_tp),
    ):
        if value % shares == 0 and (value // shares) % unit:
            per_rank = f" / etp {shares}" if shares > 1 else ""
            message = (
                f"grouped_mm needs rows of a multiple of 16 bytes, and recipe.{name} {value}{per_rank} is not"
            )
            remedy = f"set it to a multiple of {unit * shares}, such as {round_up(value, unit * shares)}"
            yield blame("layout.experts", message, remedy)


def multiply_grouped(rows: Tensor, matrix: Tensor, ends: Tensor) -> Tensor:
    """Return the product (M, F) of rows (M, H), in groups that end at `ends` (E) int32, and (E, F, H)."""
    from torch.nn import functional

    return functional.grouped_mm(rows, matrix.transpose(-2, -1), offs=ends)


def swiglu_grouped(
    x: Tensor,
    counts: Tensor,
    weights: ExpertWeights,
    products: Sequence[Product] = (multiply_grouped,) * 3,
) -> Tensor:
    """Return the result of `swiglu_loop`, computed by torch's grouped matrix product.

    `products` are the functions that multiply by gate, up and down.

    Shapes: x (M, H) sorted by expert, counts (E) int64 that sum to at most M.
    Returns: (M, H); rows after the experts' rows have undefined values.
    Raises: CaseError for float64 and for rows that are not a multiple of 16 bytes.
    """
    import torch
    from torch.nn import functional

    check_grouped(x.dtype, hidden=x.shape[-1], expert_hidden=weights.gate.shape[-2])
    num_rows, spare = len(x), count_spare_rows(x, len(counts))
    x = functional.pad(x, (0, 0, 0, spare)) if spare else x
    offsets = counts.cumsum(0).to(torch.int32)
    owner = None if weights.gate_bias is None else _find_owner(offsets, len(x))

    def multiply(find: Product, rows: Tensor, matrix: Tensor, bias: Tensor | None) -> Tensor:
        product = find(rows, matrix, offsets)
        if bias is None or owner is None:
            return product
        # Set rows without expert to zero, and so their gradients. The backward of the product with `owner`
        # sums over rows, where 0 * NaN would be NaN.
        return torch.where(owner.any(dim=1, keepdim=True), product + owner.to(bias.dtype) @ bias, 0.0)

    by_gate, by_up, by_down = products
    gated = functional.silu(multiply(by_gate, x, weights.gate, weights.gate_bias))
    inner = gated * multiply(by_up, x, weights.up, weights.up_bias)
    outputs = multiply(by_down, inner, weights.down, weights.down_bias)
    return outputs[:num_rows] if spare else outputs


def count_spare_rows(x: Tensor, num_experts: int) -> int:
    """Return the number of padding rows that make torch multiply x (M, H) faster in bfloat16 on a Hopper GPU.

    torch uses tiles of 64 rows up to a mean of 128 rows per expert, and tiles of 128 above. Each tile reads
    its expert's weights again. Small tiles are faster until, near that mean, half of the experts have more
    than 128 rows and need a third tile. A few padding rows then make torch use the large tiles.
    Source: pytorch, aten/src/ATen/native/cuda/GroupMM.cu, dispatch_bf16_grouped_kernel_on_tile_size.
    """
    import torch

    most = (_TILE + 1) * num_experts
    if not x.is_cuda or x.dtype != torch.bfloat16 or not (_TILE - 8) * num_experts < len(x) < most:
        return 0
    return most - len(x)


def _find_owner(ends: Tensor, num_rows: int) -> Tensor:
    """Return the one-hot expert (M, E) of each row, given the `ends` (E) of groups; zero after the last.

    The grouped product does not support a bias yet. A product with this matrix adds each row's bias, and
    its backward sums in a fixed order. The backward of indexing would use atomics.
    """
    import torch

    experts = torch.arange(len(ends), device=ends.device)
    rows = torch.arange(num_rows, dtype=ends.dtype, device=ends.device)
    return torch.searchsorted(ends, rows, right=True).unsqueeze(-1) == experts


def check_grouped(dtype: torch.dtype, *, hidden: int, expert_hidden: int) -> None:
    """Raise a CaseError with every reason why grouped_mm does not support this dtype and these sizes."""
    import torch

    if dtype not in (torch.float32, torch.bfloat16, torch.float16):
        message = f"grouped_mm cannot multiply {dtype} tensors"
        raise CaseError([Problem(message, path="layout.experts", remedy="use the loop backend")])
    step = _ROW_BYTES // dtype.itemsize
    sizes = {"hidden": hidden, "expert_hidden (local)": expert_hidden}
    problems = [
        Problem(
            f"grouped_mm needs {name} to be a multiple of {step} in {dtype}, not {size}",
            path="layout.experts",
            remedy="use the loop backend or another size",
        )
        for name, size in sizes.items()
        if size % step
    ]
    if problems:
        raise CaseError(problems)


class _GroupedMm(ExpertBackend):
    rules = (narrow_precision, aligned_rows)

    @property
    def multiply(self) -> Multiply:
        return swiglu_grouped

    def check(self, dtype: torch.dtype, *, hidden: int, expert_hidden: int) -> None:
        check_grouped(dtype, hidden=hidden, expert_hidden=expert_hidden)


IMPLEMENTATION = _GroupedMm()
