"""Figures of runs for services that draw them over time: one file a service, none of them needed to run anything."""
