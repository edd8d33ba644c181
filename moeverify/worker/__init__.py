"""The ranks: they verify, diagnose, make goldens, save and load. Started by `moeverify.controller`."""
