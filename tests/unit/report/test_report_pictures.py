"""Pictures of cases: drawings of their data, as SVG of a page and as PNG."""

from __future__ import annotations

import math
import re
from pathlib import Path
from typing import Any
from xml.etree import ElementTree as ET

import pytest
from matplotlib.colors import to_hex
from matplotlib.patches import Rectangle
from PIL import Image
from report_cases import EXPERTS, MESH, TIMELINE, WITHOUT_PICTURES, make_failing

from moeverify.report.formats.registry import write_run
from moeverify.report.pictures import heat_map, mesh
from moeverify.report.pictures.heat_map import find_level as find_heat
from moeverify.report.pictures.heat_map import split_name
from moeverify.report.pictures.picture import Picture, drawing, format_png, format_svg
from moeverify.report.pictures.registry import draw_case, draw_run
from moeverify.report.pictures.theme import COLORS, PALETTE
from moeverify.results.error_map import ErrorMap
from moeverify.results.mesh import MeshShape
from moeverify.results.run import RunResult

pytestmark = pytest.mark.slow

SVG = "{http://www.w3.org/2000/svg}"


@pytest.fixture(scope="module")
def pictures() -> dict[str, Picture]:
    return dict(draw_case(make_failing()))


def read_texts(picture: Picture) -> list[str]:
    root = ET.fromstring(format_svg(picture, "a"))
    return ["".join(element.itertext()) for element in root.iter(f"{SVG}text")]


def test_everything_that_there_is_data_for_is_drawn(pictures: dict[str, Picture]) -> None:
    assert list(pictures) == ["heat-map", "mesh", "ratios", "timeline", "curves", "load", "limits"]


def test_a_case_without_data_has_no_picture(make_case: Any) -> None:
    assert not list(draw_case(make_case(verdict="skipped", checks=())))


def test_a_case_of_an_older_version_has_the_pictures_of_what_it_kept() -> None:
    names = [name for name, _ in draw_case(make_failing(mesh=None, errors=(), load=None, timeline=None))]
    assert names == ["ratios", "curves", "limits"]


def test_the_map_has_the_tensors_steps_and_the_first_finding(pictures: dict[str, Picture]) -> None:
    texts = read_texts(pictures["heat-map"])
    assert {"embed.weight", "moe.experts.gate", "step 0", "step 2", "gradient", "0", "1", "2"} <= set(texts)
    caption = pictures["heat-map"].caption
    # At step 0 the experts of three layers, and 13 tensors at each of the two steps after it.
    assert caption.startswith("32 of 39 cells are over their bound")
    assert f"The frame marks the first finding: gradient: {EXPERTS[0]}, step 0." in caption


@pytest.mark.parametrize(
    ("check", "tensor", "row"),
    [
        ("gradient", "layers.1.moe.router.bias", "moe.router.bias"),
        ("optimizer state", "layers.1.moe.router.bias.exp_avg", "moe.router.bias"),
        ("routing", "layers.1.moe.router", "moe.router"),
    ],
)
def test_the_frame_is_around_the_tensor_and_not_around_the_module_it_is_in(
    check: str, tensor: str, row: str
) -> None:
    case = make_failing()
    first = case.findings[0].model_copy(update={"check": check, "tensor": tensor})
    errors = [
        ErrorMap(check=name, tensors=(f"layers.1.{family}",), steps=(0,), shares=((2.0,),))
        for name, family in (
            ("routing", "moe.router"),
            ("gradient", "moe.router.bias"),
            ("optimizer state", "moe.router.bias"),
        )
    ]
    findings = (first, *(first.model_copy(update={"check": each.check, "follows": "x"}) for each in errors))
    with drawing():
        picture = heat_map.draw(case.model_copy(update={"findings": findings, "errors": tuple(errors)}))
    assert picture is not None
    axes = picture.figure.axes[0]
    (frame,) = [patch for patch in axes.patches if isinstance(patch, Rectangle)]
    assert [label.get_text() for label in axes.get_yticklabels()][int(frame.get_y())] == row
    assert int(frame.get_x()) == [each.check for each in errors].index(check)


def test_the_ratios_tell_a_factor_of_two_from_what_is_right(pictures: dict[str, Picture]) -> None:
    bars = {
        round(bar.get_center()[0], 6): bar.get_height() for bar in pictures["ratios"].figure.axes[0].patches
    }  # type: ignore[attr-defined]
    assert bars == {0.0: 7, 1.0: 6}  # by powers of 2
    assert "6 tensors over the bound, 7 within it. Most frequent factors: 2 (6)" in pictures["ratios"].caption


def test_the_mesh_has_the_ranks_that_differ_and_the_groups_of_the_axes_at_fault(
    pictures: dict[str, Picture],
) -> None:
    texts = read_texts(pictures["mesh"])
    assert texts.count("6 of 6") == 2 * 2  # ranks 0 and 1, once for each axis
    assert texts.count("0 of 6") == 2 * 2
    assert {"groups of efsdp", "groups of ep"} <= set(texts)
    assert "groups of efsdp, in one colour each, are 0, 2 | 1, 3" in pictures["mesh"].caption


def test_the_curves_say_from_which_step_a_loss_is_no_number(pictures: dict[str, Picture]) -> None:
    assert "inf, at step 2" in pictures["curves"].caption
    assert "0.2, at step 0" in pictures["curves"].caption


def test_the_learning_rate_stands_beside_them(pictures: dict[str, Picture]) -> None:
    assert {"loss", "gradient norm", "learning rate"} <= set(read_texts(pictures["curves"]))
    assert (
        "The learning rate differs; its largest relative difference is 0.1, at step 2."
        in pictures["curves"].caption
    )


def test_the_timeline_frames_what_is_issued_where_the_first_difference_is(
    pictures: dict[str, Picture],
) -> None:
    picture = pictures["timeline"]
    assert {"rank 0", "rank 3", "dp_shard", "ep", "other groups", "0 ms"} <= set(read_texts(picture))
    bars = [patch for patch in picture.figure.axes[0].patches if isinstance(patch, Rectangle)]
    assert len(bars) == 3 + 3 + 3 + 2
    framed = [bar for bar in bars if to_hex(bar.get_edgecolor()) == COLORS["mismatch"]]
    assert [(bar.get_x(), bar.get_y()) for bar in framed] == [(0.001, rank - 0.3) for rank in range(4)]
    caption = picture.caption
    assert "different numbers of collectives in step 0: rank 0 3, rank 1 3, rank 2 3, rank 3 2." in caption
    assert "Framed, where the first difference is: all_to_all of ep in layers.0.moe (forward)." in caption


def test_collectives_that_a_result_left_out_are_counted() -> None:
    cut = TIMELINE.model_copy(update={"ranks": tuple(row[:1] for row in TIMELINE.ranks)})
    pictures = dict(draw_case(make_failing(timeline=cut, findings=())))
    assert "The first 1 of each rank are drawn." in pictures["timeline"].caption
    assert "Framed" not in pictures["timeline"].caption


def test_the_pairs_of_checkpoints_are_a_matrix(tmp_path: Path) -> None:
    names, verdicts = ("single", "fsdp2"), iter(("pass", "mismatch", "skipped", "error"))
    cases = tuple(
        make_failing(f"{saver}, {loader}", saved_by=saver, loaded_by=loader, verdict=next(verdicts))
        for saver in names
        for loader in names
    )
    ((name, picture),) = draw_run(RunResult(verdict="error", environment={}, cases=cases))
    assert name == "reshard"
    texts = read_texts(picture)
    assert texts.count("single") == texts.count("fsdp2") == 2
    assert {"gradient +1", "-", "saved by", "loaded by", "skipped"} <= set(texts)
    assert "saved by single, loaded by fsdp2: gradient +1" in picture.caption
    faces = [patch.get_facecolor() for patch in picture.figure.axes[0].patches]
    assert len(set(faces)) == 4


def test_the_load_names_the_busiest_expert(pictures: dict[str, Picture]) -> None:
    assert (
        "layer 1: the busiest expert, 1, has 1.88 times the mean, and 1 of 4 have none"
        in pictures["load"].caption
    )


@pytest.mark.parametrize(
    ("axes", "groups", "ranks"),
    [
        ({"pp": 2, "dp_shard": 4, "tp": 2}, {"tp": ((0, 1), (2, 3)), "pp": ((0, 8), (1, 9))}, 16),
        ({}, {}, 3),
        ({"dp_shard": 64}, {"ep": (tuple(range(0, 64, 2)), tuple(range(1, 64, 2)))}, 64),
    ],
)
def test_meshes_of_all_shapes_are_drawn(axes: Any, groups: Any, ranks: int) -> None:
    shape = MeshShape(axes=axes, groups=groups)
    with drawing():
        picture = mesh.draw(make_failing(mesh=shape, ranks=ranks))
    assert picture is not None
    assert f"rank {ranks - 1}" in read_texts(picture)


def test_a_mesh_too_large_to_read_is_not_drawn() -> None:
    assert mesh.draw(make_failing(mesh=MESH, ranks=65)) is None


def test_svg_shares_no_id_with_another_and_takes_its_colours_from_the_page(
    pictures: dict[str, Picture],
) -> None:
    ids: list[str] = []
    for name, picture in pictures.items():
        text = format_svg(picture, name)
        root = ET.fromstring(text)
        found = re.findall(r' id="([^"]+)"', text)
        assert all(each.startswith(f"{name}-") for each in found)
        assert root.get("aria-labelledby") == f"{name}-title {name}-desc"
        assert [root.find(f"{SVG}{tag}").text for tag in ("title", "desc")] == [  # type: ignore[union-attr]
            picture.title,
            picture.caption,
        ]
        used = re.findall(r'(?:url\(#|href="#)([^)"]+)', text)
        assert set(used) <= set(found)
        styles = " ".join(re.findall(r'style="([^"]*)"', text))
        assert not re.findall(r"#[0-9a-f]{6}", styles)
        assert set(re.findall(r"var\(--([a-z0-9-]+)\)", styles)) <= set(PALETTE)
        ids += found
    assert len(ids) == len(set(ids))
    assert len(set(COLORS.values())) == len(COLORS)  # or a colour would have two names


def test_names_with_markup_formulas_and_odd_letters_are_text() -> None:
    evil = "<script>alert(1)</script> $\\frac{$ \u4e2d"
    case = make_failing(evil)
    renamed = [finding.model_copy(update={"tensor": evil}) for finding in case.findings]
    errors = [each.model_copy(update={"tensors": (evil, *each.tensors[1:])}) for each in case.errors]
    for name, picture in draw_case(case.model_copy(update={"findings": renamed, "errors": errors})):
        text = format_svg(picture, name)
        assert "<script" not in text
        if name == "heat-map":
            assert "&lt;script&gt;alert(1)" in text
            format_png(picture)


def test_deep_models_many_steps_and_families_stay_readable() -> None:
    tensors = [f"layers.{layer}.w{family}" for layer in range(96) for family in range(60)]
    case = make_failing()
    shares = ((1e9,) * 40,) * len(tensors)
    errors = case.errors[0].model_copy(
        update={"tensors": tuple(tensors), "steps": tuple(range(40)), "shares": shares}
    )
    with drawing():
        picture = heat_map.draw(case.model_copy(update={"errors": (errors,)}))
    assert picture is not None
    width, height = picture.figure.get_size_inches()
    assert (width < 30, height < 15) == (True, True)
    assert "33 later steps not shown" in picture.caption
    assert "12 rows with smaller errors not shown" in picture.caption
    assert "0-5" in read_texts(picture)


@pytest.mark.parametrize(
    ("name", "parts"),
    [
        ("layers.12.moe.router", ("12", "moe.router")),
        ("embed.weight", ("", "embed.weight")),
        ("h.3", ("3", "h")),
        ("0.weight", ("0", "weight")),
        ("layers2.w", ("", "layers2.w")),
        ("", ("", "")),
    ],
)
def test_layers_are_read_from_names(name: str, parts: tuple[str, str]) -> None:
    assert split_name(name) == parts


def test_levels_grow_with_the_share() -> None:
    shares = (0.0, 1.0, 1.01, 10.0, 11.0, 1e6, 1e7, 1e300, math.inf, math.nan)
    assert [find_heat(share) for share in shares] == [0, 0, 1, 1, 2, 3, 4, 5, 6, 6]


def test_plots_are_files_by_case_and_picture_of_what_failed(
    make_run: Any, make_case: Any, tmp_path: Path
) -> None:
    run = make_run(
        make_case("good"),
        make_failing("../a b", checks=(), **WITHOUT_PICTURES),
        make_failing("../a/b", checks=(), **WITHOUT_PICTURES),
    )
    write_run("plots", run, tmp_path / "plots")
    names = sorted(path.name for path in (tmp_path / "plots").iterdir())
    assert names[0] == "_a_b-1.mesh.png"
    assert len(names) == 4
    assert [path.name for path in tmp_path.iterdir()] == ["plots"]
    with Image.open(tmp_path / "plots" / "_a_b.mesh.png") as image:
        assert image.info["Title"] == "Device mesh"
        assert image.width > 600
