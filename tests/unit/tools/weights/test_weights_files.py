"""Refused loads: their messages, and that they change nothing."""

from __future__ import annotations

import json
import pickle
from collections.abc import Callable
from pathlib import Path

import pytest
import safetensors.torch
import torch
from safetensors.torch import load_file
from torch.distributed.checkpoint.filesystem import FileSystemWriter
from torch.distributed.checkpoint.state_dict_saver import save as save_plain

from moeverify.errors import FormatError
from moeverify.parallel.regions.local_shard import LocalShard
from moeverify.parallel.regions.region import Region
from moeverify.tools.checkpoint.load import load, read_facts
from moeverify.tools.checkpoint.manifest import MANIFEST
from moeverify.tools.checkpoint.save import save
from moeverify.tools.weights.by_name import load_by_name

FACTS = {"recipe": "abc", "step": 3, "rate": 0.1 + 0.2}
DTYPES = (torch.float64, torch.float32, torch.bfloat16, torch.float16, torch.int64, torch.uint8, torch.bool)


def hold(name: str, tensor: torch.Tensor) -> LocalShard:
    return LocalShard(name, tensor, Region.whole(tensor.shape))


def make_tensors() -> list[LocalShard]:
    torch.manual_seed(0)
    tensors = [hold(f"weight/{n}", torch.randn(5, 3 + n).to(dtype)) for n, dtype in enumerate(DTYPES)]
    return [*tensors, hold("optimizer/step", torch.tensor(4.0))]


def zeros() -> list[LocalShard]:
    return [hold(held.name, torch.zeros_like(held.tensor)) for held in make_tensors()]


@pytest.fixture
def saved(tmp_path: Path) -> Path:
    save(tmp_path / "step-3", make_tensors(), FACTS)
    return tmp_path / "step-3"


def test_everything_comes_back_bit_for_bit(saved: Path) -> None:
    tensors = zeros()
    assert load(saved, tensors, recipe="abc") == FACTS
    for held, wanted in zip(tensors, make_tensors(), strict=True):
        assert torch.equal(held.tensor, wanted.tensor)
    assert read_facts(saved) == FACTS
    assert [path.parent for path in saved.parent.glob(f"*/{MANIFEST}")] == [saved]


def test_the_data_is_safetensors_that_others_read(saved: Path) -> None:
    found = load_file(saved / "rank-00000.safetensors")
    for held in make_tensors():
        offset = ",".join("0" * held.tensor.ndim)
        assert torch.equal(found[f"{held.name}@{offset}"], held.tensor)


def flip(path: Path, place: int) -> None:
    content = bytearray(path.read_bytes())
    content[place] ^= 1
    path.write_bytes(bytes(content))


def break_metadata(folder: Path) -> None:
    (folder / MANIFEST).unlink()
    (folder / ".metadata").write_bytes(b"anything")


BREAKS: dict[str, tuple[Callable[[Path], object], tuple[str, ...]]] = {
    "data": (
        lambda f: flip(f / "rank-00000.safetensors", -1),
        ("rank-00000.safetensors", "weight/", "damaged"),
    ),
    "header": (
        lambda f: flip(f / "rank-00000.safetensors", 20),
        ("rank-00000.safetensors", "header", "damaged"),
    ),
    "manifest": (lambda f: flip(f / MANIFEST, 200), (MANIFEST,)),
    "fact": (
        lambda f: f.joinpath(MANIFEST).write_text(
            f.joinpath(MANIFEST).read_text().replace('"step": 3', '"step": 4')
        ),
        (MANIFEST, "digest"),
    ),
    "short": (
        lambda f: (f / "rank-00000.safetensors").write_bytes(
            (f / "rank-00000.safetensors").read_bytes()[:-8]
        ),
        ("rank-00000.safetensors", "cut off"),
    ),
    "short manifest": (
        lambda f: (f / MANIFEST).write_text((f / MANIFEST).read_text()[:-30]),
        (MANIFEST, "cut off"),
    ),
    "missing file": (
        lambda f: (f / "rank-00000.safetensors").unlink(),
        ("rank-00000.safetensors", "missing"),
    ),
    "no manifest": (lambda f: (f / MANIFEST).unlink(), (MANIFEST, "never ended")),
    "plain DCP": (break_metadata, ("pickle", "not read")),
    "other JSON": (lambda f: (f / MANIFEST).write_text("{}"), (MANIFEST, "no manifest")),
    "other version": (
        lambda f: (f / MANIFEST).write_text(
            json.dumps(json.loads((f / MANIFEST).read_text()) | {"version": 7})
        ),
        ("version 7",),
    ),
}


@pytest.mark.parametrize("name", BREAKS)
def test_what_is_damaged_is_refused_with_file_and_key(name: str, saved: Path) -> None:
    act, words = BREAKS[name]
    act(saved)
    tensors = zeros()
    with pytest.raises(FormatError) as caught:
        load(saved, tensors, recipe="abc")
    assert all(word in str(caught.value) for word in words), caught.value
    assert not any(bool(held.tensor.any()) for held in tensors)


def test_every_flipped_bit_of_a_file_is_found(tmp_path: Path) -> None:
    save(tmp_path / "a", [hold("weight/w", torch.arange(3.0))], {})
    path = tmp_path / "a" / "rank-00000.safetensors"
    for place in range(path.stat().st_size):
        flip(path, place)
        with pytest.raises(FormatError):
            load(tmp_path / "a", [hold("weight/w", torch.zeros(3))])
        flip(path, place)
    load(tmp_path / "a", [hold("weight/w", torch.zeros(3))])


def change(tensors: list[LocalShard], name: str, tensor: torch.Tensor | None) -> list[LocalShard]:
    kept = [held for held in tensors if held.name != name]
    return kept if tensor is None else [*kept, hold(name, tensor)]


MISFITS: dict[str, tuple[Callable[[list[LocalShard]], list[LocalShard]], tuple[str, ...]]] = {
    "key": (lambda t: [*t, hold("weight/new", torch.zeros(2))], ("has no", "weight/new")),
    "shape": (
        lambda t: change(t, "weight/0", torch.zeros(5, 4, dtype=torch.float64)),
        ("weight/0", "[5, 3]", "[5, 4]"),
    ),
    "dtype": (lambda t: change(t, "weight/0", torch.zeros(5, 3)), ("weight/0", "F64", "F32")),
    "too much": (lambda t: change(t, "weight/0", None), ("weight/0", "has not")),
}


@pytest.mark.parametrize("name", MISFITS)
def test_what_does_not_fit_is_refused_with_its_key(name: str, saved: Path) -> None:
    act, words = MISFITS[name]
    tensors = act(zeros())
    with pytest.raises(FormatError) as caught:
        load(saved, tensors, recipe="abc")
    assert all(word in str(caught.value) for word in words), caught.value
    assert not any(bool(held.tensor.any()) for held in tensors)


def test_the_state_of_another_recipe_is_refused(saved: Path) -> None:
    with pytest.raises(FormatError, match=r"recipe abc.*is other"):
        load(saved, zeros(), recipe="other")


def test_optional_keys_may_be_left(saved: Path) -> None:
    tensors = [held for held in zeros() if not held.name.startswith("optimizer/")]
    load(saved, tensors, optional="optimizer/")


def test_a_checkpoint_is_never_written_over(saved: Path) -> None:
    before = {path.name: path.read_bytes() for path in saved.iterdir()}
    with pytest.raises(FormatError, match="there already"):
        save(saved, zeros(), FACTS)
    assert {path.name: path.read_bytes() for path in saved.iterdir()} == before


class Trap:
    """An object whose pickle writes a file when it is read."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> tuple[Callable[..., object], tuple[object, ...]]:
        return Path.touch, (self.path,)


def test_no_pickle_is_read(saved: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (saved / ".metadata").write_bytes(pickle.dumps(Trap(tmp_path / "ran")))

    def refuse(*args: object, **rest: object) -> None:
        raise AssertionError("a pickle was read")

    for name in ("load", "loads", "Unpickler"):
        monkeypatch.setattr(pickle, name, refuse)
    monkeypatch.setattr(torch, "load", refuse)
    load(saved, zeros())
    assert not (tmp_path / "ran").exists()


def test_a_plain_checkpoint_with_a_trap_is_refused_unread(tmp_path: Path) -> None:
    with pytest.warns(UserWarning, match="single process"):
        save_plain({"w": torch.ones(2)}, storage_writer=FileSystemWriter(tmp_path / "plain"))
    (tmp_path / "plain" / ".metadata").write_bytes(pickle.dumps(Trap(tmp_path / "ran")))
    with pytest.raises(FormatError, match="was not read"):
        load(tmp_path / "plain", zeros())
    assert not (tmp_path / "ran").exists()


@pytest.mark.parametrize(
    "change",
    [
        {"files": {"../rank-00000.safetensors": {"size": 1, "header": 0, "checksum": 0}}},
        {
            "tensors": {
                "w": {"dtype": "F32", "shape": [2], "chunks": [[[0], [1], "rank-00000.safetensors", 0, 0]]}
            }
        },
        {"tensors": {"w": {"dtype": "OBJECT", "shape": [2], "chunks": []}}},
        {"facts": []},
        {"tensors": 3},
    ],
    ids=["path", "hole", "dtype", "facts", "type"],
)
def test_a_manifest_that_somebody_made_is_checked(change: dict[str, object], saved: Path) -> None:
    from moeverify.tools.checkpoint.manifest import _digest

    content = json.loads((saved / MANIFEST).read_text()) | change
    del content["digest"]
    (saved / MANIFEST).write_text(json.dumps({**content, "digest": _digest(content)}))
    with pytest.raises(FormatError, match="does not hold a manifest"):
        read_facts(saved)


def test_a_tied_parameter_of_any_model_is_read_under_either_name(tmp_path: Path) -> None:
    model = torch.nn.ModuleDict(
        {"first": torch.nn.Linear(2, 2, bias=False), "last": torch.nn.Linear(2, 2, bias=False)}
    )
    model["last"].weight = model["first"].weight
    for name in ("first.weight", "last.weight"):
        value = torch.rand(2, 2)
        safetensors.torch.save_file({name: value}, tmp_path / "model.safetensors")
        load_by_name(model, tmp_path)
        assert torch.equal(model["first"].weight, value)
    safetensors.torch.save_file({"other.weight": value}, tmp_path / "model.safetensors")
    with pytest.raises(FormatError, match=r"first\.weight is in no file"):
        load_by_name(model, tmp_path)
