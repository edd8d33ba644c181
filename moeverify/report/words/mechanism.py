"""The mechanisms of first wrong operations in words."""

from __future__ import annotations

from collections.abc import Mapping

from moeverify.results.culprit import Mechanism

MECHANISMS: Mapping[Mechanism, str] = {
    "number": "a number or option differs",
    "operator": "the operator differs",
    "operand": "an operand has another value",
    "total": "it uses a partial sum; one device uses the full sum",
    "share": "it adds a value to each partial sum that should be added once",
    "whole": "it uses a part of a tensor; one device uses the whole tensor",
    "removed": "one device has no such operation",
    "inserted": "one device applies another operation first",
    "returned": "a module returns its result; on one device the module returns another value",
    "value": "its results are wrong although its operands are correct",
    "scale": "its results are a multiple of the correct ones",
    "reduction": "its results are partial sums that are never reduced",
    "moved": "its results are correct values in wrong positions",
    "race": "it uses memory that a collective is still using",
    "written": "the operation that last wrote most correct values before the first step did not write these",
    "place": "the first operation whose results differ from one device; nothing more is known",
}
