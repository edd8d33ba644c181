"""The controller process: plans jobs, starts ranks, and reports verdicts. Does not import torch."""
