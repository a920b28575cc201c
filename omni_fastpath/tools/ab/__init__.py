"""``omni-fastpath ab``: two settings of a server, started in turn, measured alike, and what can be said of them.

For any model, deploy YAML and machine: both commands are the user's own. The benchmarks and the demo stand on it too.

``command`` is the command line and ``commands`` checks what it was given. ``serving`` starts and stops a server
(``interrupts`` are the signals that end a series),
``states`` proves that it is its arm, ``measures`` reads what the user's benchmark client wrote, ``requests`` are what
the answers are compared by. ``series`` does all of it start after start, ``files`` keeps each start, ``redaction``
hides what may be a secret, ``report`` says what was found, on the terminal, as JSON and as Markdown.

``arm`` is an arm of a benchmark and the proof that it is on, ``capture`` the client that records answers, ``answers``
says whether two arms answered alike, ``rows`` are rows of measures that ``verdict`` judges and ``table`` shows,
``phases`` is the progress. ``capture`` needs aiohttp, which comes with vLLM-Omni; the extra ``ab`` names it.
"""
