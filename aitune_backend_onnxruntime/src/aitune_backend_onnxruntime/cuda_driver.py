"""The functions of the CUDA driver that graphs need and PyTorch does not offer.

PyTorch's own `torch.cuda.CUDAGraph` is not used: a capture that fails leaves its random number
generators unusable, and while one goes on, its allocator works differently in all threads.

Source:
    CUDA Driver API reference, sections "Stream Management", "Event Management" and "Graph
    Management".
"""

from __future__ import annotations

import ctypes
import enum
import sys
from ctypes import POINTER, byref, c_char_p, c_int, c_size_t, c_uint, c_uint64, c_void_p
from typing import Final

__all__ = ["CaptureMode", "CudaDriver", "CudaDriverError"]

_LIBRARY: Final = "nvcuda.dll" if sys.platform == "win32" else "libcuda.so.1"
_HOST_MEMORY: Final = 1
_UNIFIED_MEMORY: Final = 4
_POINTER_MEMORY_TYPE: Final = 2
_MEMCPY_NODE: Final = 1
#: ``CUgraphNodeType`` of nodes that do the same in every replay: kernels, memset, empty, memory
#: taken and given back within the graph.
_REPEATABLE_NODES: Final = frozenset({0, 2, 5, 10, 11})
_NODE_NAMES: Final = {3: "a call of the host", 6: "a wait for an event", 7: "an event"}


class CudaDriverError(Exception):
    """A function of the driver failed; says which, and the driver's name for the failure."""


class CaptureMode(enum.IntEnum):
    """What the capturing thread may do beside queueing work (``CUstreamCaptureMode``)."""

    #: Nothing that works on memory or waits: no allocation, no synchronous copy.
    STRICT = 1
    #: Anything.
    RELAXED = 2


class _Copy(ctypes.Structure):
    """``CUDA_MEMCPY3D``."""

    _fields_ = (
        ("src_place", c_size_t * 4),
        ("src_memory", c_uint),
        ("src_host", c_void_p),
        ("src_device", c_uint64),
        ("src_array", c_void_p * 2),
        ("src_pitch", c_size_t * 2),
        ("dst_place", c_size_t * 4),
        ("dst_memory", c_uint),
        ("dst_host", c_void_p),
        ("dst_device", c_uint64),
        ("dst_array", c_void_p * 2),
        ("dst_pitch", c_size_t * 2),
        ("extent", c_size_t * 3),
    )


class CudaDriver:
    """Streams, events and graphs by their handles, which are plain integers."""

    def __init__(self) -> None:
        library = ctypes.CDLL(_LIBRARY)
        for name, kinds in (
            ("cuGetErrorName", (c_int, POINTER(c_char_p))),
            ("cuStreamWaitEvent", (c_void_p, c_void_p, c_uint)),
            ("cuEventRecord", (c_void_p, c_void_p)),
            ("cuStreamBeginCapture_v2", (c_void_p, c_int)),
            ("cuStreamEndCapture", (c_void_p, POINTER(c_void_p))),
            ("cuGraphGetNodes", (c_void_p, POINTER(c_void_p), POINTER(c_size_t))),
            ("cuGraphNodeGetType", (c_void_p, POINTER(c_int))),
            ("cuGraphMemcpyNodeGetParams", (c_void_p, POINTER(_Copy))),
            ("cuPointerGetAttribute", (c_void_p, c_int, c_uint64)),
            ("cuGraphInstantiateWithFlags", (POINTER(c_void_p), c_void_p, c_uint64)),
            ("cuGraphLaunch", (c_void_p, c_void_p)),
            ("cuGraphExecDestroy", (c_void_p,)),
            ("cuGraphDestroy", (c_void_p,)),
        ):
            getattr(library, name).argtypes = kinds
        self._library = library
        self._wait = library.cuStreamWaitEvent
        self._record = library.cuEventRecord
        self._launch = library.cuGraphLaunch

    def wait(self, stream: int, event: int) -> None:
        """Let what is queued next on ``stream`` wait for ``event``."""
        self._check(self._wait(stream, event, 0), "cuStreamWaitEvent")

    def record(self, event: int, stream: int) -> None:
        """Put ``event`` after what is queued on ``stream``."""
        self._check(self._record(event, stream), "cuEventRecord")

    def launch(self, executable: int, stream: int) -> None:
        """Queue an executable graph on ``stream``."""
        self._check(self._launch(executable, stream), "cuGraphLaunch")

    def begin_capture(self, stream: int, mode: CaptureMode) -> None:
        """Take down what is queued on ``stream`` from now on, instead of doing it."""
        self._check(self._library.cuStreamBeginCapture_v2(stream, mode), "cuStreamBeginCapture")

    def end_capture(self, stream: int) -> int:
        """Return the graph of what was queued; `destroy_graph` frees it."""
        graph = c_void_p()
        self._check(self._library.cuStreamEndCapture(stream, byref(graph)), "cuStreamEndCapture")
        return graph.value or 0

    def instantiate(self, graph: int) -> int:
        """Return an executable of a graph; `destroy_executable` frees it."""
        executable = c_void_p()
        result = self._library.cuGraphInstantiateWithFlags(byref(executable), graph, 0)
        self._check(result, "cuGraphInstantiate")
        return executable.value or 0

    def destroy_graph(self, graph: int) -> None:
        """Free a graph; its executables stay."""
        self._check(self._library.cuGraphDestroy(graph), "cuGraphDestroy")

    def destroy_executable(self, executable: int) -> None:
        """Free an executable graph, once its launches are over."""
        self._check(self._library.cuGraphExecDestroy(executable), "cuGraphExecDestroy")

    def unrepeatable_node(self, graph: int) -> str | None:
        """Return what in a graph would do something else in a replay; None where nothing does.

        Work of the host, and copies from or to its memory, belong to the run that was captured.
        """
        for node in self._nodes(graph):
            kind = c_int()
            self._check(self._library.cuGraphNodeGetType(node, byref(kind)), "cuGraphNodeGetType")
            if kind.value == _MEMCPY_NODE:
                copy = _Copy()
                result = self._library.cuGraphMemcpyNodeGetParams(node, byref(copy))
                self._check(result, "cuGraphMemcpyNodeGetParams")
                if self._on_host(copy.src_memory, copy.src_device):
                    return "a copy from memory of the host"
                if self._on_host(copy.dst_memory, copy.dst_device):
                    return "a copy to memory of the host"
            elif kind.value not in _REPEATABLE_NODES:
                return _NODE_NAMES.get(kind.value, f"a node of type {kind.value}")
        return None

    def _nodes(self, graph: int) -> list[int]:
        count = c_size_t()
        self._check(self._library.cuGraphGetNodes(graph, None, byref(count)), "cuGraphGetNodes")
        nodes = (c_void_p * count.value)()
        self._check(self._library.cuGraphGetNodes(graph, nodes, byref(count)), "cuGraphGetNodes")
        return [node for node in nodes if node]

    def _on_host(self, memory: int, address: int) -> bool:
        if memory != _UNIFIED_MEMORY:
            return memory == _HOST_MEMORY
        kind = c_uint()
        asked = self._library.cuPointerGetAttribute(byref(kind), _POINTER_MEMORY_TYPE, address)
        # The driver knows no memory that was not allocated through it.
        return bool(asked) or kind.value == _HOST_MEMORY

    def _check(self, result: int, function: str) -> None:
        if result:
            name = c_char_p()
            self._library.cuGetErrorName(result, byref(name))
            text = name.value.decode() if name.value else f"error {result}"
            msg = f"{function}: {text}"
            raise CudaDriverError(msg)
