"""``omni-fastpath ab``: compare two settings of a server.

It works with any model, deploy YAML and machine, because both commands are the user's. The benchmarks and the demo use
these modules too.

``command`` parses the command line, and ``commands`` checks its parts and creates the fixed requests. ``series`` runs
one start after another: ``serving`` starts and stops a server, ``interrupts`` handles signals, ``states`` checks that
the server runs its setting, ``capture`` records answers, ``measures`` reads the result of the benchmark client,
``files`` stores each start, ``redaction`` hides possible secrets, and ``phases`` shows the progress.

``answers`` compares the answers of two arms, ``verdict`` tests measures, ``rows`` is a table of them, and ``report``
writes the result to the terminal, as JSON and as Markdown. ``capture`` needs aiohttp, which vLLM-Omni requires. The
extra ``ab`` installs it.
"""
