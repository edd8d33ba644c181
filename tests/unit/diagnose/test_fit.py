"""The fit of wrong gradients on the golden's parts."""

import pytest
import torch

from moeverify.diagnose.aggregation import examine_aggregation
from moeverify.diagnose.components import TERMS, Cell, Components
from moeverify.diagnose.fit import Wrong, fit_columns, share_columns
from moeverify.results.cause import Cause

NAMES = ("a", "b")


def make_components(num_cells=4, padding=True):
    generator = torch.Generator().manual_seed(0)

    def vector(scale):
        return {name: scale * torch.randn(40, generator=generator, dtype=torch.float64) for name in NAMES}

    scales = {"lm": 1.0, "balance": 1e-3, "z": 1e-5}
    cells = tuple(Cell(i, 0, f"dp {i}", (i,), (0,)) for i in range(num_cells))
    parts = {term: [vector(scales[term]) for _ in cells] for term in TERMS}
    extra = {term: vector(scales[term]) for term in TERMS} if padding else {}
    return Components(cells, parts, extra, (10, 20, 30, 40)[:num_cells], NAMES)


def golden(components, name):
    return sum(components.term(term, name) for term in TERMS)


def combine(components, weights):
    """Return the gradients with the given weight for each (term, cell)."""
    return [
        Wrong(
            name,
            sum(
                weights(term, number) * components.parts[term][number][name]
                for term in TERMS
                for number in range(len(components.cells))
            ),
            golden(components, name),
        )
        for name in NAMES
    ]


def examine(wrong, components, degrees=None):
    return examine_aggregation(wrong, components, degrees or {"ep": 2, "tp": 4})[0]


def test_one_factor_is_named_after_its_axis():
    components = make_components()
    verdict = examine(combine(components, lambda term, cell: 2.0), components)
    assert verdict.cause is Cause.SCALE
    assert "2 = ep" in verdict.sentence
    verdict = examine(combine(components, lambda term, cell: 0.25), components)
    assert "1 / (tp)" in verdict.sentence


def test_axes_of_one_size_are_both_named():
    components = make_components()
    verdict = examine(combine(components, lambda term, cell: 2.0), components, {"ep": 2, "cp": 2})
    assert "cannot tell" in verdict.sentence
    assert "cp" in verdict.where
    assert "ep" in verdict.where


@pytest.mark.parametrize(("term", "weight"), [("balance", 0.0), ("balance", 0.5), ("z", 4.0), ("lm", 0.5)])
def test_a_wrong_loss_term_is_found_however_small_it_is(term, weight):
    components = make_components()
    verdict = examine(combine(components, lambda t, cell: weight if t == term else 1.0), components)
    assert verdict.cause is Cause.TERM_SCALE
    assert verdict.where.startswith(f"{term} loss")


def test_a_missing_share_is_named():
    components = make_components()
    verdict = examine(combine(components, lambda term, cell: 0.0 if cell == 2 else 1.0), components)
    assert verdict.cause is Cause.SHARE_WEIGHTS
    assert verdict.where == "dp 2"
    assert "missing" in verdict.sentence


def test_a_mean_of_means_is_recognized():
    components = make_components()
    weights = [100 / (4 * count) for count in components.num_valid]
    verdict = examine(combine(components, lambda term, cell: weights[cell]), components)
    assert verdict.cause is Cause.SHARE_WEIGHTS
    assert "mean of means" in verdict.sentence


def test_padding_is_named():
    components = make_components()
    wrong = [
        Wrong(name, golden(components, name) + components.padding["lm"][name], golden(components, name))
        for name in NAMES
    ]
    verdict = examine(wrong, components)
    assert verdict.cause is Cause.PADDING
    assert verdict.where == "lm loss"


def test_what_is_no_combination_gets_no_cause():
    components = make_components()
    noise = torch.randn(40, dtype=torch.float64, generator=torch.Generator().manual_seed(9))
    wrong = [Wrong(name, golden(components, name) + 1e-3 * noise, golden(components, name)) for name in NAMES]
    assert examine(wrong, components) is None


def test_too_few_numbers_prove_nothing():
    components = make_components()
    wrong = [Wrong("a", 2 * golden(components, "a")[:6], golden(components, "a")[:6])]
    short = [
        (label, lambda name, column=column: column(name)[:6]) for label, column in share_columns(components)
    ]
    assert fit_columns(wrong, short) is None


def test_coefficients_come_out_to_ten_digits():
    components = make_components()
    weights = [1.0, 0.75, 0.25, 1.5]
    fit = fit_columns(combine(components, lambda term, cell: weights[cell]), share_columns(components))
    assert fit.coefficients == pytest.approx(weights, abs=1e-10)
