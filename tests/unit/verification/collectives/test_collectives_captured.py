"""The device is not queried during the capture of a CUDA graph: the query would be captured too."""

from __future__ import annotations

import pytest
import torch

from moeverify.verification.collectives.interception import Collective, is_captured


class _Work:
    def __init__(self) -> None:
        self.num_questions = 0

    def is_completed(self) -> bool:
        self.num_questions += 1
        return True


@pytest.mark.parametrize(("device", "is_capturing"), [("cuda", True), ("cuda", False), ("cpu", True)])
def test_a_collective_is_asked_about_only_outside_a_capture(
    monkeypatch: pytest.MonkeyPatch, device: str, is_capturing: bool
) -> None:
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: is_capturing)
    collective = Collective.__new__(Collective)
    collective.device, collective.state, collective.work = device, "started", _Work()
    expected = device == "cuda" and is_capturing
    assert is_captured(device) == expected
    assert collective.update() == (not expected)
    assert collective.work.num_questions == (0 if expected else 1)
