"""Verification of distributed Mixture-of-Experts training against a single device."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from moeverify.scripts.record.start import watch
    from moeverify.verification.controller.api import Verification, verify, verify_cases

__all__ = ["Verification", "verify", "verify_cases", "watch"]


def __getattr__(name: str) -> Any:
    """Return a public attribute, imported on first use, since every submodule import passes through here."""
    if name == "watch":
        from moeverify.scripts.record import start as recording

        return recording.watch
    if name in __all__:
        from moeverify.verification.controller import api

        return getattr(api, name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
