"""The folder that `moeverify watch` puts on PYTHONPATH: every interpreter of the script imports `sitecustomize`."""
