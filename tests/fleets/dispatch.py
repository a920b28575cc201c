"""Playing many fleets on all arms, stock's first and then ours, and judging them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import replace
from itertools import islice

from tests.fleets import dispatch_judge as judge
from tests.fleets.dispatch_script import Fleet, fleet
from tests.fleets.dispatch_world import Arm, Outcome, play
from tests.fleets.report import Verdict
from tests.patches.drive import switched_on

_AT_A_TIME = 50
"""Fleets that are played on stock before ours is installed: installing verifies every seam."""

STOCK = (Arm("stock, event-driven", event_driven=True), Arm("stock, poll", event_driven=False))


def verdicts(seeds: Iterable[int]) -> Iterator[Verdict]:
    """Play and judge the fleet of each seed."""
    rest = iter(seeds)
    while chosen := list(islice(rest, _AT_A_TIME)):
        fleets = [fleet(seed) for seed in chosen]
        stock = [[play(each, arm) for arm in STOCK] for each in fleets]
        with switched_on():
            ours = [
                [play(each, Arm(f"ours {n}", fast.event_driven, fast)) for n, fast in enumerate(each.fast)]
                for each in fleets
            ]
        for each, stocks, fasts in zip(fleets, stock, ours, strict=True):
            yield _judged(each, stocks, fasts)


def _judged(script: Fleet, stocks: list[Outcome], fasts: list[Outcome]) -> Verdict:
    about = f"{len(script.requests)} requests, {replace(script, requests=(), fast=())}"
    verdict = Verdict(script.seed, about)
    event_driven, polled = stocks
    # What stock does in both modes, or leaves behind in one, is upstream's: a session without async-chunk whose last
    # stage never says its end, or is given work after the session's end.
    broken = [set(judge.of_one(script, outcome, ours=False)) for outcome in stocks]
    upstreams = {line for line in broken[0] | broken[1] if line.startswith("left behind")} | (broken[0] & broken[1])
    for outcome in fasts:
        said = [line for line in judge.of_one(script, outcome, ours=True) if line not in upstreams]
        other = judge.of_two(script, outcome, polled)
        requests = {request.name: request for request in script.requests}
        for name, differs in judge.of_two(script, outcome, event_driven).items():
            once = any(judge.ends_once(script, requests[name], outcome, each) for each in stocks)
            if name in other and not once:  # equal to neither of stock's
                said += [f"{name}: {each}" for each in differs]
        if said:
            verdict.wrong += [f"{outcome.arm.name} {outcome.arm.fast}", *(f"    {each}" for each in said)]
    verdict.counts.update(_counts(script, fasts[0]))
    verdict.log = [line for outcome in (*stocks, *fasts) for line in outcome.lines()]
    return verdict


def _counts(script: Fleet, outcome: Outcome) -> Counter[str]:
    found: Counter[str] = Counter()
    for got in judge.requests_of(outcome).values():
        found["failed" if got.errors else "given back" if got.given_back else "done"] += 1
    found["raw outputs"] += sum(what == "went" for what, *_ in outcome.log)
    found["deaths"] += sum(what == "died" for what, *_ in outcome.log)
    found["attaches"] += len(script.attaches)
    return found
