"""What a slow receiver costs the others, stock and with ``save_queue_cap``: ``python -m benchmarks.save_queue``."""
