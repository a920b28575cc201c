"""The demo: one real server, stock and with omni-fastpath, side by side (``python -m benchmarks.demo``)."""
