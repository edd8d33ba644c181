"""Frameworks that people train with, ready to be named in a case: one file a framework."""
