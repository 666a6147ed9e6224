"""Every family of the sweep, in the order of the table."""

from __future__ import annotations

from typing import Final

from .audio import AUDIO, MULTIMODAL
from .decoders import CACHED_DECODERS, DECODERS
from .encoders import ENCODER_HEADS, ENCODERS
from .family import Family
from .plain import CONVOLUTIONAL, OTHER, RECURRENT
from .seq2seq import SEQ2SEQ
from .vision import VISION

FAMILIES: Final[tuple[Family, ...]] = (
    *ENCODERS,
    *ENCODER_HEADS,
    *DECODERS,
    *CACHED_DECODERS,
    *SEQ2SEQ,
    *VISION,
    *AUDIO,
    *MULTIMODAL,
    *CONVOLUTIONAL,
    *RECURRENT,
    *OTHER,
)
