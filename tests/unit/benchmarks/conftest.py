"""Import path of the programs in benchmarks/draws, which import each other as neighboring modules."""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[3] / "benchmarks" / "draws"))
