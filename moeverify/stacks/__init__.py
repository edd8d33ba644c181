"""Adapters for training frameworks, one file per framework, that a case can name."""
