"""The comparison of two recorded runs of a training script: what must be equal first, then the first difference."""
