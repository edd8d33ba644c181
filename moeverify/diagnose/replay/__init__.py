"""Replays: what a module computes on right inputs, and what it would compute if one of its parts were otherwise."""
