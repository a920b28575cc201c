"""What slow receivers cost the others, stock and with ``save_queue_cap``: ``python -m benchmarks.save_queue``.

The whole server on the simulated device, with real stage processes: none, one, two and four of 16 streams have slow
sends at one stage. Every server can make sends slow, but does so only for streams whose request id says so: the batches
with and without slow streams run on the same server in turn. What the patch costs when nobody is slow is a matter of
``python -m benchmarks.server --engines stages --arms default,with-save_queue_cap``.
"""
