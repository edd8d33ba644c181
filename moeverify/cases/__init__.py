"""Cases as written by users: schema, loading with line numbers, and overrides. Does not import torch."""
