"""The debugged process: stopping, the prompt, and the server that consoles connect to."""
