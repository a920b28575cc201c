"""Comparing two arms: the arm, whose turn it is, the proof that it is on, quantiles, intervals and the verdict.

Then what a comparison is made of and shown by: the client that records answers (``capture``), whether two arms answered
alike (``answers``), rows of measures (``rows``), a table (``table``), a page (``page``), progress (``phases``).
``omni-fastpath ab``, the benchmarks and the demo stand on it. A serving process never imports it. ``verdict`` needs
scipy, ``capture`` aiohttp and ``page`` jinja2, which come with vLLM-Omni; ``page``'s pictures need plotly. The extra
``ab`` names all of them.
"""
