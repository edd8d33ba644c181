"""Initial values from a folder of weights: values on ranks, refused folders, and the golden's name."""

from __future__ import annotations

import json
import shutil
import warnings
from pathlib import Path

import pytest
import torch
import torch.distributed.checkpoint as dcp
from safetensors.torch import load_file, save_file

from moeverify.cases.schema import Case
from moeverify.cases.validation.load import load_cases
from moeverify.errors import CaseError
from moeverify.tools.weights.description import read_description
from moeverify.tools.weights.stream import convert
from moeverify.train.assemble import assemble_single

EXAMPLE = Path(__file__).parents[3] / "examples" / "weights"
GATE = "model.layers.0.block_sparse_moe.gate.weight"


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Return a copy of the example, with its weights."""
    return Path(shutil.copytree(EXAMPLE, tmp_path / "example"))


def load(folder: Path, *overrides: str) -> Case:
    return load_cases([folder / "fsdp-ep.yaml"], overrides=overrides)[0]


def change(folder: Path, **tensors: torch.Tensor | None) -> None:
    path = folder / "tiny-mixtral" / "model.safetensors"
    changed = {**load_file(path), **tensors}
    save_file({name: value for name, value in changed.items() if value is not None}, path, {"format": "pt"})


@pytest.mark.parametrize("kind", ["hf", "dcp", "megablocks"])
def test_the_model_starts_from_the_weights_of_the_folder(folder: Path, tmp_path: Path, kind: str) -> None:
    source = folder / "tiny-mixtral"
    convert(source, tmp_path / kind, kind, described=read_description(source))
    case = load(folder, f"recipe.model.weights={tmp_path / kind}", "recipe.precision=float32")
    program = assemble_single(case.recipe, torch.device("cpu"), compute="float64")
    stored, model = load_file(source / "model.safetensors"), dict(program.model.named_parameters())
    assert torch.equal(model["layers.0.moe.router.weight"], stored[GATE].double())
    expert = stored["model.layers.1.block_sparse_moe.experts.2.w1.weight"].double()
    assert torch.equal(model["layers.1.moe.experts.gate"][2], expert)


def test_values_are_rounded_to_the_precision_of_the_recipe_first(folder: Path) -> None:
    change(folder, **{GATE: torch.full((4, 16), 1 + 2.0**-20)})
    case = load(folder, "recipe.precision=bfloat16")
    program = assemble_single(case.recipe, torch.device("cpu"), compute="float64")
    assert float(dict(program.model.named_parameters())["layers.0.moe.router.weight"].detach().max()) == 1.0


def test_a_recipe_is_named_by_the_content_of_its_weights_and_not_by_their_place(folder: Path) -> None:
    name, before = (recipe := load(folder).recipe).name, recipe.fingerprint()
    shutil.copytree(folder / "tiny-mixtral", folder / "elsewhere")
    moved = load(folder, "recipe.model.weights=elsewhere")
    assert (moved.recipe.name, moved.recipe.fingerprint()) == (name, before)
    stored = load_file(folder / "elsewhere" / "model.safetensors")
    stored[GATE][0, 0] += 1
    save_file(stored, folder / "elsewhere" / "model.safetensors", {"format": "pt"})
    assert load(folder, "recipe.model.weights=elsewhere").recipe.fingerprint() != before
    shutil.rmtree(folder / "elsewhere")
    with pytest.raises(CaseError, match=r"recipe\.model\.weights: there is no folder"):
        load(folder, "recipe.model.weights=elsewhere")


def test_everything_that_does_not_fit_is_said_at_once(folder: Path) -> None:
    change(
        folder,
        **{
            GATE: torch.zeros(5, 16),
            "lm_head.weight": None,
            "model.mtp.weight": torch.zeros(3),
        },
    )
    with pytest.raises(CaseError) as raised:
        assemble_single(load(folder).recipe, torch.device("cpu"))
    texts = [str(problem) for problem in raised.value.problems]
    assert len(texts) == 3
    assert all(
        text.startswith("recipe.model.weights: ") and "moeverify convert --drop" in text for text in texts
    )
    assert all("tiny-mixtral" in text for text in texts)
    assert [
        name in "\n".join(texts) for name in (GATE, "lm_head.weight is in no file", "model.mtp.weight")
    ] == [True] * 3


def test_codes_without_their_scales_are_refused(folder: Path) -> None:
    change(folder, **{GATE: torch.zeros(4, 16, dtype=torch.int8)})
    with pytest.raises(CaseError, match=r"layers\.0\.moe\.router\.weight has dtype int8"):
        assemble_single(load(folder).recipe, torch.device("cpu"))


def test_a_configuration_of_another_family_is_named(folder: Path) -> None:
    path = folder / "tiny-mixtral" / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"model_type": "unknown"}))
    with pytest.raises(CaseError, match=r"recipe\.model\.weights: .*config\.json"):
        assemble_single(load(folder).recipe, torch.device("cpu"))


def test_a_folder_without_weights_costs_no_launch(folder: Path) -> None:
    (folder / "tiny-mixtral" / "model.safetensors").unlink()
    with pytest.raises(CaseError, match=r"has none of model\.safetensors, .*seen from that of the case file"):
        load(folder)


def make_custom(tmp_path: Path, kind: str) -> Case:
    """Return a case of a custom model whose weights are in a folder, all of them 0.25."""
    model = make_own()
    tensors = {name: torch.full_like(tensor, 0.25) for name, tensor in model.state_dict().items()}
    folder = tmp_path / kind
    if kind == "dcp":
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # torch warns that it saves in one process
            dcp.save(dict(tensors), checkpoint_id=folder, no_dist=True)
    else:
        folder.mkdir()
        save_file(tensors, folder / "model.safetensors")
    recipe = {
        "model": {"factory": f"{__name__}:make_own", "vocab_size": 8, "weights": kind},
        "data": {"batch": 2},
    }
    path = tmp_path / "own.yaml"
    path.write_text(json.dumps({"name": "own", "recipe": recipe, "layout": {}}))
    return load_cases([path])[0]


def make_own() -> torch.nn.Module:
    """Return a custom model."""
    return torch.nn.Sequential(torch.nn.Embedding(8, 4), torch.nn.Linear(4, 8))


@pytest.mark.parametrize("kind", ["hf", "dcp"])
def test_a_model_of_ones_own_gets_the_tensors_of_its_names(tmp_path: Path, kind: str) -> None:
    program = assemble_single(make_custom(tmp_path, kind).recipe, torch.device("cpu"), compute="float64")
    assert all(bool((parameter == 0.25).all()) for parameter in program.model.parameters())


def test_everything_that_does_not_fit_a_model_of_ones_own_is_named(tmp_path: Path) -> None:
    case = make_custom(tmp_path, "hf")
    path = tmp_path / "hf" / "model.safetensors"
    tensors = load_file(path)
    tensors["1.weights"] = tensors.pop("1.weight")
    tensors["0.weight"] = tensors["0.weight"][:4].clone()
    save_file(tensors, path)
    with pytest.raises(CaseError) as error:
        assemble_single(case.recipe, torch.device("cpu"), compute="float64")
    found = str(error.value)
    assert "1.weight is in no file" in found
    assert "1.weights is no tensor of this model" in found
    assert "0.weight has shape (4, 4)" in found
    assert "state_dict()" in found
