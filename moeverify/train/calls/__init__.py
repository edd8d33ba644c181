"""Calls of a training loop (backward, `zero_grad`, clip, step, scheduler), and rules for their order."""
