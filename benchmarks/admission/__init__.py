"""What ``--max-num-queued-reqs`` gains when more requests arrive than a server can sustain: stock, `admission_limit`.

    python -m benchmarks.admission --capacity 6 --starts 3

Each start has a closed loop with one stream less than the limit of 8, an open loop at half of stock's capacity, one at
three times the capacity, and a burst of 200 requests. The capacity is stock's throughput with 64 streams, as
``python -m benchmarks.server --arms stock --levels 64`` measures it, because light engines serve more than 8 requests
at a time. The time of a refusal is measured on a new connection, from sending the request until its body was received.
The load runs outside of the server's processes. A request that is neither served nor refused ends the run. The counters
of the state file are printed below the table.
"""
