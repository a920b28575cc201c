"""What a figure varies by when nothing is changed: starts of one arm, and what drifts from one to the next.

    python -m benchmarks.drift --starts 10

Stock at a light load, one server after another. A figure's logarithm is taken for the sum of a walk, which drifts from
start to start, and of noise that each start has by itself; the two deviations are what the simulation in
tests/compare/test_verdict.py assumes (DRIFT_SIGMA, PRIMARY_SIGMA, WORST_SIGMA).
"""
