"""``make parity``: one server with real stage engines on the simulated device, stock and with omni-fastpath.

    python -m benchmarks.parity [--requests N] [--starts N] [--output DIR]

Schedulers, connectors, runners and chunk managers are upstream's here, in six stage processes, so that whatever the
patches do to any of them shows in the answers, which must be the same byte for byte. The six processes fill two cores
before the API process does: `benchmarks.demo`, on light engines, is the one that shows what waits there.
"""
