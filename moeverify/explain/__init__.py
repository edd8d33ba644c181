"""Explanation of wrong steps by their operators: recorded, aligned with a single device, re-executed."""
