"""What ``forward_gate`` takes off the wire and off the orchestrator's thread, on a release's own components."""
