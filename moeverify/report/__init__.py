"""Rendering of verdicts as text, JSON, JUnit XML and HTML. No torch."""
