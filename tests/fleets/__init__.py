"""Random fleets on real parts: a seed is a script that stock and ours both get, and every stream is compared.

``stage`` is one stage with its save thread; ``stage_script`` is a pure function of a seed. ``python -m tests.fleets
stage --seeds 1000 --first 0``. The orchestrator's are in ``tests/schedules``.
"""
