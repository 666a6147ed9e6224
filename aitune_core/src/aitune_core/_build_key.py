"""The name of a build: a hash of all that decides what becomes of it."""

from __future__ import annotations

import hashlib
import json

from aitune_core._distributions import package_facts
from aitune_core._environment import build_facts
from aitune_core._identity import ContentHash, TensorHashes, UnknownContentError
from aitune_core._spec_json import graph_to_json
from aitune_core._trees import TreeError
from aitune_core.backend import Backend, BuildRequest

__all__ = ["build_key"]

#: Raised where the same content is described in another way.
_VERSION = 1


def build_key(backend: Backend, request: BuildRequest, tensors: TensorHashes) -> str | None:
    """Return a hash of all that decides what a backend builds, the same in every process.

    In it: the module's weights, attributes and code; the graph; shapes, strides and values of the
    samples; the backend's options and what it says of itself; versions, hardware and settings.

    Args:
        backend: The candidate.
        request: What it is to be given.
        tensors: Hashes of tensors that are known; it learns those that are not.

    Returns:
        A SHA-256 in hexadecimal digits; None where engines of the backend cannot be stored.

    Raises:
        UnknownContentError: The content of something cannot be told.
    """
    own = backend.fingerprint(request.device)
    if own is None:
        return None
    kind = type(backend)
    content = ContentHash(tensors)
    try:
        facts = {
            "version": _VERSION,
            "core": dict(package_facts(__name__)),
            "backend": [backend.name, kind.__module__, kind.__qualname__],
            "options": backend.config.to_options(),
            "fingerprint": dict(own),
            "environment": build_facts(request.device),
            "graph": graph_to_json(request.graph),
        }
        text = json.dumps(facts, sort_keys=True)
        if kind.__module__ == "__main__":  # a script or notebook has no package
            content.add("backend", kind)
        content.add("module", request.module)
        content.add("samples", request.samples)
    except UnknownContentError:
        raise
    except TreeError as error:
        msg = f"{error.path}: {error.reason}"
        raise UnknownContentError(msg) from error
    except Exception as error:
        # Code of objects that hang on a module may raise anything when they are looked at.
        raise UnknownContentError(repr(error)) from error
    return hashlib.sha256(f"{text}\n{content.hexdigest()}".encode()).hexdigest()
