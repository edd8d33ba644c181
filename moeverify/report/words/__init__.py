"""Sentences: made here alone, from results that are data."""
