"""`python -m moeverify` is `moeverify`."""

from moeverify.cli import main

main()
