"""What ``forward_gate`` takes off the wire and off the orchestrator's thread.

    python -m benchmarks.forward_gate

Qwen3-Omni's talker, whose payload stock sends twice: its real scheduler, encoder, decoder and output processor, with
the simulated device's codes, [1, 16] a token. 64 and 128 requests in flight, 900 tokens each, 32 at a time ending in
one batch. Arms alternate, each in a process of its own; stock runs twice, as an A/A pair. What the output processor
makes for the user, without the payload, and its counts of tokens and ends are compared.
"""
