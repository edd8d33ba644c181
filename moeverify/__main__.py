"""Entry point of `python -m moeverify`."""

from moeverify.cli import main

main()
