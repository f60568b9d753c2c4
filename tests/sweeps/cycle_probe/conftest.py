"""The probe's folder is on the path, as the server has it."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[3] / "sweeps" / "cycle_probe"))
