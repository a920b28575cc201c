"""Random fleets at the orchestrator: stock and ours get the same script, and every request is compared.

``fleet`` is the script, a pure function of its seed; ``virtual`` is a clock on which everything happens in the same
order in each run; ``world`` plays a script on the real orchestrator; ``judge`` says what differs and what broke.
``python -m tests.fleets_dispatch --seeds 1000 --first 0``.
"""
