"""Where a tuning runs: versions and hardware."""

from __future__ import annotations

import platform

import attrs
import torch

__all__ = ["EnvironmentReport", "environment_report"]


@attrs.frozen(kw_only=True)
class EnvironmentReport:
    """Where a tuning ran."""

    python: str
    torch: str
    platform: str
    cuda: str | None
    device_name: str | None


def environment_report(device: torch.device) -> EnvironmentReport:
    """Describe this process and ``device``."""
    cuda = device.type == "cuda"
    return EnvironmentReport(
        python=platform.python_version(),
        torch=str(torch.__version__),
        platform=platform.platform(),
        cuda=torch.version.cuda if cuda else None,
        device_name=torch.cuda.get_device_name(device) if cuda else None,
    )
