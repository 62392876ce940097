"""The authors' laboratory: benchmarks, experiments and measurements. Not in the wheel."""

import sys
from pathlib import Path

# A preregistered study's files are fixed by their hashes. They import `experiments.forks`.
sys.path.append(str(Path(__file__).parent))
