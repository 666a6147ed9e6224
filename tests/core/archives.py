"""Taking checkpoints apart and putting them together differently."""

from __future__ import annotations

import hashlib
import json
import warnings
import zipfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

PAYLOAD = "modules/0/graphs/0/weights/values.bin"
Manifest = dict[str, Any]
MANIFEST, MANIFEST_HASH = "manifest.json", "manifest.json.sha256"


def members(path: Path) -> dict[str, bytes]:
    """Return the files of a checkpoint."""
    with zipfile.ZipFile(path) as archive:
        return {name: archive.read(name) for name in archive.namelist()}


def manifest_of(path: Path) -> dict[str, Any]:
    """Return the manifest of a checkpoint."""
    manifest: dict[str, Any] = json.loads(members(path)[MANIFEST])
    return manifest


def graph_of(manifest: Manifest) -> Manifest:
    """Return the entry of the first graph of a manifest."""
    graph: Manifest = manifest["modules"][0]["graphs"][0]
    return graph


def write(
    path: Path,
    files: Mapping[str, bytes],
    *,
    manifest: object = None,
    double: str | None = None,
    link: str | None = None,
    compressed: str | None = None,
) -> None:
    """Write a checkpoint from files; a manifest given as data gets a matching hash."""
    files = dict(files)
    if manifest is not None:
        text = manifest if isinstance(manifest, bytes) else json.dumps(manifest).encode()
        files = {
            **files,
            MANIFEST: text,
            MANIFEST_HASH: hashlib.sha256(text).hexdigest().encode(),
        }
    with zipfile.ZipFile(path, "w") as archive, warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)
        for name, content in files.items():
            info = zipfile.ZipInfo(name)
            if name == link:
                info.external_attr = 0o120777 << 16
            kind = zipfile.ZIP_DEFLATED if name == compressed else zipfile.ZIP_STORED
            archive.writestr(info, content, compress_type=kind)
            if name == double:
                archive.writestr(zipfile.ZipInfo(name), content)
