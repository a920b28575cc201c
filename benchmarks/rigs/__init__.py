"""What the benchmarks and the tests run on: orchestrator, stages and servers, arms, drivers and results."""
