"""The line that drew a batch, in functions that pass the batch on and in loops that draw it early."""

from __future__ import annotations

import sys
from collections import UserDict
from collections.abc import Iterator
from pathlib import Path

import torch
from torch import Tensor

from moeverify.scripts.record.draw import find_draw, list_batch


def locate(tokens: Tensor) -> str:
    return find_draw(sys._getframe(1), tokens)


def draw() -> Iterator[Tensor]:
    yield from (torch.zeros(2, 3, dtype=torch.int64) for _ in range(2))


def train_on(part: Tensor) -> str:
    part = part.to("cpu")
    return locate(part[:, :-1])


def lines_of(*words: str) -> list[str]:
    file = Path(__file__)
    lines = enumerate(file.read_text().splitlines(), 1)
    return [f"{file.name}:{number}" for number, line in lines if line.strip() in words]


def test_a_batch_of_a_loop_is_found_in_the_outermost_function() -> None:
    found = []
    for batch in draw():
        batch = batch.to("cpu")  # noqa: PLW2901 - as scripts do
        for part in batch.chunk(2):
            found.append(train_on(part))
    assert set(found) == set(lines_of("for batch in draw():"))


def test_a_batch_in_a_container_and_one_that_was_drawn_before_the_loop() -> None:
    batch = {"tokens": torch.ones(2, 3, dtype=torch.int64)}
    assert [locate(batch["tokens"])] == lines_of('batch = {"tokens": torch.ones(2, 3, dtype=torch.int64)}')
    assert locate(torch.ones(2, 3)) == ""


def call_model(*args: object, **kwargs: object) -> list[str]:
    """Return the names in the batch of a call, as torch's hooks find them."""
    return list(list_batch(sys._getframe(0)))


def test_a_batch_of_transformers_is_found_with_its_labels() -> None:
    batch = UserDict({"input_ids": torch.ones(2, 3, dtype=torch.int64), "labels": torch.ones(2).long()})
    assert [locate(batch["input_ids"])] == lines_of(
        'batch = UserDict({"input_ids": torch.ones(2, 3, dtype=torch.int64), "labels": torch.ones(2).long()})'
    )
    assert any(name.endswith("batch.labels") for name in call_model(input_ids=batch["input_ids"]))
