"""Runs cases: golden, launch, collect, judge."""
