"""Bugs of public trackers reproduced in the built-in model, as faults for `--fault builtin.FILE:NAME`."""
