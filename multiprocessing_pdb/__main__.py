"""Entry point of the console: `python -m multiprocessing_pdb`."""

import sys

from multiprocessing_pdb.console.command_line import main

if __name__ == "__main__":
    sys.exit(main())
