"""Comparing two arms: the arm, whose turn it is, the proof that it is on, quantiles, intervals and the verdict.

Benchmarks and the demo stand on it. A serving process never imports it. ``verdict`` needs scipy, which the extra
``compare`` names and every vLLM brings; nothing else here needs more than the standard library.
"""
