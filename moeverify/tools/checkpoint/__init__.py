"""Training state on disk, saved under one layout and loaded under any."""
