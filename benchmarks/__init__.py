"""The benchmark of the product, and the page it writes: see ``benchmarks.run`` and ``render``."""
