"""Guard of one run of a training script: errors that show without a second run."""
