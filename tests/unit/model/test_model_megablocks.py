"""Replacements of megablocks' compiled kernels, against definitions in loops; megablocks is not needed."""

from __future__ import annotations

import pytest
import torch

from moeverify.model.megablocks import grouped_gemm, ops

INTEGERS = [torch.int16, torch.int32, torch.int64]


def make_integers(*shape: int, most: int = 9, dtype: torch.dtype = torch.int32) -> torch.Tensor:
    return torch.randint(0, most, shape, generator=torch.Generator().manual_seed(0)).to(dtype)


@pytest.mark.parametrize("dtype", INTEGERS)
def test_cumulative_sums(dtype) -> None:
    x = make_integers(3, 7, dtype=dtype)
    inclusive, exclusive = torch.empty_like(x), torch.empty_like(x)
    ops.inclusive_cumsum(x, 1, inclusive)
    ops.exclusive_cumsum(x, 1, exclusive)
    for row in range(3):
        values = x[row].tolist()
        assert inclusive[row].tolist() == [sum(values[: end + 1]) for end in range(7)]
        assert exclusive[row].tolist() == [sum(values[:end]) for end in range(7)]


@pytest.mark.parametrize("dtype", INTEGERS)
@pytest.mark.parametrize("shape", [(40,), (3, 40), (0,)])
def test_histogram_counts_what_lies_in_the_bins_alone(dtype, shape) -> None:
    x = make_integers(*shape, most=9, dtype=dtype) - 1
    counts = ops.histogram(x, 6)
    assert counts.dtype == torch.int32
    assert counts.shape == (*shape[:-1], 6)
    for row, values in zip(counts.view(-1, 6).tolist(), torch.atleast_2d(x).tolist(), strict=True):
        assert row == [values.count(number) for number in range(6)]


def test_indices_are_the_columns_of_a_block_diagonal() -> None:
    # Bins of 2, 0 and 3 rows of blocks; 4 columns of blocks each.
    out = torch.full((20,), -1, dtype=torch.int16)
    ops.indices(torch.tensor([256, 256, 640], dtype=torch.int32), 128, 5, 4, out)
    expected = [[0, 1, 2, 3]] * 2 + [[8, 9, 10, 11]] * 3
    assert out.view(5, 4).tolist() == expected


@pytest.mark.parametrize("dtype", [torch.float16, torch.int16, torch.int32])
def test_replicate_repeats_each_value_over_its_bin(dtype) -> None:
    x = torch.tensor([[5, 7, 9], [1, 2, 3]], dtype=dtype)
    out = torch.full((2, 6), -1, dtype=dtype)
    ops.replicate_forward(x, torch.tensor([2, 2, 5], dtype=torch.int32), out)
    assert out[:, :5].tolist() == [[5, 5, 9, 9, 9], [1, 1, 3, 3, 3]]


def test_replicate_backward_sums_over_each_bin() -> None:
    grad = torch.tensor([[1.0, 2.0, 4.0, 8.0, 16.0, 32.0]], dtype=torch.float16)
    out = torch.full((1, 3), -1.0, dtype=torch.float16)
    ops.replicate_backward(grad, torch.tensor([2, 2, 5], dtype=torch.int32), out)
    assert out.tolist() == [[3.0, 0.0, 28.0]]  # rows after all bins belong to none


@pytest.mark.parametrize("dtype", INTEGERS)
def test_sort_looks_at_the_lowest_bits_and_keeps_the_order_of_equal_keys(dtype) -> None:
    x = make_integers(50, most=16, dtype=dtype)
    values, places = torch.empty_like(x), torch.empty_like(x)
    ops.sort(x, 3, values, places)
    order = sorted(range(50), key=lambda place: (int(x[place]) & 7, place))
    assert places.tolist() == order
    assert values.tolist() == [int(x[place]) for place in order]


SIZES = [[3, 0, 5, 1], [0, 0, 0, 9], [0, 0, 0, 0]]


def make_operands(sizes: list[int], dtype: torch.dtype, width: int) -> tuple[torch.Tensor, ...]:
    generator = torch.Generator().manual_seed(1)

    def draw(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator, dtype=torch.float64).to(dtype).requires_grad_()

    return draw(sum(sizes), 16), draw(4, width, 16), draw(sum(sizes), width).detach()


@pytest.mark.parametrize("sizes", SIZES)
@pytest.mark.parametrize("trans_b", [False, True])
@pytest.mark.parametrize(
    ("dtype", "width", "tolerance"),
    # A width of 6 elements is no multiple of 16 bytes: there the loop must take over.
    [
        (torch.float64, 8, 1e-14),
        (torch.float32, 8, 1e-6),
        (torch.float32, 6, 1e-6),
        (torch.bfloat16, 8, 2e-2),
    ],
)
def test_multiply_is_a_product_for_each_expert(sizes, trans_b, dtype, width, tolerance) -> None:
    a, matrices, slope = make_operands(sizes, dtype, width)
    b = matrices if trans_b else matrices.detach().transpose(1, 2).contiguous().requires_grad_()
    expected = [
        rows @ (matrix.t() if trans_b else matrix)
        for rows, matrix in zip(torch.split(a, sizes), b.unbind(), strict=True)
    ]
    wanted = torch.autograd.grad(torch.cat(expected), [a, b], slope)
    y = grouped_gemm.ops.gmm(a, b, torch.tensor(sizes), trans_b)
    found = torch.autograd.grad(y, [a, b], slope)
    for value, other in zip([torch.cat(expected), *wanted], [y, *found], strict=True):
        assert other.dtype == dtype
        assert (other - value).double().norm() <= tolerance * value.double().norm()


@pytest.mark.parametrize("sizes", SIZES[:2])
@pytest.mark.parametrize(("dtype", "width"), [(torch.float64, 8), (torch.float32, 8), (torch.float32, 6)])
def test_raw_products_transpose_and_write_where_they_are_told(sizes, dtype, width) -> None:
    a, matrices, slope = (tensor.detach() for tensor in make_operands(sizes, dtype, width))
    counts = torch.tensor(sizes)
    product = grouped_gemm.backend.gmm(a, slope, counts, trans_a=True)
    split = zip(torch.split(a, sizes), torch.split(slope, sizes), strict=True)
    torch.testing.assert_close(product, torch.stack([rows.t() @ other for rows, other in split]))
    out = torch.full_like(slope, torch.nan)
    assert grouped_gemm.backend.gmm(a, matrices, counts, trans_b=True, c=out) is out
    torch.testing.assert_close(out, grouped_gemm.ops.gmm(a, matrices, counts, True))
