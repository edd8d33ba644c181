"""Only `moeverify golden` records and refreshes goldens. Other commands report bad goldens and keep them."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from moeverify.checksum import seal, unseal

pytestmark = pytest.mark.timeout(900)  # several launches, on a machine that may be busy

NAMES = ("changed", "cut", "fine", "missing", "wrong")
ORDER = [f"{name}.cpu.json" for name in NAMES]


def write_recipe(project: Any, name: str, *, seed: int) -> None:
    text = (project.folder / "cases" / "recipes" / "tiny.yaml").read_text()
    (project.folder / "cases" / "recipes" / f"{name}.yaml").write_text(f"{text}seed: {seed}\n")


def damage(project: Any) -> None:
    """Damage all goldens but one, each in a different way. Add one unused golden, and one that others use."""
    folder = project.folder / "golden"
    (folder / "missing.cpu.json").unlink()
    whole = (folder / "cut.cpu.json").read_text()
    (folder / "cut.cpu.json").write_text(whole[: len(whole) // 2])
    write_recipe(project, "changed", seed=7)
    content = unseal((folder / "wrong.cpu.json").read_bytes())
    assert content is not None
    text = content.decode()
    loss = re.search(r'"0/loss/total": ([\d.]+)', text)
    assert loss is not None
    wrong = text.replace(loss[0], f'"0/loss/total": {float(loss[1]) * 1.001:.13g}')
    (folder / "wrong.cpu.json").write_text(seal(wrong))  # as another machine would record it
    (folder / "old.name.cpu.json").write_text(whole)
    (folder / "theirs.cpu.json").write_text(whole)
    (project.folder / "others").mkdir()
    (project.folder / "others" / "case.yaml").write_text(
        "recipe: {name: theirs, model: {preset: tiny-gpt}}\n"
    )


def flip_bits_of_full_golden(project: Any, name: str) -> tuple[Path, bytes]:
    """Flip bits in the cached tensors of a recipe, which stay readable. Returns the file and old bytes."""
    recipe = json.loads(project.goldens[f"{name}.cpu.json"])["recipe"]
    (path,) = project.shared.rglob(f"{recipe}-*/step0.safetensors")
    content = path.read_bytes()
    flipped = bytearray(content)
    for part in (0.6, 0.75, 0.9):  # after the header
        flipped[int(len(content) * part)] ^= 0x40
    path.write_bytes(flipped)
    return path, content


def read_rows(out: str) -> dict[str, tuple[str, str]]:
    """Return (status, detail) of each golden that a command reports."""
    rows = re.findall(r"^(\w+) +golden/(\S+\.json) *(.*)$", out, re.MULTILINE)
    return {name: (status, detail) for status, name, detail in rows}


@pytest.fixture(scope="module")
def life(tmp_path_factory: pytest.TempPathFactory, make_project: Callable[..., Any]) -> dict[str, Any]:
    """Return the output of each command in the life of five goldens, and the goldens after it."""
    project = make_project(tmp_path_factory.mktemp("life"))
    for seed, name in enumerate(NAMES):
        write_recipe(project, name, seed=seed)
        project.write_case(name, f"recipe: {name}\nlayout: {{dp_shard: 2}}\nchecks: {{repeat: never}}\n")
    life: dict[str, Any] = {"project": project}

    def do(title: str, *words: str) -> None:
        life[title] = project.do("golden", "cases", "--device", "cpu", *words), project.goldens

    do("record")
    damage(project)
    life["damaged"] = project.goldens
    life["flipped"] = flip_bits_of_full_golden(project, "fine")
    project.variables["CI"] = "true"
    life["run"] = *project.run("cases"), project.goldens
    do("check", "--check", "--json", "check.json")
    do("refresh")
    (project.folder / "golden" / "old.name.cpu.json").unlink()
    (project.folder / "golden" / "theirs.cpu.json").unlink()
    do("check again", "--check", "-k", "fine")
    return life


def test_recording_writes_one_file_a_recipe(life: dict[str, Any]) -> None:
    done, goldens = life["record"]
    assert (done.code, done.err) == (0, "")
    assert list(goldens) == ORDER
    assert {status for status, _ in read_rows(done.out).values()} == {"recorded"}
    assert done.out.endswith("5 goldens: 5 recorded\n")
    ended = re.findall(r"^\[(\d)/5\] (\w+) done$", done.out, re.MULTILINE)
    assert [number for number, _ in ended] == list("12345")
    assert {name for _, name in ended} == set(NAMES)


def test_a_run_says_what_is_wrong_with_each_golden(life: dict[str, Any]) -> None:
    done, cases, _ = life["run"]
    assert done.code == 3
    verdicts = {name: case["verdict"] for name, case in cases.items()}
    assert verdicts == {**dict.fromkeys(NAMES, "error"), "fine": "pass"}
    reasons = {name: cases[name]["reason"] for name in NAMES}
    assert reasons["missing"] == (
        "golden golden/missing.cpu.json is not recorded; record it with `moeverify golden cases/missing.yaml`"
    )
    assert re.fullmatch(
        r"recipe changed has changed: golden/changed\.cpu\.json was recorded for [0-9a-f]{16}, this is "
        r"[0-9a-f]{16}; refresh it with `moeverify golden cases/changed\.yaml`",
        reasons["changed"],
    )
    assert re.match(
        r"golden/cut\.cpu\.json:\d+: not valid JSON, or .*; restore it from version control", reasons["cut"]
    )
    assert "another golden than golden/wrong.cpu.json: 0/loss/total is off by 0.001" in reasons["wrong"]
    assert "if the change is meant, refresh it with `moeverify golden cases/wrong.yaml`" in reasons["wrong"]
    for reason in reasons.values():
        assert reason in done.out


def test_a_check_is_written_as_json(life: dict[str, Any]) -> None:
    told = json.loads((life["project"].folder / "check.json").read_text())
    assert (told["command"], told["status"], told["exit_code"]) == ("golden", "mismatch", 1)
    rows = {Path(each["name"]).name: each["status"] for each in told["facts"]["goldens"]}
    assert rows == {name: status for name, (status, _) in read_rows(life["check"][0].out).items()}
    assert [each["command"] for each in told["next"]] == ["moeverify golden cases"]


def test_neither_a_run_nor_a_check_touches_a_golden(life: dict[str, Any]) -> None:
    assert life["run"][2] == life["damaged"]
    assert life["check"][1] == life["damaged"]


def test_a_check_finds_the_same(life: dict[str, Any]) -> None:
    done, _ = life["check"]
    assert done.code == 1
    rows = read_rows(done.out)
    assert {name: status for name, (status, _) in rows.items()} == {
        "changed.cpu.json": "differs",
        "cut.cpu.json": "differs",
        "fine.cpu.json": "unchanged",
        "missing.cpu.json": "missing",
        "wrong.cpu.json": "differs",
        "old.name.cpu.json": "unused",
    }
    assert rows["old.name.cpu.json"][1] == "no case uses it; delete it or restore its case"


def test_refreshing_makes_the_same_bytes_again(life: dict[str, Any]) -> None:
    done, goldens = life["refresh"]
    recorded = life["record"][1]
    statuses = {name: status for name, (status, _) in read_rows(done.out).items()}
    assert statuses == {
        "changed.cpu.json": "refreshed",
        "cut.cpu.json": "refreshed",
        "fine.cpu.json": "unchanged",
        "missing.cpu.json": "recorded",
        "wrong.cpu.json": "refreshed",
        "old.name.cpu.json": "unused",
    }
    for name in ("cut", "fine", "missing", "wrong"):
        assert goldens[f"{name}.cpu.json"] == recorded[f"{name}.cpu.json"], name
    assert goldens["changed.cpu.json"] != recorded["changed.cpu.json"]
    again, unchanged = life["check again"]
    assert again.code == 0
    assert list(unchanged) == ORDER


def test_a_full_golden_with_flipped_bits_is_made_again(life: dict[str, Any]) -> None:
    path, content = life["flipped"]
    fine = life["run"][1]["fine"]
    assert fine["verdict"] == "pass"
    assert [note for note in fine["notes"] if "step0.safetensors: damaged" in note]
    assert path.read_bytes() == content


def test_a_run_says_how_long_the_goldens_took_that_it_made(life: dict[str, Any]) -> None:
    (line,) = re.findall(r"^goldens +(.*)$", life["run"][0].out, re.MULTILINE)
    # A changed recipe has none yet, and the damaged one is recorded again; the others were kept.
    assert sorted(re.findall(r"(\w+) [\d.]+ s", line)) == ["changed", "fine"]
