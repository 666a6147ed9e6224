"""Reports as JSON, and back."""

from __future__ import annotations

import functools
import json
import math
from typing import TYPE_CHECKING, Any, Final, TypeVar

from aitune_core._report import TuneRecord
from aitune_core.errors import ReportError

if TYPE_CHECKING:
    import cattrs

__all__ = ["SCHEMA_VERSION", "report_from_json", "report_to_json"]

#: Raised where a field is taken away, renamed, or means something else.
SCHEMA_VERSION: Final = 1
#: JSON has no numbers for these.
_NOT_FINITE: Final = ("Infinity", "-Infinity", "NaN")

_Record = TypeVar("_Record", bound=TuneRecord)


def report_to_json(report: TuneRecord, *, indent: int | None = None) -> str:
    """Return a report as JSON text."""
    data = {"schema_version": SCHEMA_VERSION, **_converter().unstructure(report)}
    return json.dumps(data, indent=indent, allow_nan=False)


def report_from_json(text: str | bytes, kind: type[_Record]) -> _Record:
    """Return the report that `report_to_json` made a text of.

    Raises:
        ReportError: It is no such text, or one of another version.
    """
    try:
        data = json.loads(text)
    except (ValueError, RecursionError) as error:
        msg = f"the text is not JSON: {error}; give what TuneReport.to_json returned"
        raise ReportError(msg, expected="JSON", got=str(error)) from error
    if not isinstance(data, dict) or "schema_version" not in data:
        msg = "the text is JSON but no report; give what TuneReport.to_json returned"
        raise ReportError(msg, expected="an object with schema_version", got=type(data).__name__)
    version = data.pop("schema_version")
    if version != SCHEMA_VERSION or isinstance(version, bool):
        msg = (
            f"the report has schema_version {version!r:.40}, and this version of aitune-core reads "
            f"{SCHEMA_VERSION}; read it with the version that wrote it"
        )
        raise ReportError(msg, expected=SCHEMA_VERSION, got=version)
    try:
        return _converter().structure(data, kind)
    except Exception as error:
        from cattrs import transform_error  # noqa: PLC0415 - as in _converter

        problems = transform_error(error, path="report")
        msg = (
            f"the report does not have the fields of schema_version {SCHEMA_VERSION}: "
            f"{'; '.join(problems)[:1000]}; write it again with TuneReport.to_json"
        )
        raise ReportError(msg, expected="the fields of a report", got=problems) from error


@functools.cache
def _converter() -> cattrs.Converter:
    import cattrs  # noqa: PLC0415 - slow to import, needed for stored reports only

    converter = cattrs.Converter(forbid_extra_keys=True)
    converter.register_unstructure_hook(float, _number_to_json)
    converter.register_structure_hook(float, lambda data, _: _number(data))
    for kind in (bool, int, str):
        converter.register_structure_hook(kind, functools.partial(_exactly, kind))
    # A cell of a table.
    converter.register_unstructure_hook(str | int | float, _cell_to_json)
    converter.register_structure_hook(str | int | float, lambda data, _: _cell(data))
    return converter


def _number_to_json(value: float) -> float | str:
    if math.isfinite(value):
        return value
    return "NaN" if math.isnan(value) else "Infinity" if value > 0 else "-Infinity"


def _number(data: object) -> float:
    if isinstance(data, str) and data in _NOT_FINITE:
        return float(data)
    if isinstance(data, int | float) and not isinstance(data, bool):
        return float(data)
    msg = f"expected a number, got {data!r:.80}"
    raise ValueError(msg)


def _exactly(kind: type, data: object, _: object) -> Any:  # noqa: ANN401
    if type(data) is kind:
        return data
    msg = f"expected {kind.__name__}, got {data!r:.80}"
    raise ValueError(msg)


def _cell_to_json(value: str | float) -> str | float:
    return _number_to_json(value) if isinstance(value, float) else value


def _cell(data: object) -> str | int | float:
    if isinstance(data, str | int | float):
        return data
    msg = f"expected a text or a number, got {data!r:.80}"
    raise ValueError(msg)
