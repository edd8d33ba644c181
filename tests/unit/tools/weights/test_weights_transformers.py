"""The reference model against transformers: logits, loss and every gradient, for each family.

The comparison goes through files on disk: transformers saves a model and this package loads it. Gradients
are saved in the same way, in place of the weights.

transformers computes norms, softmax, router scores, rotary angles and the loss in float32 even in a float64
model. Unmodified, the agreement is limited to an amplified float32 error of 1e-7: AS_IT_IS. With float64
instead of float32 in its code, only the order of sums differs: WIDENED.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from hf_models import FAMILIES, build, save, widen_rotary, widened
from torch import Tensor
from torch.nn import functional

from moeverify.cases.schema import Data
from moeverify.errors import FormatError
from moeverify.model.transformer import Transformer
from moeverify.parallel.regions.local_shard import buffers, parameters
from moeverify.tools.weights.description import read_description
from moeverify.tools.weights.families import FAMILIES as TABLES
from moeverify.tools.weights.families import read_config
from moeverify.tools.weights.load import load_weights
from moeverify.train.data import MicroBatch, whole_share
from moeverify.train.data import make_batch as make_batch_of_ranks
from moeverify.train.objective import GroupSums, Normalizers, router_losses

AS_IT_IS = 1e-5  # observed: at most 1.1e-6
WIDENED = 1e-13  # observed: at most 2.3e-15

B, S = 3, 12


def make_batch(vocab_size: int) -> tuple[Tensor, Tensor]:
    """Return tokens (B, S), and the token after each (B, S), some of which do not count."""
    stream = torch.randint(vocab_size, (B, S + 1), generator=torch.Generator().manual_seed(7))
    targets = stream[:, 1:].clone()
    targets[1, 8:] = -100
    return stream[:, :-1], targets


def run_theirs(model: Any, tokens: Tensor, targets: Tensor, **options: Any) -> Any:
    # Their loss shifts labels by one; these are shifted already.
    output = model(tokens, labels=targets, shift_labels=targets, use_cache=False, **options)
    output.loss.backward()
    return output


def load_ours(folder: Path) -> Transformer:
    model = Transformer(read_description(folder).model)
    load_weights(model, folder)
    return model


def save_gradients(model: Any, folder: Path) -> Path:
    """Write the gradients of a model as if they were its weights."""
    with torch.no_grad():
        for parameter in model.parameters():
            gradient = parameter.grad
            parameter.copy_(torch.zeros_like(parameter) if gradient is None else gradient)
    return save(model, folder)


def measure(expected: Tensor, actual: Tensor) -> float:
    with torch.no_grad():
        return float((expected - actual).norm() / expected.norm())


def compare(theirs: Any, tmp_path: Path) -> dict[str, float]:
    """Return the differences of logits, loss and each gradient from theirs, relative to their norm."""
    ours = load_ours(save(theirs, tmp_path / "weights"))
    tokens, targets = make_batch(theirs.config.vocab_size)
    output = run_theirs(theirs, tokens, targets)
    logits = ours(tokens).logits
    loss = functional.cross_entropy(logits.flatten(0, 1), targets.flatten(), ignore_index=-100)
    loss.backward()
    far = {"logits": measure(output.logits, logits), "loss": measure(output.loss, loss)}
    held = parameters(ours)
    gradients = {each.name: each.tensor.grad for each in held}
    load_weights([*held, *buffers(ours)], save_gradients(theirs, tmp_path / "gradients"))
    for each in held:
        gradient = gradients[each.name]
        assert gradient is not None
        far[each.name] = measure(each.tensor.detach(), gradient)
    return far


@pytest.mark.parametrize("name", FAMILIES)
def test_family_is_that_of_transformers(name: str, tmp_path: Path) -> None:
    far = compare(build(name), tmp_path)
    assert len(far) >= 25
    assert 1e-9 < max(far.values()) < AS_IT_IS, far


@pytest.mark.parametrize("name", FAMILIES)
def test_family_is_that_of_transformers_to_the_order_of_sums(name: str, tmp_path: Path) -> None:
    theirs = build(name)
    widen_rotary(theirs)
    with widened(theirs):
        far = compare(theirs, tmp_path)
    assert len(far) >= 25
    assert max(far.values()) < WIDENED, far


def compute_balance(model: Transformer, tokens: Tensor, coefficient: float) -> tuple[Tensor, Tensor]:
    """Return logits, and this package's balance loss over the batch, all of whose tokens are valid."""
    assert model.spec.moe is not None
    moe = model.spec.moe.model_copy(update={"balance_coef": coefficient, "balance_scope": "batch"})
    output = model(tokens)
    batch = make_whole_batch(Data(batch=B, seq_len=S))
    balance, _ = router_losses(moe, output.routers, batch, Normalizers(torch.tensor(B * S), B), GroupSums())
    return output.logits, balance


def make_whole_batch(data: Data) -> MicroBatch:
    return make_batch_of_ranks(data, 96, 0, 0, whole_share(data), torch.device("cpu"))


@pytest.mark.parametrize("name", ["mixtral", "qwen2_moe", "qwen3_moe", "olmoe"])
@pytest.mark.parametrize("num_layers", [1, 2])
def test_balancing_loss_is_that_of_transformers_for_one_layer(
    name: str, num_layers: int, tmp_path: Path
) -> None:
    # Theirs averages shares and probabilities over the layers before multiplying them, and does not divide
    # by k. With one layer, ours with k times the coefficient is the same; with more layers it differs.
    theirs = build(name, num_hidden_layers=num_layers, router_aux_loss_coef=0.3)
    widen_rotary(theirs)
    ours = load_ours(save(theirs, tmp_path / "weights"))
    tokens, targets = make_batch(theirs.config.vocab_size)
    with widened(theirs):
        output = run_theirs(theirs, tokens, targets, output_router_logits=True)
    assert ours.spec.moe is not None
    logits, balance = compute_balance(ours, tokens, 0.3 * ours.spec.moe.top_k)
    lm = functional.cross_entropy(logits.flatten(0, 1), targets.flatten(), ignore_index=-100)
    (lm + balance).backward()
    far = measure(output.loss, lm + balance)
    if num_layers > 1:
        assert far > 1e-3
        return
    assert far < WIDENED
    assert balance > 0.1
    held = parameters(ours)
    gradients = {each.name: each.tensor.grad for each in held}
    load_weights(held, save_gradients(theirs, tmp_path / "gradients"))
    for each in held:
        gradient = gradients[each.name]
        assert gradient is not None
        assert measure(each.tensor.detach(), gradient) < WIDENED


@pytest.mark.parametrize("name", [name for name in TABLES if name != "kimi_k2"])
def test_the_default_of_a_missing_key_is_that_of_the_family(name: str) -> None:
    """A config with sizes alone means the same to both."""
    transformers = pytest.importorskip("transformers")
    full = transformers.AutoConfig.for_model(name, num_experts_per_tok=2)
    needed = {key for key in TABLES[name].fields.values() if key not in TABLES[name].defaults}
    sizes = {key: getattr(full, key, None) for key in needed if key != "head_dim"}
    sizes["topk_method"] = getattr(full, "topk_method", None)  # tells V2 from its Lite form
    spec = read_config({"model_type": name, **sizes}, "config.json")[1]
    written = {key: value for key, value in full.to_dict().items() if key != "sliding_window"}
    assert spec == read_config(written, "config.json")[1]


def test_a_known_family_that_cannot_be_computed_is_refused_with_the_reason() -> None:
    with pytest.raises(FormatError, match="model_type is 'gpt_oss', with attention sinks"):
        read_config({"model_type": "gpt_oss"}, "config.json")
