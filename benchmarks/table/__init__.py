"""The table at the top of the README, measured here: `make bench`, some 15 minutes on two cores.

    python -m benchmarks.table                  every row, and where the figures come from
    python -m benchmarks.table --rows calm      one row
    python -m benchmarks.table --full           longer, and six starts an arm; an hour

Each row is another benchmark's, run shorter: the arms alternate, each runs at least twice, in a process of its own,
and a cell says the least and the most that its runs gave. What two runs of one arm lie apart is how much a difference
must be to mean something. The lines go to ``results/table.jsonl``.
"""

from __future__ import annotations

ROWS = {
    "busy": "first audio p99, two replicas a stage, 80 % load",
    "slow-receiver": "first audio p99, one slow receiver among 16 streams (`save_queue_cap`)",
    "calm": "one replica a stage, 1 to 16 streams",
}
"""The README's rows by the name that ``--rows`` takes."""
