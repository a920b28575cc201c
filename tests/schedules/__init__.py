"""Random schedules on real parts: state machines against plain models, shrunk by hypothesis.

``make test`` draws few and always the same, ``make trust`` thousands of others.
"""
