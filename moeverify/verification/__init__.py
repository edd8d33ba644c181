"""Verification of a layout against a single device: planning, launching, training, comparing, judging."""
