"""What dispatch costs: the real loops with queued raw outputs, processing stubbed.

    python -m benchmarks.dispatch

Upstream's processing, routing and terminal bookkeeping are replaced by functions that do nothing, so that what remains
is what runs for each raw output besides them: the put into the client's queue with what hangs on it, dequeue,
keep-or-drop rule, order, budget, judging, yields, and the stubs themselves. The raw outputs are put
one after the other while the loop sleeps, and the clock runs from the first put to the last dispatch. They are of the
``first`` stage (text) or the ``last`` (audio, of which 15 of 16 bring nobody anything: the queue of issue #4561).
``others wait``: as many are put at each of the two other stages, so that stages are chosen between; the figure is for
each of all. ``ends wait``: each raw output of the last stage ends a request of which text waits at the first.

The fast path runs twice a round: the difference between the two is noise.
"""
