"""Training state on disk: saved by ranks under any layout, loaded by ranks under any other."""
