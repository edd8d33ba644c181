"""Bugs of public trackers made again in the built-in model, as faults for `--fault builtin.FILE:NAME`."""
