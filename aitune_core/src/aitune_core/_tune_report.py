"""The report of a tuning, and what can be made of it."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Self

import attrs

from aitune_core._report import TuneRecord
from aitune_core._report_file import write_page
from aitune_core._report_json import report_from_json, report_to_json
from aitune_core._report_text import report_summary

__all__ = ["TuneReport"]


@attrs.frozen(kw_only=True)
class TuneReport(TuneRecord):
    """What `tune` did.

    Attributes:
        modules: The modules that the calls reached.
        device: Where they were tuned.
        environment: Versions and hardware.
        seconds: Time the whole tuning took.
        dry_run: Whether only recording was asked for.
    """

    def to_json(self, *, indent: int | None = None) -> str:
        """Return everything as JSON text, in the format of ``docs/tune-report.schema.json``."""
        return report_to_json(self, indent=indent)

    @classmethod
    def from_json(cls, text: str | bytes) -> Self:
        """Return the report that `to_json` made a text of.

        Raises:
            ReportError: The text is no report, or one of another version of the format.
        """
        return report_from_json(text, cls)

    def to_html(self, path: str | os.PathLike[str]) -> Path:
        """Write the report as one HTML file that needs nothing besides itself.

        Args:
            path: The file; one that is there is replaced, whole or not at all.

        Returns:
            The path.

        Raises:
            MissingExtraError: The extra ``report`` is not installed.
            ReportError: The file cannot be written.
        """
        return write_page(self, path)

    def summary(self) -> str:
        """Return the report as text for a terminal, in lines of at most 100 characters."""
        return report_summary(self)

    def __str__(self) -> str:
        """Return `summary`."""
        return self.summary()
