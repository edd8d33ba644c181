"""Placements: validity, matrices and marks, files, and every error message."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from moeverify.errors import CaseError
from moeverify.tools.placement.cluster import Cluster
from moeverify.tools.placement.load_trace import LoadTrace, TraceHeader
from moeverify.tools.placement.marks import from_marks, mark
from moeverify.tools.placement.placement import Placement, check_fit, place_in_blocks
from moeverify.tools.placement.placement_file import format_placement, placement_to_dict, read_placement
from moeverify.tools.placement.plan import make_plan

PAIRS = ((0, 3), (1, 2), (1, 2), (0, 3))


def test_a_matrix_says_which_rank_holds_what() -> None:
    marks = mark(Placement(4, (PAIRS,)))
    assert marks.shape == (1, 4, 4)
    assert [np.flatnonzero(marks[0, expert]).tolist() for expert in range(4)] == [
        [0, 3],
        [1, 2],
        [1, 2],
        [0, 3],
    ]


def test_ranks_may_hold_different_numbers_of_experts() -> None:
    placement = Placement(4, (((0, 1, 2, 3), (2,)),))
    assert placement.num_ranks == 2
    assert placement.num_slots == 4
    assert mark(placement).sum() == 5


def test_one_matrix_stands_for_every_layer() -> None:
    placement = Placement(4, (PAIRS,)).spell_out([1, 5])
    assert placement.layers == (1, 5)
    assert placement.matrices == (PAIRS, PAIRS)
    with pytest.raises(CaseError, match="MoE layers 1, 5, expected 2"):
        placement.spell_out([2])


@pytest.mark.parametrize(
    ("matrix", "words"),
    [
        (((0, 1), (2,)), "no rank holds expert 3"),
        (((0, 1, 2, 3), ()), r"matrix\[1\]: rank 1 holds no expert"),
        (((0, 1), (2, 3, 4)), r"matrix\[1\]: expert 4 is not one of the 4 experts"),
        (((0, 1), (2, 3, -1)), "expert -1 is not one of"),
        (((0, 0, 1), (2, 3)), "rank 0 holds expert 0 more than once"),
        ((), "there is no rank"),
    ],
)
def test_what_is_wrong_with_a_matrix_is_said(matrix: tuple[tuple[int, ...], ...], words: str) -> None:
    with pytest.raises(CaseError, match=words):
        Placement(4, (matrix,))


def test_everything_wrong_is_said_at_once() -> None:
    with pytest.raises(CaseError) as error:
        Placement(4, (((0, 0), ()), ((0, 1), (2, 3), (9,))), (1, 1))
    said = "\n".join(map(str, error.value.problems))
    for words in (
        "different indices",
        "more than once",
        "holds no expert",
        "experts 1, 2, 3",
        "expert 9",
        "2, 3",
    ):
        assert words in said


def test_nodes_are_given_by_their_size() -> None:
    assert Cluster.of_nodes(8, 4) == Cluster(8, 2)
    assert Cluster.of_nodes(6, None) == Cluster(6, 1)
    for size in (3, 16):
        with pytest.raises(CaseError, match=f"--ranks-per-node: 8 ranks do not fill nodes of {size}"):
            Cluster.of_nodes(8, size)


def test_sizes_beyond_every_job_are_refused_at_once() -> None:
    with pytest.raises(CaseError, match="expected 1 to 1048576 experts"):
        Placement(10**18, (((0,),),))
    with pytest.raises(CaseError, match="expected 1 to 1048576 ranks"):
        Cluster(10**9)
    header = TraceHeader(tuple(range(58)), 256)
    trace = LoadTrace(header, (0,), np.ones((1, *header.shape)))
    with pytest.raises(CaseError, match="58 layers, 256 experts and 2048 ranks"):
        make_plan(trace, Cluster(2048), 8)


def test_a_placement_of_another_model_does_not_fit() -> None:
    placement = Placement(4, (PAIRS, PAIRS), (1, 2))
    problems = check_fit(placement, num_experts=8, num_ranks=2, layers=(1, 3), file="p.yaml")
    said = [str(problem) for problem in problems]
    assert len(said) == 3
    assert all(line.startswith("p.yaml: ") for line in said)
    assert "4 experts, the model has 8" in said[0]
    assert "4 ranks, expected 2" in said[1]
    assert "MoE layers 1, 2, the model has 1, 3" in said[2]
    assert not list(check_fit(placement, num_experts=4, num_ranks=4, layers=(1, 2)))


@pytest.mark.parametrize(("num_experts", "num_ranks"), [(8, 4), (10, 4), (7, 7), (3, 8), (1, 5), (64, 6)])
def test_blocks_are_consecutive_and_even(num_experts: int, num_ranks: int) -> None:
    placement = place_in_blocks(num_experts, num_ranks, [0, 3])
    rows = placement.matrices[1]
    assert len(rows) == num_ranks
    assert [expert for row in rows for expert in row] == sorted(expert for row in rows for expert in row)
    sizes = [len(row) for row in rows]
    assert max(sizes) - min(sizes) <= 1


def test_experts_that_stay_keep_their_slots() -> None:
    old = Placement(6, (((0, 1, 2), (3, 4, 5)),), (0,))
    new = Placement(6, (((2, 5, 0), (1, 3, 4)),), (0,))
    kept = from_marks(mark(new), [0], previous=old)
    assert kept.matrices[0] == ((0, 5, 2), (3, 4, 1))
    assert (mark(kept) == mark(new)).all()


def write(path: Path, text: str) -> Path:
    path.write_text(text)
    return path


@pytest.mark.parametrize("suffix", ["yaml", "json"])
@pytest.mark.parametrize("layers", [(), (0, 1)])
def test_files_hold_what_was_written(tmp_path: Path, suffix: str, layers: tuple[int, ...]) -> None:
    placement = Placement(4, (PAIRS, ((0,), (1,), (2, 3), (0, 1)))[: len(layers) or 1], layers)
    text = format_placement(placement) if suffix == "yaml" else json.dumps(placement_to_dict(placement))
    assert read_placement(write(tmp_path / f"p.{suffix}", text)) == placement


def test_a_matrix_alone_is_a_file(tmp_path: Path) -> None:
    path = write(tmp_path / "p.yaml", "[[0, 3], [1, 2], [1, 2], [0, 3]]")
    assert read_placement(path) == Placement(4, (PAIRS,))
    assert read_placement(write(path, "- [0, 3]\n- [1, 2]\n- [1, 2]\n- [0, 3]\n")) == Placement(4, (PAIRS,))


@pytest.mark.parametrize(
    ("text", "line", "words"),
    [
        ("num_experts: 4\nmatrix:\n- [0, 3]\n- [1, 1]\n- [2]\n", 4, "rank 1 holds expert 1 more than once"),
        ("num_experts: 5\nlayers:\n  0:\n  - [0, 1]\n  1:\n  - [0, 1]\n", 3, "no rank holds experts 2, 3, 4"),
        ("num_experts: 2\nlayers:\n  0:\n  - [0, 1]\n  - []\n", 5, "rank 1 holds no expert"),
        ("matrix:\n- [0, 1]\n- 7\n", 3, "expected the experts of rank 1, got 7"),
        ("matrix:\n- [0, 1]\n- [x, true]\n", 3, "expected an expert, got 'x'"),
        ("layers:\n  first: [[0]]\n", 2, "expected the index of an MoE layer"),
        ("num_experts: many\nmatrix: [[0]]\n", 1, "expected a number of experts, got 'many'"),
        ("matrx: [[0]]\nmatrix: [[0]]\n", 1, "unknown field"),
        ('{"num_experts": 3,\n "matrix": [[0],\n [1, 2, 2]]}', 3, "more than once"),
        ("matrix: [[0]\nlayers: 1\n", 2, "broken YAML"),
        ("matrix: [[0]]\nmatrix: [[1]]\n", 2, "given twice"),
        ('{"matrix": [[0]],\n"matrix": [[1]]}', 2, "given twice"),
        ('{"matrix": [[0, 1],\n[99999999999999999999, 1]]}', 2, "beyond 64 bits"),
        ("num_experts: 2\nmatrix:\n- [0, 1]\n- [9999999]\n", 4, "expected an expert"),
        ("num_experts: 9999999\nmatrix: [[0]]\n", 1, "expected a number of experts"),
    ],
)
def test_messages_name_file_and_line(tmp_path: Path, text: str, line: int, words: str) -> None:
    path = write(tmp_path / "p.yaml", text)
    with pytest.raises(CaseError) as error:
        read_placement(path)
    assert any(
        problem.file == str(path) and problem.line == line and words in problem.message
        for problem in error.value.problems
    ), error.value


@pytest.mark.parametrize(
    "text", ["", "12", "num_experts: 3\n", "matrix: [[0]]\nlayers: {0: [[0]]}\n", "layers: 3\n"]
)
def test_what_is_no_placement_is_said(tmp_path: Path, text: str) -> None:
    with pytest.raises(CaseError, match="expected"):
        read_placement(write(tmp_path / "p.yaml", text))


def test_files_that_cannot_be_read_are_said(tmp_path: Path) -> None:
    with pytest.raises(CaseError, match="there is no such file"):
        read_placement(tmp_path / "none.yaml")
    (tmp_path / "p.yaml").write_bytes(b"\xff\xfe\x00matrix")
    with pytest.raises(CaseError, match="not UTF-8"):
        read_placement(tmp_path / "p.yaml")
    with pytest.raises(CaseError, match="cannot be read"):
        read_placement(tmp_path)
