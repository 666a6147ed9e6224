"""What is measured, and what is to be reached; imports no torch."""

from __future__ import annotations

from typing import Final

import attrs

__all__ = [
    "BATCHES",
    "CASES",
    "CONTENDERS",
    "HEADLINE_BATCH",
    "TARGETS",
    "TITLES",
    "Case",
    "Target",
    "chosen_cases",
]

#: Models by key, in the order of the tables.
TITLES: Final = {
    "mlp": "MLP, 4 linear layers of 256",
    "resnet50": "ResNet-50, 224 x 224",
    "bert": "BERT-base, length 128",
    "vit": "ViT-B/16, 224 x 224",
}
HEADLINE_BATCH: Final = 8
BATCHES: Final = (1, HEADLINE_BATCH, 64)
#: Ways to run a model, by key, as the tables name them.
CONTENDERS: Final = {"eager": "eager", "compile": "torch.compile", "ours": "aitune"}


@attrs.frozen
class Case:
    """One row: a model in one element type at one batch size."""

    model: str
    dtype: str
    batch: int

    @property
    def key(self) -> str:
        """Name in files, such as ``"bert-float16-8"``."""
        return f"{self.model}-{self.dtype}-{self.batch}"

    @property
    def title(self) -> str:
        """Name of model and element type in tables."""
        return f"{TITLES[self.model]}, {self.dtype}"


@attrs.frozen
class Target:
    """What a case is to reach.

    Attributes:
        case: The case.
        p50_us: Median of a call, microseconds, at most.
        p50_ratio: Median of ``torch.compile`` divided by ours, at least.
        pipelined_ratio: The same for back-to-back calls; None where nothing is asked.
        stretch_us: Median to reach later, microseconds; None where nothing is asked.
    """

    case: Case
    p50_us: float
    p50_ratio: float
    pipelined_ratio: float | None = None
    stretch_us: float | None = None


_HEADLINES: Final = {
    "mlp": Case("mlp", "float32", HEADLINE_BATCH),
    "resnet50": Case("resnet50", "float16", HEADLINE_BATCH),
    "bert": Case("bert", "float16", HEADLINE_BATCH),
    "vit": Case("vit", "float16", HEADLINE_BATCH),
}

#: Every row, the most telling ones first, so that a limit on time cuts off the others.
CASES: Final = (
    *_HEADLINES.values(),
    Case("bert", "float32", HEADLINE_BATCH),
    Case("bert", "bfloat16", HEADLINE_BATCH),
    *(
        attrs.evolve(case, batch=batch)
        for batch in BATCHES
        if batch != HEADLINE_BATCH
        for case in _HEADLINES.values()
    ),
)

TARGETS: Final = (
    Target(_HEADLINES["mlp"], 65, 4.0),
    Target(_HEADLINES["resnet50"], 740, 1.35, 1.0, stretch_us=600),
    Target(_HEADLINES["bert"], 1180, 1.2, 1.0, stretch_us=950),
    Target(_HEADLINES["vit"], 1330, 1.0, stretch_us=1150),
)


def chosen_cases(models: list[str], batches: list[int]) -> tuple[Case, ...]:
    """Return the cases of some models and batch sizes, in the order of `CASES`."""
    return tuple(case for case in CASES if case.model in models and case.batch in batches)
