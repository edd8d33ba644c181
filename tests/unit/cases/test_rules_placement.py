"""Rules on initial and later expert placement: matrices, files of matrices, and compatible options."""

from __future__ import annotations

import pytest

from moeverify.cases.validation.load import load_cases

# The rows have the format of test_rules.py.
BROKEN = [
    ("placement: striped", "", "layout.placement", "placement needs ep above 1", "set ep"),
    (
        "dp_shard: 2, ep: 2, placement: spread",
        "",
        "layout.placement",
        "there is no strategy `spread`",
        "`striped`",
    ),
    (
        "dp_shard: 2, ep: 2, placement: [[0, 1, 2], [3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14]]",
        "",
        "layout.placement",
        "no rank holds expert 15",
        "put each expert on at least one rank",
    ),
    (
        "dp_shard: 2, ep: 2, placement: [[0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15, 16], [1]]",
        "",
        "layout.placement[0]",
        "expert 16 is not one of the 16 experts",
        "0 to 15",
    ),
    (
        "dp_shard: 2, ep: 2, placement: [[0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15], []]",
        "",
        "layout.placement[1]",
        "rank 1 holds no expert",
        "at least one",
    ),
    (
        "dp_shard: 4, ep: 4, placement: {1: [[0], [1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15]]}",
        "",
        "layout.placement.1",
        "2 rows for the 4 ranks of ep",
        "write 4 rows, or `ep: 2`",
    ),
    (
        "dp_shard: 2, ep: 2, placement: {0: [[0], [1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15]]}",
        "",
        "layout.placement",
        "there is no matrix for MoE layer 1, 2",
        "one for all",
    ),
    (
        "dp_shard: 2, ep: 2, placement: {0: [[0], [1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15]]}",
        "",
        "layout.placement.0",
        "the model has no MoE layer `0`",
        "1, 2",
    ),
    (
        "dp_shard: 2, tp: 2, ep: 2, etp: 2, placement: striped",
        "",
        "layout.placement",
        "placement together with etp 2 is not supported",
        "write `etp: 1`",
    ),
    (
        "dp_shard: 2, ep: 2, experts: megablocks, placement: striped",
        "",
        "layout.placement",
        "placement together with `experts: megablocks` is not supported",
        "`experts: loop`",
    ),
]

EXCHANGED = [
    ("exchange: {1: striped}", "", "layout.exchange", "exchange needs ep above 1", "set ep"),
    (
        "dp_shard: 2, ep: 2, exchange: {1: striped}",
        "moe: null",
        "layout.exchange",
        "exchange needs experts that moeverify divides",
        "use a model with `moe`",
    ),
    (
        "dp_shard: 2, ep: 2, exchange: {1: striped}, parallelize: 'mine:divide'",
        "",
        "layout.exchange",
        "exchange needs experts that moeverify divides",
        "remove it",
    ),
    (
        "dp_shard: 2, ep: 2, exchange: {0: striped}",
        "",
        "layout.exchange.0",
        "expected a number of steps from 1 to 1, got `0`",
        "the recipe trains 2 steps, and a move after the last one has no effect",
    ),
    (
        "dp_shard: 2, ep: 2, exchange: {3: striped}",
        "steps: 3",
        "layout.exchange.3",
        "expected a number of steps from 1 to 2, got `3`",
        "the recipe trains 3 steps",
    ),
    ("dp_shard: 2, ep: 2, exchange: {all: striped}", "", "layout.exchange.all", "1 to 1, got `all`", ""),
    ("dp_shard: 2, ep: 2, exchange: {'01': striped}", "", "layout.exchange.01", "1 to 1, got `01`", ""),
    (
        "dp_shard: 2, ep: 2, exchange: {1: striped}",
        "steps: 1",
        "layout.exchange.1",
        "an exchange is between two steps, and the recipe trains 1",
        "set recipe.steps to 2 or more, or remove exchange",
    ),
    (
        "dp_shard: 2, ep: 2, placement: striped, exchange: {1: spread}",
        "",
        "layout.exchange.1",
        "there is no strategy `spread`",
        "`striped`",
    ),
    (
        "dp_shard: 2, ep: 2, exchange: {1: [[0, 1, 2], [3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14]]}",
        "",
        "layout.exchange.1",
        "no rank holds expert 15",
        "put each expert on at least one rank",
    ),
    (
        "dp_shard: 2, ep: 2, exchange: {1: [[0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15], [16]]}",
        "",
        "layout.exchange.1[1]",
        "expert 16 is not one of the 16 experts",
        "0 to 15",
    ),
    (
        "dp_shard: 4, ep: 4, exchange: {1: [[0], [1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15]]}",
        "",
        "layout.exchange.1",
        "2 rows for the 4 ranks of ep",
        "write 4 rows, or `ep: 2`",
    ),
    (
        "dp_shard: 2, ep: 2, exchange: {1: {1: [[0], [1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15]]}}",
        "",
        "layout.exchange.1",
        "there is no matrix for MoE layer 2",
        "one for all",
    ),
    (
        "dp_shard: 2, ep: 2, exchange: {1: {0: [[0], [1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15]]}}",
        "",
        "layout.exchange.1.0",
        "the model has no MoE layer `0`",
        "1, 2",
    ),
    (
        "dp_shard: 2, tp: 2, ep: 2, etp: 2, exchange: {1: striped}",
        "",
        "layout.exchange",
        "exchange together with etp 2 is not supported",
        "write `etp: 1`, or remove exchange",
    ),
    (
        "dp_shard: 2, ep: 2, experts: megablocks, exchange: {1: striped}",
        "",
        "layout.exchange",
        "exchange together with `experts: megablocks` is not supported",
        "or remove exchange",
    ),
]

REBALANCED = [
    ("rebalance: {every: 1, slots: 9}", "", "layout.rebalance", "rebalance needs ep above 1", "set ep"),
    (
        "dp_shard: 2, ep: 2, rebalance: {every: 2, slots: 9}",
        "",
        "layout.rebalance.every",
        "the first new placement would come after 2 steps, and the recipe trains 2",
        "write at most 1, or set recipe.steps",
    ),
    (
        "dp_shard: 2, ep: 2, rebalance: {every: 1, slots: 7}",
        "",
        "layout.rebalance.slots",
        "2 ranks with 7 slots each hold 14 experts, and the model has 16",
        "write at least 8, or a larger ep",
    ),
    (
        "dp_shard: 2, ep: 2, rebalance: {every: 1, slots: 9}, "
        "placement: [[0, 1, 2, 3, 4, 5, 6, 7, 8, 9], [10, 11, 12, 13, 14, 15]]",
        "",
        "layout.rebalance.slots",
        "a rank holds 10 experts at first, and there are 9 slots",
        "write at least 10, or another placement",
    ),
    (
        "dp_shard: 2, ep: 2, rebalance: {every: 1, slots: 9}, exchange: {1: striped}",
        "",
        "layout.rebalance",
        "the placements are given by exchange, and would be solved by rebalance as well",
        "remove one of them",
    ),
    (
        "dp_shard: 2, tp: 2, ep: 2, etp: 2, rebalance: {every: 1, slots: 9}",
        "",
        "layout.rebalance",
        "rebalance together with etp 2 is not supported",
        "write `etp: 1`, or remove rebalance",
    ),
]

KEPT = [
    ("dp_shard: 2, ep: 2, rebalance: {every: 1, slots: 8, last: 1, max_moves: 0}", ""),
    ("dp_shard: 2, ep: 2, placement: everywhere, rebalance: {every: 1, slots: 16}", ""),
    ("dp_shard: 2, ep: 2, placement: everywhere", ""),
    ("dp_shard: 2, ep: 2, exchange: {1: striped}", ""),
    ("dp_shard: 2, ep: 2, placement: striped, exchange: {1: blocks, 2: everywhere}", "steps: 3"),
    ("dp_shard: 2, tp: 2, ep: 4, exchange: {1: striped}", ""),
]


@pytest.mark.parametrize(("layout", "recipe", "path", "message", "remedy"), BROKEN + EXCHANGED + REBALANCED)
def test_broken_rule(check_broken, layout, recipe, path, message, remedy):
    check_broken(layout, recipe, path, message, remedy)


@pytest.mark.parametrize(("layout", "recipe"), KEPT)
def test_kept_rule(write, find_problems, compose, layout, recipe):
    assert find_problems(write("case.yaml", compose(layout, recipe))) == []


PLACED = """
recipe: {model: {preset: stress}}
layout:
  dp_shard: 2
  ep: 2
  placement: %s
"""
ALL_BUT_15 = list(range(15))


def test_a_row_of_a_placement_is_blamed_at_its_line(write, find_problems):
    rows = f"\n  - {ALL_BUT_15}\n  - [15, 16]\n"
    [problem] = find_problems(write("case.yaml", PLACED % rows))
    assert (problem.path, problem.line) == ("layout.placement[1]", 7)


def test_a_placement_file_stands_beside_the_case(write):
    write(
        "where/placed.yaml",
        f"num_experts: 16\nlayers:\n  1: [{ALL_BUT_15}, [15]]\n  2: [[15], {ALL_BUT_15}]\n",
    )
    [case] = load_cases([write("where/case.yaml", PLACED % "placed.yaml")])
    assert case.layout.placement == {"1": (tuple(ALL_BUT_15), (15,)), "2": ((15,), tuple(ALL_BUT_15))}


def test_what_is_wrong_with_a_placement_file_is_blamed_there(write, find_problems):
    file = write("placed.yaml", "num_experts: 16\nlayers:\n  1:\n  - [0, 1]\n  - []\n")
    problems = find_problems(write("case.yaml", PLACED % "placed.yaml"))
    assert {(problem.file, problem.line) for problem in problems} == {(str(file), 3), (str(file), 5)}


def test_a_placement_file_that_is_not_there(write, find_problems):
    [problem] = find_problems(write("case.yaml", PLACED % "placed.yaml"))
    assert problem.file.endswith("case.yaml")
    assert problem.line == 5
    assert problem.message.endswith("placed.yaml")


def test_an_exchange_is_read_from_a_file_beside_the_case(write):
    write("placed.yaml", f"num_experts: 16\nlayers:\n  1: [{ALL_BUT_15}, [15]]\n  2: [[15], {ALL_BUT_15}]\n")
    [case] = load_cases([write("case.yaml", PLACED % "striped\n  exchange: {1: placed.yaml}")])
    assert case.layout.exchange == {"1": {"1": (tuple(ALL_BUT_15), (15,)), "2": ((15,), tuple(ALL_BUT_15))}}


def test_a_file_of_an_exchange_that_is_not_there(write, find_problems):
    [problem] = find_problems(write("case.yaml", PLACED % "striped\n  exchange: {1: placed.yaml}"))
    assert problem.file.endswith("case.yaml")
    assert problem.line == 6
    assert problem.message.endswith("placed.yaml")
