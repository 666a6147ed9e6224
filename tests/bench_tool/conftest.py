"""The benchmark tool is no installed package: it lies beside this folder's parent."""

from __future__ import annotations

import sys
from pathlib import Path

# At the end, so that the folders of the packages are not taken for the packages.
sys.path.append(str(Path(__file__).parents[2]))
