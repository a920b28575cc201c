"""What ``--max-num-queued-reqs`` is worth where more arrives than a server bears: stock, and `admission_limit`.

    python -m benchmarks.admission --starts 3

Each start: a closed loop of one stream less than the limit of 8, from which follows how many requests a second the
server bears; an open loop at half of that; one at three times that; a burst of 200 at once. Light engines. A refusal's
time is from sending, with a new connection, until its body has come; the load has a process of its own. Who is neither
served nor refused ends the run; the counters of the state file stand below the table.
"""
