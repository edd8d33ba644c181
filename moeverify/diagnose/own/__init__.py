"""A user's own module as its own formula: replayed on one device on right inputs, with one mistake at a time."""
