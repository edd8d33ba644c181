"""Plants without switches: both sides execute the wrong line."""

from __future__ import annotations

from importlib import import_module
from pathlib import Path
from typing import Any

import pytest

fold: Any = import_module("fold")
loader: Any = import_module("loader")


@pytest.mark.parametrize(
    ("text", "folded"),
    [
        ('if grid.mode == "p1" and cp > 1:\n    x = 1\n', "if True and cp > 1:\n    x = 1\n"),
        ('if mode != "p1":\n    x = 1\n', "if False:\n    x = 1\n"),
        ('if mode in ("p1", "p2"):\n    x = 1\n', "if True:\n    x = 1\n"),
        ('x = a if pc.on("p1") else b\n', "x = a if True else b\n"),
        ('é = on("p1"), on("p2")\n', 'é = True, on("p2")\n'),
        ('@op("p1")\ndef run():\n    pass\n', '@op("p1")\ndef run():\n    pass\n'),
    ],
)
def test_the_test_of_a_switch_becomes_its_value(text: str, folded: str) -> None:
    assert fold.fold_text(text, "p1") == folded


def test_a_plant_is_folded_in_its_own_copy_of_the_stack(tmp_path: Path) -> None:
    plants = {plant.id: plant for plant in loader.load_stack("hazel")}
    folded = fold.fold(plants["hazel-rms-numel"], tmp_path)
    assert folded.package == tmp_path / "hazel-rms-numel"
    (line,) = folded.truth.lines
    text = (folded.package / line.file).read_text().splitlines()
    assert text[line.first - 2].strip() == "if True:"
    assert fold.fold(plants["hazel-clean-dp"], tmp_path) is None
