"""First audio behind a backlog: how long a packet that is ready waits while other stages have queued outputs.

    python -m benchmarks.backlog

The real loop and real processing, three stages. The thinker's and the talker's queues hold a backlog; code2wav has the
queue of issue #4561: outputs that nobody hears, then the first audio of each request. Residence is from the loop's
start, when everything is queued, to the routing of each request's first audio. The arm with ``max_items 1`` takes one
raw output from every replica in turn, as stock does, but without stock's waiting.
"""
