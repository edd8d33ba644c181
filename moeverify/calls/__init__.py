"""The calls of a training loop (backward, `zero_grad`, clip, step, scheduler), and rules of their order."""
