"""Mesh axes as plain arithmetic: degrees, views, groups, and what each axis divides. Imports no torch."""
