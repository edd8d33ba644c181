"""Recording of an unmodified training script: inputs and results of its optimizers, and order of calls."""
