"""The configuration of a model is found in arguments, in a class, or in the model."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from torch import nn

from moeverify.errors import CaseError
from moeverify.stacks.configuration import find_configuration
from moeverify.stacks.configured import (
    loss_of_first,
    loss_of_images,
    loss_of_model,
    loss_with_targets,
    make,
)
from moeverify.verification.worker.probes.factory import main, try_model

MODULE = """
from dataclasses import dataclass
import torch
from torch import nn

@dataclass
class Config:
    vocab: int = 4096
    width: int = 512
    inner: int = 0
    dropout: float = 0.1
    def __post_init__(self):
        self.inner = self.inner or 4 * self.width

class Net(nn.Module):
    def __init__(self, config):
        super().__init__()
        self.config = config
        self.embed = nn.Embedding(config.vocab, config.width)
        self.up = nn.Linear(config.width, config.inner)
        self.down = nn.Linear(config.inner, config.width)
        self.drop = nn.Dropout(config.dropout)
        self.head = nn.Linear(config.width, config.vocab)
    def forward(self, tokens, targets=None):
        x = self.embed(tokens)
        logits = self.head(x + self.drop(self.down(self.up(x).relu())))
        if targets is None:
            return logits[:, -1:], None
        return logits, self.embed(targets).sum()

class LooseConfig:
    def __init__(self, vocab=4096, width=512, **kept):
        self.vocab, self.width = vocab, width
        vars(self).update(kept)
    def to_diff_dict(self):
        return vars(self)

class Loose(nn.Module):
    def __init__(self, config: LooseConfig):
        super().__init__()
        self.embed = nn.Embedding(config.vocab, config.width)

def whole():
    return Net(Config(width=1024))

def by_sizes(vocab=4096, width=512, dropout=0.5):
    return Net(Config(vocab=vocab, width=width, dropout=dropout))

def two(vocab, width):
    return Net(Config(vocab, width))

def with_dropout():
    net = whole()
    net.drop = nn.Dropout(0.5)
    del net.config
    return net

def with_object(net, width):
    return net

class Namespace:
    def __init__(self, **fields):
        self.__dict__.update(fields)

class Unset(nn.Module):
    @staticmethod
    def get_default_config():
        return Namespace(kind="named", vocab_size=None, n_layer=None, n_head=None)
    def __init__(self, config):
        super().__init__()
        assert config.kind is None
        assert config.n_layer is not None
        self.embed = nn.Embedding(config.vocab_size, 8)
    def forward(self, tokens):
        return self.embed(tokens) @ self.embed.weight.T

@dataclass
class Sizes:
    d_model: int
    vocab_size: int
    scale: float = 1.0

class Open(nn.Module):
    def __init__(self, args: Sizes):
        super().__init__()
        self.embed = nn.Embedding(args.vocab_size, args.d_model)
    def forward(self, tokens):
        return self.embed(tokens) @ self.embed.weight.T

@dataclass
class Preset:
    kind: str = "large"
    vocab_size: int = 64
    d_model: int = None

class Filled(nn.Module):
    def __init__(self, config: Preset):
        super().__init__()
        self.embed = nn.Embedding(config.vocab_size, config.d_model or {"large": 1 << 20}[config.kind])
    def forward(self, tokens):
        return self.embed(tokens) @ self.embed.weight.T

@dataclass
class Needy:
    d_model: int
    norm_eps: float
    act: str

class Needing(nn.Module):
    def __init__(self, args: Needy):
        super().__init__()

class Layer(nn.Module):
    def __init__(self, dim, num_experts=16):
        super().__init__()
        self.experts = nn.Parameter(torch.randn(num_experts, dim, dim))
    def forward(self, x):
        return torch.einsum("bsd,edh->bsh", x, self.experts), x.sum()

class Narrow(nn.Module):
    def __init__(self, width=8):
        super().__init__()
        self.embed = nn.Embedding(8, width)
    def forward(self, tokens):
        found = self.embed(tokens)
        assert found.dtype == torch.float32
        return found

class Summing(nn.Module):
    def __init__(self, vocab=8, noise=0.25, scale=0.5):
        super().__init__()
        self.embed = nn.Embedding(vocab, 8)
        self.noise, self.scale = noise, scale
    def forward(self, tokens):
        x = nn.functional.dropout(self.embed(tokens) * self.scale, self.noise)
        return {"loss": (x @ self.embed.weight.T).logsumexp(-1).mean(), "width": 8}
    def configure_optimizers(self):
        raise NotImplementedError

class Images(nn.Module):
    def __init__(self, width, num_classes=10):
        super().__init__()
        self.conv = nn.Conv2d(2, width, 5, stride=4)
        self.head = nn.Linear(width, num_classes)
    def forward(self, images):
        return self.head(self.conv(images).mean((2, 3)))

class Built:
    def __init__(self, sizes):
        self.sizes = sizes
    @classmethod
    def wide(cls, vocab_size, d_model=512):
        return cls(Sizes(d_model, vocab_size))
    def build(self):
        return Open(self.sizes)

class Beside(Open):
    def __init__(self, causal: bool, args: Sizes):
        super().__init__(args)

class Foreign(Images):
    def forward(self, tokens):
        raise RuntimeError("no parallel state")

Foreign.__module__ = "megatron.core.models"

class Module(Images):
    pass

Module.__module__ = "lightning.pytorch"

def broken():
    raise ValueError("no data")

def fixed():
    return nn.Linear(2, 2)
"""


@pytest.fixture(scope="module", autouse=True)
def module(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    folder = tmp_path_factory.mktemp("configured")
    (folder / "theirs.py").write_text(MODULE)
    sys.path.insert(0, str(folder))
    yield
    sys.path.remove(str(folder))
    sys.modules.pop("theirs", None)


@pytest.mark.parametrize(
    ("target", "changes", "named"),
    [
        ("theirs:by_sizes", {"width": 64}, ("theirs:by_sizes", {"width": 64})),
        (
            "theirs:Net",
            {"width": 64},
            ("moeverify.stacks.configured:make", {"model": "theirs:Net", "fields": {"width": 64}}),
        ),
        ("theirs:whole", {}, ("theirs:whole", {})),
        (
            "theirs:whole",
            {"vocab": 64},
            ("moeverify.stacks.configured:make", {"model": "theirs:whole", "fields": {"vocab": 64}}),
        ),
    ],
)
def test_a_recipe_builds_the_model_with_changed_fields(
    target: str, changes: dict[str, int], named: tuple[str, dict[str, object]]
) -> None:
    configuration = find_configuration(target)
    assert configuration.rates == {"dropout": 0.5 if "by_sizes" in target else 0.1}
    assert configuration.name(changes) == named
    built = configuration.build(changes)
    assert built.embed.weight.shape == (changes.get("vocab", 4096), changes.get("width", 1024))


def test_a_class_derives_its_other_fields_again() -> None:
    assert make("theirs:Net", {"width": 32}).up.weight.shape == (128, 32)


def test_constant_tensors_get_offsets() -> None:
    class_with_norm = nn.LayerNorm(4)
    assert bool((class_with_norm.weight == 1).all())
    built = make("theirs:Net", {"width": 8, "vocab": 8})
    assert built.embed.weight.std() > 0


@pytest.mark.parametrize(
    ("target", "words"),
    [
        ("theirs:with_object", "`theirs:with_object` needs `net`,"),
        ("theirs:Needing", "takes a `Needy`, which needs `norm_eps` and `act`"),
        ("theirs:Narrow", "the model computes in float32 only: AssertionError"),
        ("theirs:broken", "the factory failed: ValueError"),
        ("theirs:fixed", "no step of the model works"),
        ("theirs:nothing", "has no `nothing`"),
    ],
)
def test_a_refusal_is_one_problem(target: str, words: str) -> None:
    with pytest.raises(CaseError) as caught:
        try_model(target, "", {})
    assert len(caught.value.problems) == 1
    assert words in caught.value.problems[0].message


def test_a_name_that_the_factory_does_not_take_is_refused_with_the_nearest(tmp_path: Path) -> None:
    main("theirs:two", "", {"widht": 8, "vocab": 8, "width": 8}, tmp_path / "found.json")
    assert json.loads((tmp_path / "found.json").read_text()) == {
        "message": "`theirs:two` takes no `widht`",
        "path": "--set",
        "remedy": "did you mean `width`?",
    }


def test_a_model_with_logits_only_for_targets_gets_a_loss_and_becomes_small() -> None:
    found = try_model("theirs:Net", "", {})
    assert found.loss == "moeverify.stacks.configured:loss_with_targets"
    assert found.parameters[1] <= 200_000 < found.parameters[0]
    assert found.arguments["fields"]["dropout"] == 0.0
    assert found.vocab_size == found.arguments["fields"]["vocab"]
    assert found.notes == ()


@pytest.mark.parametrize(
    ("target", "given", "guessed"),
    [
        ("theirs:two", {}, {"vocab": 64, "width": 64}),
        ("theirs:two", {"width": 32}, {"vocab": 64}),
        ("theirs:Open", {"scale": 2.0}, {"d_model": 64, "vocab_size": 64}),
        ("theirs:Unset", {"kind": None}, {"vocab_size": 64, "n_layer": 2}),
        ("theirs:Unset", {}, {"kind": None, "vocab_size": 64, "n_layer": 2, "n_head": 2}),
        ("theirs:Filled", {}, {"d_model": 64}),
        ("theirs:Beside", {"causal": True}, {"d_model": 64, "vocab_size": 64}),
    ],
)
def test_sizes_that_the_code_leaves_open_are_guessed(
    target: str, given: dict[str, object], guessed: dict[str, int | None]
) -> None:
    found = try_model(target, "", given)
    assert found.guessed == guessed
    assert found.arguments.get("fields", found.arguments) == {**given, **guessed}


def test_a_layer_gets_an_embedding_and_a_head() -> None:
    found = try_model("theirs:Layer", "", {})
    assert found.arguments == {"model": "theirs:Layer", "fields": {"dim": 64}, "width": 64}
    built = make(**found.arguments)
    assert built(torch.zeros(2, 3, dtype=torch.long)).shape == (2, 3, found.vocab_size)


def test_a_model_that_returns_only_its_loss_keeps_every_target() -> None:
    found = try_model("theirs:Summing", "", {})
    assert found.loss == "moeverify.stacks.configured:loss_of_model"
    assert found.min_valid == 1.0
    assert found.notes == (
        "the loss is that of the model, which must be a mean over all tokens; every target is valid",
        "`configure_optimizers` is not called: the optimizer is that of the recipe",
    )
    model = make("theirs:Summing", {"noise": 0.0})
    tokens = torch.arange(6).view(2, 3)
    assert torch.equal(loss_of_model(model, tokens, tokens), 6 * model(tokens)["loss"])
    with pytest.raises(CaseError, match="no output of the model is a loss"):
        loss_of_model(make("theirs:Open", {}), tokens, tokens)


def test_a_rate_of_any_name_is_zero_if_random_numbers_depend_on_it() -> None:
    assert try_model("theirs:Summing", "", {}).changes == {"noise": (0.25, 0.0)}


def test_a_classifier_of_images_gets_images() -> None:
    found = try_model("theirs:Images", "", {})
    assert (found.loss, found.guessed) == ("moeverify.stacks.configured:loss_of_images", {"width": 64})
    tokens, targets = torch.arange(12).view(3, 4) % 5, torch.tensor([[1, 2, 3, -100]]).expand(3, 4)
    loss = loss_of_images(make("theirs:Images", {"width": 4}), tokens, targets)
    assert ((loss == 0) == (targets == -100)).all()
    assert torch.equal(loss[:, 0], loss[:, 1])
    assert loss[:, 0].unique().numel() == 3


def test_a_model_of_a_framework_is_refused_only_if_no_step_works() -> None:
    with pytest.raises(CaseError, match="no parallel state") as caught:
        try_model("theirs:Foreign", "", {})
    assert caught.value.problems[0].remedy == (
        "write its settings into a recipe like those of examples/stacks/megatron"
    )
    assert try_model("theirs:Module", "", {}).framework == "lightning"


def test_a_configuration_builds_the_model() -> None:
    found = try_model("theirs:Built.wide", "", {})
    assert found.title == "Open"
    assert (found.factory, found.arguments) == ("theirs:Built.wide", {"vocab_size": 64})


def test_an_unknown_field_is_named() -> None:
    with pytest.raises(CaseError, match="`Config` takes no `widht`"):
        try_model("theirs:Net", "", {"widht": 8})


def test_a_configuration_that_keeps_everything_refuses_a_name_like_that_of_a_field() -> None:
    with pytest.raises(CaseError, match=r"`LooseConfig` takes no `widht`; did you mean `width`\?"):
        find_configuration("theirs:Loose", {"widht": 8})
    found = find_configuration("theirs:Loose", {"width": 8, "read_later": True})
    assert found.name({})[1]["fields"] == {"width": 8, "read_later": True}


def test_dropout_that_no_field_switches_off_is_switched_off() -> None:
    assert make("theirs:with_dropout", {}).drop.p == 0.0
    assert find_configuration("theirs:with_dropout").build({}).drop.p == 0.5


def test_losses_ignore_targets_without_a_token() -> None:
    model = make("theirs:Net", {"width": 8, "vocab": 8, "dropout": 0.0})
    tokens = torch.arange(6).view(2, 3)
    targets = torch.tensor([[1, -100, 2], [-100, 3, 4]])
    loss = loss_with_targets(model, tokens, targets)
    assert ((loss == 0) == (targets == -100)).all()
    with pytest.raises(CaseError, match="no output of the model"):
        loss_of_first(model, tokens, targets)
