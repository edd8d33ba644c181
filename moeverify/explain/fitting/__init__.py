"""Diagnosis: turn findings into causes and places, by fitting wrong tensors on parts of the golden."""
