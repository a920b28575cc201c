"""What the end of a request costs the front end: upstream's summary of it, stock and each way of ``lean_front_end``.

Real are upstream's aggregator, its summary, its logger and vLLM's handler and formatter, writing into a pipe; the
requests are made up: three stages, two transfers, as many latencies as a request of so many text tokens has.
"""
