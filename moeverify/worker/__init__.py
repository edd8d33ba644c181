"""What the ranks do: verify, diagnose, record goldens, reshard. Started by `moeverify.controller`."""
