"""Weights in the formats of others: Hugging Face, DCP, megablocks."""
