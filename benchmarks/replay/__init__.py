"""Stage outputs replayed through the real orchestrator at a set utilisation: the instrument for order and waits."""
