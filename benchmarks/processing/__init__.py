"""What processing an entry of a raw output costs the orchestrator's thread, by how long its request is.

The real orchestrator's ``_process_llm_stage_outputs`` in this process, without its loop: stage pools, output processors
and statistics (``--disable-log-stats`` is not set) are upstream's. 16 requests, DELTA, one raw output a step with an
entry of each; processor time of the thread, divided by the entries, median of 80 raw outputs around each length.
"""
