"""Full goldens on disk: shards in, regions out, and no partial golden under the final name."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
from pathlib import Path

import pytest
import torch
from torch import Tensor

from moeverify.errors import FormatError
from moeverify.parallel.regions.region import Region
from moeverify.verification.golden.store import GoldenWriter, StoredGolden, is_stored, note_places, sweep

SHAPE = (6, 4)


@pytest.fixture
def weight() -> Tensor:
    return torch.arange(24, dtype=torch.float64).reshape(SHAPE)


def store(folder: Path, weight: Tensor) -> StoredGolden:
    """Return a golden with `weight` in two shards at step 0, and other things beside it."""
    upper, lower = Region.box(SHAPE, [(4, 0, 2), range(4)]), Region.box(SHAPE, [(5, 3, 1), range(4)])
    with GoldenWriter(folder) as writer:
        writer.observe(-1, "initial_weight", "w", weight, Region.whole(SHAPE))
        writer.observe(0, "gradient", "w", upper.take(weight), upper)
        writer.observe(0, "gradient", "w", lower.take(weight), lower)
        writer.observe(0, "gradient", "never", None, Region.whole((3,)))
        writer.observe(0, "loss", "total", torch.tensor(2.5, dtype=torch.float64), Region.whole(()))
        writer.observe(1, "gradient", "w", 2.0 * weight, Region.whole(SHAPE))
        own = [("clip", "gradient_norm", "total")]
        writer.finish({"0/gradient/w": 1e-15}, {"losses": {"0/loss/total": 2.5}}, own)
    return StoredGolden(folder)


def fail(folder: Path, weight: Tensor) -> None:
    """Fail when one step is on disk and another is not."""
    with GoldenWriter(folder) as writer:
        writer.observe(0, "gradient", "w", weight, Region.whole(SHAPE))
        writer.observe(1, "gradient", "w", weight, Region.whole(SHAPE))
        raise ZeroDivisionError


def test_what_was_observed_is_read(tmp_path: Path, weight: Tensor) -> None:
    golden = store(tmp_path / "g", weight)
    assert is_stored(tmp_path / "g")
    assert golden.noise == {"0/gradient/w": 1e-15}
    assert golden.own_results == {("clip", "gradient_norm", "total")}
    assert golden.summary == {"losses": {"0/loss/total": 2.5}}
    assert golden.keys(0) == ["gradient/never", "gradient/w", "loss/total"]
    assert torch.equal(golden.whole(0, "gradient/w"), weight)
    assert torch.equal(golden.whole(1, "gradient/w"), 2.0 * weight)
    assert torch.equal(golden.whole(0, "gradient/never"), torch.zeros(3, dtype=torch.float64))
    assert golden.whole(0, "loss/total").item() == 2.5
    assert [path.name for path in tmp_path.iterdir()] == ["g"]


@pytest.mark.parametrize(
    "region",
    [
        Region.whole(SHAPE),
        Region.box(SHAPE, [range(2, 5), range(1, 3)]),
        Region.box(SHAPE, [(5, 0), range(4)]),
        Region.box(SHAPE, [range(6, 6), range(4)]),
        Region.run(SHAPE, 3, 17),
    ],
    ids=["whole", "box", "irregular", "empty", "flat"],
)
def test_regions_are_read_as_they_are_taken(region: Region, tmp_path: Path, weight: Tensor) -> None:
    part = store(tmp_path / "g", weight).read(0, "gradient", "w", region)
    assert part is not None
    assert torch.equal(part, region.take(weight))


def test_what_the_golden_does_not_have_is_none(tmp_path: Path, weight: Tensor) -> None:
    golden = store(tmp_path / "g", weight)
    assert golden.read(0, "gradient", "stranger", Region.whole((1,))) is None
    wider = (*SHAPE[:-1], SHAPE[-1] + 1)
    assert golden.read(0, "gradient", "w", Region.whole(wider)) is None
    assert golden.read(0, "gradient", "w", Region.whole(SHAPE[1:])) is None


def test_the_run_may_change_a_tensor_after_it_was_observed(tmp_path: Path, weight: Tensor) -> None:
    with GoldenWriter(tmp_path / "g") as writer:
        writer.observe(0, "weight", "w", weight, Region.whole(SHAPE))
        expected = weight.clone()
        weight.zero_()
        writer.finish({}, {})
    assert torch.equal(StoredGolden(tmp_path / "g").whole(0, "weight/w"), expected)


def test_a_run_that_fails_leaves_nothing(tmp_path: Path, weight: Tensor) -> None:
    with pytest.raises(ZeroDivisionError):
        fail(tmp_path / "g", weight)
    assert list(tmp_path.iterdir()) == []


def test_a_run_that_fails_leaves_the_older_golden(tmp_path: Path, weight: Tensor) -> None:
    store(tmp_path / "g", weight)
    with pytest.raises(ZeroDivisionError):
        fail(tmp_path / "g", 3.0 * weight)
    assert torch.equal(StoredGolden(tmp_path / "g").whole(0, "gradient/w"), weight)


def test_a_new_golden_replaces_the_older_one(tmp_path: Path, weight: Tensor) -> None:
    store(tmp_path / "g", weight)
    assert torch.equal(store(tmp_path / "g", 5.0 * weight).whole(0, "gradient/w"), 5.0 * weight)
    assert [path.name for path in tmp_path.iterdir()] == ["g"]


def test_a_golden_that_another_process_has_finished_meanwhile_stays(tmp_path: Path, weight: Tensor) -> None:
    folder = tmp_path / "golden"
    with GoldenWriter(folder) as writer:
        writer.observe(0, "weight", "w", weight, Region.whole(weight.shape))
        other = GoldenWriter(folder)
        other._partial = folder.with_name("golden.other.partial")  # of another process
        with other:
            other.observe(0, "weight", "w", weight, Region.whole(weight.shape))
            other.finish({}, {"by": "other"})
        reading = StoredGolden(folder)
        writer.finish({}, {"by": "self"})
    assert StoredGolden(folder).summary == {"by": "other"}
    assert reading.read(0, "weight", "w", Region.whole(weight.shape)) is not None
    assert [path.name for path in tmp_path.iterdir()] == ["golden"]


@pytest.mark.parametrize("part", [0.5, 0.0])
def test_a_truncated_file_is_named_with_what_to_delete(part: float, tmp_path: Path, weight: Tensor) -> None:
    store(tmp_path / "g", weight)
    path = tmp_path / "g" / "step0.safetensors"
    path.write_bytes(path.read_bytes()[: int(path.stat().st_size * part)])
    golden = StoredGolden(tmp_path / "g")
    with pytest.raises(FormatError, match=rf"step0\.safetensors: cannot be read .*; delete {tmp_path / 'g'}"):
        golden.read(0, "gradient", "w", Region.whole(SHAPE))


@pytest.mark.parametrize(
    "content",
    [None, "", '{"version": 1', '{"version": 0, "noise": {}, "summary": {}}', '{"version": 1}', "[]"],
)
def test_an_index_that_is_none(content: str | None, tmp_path: Path, weight: Tensor) -> None:
    store(tmp_path / "g", weight)
    path = tmp_path / "g" / "golden.json"
    if content is None:
        path.unlink()
        assert not is_stored(tmp_path / "g")
    else:
        path.write_text(content)
    with pytest.raises(FormatError, match=r"golden\.json.*delete the folder, it is made again"):
        StoredGolden(tmp_path / "g")


def test_a_narrowed_golden_keeps_single_numbers_and_integers(tmp_path: Path, weight: Tensor) -> None:
    loss, ids = torch.tensor(0.1, dtype=torch.float64), torch.arange(5)
    with GoldenWriter(tmp_path / "g") as writer:
        for step in range(2):
            writer.observe(step, "gradient", "w", weight, Region.whole(SHAPE))
            writer.observe(step, "loss", "total", loss, Region.whole(()))
            writer.observe(step, "router_ids", "r", ids, Region.whole((5,)))
        writer.narrow()
        writer.finish({}, {})
    golden = StoredGolden(tmp_path / "g")
    for step in range(2):
        assert torch.equal(golden.whole(step, "gradient/w"), weight.to(torch.float32))
        assert golden.whole(step, "gradient/w").dtype is torch.float32
        assert torch.equal(golden.whole(step, "loss/total"), loss)
        assert golden.whole(step, "loss/total").dtype is torch.float64
        assert torch.equal(golden.whole(step, "router_ids/r"), ids)
    assert sorted(path.suffix for path in (tmp_path / "g").iterdir()) == [
        ".json",
        ".safetensors",
        ".safetensors",
    ]


@pytest.mark.parametrize("place", [0.05, 0.3, 0.6, 0.99])
@pytest.mark.parametrize("name", ["step0.safetensors", "golden.json"])
def test_a_flipped_bit_is_found(name: str, place: float, tmp_path: Path, weight: Tensor) -> None:
    store(tmp_path / "g", weight).verify([0])
    path = tmp_path / "g" / name
    content = bytearray(path.read_bytes())
    content[int(len(content) * place)] ^= 1
    path.write_bytes(content)
    with pytest.raises(FormatError, match=name):
        StoredGolden(tmp_path / "g").verify([0])


def test_what_a_killed_process_has_left_is_swept(tmp_path: Path, weight: Tensor) -> None:
    recording = (
        "import os, signal, sys; from pathlib import Path\n"
        "from moeverify.verification.golden.store import GoldenWriter\n"
        "with GoldenWriter(Path(sys.argv[1])): os.kill(os.getpid(), signal.SIGKILL)"
    )
    done = subprocess.run([sys.executable, "-c", recording, str(tmp_path / "killed")], check=False)
    assert done.returncode == -9
    assert len(list(tmp_path.glob("killed.*.partial"))) == 1
    (tmp_path / "old.1.retired").mkdir()
    with GoldenWriter(tmp_path / "g") as writer:  # in use: it stays
        sweep(tmp_path)
        assert sorted(path.name for path in tmp_path.iterdir()) == [f"g.{os.getpid()}.partial"]
        writer.observe(0, "gradient", "w", weight, Region.whole(SHAPE))
        writer.finish({}, {})
    assert sorted(path.name for path in (tmp_path / "g").iterdir()) == ["golden.json", "step0.safetensors"]


def test_goldens_of_code_that_is_gone_are_swept(tmp_path: Path, weight: Tensor) -> None:
    (tmp_path / "code").mkdir()
    (tmp_path / "cache").mkdir()
    for name, places in (("kept", ["code"]), ("gone", ["code", "checkout"])):
        note_places(
            store(tmp_path / "cache" / name, weight).folder, [str(tmp_path / each) for each in places]
        )
    store(tmp_path / "cache" / "built-in", weight)
    (store(tmp_path / "cache" / "damaged", weight).folder / "places").write_bytes(b"\xff\x00")
    sweep(tmp_path / "cache")
    assert sorted(path.name for path in (tmp_path / "cache").iterdir()) == ["built-in", "damaged", "kept"]


def test_a_reader_waits_for_a_golden_that_is_replaced(tmp_path: Path, weight: Tensor) -> None:
    golden, away = store(tmp_path / "golden", weight), tmp_path / "away"
    golden.folder.rename(away)
    timer = threading.Timer(0.3, lambda: away.rename(golden.folder))
    timer.start()
    found = golden.read(0, "gradient", "w", Region.whole(SHAPE))
    timer.join()
    assert found is not None
    assert torch.equal(found, weight)
