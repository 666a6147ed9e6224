"""Configuration of backends: frozen records that travel in checkpoints."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Self

import attrs

from aitune_core.errors import ConfigError

__all__ = ["BackendConfig"]


@attrs.frozen(kw_only=True)
class BackendConfig:
    """Base of backend configurations.

    Subclass with ``@attrs.frozen(kw_only=True)``, give every field a default, a converter where
    input is loose and a validator. Values must be JSON-able or enums with JSON-able values.
    """

    @classmethod
    def from_options(cls, options: Mapping[str, Any]) -> Self:
        """Make a configuration from options by name.

        Raises:
            ConfigError: An option is unknown, or its value cannot be used.
        """
        known = [attribute.alias for attribute in attrs.fields(cls)]
        for name in options:
            if name not in known:
                allowed = ", ".join(map(str, known)) or "none"
                msg = f"{cls.__name__} has no option {name!r}; its options are: {allowed}"
                raise ConfigError(msg, field=name, value=options[name], allowed=tuple(known))
        return cls(**options)

    def to_options(self) -> dict[str, Any]:
        """Return the options as JSON-able data that `from_options` accepts."""
        return attrs.asdict(self, value_serializer=_plain)


def _plain(_owner: Any, _attribute: Any, value: Any) -> Any:  # noqa: ANN401
    return getattr(value, "value", value) if hasattr(type(value), "__members__") else value
