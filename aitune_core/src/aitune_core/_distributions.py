"""Installed distributions: which version of what a module came in, and what that needs."""

from __future__ import annotations

import functools
import hashlib
import re
import sys
import types
from collections.abc import Mapping
from importlib import metadata
from pathlib import Path

__all__ = ["package_facts", "versions_of"]

_NAME = re.compile(r"[A-Za-z0-9](?:[A-Za-z0-9._-]*[A-Za-z0-9])?")


@functools.cache
def _distributions() -> Mapping[str, list[str]]:
    """Distributions by top-level package; looked up once, since it reads all that is installed."""
    return metadata.packages_distributions()


def versions_of(package: str) -> dict[str, str]:
    """Return the versions of the distributions that a top-level package came in, by name.

    An editable install does not list its packages, and is looked for by the package's own name.
    """
    versions = {}
    for name in sorted(set(_distributions().get(package, (package.replace("_", "-"),)))):
        version = _version(name)
        if version is not None:
            versions[name] = version
    return versions


@functools.cache
def package_facts(module: str) -> Mapping[str, str]:
    """Return what tells one state of an installed module from another.

    Looked up once: sources that are edited later are not what runs.

    Args:
        module: Full name of an imported module.

    Returns:
        Versions of the distributions that it came in and of those that they require, and a hash
        of the sources of its package: an editable install changes without a new version.
    """
    facts = versions_of(module.partition(".")[0])
    for name in tuple(facts):
        for requirement in metadata.requires(name) or ():
            if "extra ==" in requirement:
                continue
            found = _NAME.match(requirement)
            version = None if found is None else _version(found.group())
            if found is not None and version is not None:
                facts[found.group()] = version
    sources = _sources_hash(module)
    if sources is not None:
        facts[f"sources of {module}"] = sources
    return types.MappingProxyType(facts)


def _version(distribution: str) -> str | None:
    try:
        return metadata.version(distribution)
    except metadata.PackageNotFoundError:
        return None


def _sources_hash(module: str) -> str | None:
    """Hash the sources beside a module and below; of the module alone where it is no package's."""
    loaded = sys.modules.get(module)
    file = getattr(loaded, "__file__", None)
    if file is None:
        return None
    path = Path(file)
    in_package = bool(getattr(loaded, "__package__", ""))
    digest = hashlib.sha256()
    try:
        for source in sorted(path.parent.rglob("*.py")) if in_package else [path]:
            content = source.read_bytes()
            name = source.relative_to(path.parent).as_posix()
            digest.update(f"{name} {len(content)}\n".encode())
            digest.update(content)
    except OSError:
        return None
    return digest.hexdigest()
