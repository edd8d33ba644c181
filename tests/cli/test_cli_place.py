"""`moeverify place` as a user sees it: its output, its files and its messages for bad input."""

from __future__ import annotations

import json
import xml.etree.ElementTree as ET
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from typer.testing import Result

from moeverify.report.results_schema import make_results_schema
from moeverify.tools.placement.marks import mark
from moeverify.tools.placement.placement import place_in_blocks
from moeverify.tools.placement.placement_file import format_placement, read_placement
from moeverify.tools.placement.synthetic import make_trace
from moeverify.tools.placement.trace_file import TraceWriter

Invoke = Callable[..., Result]


@pytest.fixture
def trace(tmp_path: Path) -> Path:
    path = tmp_path / "load.trace"
    made = make_trace("zipf", seed=0, num_layers=2, num_experts=16, num_sources=4, num_steps=3)
    with TraceWriter(path, made.header) as writer:
        for step, copies in zip(made.steps, made.copies, strict=True):
            writer.append(step, copies)
    return path


def test_a_trace_becomes_a_placement(invoke: Invoke, trace: Path, tmp_path: Path) -> None:
    out, picture, results = tmp_path / "p.yaml", tmp_path / "p.svg", tmp_path / "p.json"
    done = invoke(
        "place", trace, "--world-size", 4, "--slots", 6, "--save", out, "--svg", picture, "--json", results
    )
    assert done.exit_code == 0, done.stderr
    assert "3 steps, 2 MoE layers, 16 experts; tokens of each rank" in done.stdout
    assert "4 on 1 node, 6 slots each, 8 spare" in done.stdout
    plan = json.loads(results.read_text())
    assert plan["before"]["balancedness"] < 0.7
    (known,) = (each for each in make_results_schema()["anyOf"] if "num_slots" in each.get("properties", ()))
    assert set(known["required"]) <= set(plan) <= set(known["properties"])
    assert plan["after"]["balancedness"] > 0.97
    assert f"{plan['after']['balancedness']:.4f}" in done.stdout
    assert all(
        low <= high * (1 + 1e-9) for low, high in zip(plan["bound"], plan["after"]["largest"], strict=True)
    )
    placement = read_placement(out)
    assert placement.layers == (0, 1)
    assert f"layer 1: {[list(row) for row in placement.matrices[1]]}" in done.stdout
    assert plan["after"]["placement"]["layers"]["1"] == [list(row) for row in placement.matrices[1]]
    cells = [each for each in ET.parse(picture).iter() if each.tag.endswith("title")]
    assert len(cells) == 2 * 2 * 4


def test_a_placement_in_use_is_improved_within_a_budget(invoke: Invoke, trace: Path, tmp_path: Path) -> None:
    current, out = tmp_path / "now.json", tmp_path / "next.json"
    assert (
        invoke("place", trace, "--world-size", 4, "--slots", 6, "--last", 1, "--save", current).exit_code == 0
    )
    done = invoke(
        "place", trace, "--world-size", 4, "--slots", 6, "--current", current, "--max-moves", 2, "--save", out
    )
    assert done.exit_code == 0, done.stderr
    before, after = (mark(read_placement(path)) for path in (current, out))
    assert (after & ~before).sum() <= 2
    assert "at most 2: " in done.stdout


def test_an_array_is_a_trace_without_sources(invoke: Invoke, tmp_path: Path) -> None:
    path = tmp_path / "load.npy"
    np.save(path, np.array([[9, 5, 4, 2]]))
    done = invoke("place", path, "--world-size", 2, "--slots", 2)
    assert done.exit_code == 0, done.stderr
    assert "bound    11: no placement has less; the gap to it is 0.00%" in done.stdout  # 9 + 2
    assert "tokens the same from every rank" in done.stdout


def test_everything_wrong_is_said_at_once(invoke: Invoke, tmp_path: Path) -> None:
    bad = tmp_path / "p.yaml"
    bad.write_text("num_experts: 4\nmatrix:\n- [0, 1]\n- []\n")
    done = invoke(
        "place",
        tmp_path / "none.trace",
        "--world-size",
        4,
        "--ranks-per-node",
        3,
        "--slots",
        1,
        "--current",
        bad,
    )
    assert done.exit_code == 2
    for words in (
        "none.trace: there is no such file",
        "4 ranks do not fill nodes of 3",
        f"{bad}:4: matrix[1]: rank 1 holds no expert",
        "no rank holds experts 2, 3",
        "4 problems",
    ):
        assert words in done.stderr


def test_what_does_not_fit_together_leaves_no_file(invoke: Invoke, trace: Path, tmp_path: Path) -> None:
    current, out = tmp_path / "now.yaml", tmp_path / "next.yaml"
    current.write_text(format_placement(place_in_blocks(8, 4, [0, 1])))
    done = invoke("place", trace, "--world-size", 4, "--slots", 3, "--current", current, "--save", out)
    assert done.exit_code == 2
    assert "4 ranks with 3 slots each hold 12 experts, the trace has 16" in done.stderr
    assert f"{current}: num_experts: the placement has 8 experts, the model has 16" in done.stderr
    assert not out.exists()
    trace.write_bytes(b"x")
    done = invoke("place", trace, "--world-size", 4, "--slots", 4)
    assert done.exit_code == 2
    assert "this is no load trace; write one with TraceWriter" in done.stderr
