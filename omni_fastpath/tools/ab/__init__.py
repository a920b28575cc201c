"""``omni-fastpath ab``: two settings of a server, started in turn, measured alike, and what can be said of them.

For any model, deploy YAML and machine: both commands are the user's own. The benchmarks and the demo stand on it too.

``command`` is the command line and ``asked`` what it asks for. ``serving`` starts and stops a server, ``states`` proves
that it is its arm, ``client`` runs the user's benchmark client, ``measures`` reads its result, ``requests`` are what
the answers are compared by. ``series`` does all of it start after start, ``files`` keeps each start, ``report`` says
what was found, on the terminal, as JSON, as Markdown and as a page.

``arm`` is an arm of a benchmark and the proof that it is on, ``capture`` the client that records answers, ``answers``
says whether two arms answered alike, ``rows`` are rows of measures that ``verdict`` judges, ``table`` and ``page`` show
them, ``phases`` is the progress. ``verdict`` needs scipy, ``capture`` aiohttp and ``page`` jinja2, which come with
vLLM-Omni; ``page``'s pictures need plotly. The extra ``ab`` names all of them.
"""
