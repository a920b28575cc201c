"""``omni-fastpath ab`` held against what is known: a setting against itself, and a stage slowed by a known time.

The first must find no difference. The second must find "worse" for the measures that are named before the run,
and must not for first text, which no later stage can reach. Light engines, Qwen3-Omni, upstream's own client; some
eight minutes on two cores with nothing else at work.
"""
