"""Verdicts in, text, JSON, JUnit and HTML out; no torch."""
