"""Where a tuning runs: versions, hardware, and settings of torch."""

from __future__ import annotations

import hashlib
import platform
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Final

import attrs
import torch

__all__ = ["EnvironmentReport", "build_facts", "environment_report"]


@attrs.frozen(kw_only=True)
class EnvironmentReport:
    """Where a tuning ran.

    Attributes:
        python: Version of Python.
        torch: Version of PyTorch.
        platform: The operating system.
        cuda: CUDA version of PyTorch, where it ran on CUDA.
        device_name: Name of the GPU.
        facts: Settings of torch, and what else of the machine decides what engines are.
    """

    python: str
    torch: str
    platform: str
    cuda: str | None
    device_name: str | None
    facts: dict[str, str] = attrs.field(factory=dict)


def environment_report(device: torch.device) -> EnvironmentReport:
    """Describe this process and ``device``."""
    cuda = device.type == "cuda"
    return EnvironmentReport(
        python=platform.python_version(),
        torch=str(torch.__version__),
        platform=platform.platform(),
        cuda=torch.version.cuda if cuda else None,
        device_name=torch.cuda.get_device_name(device) if cuda else None,
        facts=build_facts(device),
    )


#: Settings that decide what an exporter sees and what eager computes.
_SETTINGS: Final[Mapping[str, Callable[[], object]]] = {
    "default dtype": torch.get_default_dtype,
    "float32 matmul precision": torch.get_float32_matmul_precision,
    "TF32 in products": lambda: torch.backends.cuda.matmul.allow_tf32,
    "TF32 in convolutions": lambda: torch.backends.cudnn.allow_tf32,
    "reduced sums of float16": lambda: (
        torch.backends.cuda.matmul.allow_fp16_reduced_precision_reduction
    ),
    "reduced sums of bfloat16": lambda: (
        torch.backends.cuda.matmul.allow_bf16_reduced_precision_reduction
    ),
    "deterministic": torch.are_deterministic_algorithms_enabled,
    "deterministic cuDNN": lambda: torch.backends.cudnn.deterministic,
    "oneDNN": lambda: torch.backends.mkldnn.enabled,
    "flash attention": torch.backends.cuda.flash_sdp_enabled,
    "memory-efficient attention": torch.backends.cuda.mem_efficient_sdp_enabled,
    "fast path of encoders": torch.backends.mha.get_fastpath_enabled,
}


def build_facts(device: torch.device) -> dict[str, str]:
    """Return what decides engines that are built in this process, whatever builds them."""
    facts = {
        "python": f"{platform.python_implementation()} {platform.python_version()}",
        "torch": f"{torch.__version__} {torch.version.git_version}",
        "machine": f"{sys.platform} {platform.machine()}",
        "device": device.type,
        "autocast": (
            f"{torch.is_autocast_enabled(device.type)} {torch.get_autocast_dtype(device.type)}"
        ),
    }
    if device.type == "cuda":
        facts["GPU"] = torch.cuda.get_device_name(device)
        facts["capability"] = repr(torch.cuda.get_device_capability(device))
        facts["CUDA"] = str(torch.version.cuda)
        facts["cuDNN"] = str(torch.backends.cudnn.version())  # type: ignore[no-untyped-call]
    else:
        facts["CPU"] = _cpu()
    for name, read in _SETTINGS.items():
        try:
            facts[name] = str(read())
        except RuntimeError as error:  # older and newer settings of TF32 are mixed
            facts[name] = type(error).__name__
    return facts


def _cpu() -> str:
    """Name and instructions of the processor, as far as the platform tells them."""
    known = torch.backends.cpu.get_cpu_capability()
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        return f"{platform.processor()}, {known}"
    first: dict[str, str] = {}
    for line in lines:
        name, _, value = line.partition(":")
        first.setdefault(name.strip(), value.strip())
    instructions = " ".join(sorted((first.get("flags") or first.get("Features", "")).split()))
    digest = hashlib.sha256(instructions.encode()).hexdigest()[:16]
    return f"{first.get('model name') or platform.processor()}, {known}, {digest}"
