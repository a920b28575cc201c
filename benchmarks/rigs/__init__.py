"""What several benchmarks stand on, beside omni_fastpath.compare."""
