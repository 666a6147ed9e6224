"""``python -m aitune_core`` is the command ``aitune``."""

from __future__ import annotations

from aitune_core._cli import main

if __name__ == "__main__":
    main()
