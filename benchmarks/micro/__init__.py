"""Micro-benchmarks: one file per seam, each with both arms, stock and fastpath, on pytest-benchmark.

    make bench                                          both arms, and the ratio of fastpath to stock
    make bench ARGS="--benchmark-save base"             the same, and each arm saved in .benchmarks/
    make bench ARGS="--benchmark-compare 0001 -k end"   beside a saved run
    .venv/bin/python -m pytest benchmarks/micro --arm fastpath      one arm

Patching affects a whole process, so each arm runs in its own process. Arguments are passed to pytest. A figure is the
cost of one raw output, entry, token, chunk or task, as the docstring of the benchmark says.
"""
