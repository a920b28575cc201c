"""Random fleets on real parts: a seed is a script that stock and ours both get, and every request is compared.

``dispatch`` is the orchestrator with its pools, ``stage`` one stage with its save thread. Of each, ``_script`` is a
pure function of a seed. ``python -m tests.fleets dispatch --seeds 1000 --first 0``.
"""
