"""Sentences of reports, built from results that are plain data; no other package builds them."""
