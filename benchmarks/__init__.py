"""Benchmarks and the machinery they share; run from the repository root as ``python -m benchmarks.<suite>``."""
