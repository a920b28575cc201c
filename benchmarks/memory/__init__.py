"""Whether the API process's memory stays flat: an hour of requests, stock and with what puts collections off, at once.

    python -m benchmarks.memory --minutes 60 --streams 4 --arms stock,only-gc_pacing

One server on light engines for each arm, all of them at the same time, each with so many streams that never pause: a
request's successor starts as it ends, so that ``gc_pacing`` finds hardly a quiet moment and its bounds count. Memory is
what the kernel calls private to the process (USS). The first quarter is warming up: allocators and caches fill.
Nothing here is a time: it may run beside other work.
"""
