"""Mesh axes as plain arithmetic: degrees, views, groups, and the tensors that each axis affects. No torch."""
