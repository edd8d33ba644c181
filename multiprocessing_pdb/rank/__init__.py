"""The debugged process: stops, prompts, and the server for consoles."""
