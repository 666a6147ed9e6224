"""What must not happen at the same time, in any two threads of the process."""

from __future__ import annotations

import threading
from typing import Final

__all__ = ["DEVICE_WORK"]

#: Held while a CUDA graph is captured, and while a session on CUDA is created or freed: that
#: synchronises the device, which fails during a capture and spoils it. CUDA's rule is about the
#: process, so this is the one thing that all engines share. Reentrant, since a session may be
#: freed by the garbage collector while another one is created.
DEVICE_WORK: Final = threading.RLock()
