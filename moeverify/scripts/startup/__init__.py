"""The folder that `moeverify watch` puts on PYTHONPATH, with the module `sitecustomize`."""
