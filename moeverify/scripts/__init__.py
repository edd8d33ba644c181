"""Unmodified training scripts: recorded, compared with each other, and guarded while they run."""
