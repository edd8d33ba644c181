"""Newly computed goldens against those in git."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Literal

import pytest

from moeverify.cases.validation.load import load_cases
from moeverify.errors import CaseError
from moeverify.report.words.note import describe_golden, describe_nearness
from moeverify.results.golden import GoldenState
from moeverify.stale_folders import LOCK
from moeverify.verification.controller.goldens import GoldenSet
from moeverify.verification.controller.options import RunOptions
from moeverify.verification.golden.file import GoldenFile, golden_path, write_golden
from moeverify.verification.jobs import GoldenOrder, GoldenSummary, Refusal

CASE = Path(__file__).parents[4] / "cases" / "ddp.yaml"
LOSSES = {"0/loss/lm": 2.0}
TENSORS: dict[str, list[float] | str] = {"0/gradient/x": [4.0, 1.0, -1.0], "0/routing/r": "an-exact-hash"}


@pytest.fixture
def goldens(tmp_path: Path) -> GoldenSet:
    return GoldenSet.of(load_cases([CASE]), RunOptions(device="cuda", golden_folder=tmp_path))


@pytest.mark.parametrize("option", ["--cache", "--goldens"])
def test_a_place_that_is_no_folder_is_refused_before_anything_starts(tmp_path: Path, option: str) -> None:
    file = tmp_path / "file"
    file.touch()
    options = RunOptions(**{"--cache": {"cache_folder": file}, "--goldens": {"golden_folder": file}}[option])
    with pytest.raises(CaseError, match="file is no folder") as caught:
        GoldenSet.of(load_cases([CASE]), options)
    assert caught.value.problems[0].path == option


@pytest.mark.parametrize(
    ("model", "is_apart"), [('{factory: "net:Net", vocab_size: 8}', True), ("{preset: stress}", False)]
)
def test_two_checkouts_share_goldens_of_built_in_models_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, model: str, is_apart: bool
) -> None:
    monkeypatch.chdir(tmp_path)
    names = []
    for checkout in ("ours", "theirs", "ours"):
        (tmp_path / checkout).mkdir(exist_ok=True)
        (tmp_path / checkout / "net.py").write_text("class Net: ...\n")
        (tmp_path / checkout / "case.yaml").write_text(
            f"recipe: {{model: {model}}}\nlayout: {{dp_shard: 2}}\n"
        )
        goldens = GoldenSet.of(load_cases([Path(checkout) / "case.yaml"]), RunOptions(cache_folder=tmp_path))
        names += [folder.name for folder in goldens.orders]
    monkeypatch.setenv("PYTHONPATH", str(tmp_path / "theirs"))
    goldens = GoldenSet.of(load_cases([Path("ours") / "case.yaml"]), RunOptions(cache_folder=tmp_path))
    ours, theirs, again, *others = [*names, *(folder.name for folder in goldens.orders)]
    assert ours == again
    assert (theirs != ours, others != [ours]) == (is_apart, is_apart)


def test_an_interrupt_leaves_no_unfinished_golden(tmp_path: Path) -> None:
    goldens = GoldenSet.of(load_cases([CASE]), RunOptions(cache_folder=tmp_path))
    unfinished = tmp_path / "golden.1.partial"

    def interrupt() -> None:
        with goldens.swept():
            unfinished.mkdir()
            (unfinished / LOCK).touch()  # its process has ended
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        interrupt()
    assert list(tmp_path.iterdir()) == []


def test_a_case_that_sets_a_limit_limits_its_golden(goldens: GoldenSet) -> None:
    assert find_order(goldens).timeout is None
    default = goldens.job(1).timeout
    (case,), (limited,), (short,) = (
        load_cases([CASE], overrides=[*settings])
        for settings in ((), ("checks.timeout=3000",), ("checks.timeout=1",))
    )
    assert find_order(GoldenSet.of([short], RunOptions(device="cuda"))).timeout == 120
    own = GoldenSet.of([limited], RunOptions(device="cuda"))
    assert find_order(own).timeout == 3000
    assert own.job(1).timeout > 3000 > default
    assert find_order(GoldenSet.of([case, limited], RunOptions(device="cuda"))).timeout is None
    assert find_order(GoldenSet.of([limited], RunOptions(device="cuda", timeout=7.0))).timeout == 7


def record(goldens: GoldenSet, device_class: str, **changes: Any) -> Path:
    recipe = find_order(goldens).recipe
    fields = {"name": recipe.name, "recipe": recipe.fingerprint(), "device_class": device_class}
    path = golden_path(goldens.options.golden_folder, recipe.name, device_class)
    write_golden(path, GoldenFile(**{**fields, "losses": LOSSES, "tensors": TENSORS, **changes}))
    return path


def find_order(goldens: GoldenSet) -> GoldenOrder:
    (order,) = goldens.orders.values()
    return order


def examine(goldens: GoldenSet, off: float = 0.0, **tensors: Any) -> GoldenState:
    found = {**TENSORS, "0/gradient/x": [4.0 + off, 1.0, -1.0], **tensors}
    summary = GoldenSummary(losses=LOSSES, tensors=found)
    return goldens.examine(find_order(goldens).folder, summary, "a-gpu")


def test_a_gpus_golden_near_that_of_a_cpu_is_said_to_be(goldens: GoldenSet) -> None:
    path = record(goldens, "cpu")
    state = examine(goldens, off=4e-13)
    assert state.status == "missing"
    assert state.across is not None
    assert state.across.distance == pytest.approx(1e-13, rel=1e-2)
    assert describe_nearness(state) == f"the golden of a-gpu is within 1.0e-13 of {path}"
    record(goldens, "a-gpu")
    assert examine(goldens, off=4e-13).status == "recorded"


@pytest.mark.parametrize("wrong", [{"off": 4e-9}, {"0/routing/r": "another-hash"}])
def test_a_gpus_golden_far_from_that_of_a_cpu_is_an_error(goldens: GoldenSet, wrong: dict[str, Any]) -> None:
    record(goldens, "cpu")
    record(goldens, "a-gpu", tensors={**TENSORS, "0/gradient/x": [4.0 + wrong.get("off", 0.0), 1.0, -1.0]})
    state = examine(goldens, **wrong)
    assert state.status == "differs"
    assert "off by" in describe_golden(state)
    assert describe_nearness(state) == ""


def test_a_golden_of_another_recipe_says_nothing_of_nearness(goldens: GoldenSet) -> None:
    record(goldens, "cpu", recipe="another")
    assert examine(goldens).across is None
    assert examine(goldens).status == "missing"


def test_every_state_has_its_words_and_its_remedy(goldens: GoldenSet) -> None:
    command = f"`moeverify golden {CASE}`"
    path = record(goldens, "a-gpu")
    assert describe_golden(examine(goldens)) == ""
    assert describe_golden(examine(goldens, off=4e-3)) == (
        f"one device here computes another golden than {path}: 0/gradient/x is off by 0.001 of its norm; "
        f"if the change is meant, refresh it with {command}"
    )
    record(goldens, "a-gpu", recipe="another")
    assert describe_golden(examine(goldens)).endswith(f"; refresh it with {command}")
    path.write_text("{")
    broken = examine(goldens)
    assert broken.status == "unreadable"
    assert "not valid JSON" in broken.error
    assert describe_golden(broken).endswith("record it anew with `moeverify golden`")
    path.unlink()
    assert describe_golden(examine(goldens)) == f"golden {path} is not recorded; record it with {command}"
    failed = goldens.examine(find_order(goldens).folder, Refusal(error="no such module"), "a-gpu")
    assert (failed.status, describe_golden(failed)) == ("failed", "no such module")


def test_goldens_with_optional_checks_are_kept_apart(tmp_path: Path) -> None:
    plain = load_cases([CASE])[0]
    checks = plain.checks.model_copy(update={"also": ("trace",)})
    asking = plain.model_copy(update={"name": "asking", "checks": checks})
    goldens = GoldenSet.of([plain, asking], RunOptions(cache_folder=tmp_path))
    first, second = goldens.orders.values()
    assert (first.also, second.also) == ((), ("trace",))
    assert first.folder != second.folder
    assert goldens.folders == {plain.name: first.folder, "asking": second.folder}


def test_a_sketch_is_found_only_where_no_whole_tensors_are_stored(tmp_path: Path) -> None:
    def find(mode: Literal["never", "found", "always"]) -> GoldenOrder:
        options = RunOptions(cache_folder=tmp_path, sketch=mode)
        return find_order(GoldenSet.of(load_cases([CASE]), options))

    def store(folder: Path) -> None:
        place = folder.with_name(f"{folder.name}-cpu")
        place.mkdir()
        (place / "golden.json").touch()

    forced, plain = find("always"), find("never")
    assert forced.folder != plain.folder
    assert not find("found").sketch
    store(forced.folder)
    assert find("found") == forced
    assert not find("never").sketch
    store(plain.folder)
    assert find("found") == plain
    assert find("always") == forced
