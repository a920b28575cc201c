"""Micro-benchmarks of single operations: ``make micro``."""
