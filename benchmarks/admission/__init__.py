"""What ``--max-num-queued-reqs`` is worth where more arrives than a server bears: stock, and `admission_limit`.

    python -m benchmarks.admission --bears 6 --starts 3

Each start: a closed loop of one stream less than the limit of 8; an open loop at half of what stock bears; one at three
times that; a burst of 200 at once. What it bears is the throughput of 64 streams, by ``python -m benchmarks.server
--arms stock --levels 64``: light engines take more than 8 at a time. A refusal's time is from sending, with a new
connection, until its body has come; the load has a process of its own. Who is neither served nor refused ends the run;
the counters of the state file stand below the table.
"""
