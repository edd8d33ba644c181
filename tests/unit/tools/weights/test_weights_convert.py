"""Conversion: every format into every other and back, bit for bit, and no partial output."""

from __future__ import annotations

import dataclasses
import json
import os
import resource
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch
from folders import (
    HF_PRESETS,
    make_spec,
    make_weights,
    read_bytes,
    read_dcp,
    read_safetensors,
    save_dcp,
    write_dcp,
)
from hf_models import FAMILIES, build, save
from safetensors.torch import save_file
from torch import Tensor

from moeverify.errors import CaseError, FormatError, MachineError
from moeverify.tools.weights import source as sources
from moeverify.tools.weights.description import Description, Kind, read_description
from moeverify.tools.weights.families import FAMILIES as TABLES
from moeverify.tools.weights.families import find_family
from moeverify.tools.weights.stream import convert, open_source

pytestmark = pytest.mark.slow


def describe(preset: str) -> Description:
    return Description(make_spec(preset))


def assert_equal(expected: dict[str, Tensor], actual: dict[str, Tensor]) -> None:
    assert set(expected) == set(actual)
    for name, tensor in expected.items():
        assert actual[name].dtype == tensor.dtype, name
        assert torch.equal(actual[name], tensor), name


@pytest.fixture(autouse=True)
def small_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    """Cut tiny tensors too: most into several chunks of a few rows."""
    monkeypatch.setattr(sources, "CHUNK_BYTES", 1000)


@pytest.mark.parametrize("preset", HF_PRESETS)
def test_every_way_round_keeps_every_bit(preset: str, tmp_path: Path) -> None:
    weights = save_dcp(tmp_path / "start", preset)
    convert(tmp_path / "start", tmp_path / "hf", "hf", described=describe(preset), shard_bytes=20_000)
    convert(tmp_path / "hf", tmp_path / "mega", "megablocks", shard_bytes=30_000)
    convert(tmp_path / "mega", tmp_path / "dcp", "dcp")
    assert_equal(weights, read_dcp(tmp_path / "dcp", weights))
    convert(tmp_path / "dcp", tmp_path / "mega-again", "megablocks", shard_bytes=30_000)
    convert(tmp_path / "mega-again", tmp_path / "hf-again", "hf", shard_bytes=20_000)
    assert len(list((tmp_path / "hf").glob("*.safetensors"))) > 2
    assert read_bytes(tmp_path / "hf") == read_bytes(tmp_path / "hf-again")
    assert read_bytes(tmp_path / "mega") == read_bytes(tmp_path / "mega-again")


@pytest.mark.parametrize("name", FAMILIES)
def test_what_transformers_saved_comes_back_as_it_was(name: str, tmp_path: Path) -> None:
    save(build(name).to(torch.bfloat16), tmp_path / "start", max_shard_size="30KB")
    expected = read_safetensors(tmp_path / "start")
    convert(tmp_path / "start", tmp_path / "dcp", "dcp")
    convert(tmp_path / "dcp", tmp_path / "back", "hf", shard_bytes=30_000)
    assert_equal(expected, read_safetensors(tmp_path / "back"))
    assert json.loads((tmp_path / "back/config.json").read_text()) == json.loads(
        (tmp_path / "start/config.json").read_text()
    )


@pytest.mark.parametrize("name", ["mixtral", "qwen2_moe", "olmoe", "deepseek_v3", "glm4_moe", "minimax_m2"])
def test_the_modules_of_transformers_5_are_read_like_the_published_format(name: str, tmp_path: Path) -> None:
    """`save_original_format=False` stores fused experts: gate and up in one tensor of all experts."""
    model = build(name).to(torch.bfloat16)
    save(model, tmp_path / "published")
    save(model, tmp_path / "fused", save_original_format=False)
    assert any(key.endswith("experts.gate_up_proj") for key in read_safetensors(tmp_path / "fused"))
    convert(tmp_path / "fused", tmp_path / "hf", "hf")
    assert_equal(read_safetensors(tmp_path / "published"), read_safetensors(tmp_path / "hf"))


def test_a_tied_tensor_is_read_under_either_name(tmp_path: Path) -> None:
    save(build("qwen3_moe-tied"), tmp_path / "start")
    expected = read_safetensors(tmp_path / "start")
    rename = {"model.embed_tokens.weight": "lm_head.weight"}
    safetensors.torch.save_file(
        {rename.get(key, key): tensor for key, tensor in expected.items()},
        tmp_path / "start/model.safetensors",
        metadata={"format": "pt"},
    )
    convert(tmp_path / "start", tmp_path / "hf", "hf")
    assert_equal(expected, read_safetensors(tmp_path / "hf"))


def test_drop_reaches_what_only_the_index_lists(tmp_path: Path) -> None:
    """Files of dropped tensors alone need not be there, nor listed tensors that a file does not have."""
    folder = start_hf(tmp_path)
    index = folder / "model.safetensors.index.json"
    content = json.loads(index.read_text())
    first = content["weight_map"][GATE]
    content["weight_map"] |= {"extra.a": "extra.safetensors", "extra.b": first}
    index.write_text(json.dumps(content))
    with pytest.raises(FormatError, match="the file is missing"):
        convert(folder, tmp_path / "out", "dcp")
    convert(folder, tmp_path / "out", "dcp", drop=["extra.*"])
    with pytest.raises(FormatError, match=r"norm\.weight is in no file"):
        convert(folder, tmp_path / "other", "dcp", drop=["extra.*", "*"])


@pytest.mark.parametrize("preset", HF_PRESETS)
def test_transformers_loads_what_we_wrote_for_a_preset(preset: str, tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers")
    from moeverify.model.transformer import Transformer
    from moeverify.tools.weights.load import load_weights

    save_dcp(tmp_path / "start", preset, torch.float64)
    convert(tmp_path / "start", tmp_path / "hf", "hf", described=describe(preset), shard_bytes=50_000)
    theirs, loading = transformers.AutoModelForCausalLM.from_pretrained(
        tmp_path / "hf",
        dtype=torch.float64,
        attn_implementation="eager",
        experts_implementation="eager",
        output_loading_info=True,
    )
    assert not any(loading[key] for key in ("missing_keys", "unexpected_keys", "mismatched_keys"))
    ours = Transformer(make_spec(preset))
    load_weights(ours, tmp_path / "hf")
    tokens = torch.arange(24).view(2, 12)
    expected, actual = theirs(tokens, use_cache=False).logits, ours(tokens).logits
    assert float((expected - actual).detach().norm() / expected.detach().norm()) < 1e-5


@pytest.mark.parametrize(
    "dtype", [torch.float64, torch.float32, torch.float16, torch.float8_e4m3fn, torch.float8_e5m2]
)
def test_every_dtype_stays_as_it_is_stored(dtype: torch.dtype, tmp_path: Path) -> None:
    weights = {name: t.to(dtype) for name, t in make_weights("tiny-deepseek-v3", torch.float32).items()}
    weights["norm.weight"] = weights["norm.weight"].to(torch.bfloat16)
    write_dcp(tmp_path / "start", weights)
    described = describe("tiny-deepseek-v3")
    convert(tmp_path / "start", tmp_path / "hf", "hf", described=described)
    convert(tmp_path / "hf", tmp_path / "dcp", "dcp")
    found = read_dcp(tmp_path / "dcp", weights)
    for name, tensor in weights.items():
        assert torch.equal(found[name].view(torch.uint8), tensor.view(torch.uint8)), name


def test_experts_lie_as_megablocks_has_them(tmp_path: Path) -> None:
    weights = save_dcp(tmp_path / "start", "tiny-mixtral-8x7b")
    convert(tmp_path / "start", tmp_path / "mega", "megablocks", described=describe("tiny-mixtral-8x7b"))
    found = read_safetensors(tmp_path / "mega")
    down = weights["layers.1.moe.experts.down"]  # (E, H, F)
    num_experts, hidden, size = down.shape
    mlp = {part: found[f"layers.1.moe.experts.mlp.{part}"] for part in ("w1", "v1", "w2")}
    assert {tensor.shape for tensor in mlp.values()} == {(num_experts * size, hidden)}
    x = torch.randn(5, hidden, dtype=torch.bfloat16)
    for expert in range(num_experts):
        rows = slice(expert * size, (expert + 1) * size)
        assert torch.equal(mlp["w1"][rows], weights["layers.1.moe.experts.gate"][expert])
        assert torch.equal(mlp["v1"][rows], weights["layers.1.moe.experts.up"][expert])
        inner = torch.nn.functional.silu(x @ mlp["w1"][rows].T) * (x @ mlp["v1"][rows].T)
        expected = inner.float() @ down[expert].float().T
        torch.testing.assert_close(inner.float() @ mlp["w2"][rows].float(), expected)
    assert torch.equal(found["layers.1.moe.router.layer.weight"], weights["layers.1.moe.router.weight"])


def test_every_family_has_a_preset_that_it_is_found_for() -> None:
    found = [find_family(make_spec(preset)).model_type for preset in HF_PRESETS]
    assert set(found) == set(TABLES) - {"kimi_k2"}  # the same model as deepseek_v3
    full = [find_family(make_spec(preset.removeprefix("tiny-"))).model_type for preset in HF_PRESETS]
    assert full == found


@pytest.mark.parametrize(("preset", "message"), [("stress", "no family"), ("gpt", "no family")])
def test_a_model_of_no_family_cannot_be_of_hugging_face(preset: str, message: str, tmp_path: Path) -> None:
    save_dcp(tmp_path / "start", f"tiny-{preset}" if preset == "gpt" else preset)
    described = describe(f"tiny-{preset}" if preset == "gpt" else preset)
    with pytest.raises(FormatError, match=message):
        convert(tmp_path / "start", tmp_path / "hf", "hf", described=described)
    assert not (tmp_path / "hf").exists()
    assert [path.name for path in tmp_path.iterdir()] == ["start"]


def start_hf(tmp_path: Path, preset: str = "tiny-deepseek-v3") -> Path:
    save_dcp(tmp_path / "dcp", preset)
    convert(tmp_path / "dcp", tmp_path / "hf", "hf", described=describe(preset), shard_bytes=60_000)
    return tmp_path / "hf"


def spoil_config(key: str, value: Any) -> Any:
    def spoil(folder: Path) -> None:
        config = json.loads((folder / "config.json").read_text())
        config = {name: each for name, each in {**config, key: value}.items() if each != "REMOVED"}
        (folder / "config.json").write_text(json.dumps(config))

    return spoil


def spoil_tensor(key: str, change: Any) -> Any:
    """Rewrite the file that holds a tensor, replacing the tensor with another or removing it."""

    def spoil(folder: Path) -> None:
        file = folder / json.loads((folder / "model.safetensors.index.json").read_text())["weight_map"][key]
        tensors = read_safetensors_file(file)
        tensors[key] = change(tensors[key])
        save_file({name: t for name, t in tensors.items() if t is not None}, file)

    return spoil


def read_safetensors_file(path: Path) -> dict[str, Any]:
    from safetensors.torch import load_file

    return dict(load_file(path))


def cut_off(folder: Path) -> None:
    path = sorted(folder.glob("*.safetensors"))[1]
    os.truncate(path, path.stat().st_size - 1)


def overwrite(name: str, content: bytes) -> Any:
    return lambda folder: (folder / name).write_bytes(content)


FIRST = "model-00001-of-00006.safetensors"
GATE = "model.layers.1.mlp.experts.3.gate_proj.weight"
BAD: dict[str, tuple[Any, tuple[str, ...]]] = {
    "cut off": (cut_off, (r"model-00002-of-\d+\.safetensors", "no whole safetensors file")),
    "a file is gone": (
        lambda folder: sorted(folder.glob("*.safetensors"))[0].unlink(),
        ("model-00001-of-", "the file is missing"),
    ),
    "a header of nonsense": (overwrite(FIRST, b"\xff" * 64), ("model-00001", "no whole")),
    "an empty file": (overwrite(FIRST, b""), ("model-00001", "no whole")),
    "a tensor is gone": (spoil_tensor(GATE, lambda t: None), (GATE, "is missing")),
    "another shape": (spoil_tensor(GATE, lambda t: t[:-1].clone()), (GATE, r"\(15, 56\), and the model \(16, 56\)")),
    "another dtype in a stack": (spoil_tensor(GATE, lambda t: t.float()), (GATE, "float32", "same stack")),
    "a dtype of no name": (spoil_tensor(GATE, lambda t: t.to(torch.complex64)), (GATE, "C64", "not supported")),
    "an index of nonsense": (overwrite("model.safetensors.index.json", b"{"), ("index.json", "not valid JSON")),
    "an index to elsewhere": (
        overwrite("model.safetensors.index.json", b'{"weight_map": {"a": "../b.safetensors"}}'),
        ("index.json:1: weight_map.a", "no name of a file in this folder"),
    ),
    "no model type": (spoil_config("model_type", "llama"), ("config.json", "model_type is 'llama'", "mixtral")),
    "no size": (spoil_config("kv_lora_rank", "REMOVED"), ("config.json", "kv_lora_rank is missing")),
    "a size of words": (spoil_config("kv_lora_rank", "wide"), ("config.json", "kv_lora_rank")),
    "quantized": (spoil_config("quantization_config", {"a": 1}), ("config.json", "quantization_config")),
    "another activation": (spoil_config("hidden_act", "gelu"), ("config.json", "hidden_act is 'gelu'")),
    "another rotary embedding": (spoil_config("rope_scaling", {"type": "linear"}), ("rope_scaling", "'linear'")),
    "more experts": (spoil_config("n_routed_experts", 20), (r"has shape \(16,\), and the model \(20,\)",)),
    "fewer experts": (spoil_config("n_routed_experts", 12), (r"experts\.1\d\.", "no tensor of this model", "--drop")),
    "no config": (lambda folder: (folder / "config.json").unlink(), ("config.json", "preset")),
    "no JSON": (overwrite("config.json", b"\x00"), ("config.json", "not valid JSON")),
}  # fmt: skip


@pytest.mark.parametrize("title", BAD)
def test_what_is_wrong_with_safetensors_is_named(title: str, tmp_path: Path) -> None:
    folder = start_hf(tmp_path)
    assert len(list(folder.glob("*.safetensors"))) == 6
    spoil, messages = BAD[title]
    spoil(folder)
    with pytest.raises(FormatError) as caught:
        convert(folder, tmp_path / "out", "dcp")
    for message in (str(tmp_path), *messages):
        assert caught.match(message)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["dcp", "hf"]


class Exploit:
    def __init__(self, mark: Path) -> None:
        self.mark = mark

    def __reduce__(self) -> Any:
        return (Path.touch, (self.mark,))


def spoil_metadata(change: Any) -> Any:
    def spoil(folder: Path) -> None:
        import pickle

        metadata = pickle.loads((folder / ".metadata").read_bytes())
        (folder / ".metadata").write_bytes(pickle.dumps(change(metadata, folder)))

    return spoil


def without(metadata: Any, folder: Path) -> Any:
    del metadata.state_dict_metadata["norm.weight"]
    return metadata


def reshaped(metadata: Any, folder: Path) -> Any:
    metadata.state_dict_metadata["norm.weight"].size = torch.Size([3])
    return metadata


def unchunked(metadata: Any, folder: Path) -> Any:
    metadata.state_dict_metadata["lm_head.weight"].chunks.pop()
    return metadata


def elsewhere(metadata: Any, folder: Path) -> Any:
    for index, place in metadata.storage_data.items():
        metadata.storage_data[index] = dataclasses.replace(place, relative_path="../x.distcp")
    return metadata


def with_more(metadata: Any, folder: Path) -> Any:
    metadata.state_dict_metadata["optimizer.step"] = metadata.state_dict_metadata["norm.weight"]
    return metadata


def flip(folder: Path) -> None:
    """Damage the middle of the largest stored tensor's pickle header."""
    path = folder / "__0_0.distcp"
    content = bytearray(path.read_bytes())
    at = content.index(b"data.pkl")
    content[at : at + 40] = bytes(40)
    path.write_bytes(content)


BAD_DCP: dict[str, tuple[Any, tuple[str, ...]]] = {
    "cut off": (
        lambda folder: os.truncate(folder / "__0_0.distcp", 1000),
        (r"__0_0\.distcp", "cut off at 1000 of"),
    ),
    "a file is gone": (lambda folder: (folder / "__0_0.distcp").unlink(), (r"__0_0\.distcp", "missing")),
    "damaged": (flip, (r"__0_0\.distcp", "cannot be read")),
    "a tensor is gone": (spoil_metadata(without), (r"\.metadata", r"norm\.weight is missing")),
    "another shape": (spoil_metadata(reshaped), (r"norm\.weight has shape \(3,\), and the model \(56,\)",)),
    "a chunk is gone": (spoil_metadata(unchunked), (r"the chunks of lm_head\.weight are not the whole",)),
    "a tensor too many": (
        spoil_metadata(with_more),
        (r"optimizer\.step is no tensor of this model", "--drop"),
    ),
    "a file elsewhere": (spoil_metadata(elsewhere), (r"\.\./x\.distcp is outside of the folder",)),
    "metadata of nonsense": (overwrite(".metadata", b"\x80\x05]."), (r"\.metadata", "no metadata")),
    "metadata cut off": (overwrite(".metadata", b"\x80"), (r"\.metadata", "no metadata")),
    "a foreign object": (
        spoil_metadata(lambda metadata, folder: Exploit(folder.parent / "pwned")),
        (r"pathlib\S*\.Path.* does not belong|does not belong into a checkpoint",),
    ),
    "another format": (overwrite("model.json", b'{"format": "x"}'), (r"model\.json:1: format: 'x'",)),
}


@pytest.mark.parametrize("title", BAD_DCP)
def test_what_is_wrong_with_a_distributed_checkpoint_is_named(title: str, tmp_path: Path) -> None:
    save_dcp(tmp_path / "start", "tiny-deepseek-v3")
    convert(tmp_path / "start", tmp_path / "dcp", "megablocks", described=describe("tiny-deepseek-v3"))
    convert(tmp_path / "dcp", tmp_path / "good", "dcp")
    spoil, messages = BAD_DCP[title]
    spoil(tmp_path / "good")
    with pytest.raises(FormatError) as caught:
        convert(tmp_path / "good", tmp_path / "out", "hf")
    for message in (str(tmp_path), *messages):
        assert caught.match(message)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["dcp", "good", "start"]


def test_tensors_are_left_out_by_name(tmp_path: Path) -> None:
    folder = start_hf(tmp_path)
    file = folder / "model-00002-of-00006.safetensors"
    extra = {
        "model.layers.3.mtp.weight": torch.ones(3),
        "model.layers.0.self_attn.rotary_emb.inv_freq": torch.ones(2),
    }
    save_file({**read_safetensors_file(file), **extra}, file)
    with pytest.raises(FormatError, match=r"model\.layers\.3\.mtp\.weight is no tensor of this model"):
        open_source(folder)
    assert "norm.weight" in open_source(folder, drop=["model.layers.3.*"]).specs


def test_a_destination_that_is_there_is_kept(tmp_path: Path) -> None:
    folder = start_hf(tmp_path)
    before = read_bytes(tmp_path / "dcp")
    with pytest.raises(CaseError, match="something is there already"):
        convert(folder, tmp_path / "dcp", "dcp")
    assert read_bytes(tmp_path / "dcp") == before


@pytest.mark.parametrize("to", ["hf", "dcp", "megablocks"])
def test_a_write_that_fails_leaves_nothing(to: Kind, tmp_path: Path) -> None:
    folder = start_hf(tmp_path)
    limit = resource.getrlimit(resource.RLIMIT_FSIZE)
    handler = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, limit[1]))  # a real failure of the operating system
    try:
        with pytest.raises(MachineError, match="was not written: File too large"):
            convert(folder, tmp_path / "out", to)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limit)
        signal.signal(signal.SIGXFSZ, handler)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["dcp", "hf"]


def test_a_disk_without_room_is_found_before_the_work(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from moeverify.tools.weights.stream import check_room

    with pytest.raises(
        MachineError, match=r"was not written: [\d.]+ GB are needed there, and [\d.]+ GB are free"
    ):
        check_room(tmp_path / "out", 10**18)


def interrupt(name: str, done: int, total: int) -> None:
    if done > total // 2:
        raise KeyboardInterrupt


@pytest.mark.parametrize("to", ["hf", "dcp", "megablocks"])
def test_an_interrupt_leaves_nothing(to: Kind, tmp_path: Path) -> None:
    folder = start_hf(tmp_path)
    with pytest.raises(KeyboardInterrupt):
        convert(folder, tmp_path / "out", to, on_progress=interrupt)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["dcp", "hf"]


SLOW = """
import sys, time
from pathlib import Path
from moeverify.tools.weights.stream import convert
def wait(name, done, total):
    if done > total // 2:
        print("half", flush=True); time.sleep(60)
convert(Path(sys.argv[1]), Path(sys.argv[2]), sys.argv[3], on_progress=wait)
"""


@pytest.mark.ranks
@pytest.mark.parametrize("to", ["hf", "dcp"])
def test_a_kill_leaves_nothing_that_passes_for_complete(to: Kind, tmp_path: Path) -> None:
    folder = start_hf(tmp_path)
    command = [sys.executable, "-c", SLOW, str(folder), str(tmp_path / "out"), to]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    assert process.stdout.readline() == "half\n"
    process.kill()
    process.wait()
    process.stdout.close()
    assert not (tmp_path / "out").exists()
    [rest] = [path for path in tmp_path.iterdir() if path.name.startswith(".out.partial-")]
    convert(folder, tmp_path / "out", to)
    assert read_description(tmp_path / "out").model == read_description(folder).model
    assert rest.exists()
