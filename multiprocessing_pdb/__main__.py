"""python -m multiprocessing_pdb: the console."""

import sys

from multiprocessing_pdb.console.command_line import main

if __name__ == "__main__":
    sys.exit(main())
