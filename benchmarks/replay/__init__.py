"""Replay: real raw outputs through the real orchestrator, at a set utilisation, stock and fastpath in turn.

    python -m benchmarks.replay                                 every cell, one round, some two hours
    python -m benchmarks.replay --cells dear-0.95 --rounds 3
    python -m benchmarks.replay --quick                         a few seconds a cell: does it run?

A cell's utilisation is that of fastpath's orchestrator: of the raw outputs a second that it bears when they are sent as
fast as they are taken (the calibration, anew for each round, because a shared machine's speed drifts by tens of percent
within minutes). All arms of a round get the same rate, so each has a utilisation of its own, which is printed. What an
arm's stages would not send is not sent: with ``forward_gate`` the talker's raw outputs have no codes.
"""
