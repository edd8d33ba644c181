"""A safetensors file as views: equal to the library's reads, for every dtype and every box."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from moeverify.errors import FormatError
from moeverify.verification.golden.mapped import MappedFile

DTYPES = [
    torch.float64,
    torch.float32,
    torch.float16,
    torch.bfloat16,
    torch.int64,
    torch.int32,
    torch.int16,
    torch.int8,
    torch.uint8,
    torch.bool,
]


@pytest.fixture
def path(tmp_path: Path) -> Path:
    generator = torch.Generator().manual_seed(0)
    tensors = {
        f"{dtype}".partition(".")[2]: (torch.randn(3, 4, 5, generator=generator) * 9).to(dtype)
        for dtype in DTYPES
    }
    tensors |= {
        "number": torch.tensor(3.5),
        "empty": torch.empty(0, 4),
        "odd": torch.arange(3, dtype=torch.uint8),
    }
    save_file(tensors, tmp_path / "a.safetensors", metadata={"said": "something"})
    return tmp_path / "a.safetensors"


def test_whole_tensors_are_those_that_the_library_reads(path: Path) -> None:
    file, expected = MappedFile(path), load_file(path)
    assert file.keys() == sorted(expected)
    for key, tensor in expected.items():
        assert file.whole(key).dtype is tensor.dtype
        assert torch.equal(file.whole(key), tensor)


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_box_is_the_slice_of_the_whole(path: Path, dtype: torch.dtype) -> None:
    key = f"{dtype}".partition(".")[2]
    whole = load_file(path)[key]
    file = MappedFile(path)
    assert torch.equal(file.box(key, [range(1, 3), range(4), range(2, 4)]), whole[1:3, :, 2:4])
    assert torch.equal(file.box(key, [range(3), range(3, 4), range(5)]), whole[:, 3:4])
    assert file.box(key, [range(2, 2), range(4), range(5)]).shape == (0, 4, 5)


def test_names(path: Path) -> None:
    file = MappedFile(path)
    assert "number" in file
    assert "said" not in file
    assert "__metadata__" not in file


def test_writing_to_a_view_changes_neither_the_file_nor_the_view_of_another(path: Path) -> None:
    expected = load_file(path)["float64"].clone()
    MappedFile(path).whole("float64").zero_()
    assert torch.equal(MappedFile(path).whole("float64"), expected)
    assert torch.equal(load_file(path)["float64"], expected)


@pytest.mark.parametrize("size", [0, 7, 100, -1])
def test_a_file_that_is_cut_off_is_refused(path: Path, size: int) -> None:
    path.write_bytes(path.read_bytes()[:size])
    with pytest.raises(FormatError, match=r"a\.safetensors: cannot be read"):
        MappedFile(path)


def test_a_file_that_is_not_there_is_refused(tmp_path: Path) -> None:
    with pytest.raises(FormatError, match=r"a\.safetensors: cannot be read"):
        MappedFile(tmp_path / "a.safetensors")
