"""What the judge of the fleets lets pass, and what it does not."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

pytest.importorskip("vllm_omni")

from tests.fleets import dispatch_judge as judge
from tests.fleets.dispatch_script import Fleet, Request
from tests.fleets.dispatch_world import Arm, Note, Outcome, Said

pytestmark = pytest.mark.upstream


def _fleet(**changes: Any) -> Any:
    request = Request("q", 0.0, "DELTA", (2,), ((),))
    fleet = Fleet(
        seed=0,
        async_chunk=True,
        stages=((True, "text"), (False, "latent"), (True, "audio")),
        replicas=(1, 1, 1),
        cost_s=(0.001, 0.001, 0.001),
        tick_s=0.001,
        requests=(request,),
    )
    return replace(fleet, **changes)


def _outcome(*, log: tuple[tuple[Any, ...], ...] = (), said: tuple[tuple[int, bool], ...] = ()) -> Any:
    """An arm with a log, or with a message of each stage named, and whether it said that it was the last."""
    texts = {stage: iter(range(100)) for stage, _ in said}
    messages = [Said("q", stage, ends, "output", (stage, next(texts[stage]))) for stage, ends in said]
    return Outcome(Arm("arm", event_driven=False), log=list(log), messages=messages)


_HEARD = ("died", 0.0, 0, "0.0"), ("in front", 1.0, 0, "0.0"), ("heard", 1.001, 0, "0.0")


@pytest.mark.parametrize(
    ("log", "wrong"),
    [
        ((_HEARD[0], ("refused", 0.9, "q", 0, "0.0")), None),
        ((*_HEARD[:2], ("refused", 1.01, "q", 0, "0.0")), None),
        ((*_HEARD[:2], ("refused", 1.1, "q", 0, "0.0")), "the next to be read"),
        ((*_HEARD, ("refused", 1.002, "q", 0, "0.0")), "after its death was heard"),
    ],
)
def test_who_may_be_sent_to_a_dead_replica(log: tuple[tuple[Any, ...], ...], wrong: str | None) -> None:
    """The news waits behind what the replica sent before; next in line, it is read within a round, and holds."""
    found = judge._of_log(_fleet(), _outcome(log=log), ours=True)
    assert (wrong in found[0]) if wrong else not found


def _given(*stages: int) -> tuple[tuple[Any, ...], ...]:
    return tuple(("submitted", 0.0, "q", stage, f"{stage}.0") for stage in stages)


_ENDED = ("ended", 1.0, "q")


@pytest.mark.parametrize(
    ("log", "is_upstreams"),
    [
        ((*_given(0, 1), ("buried", 1.0, 0, "0.0", True), _ENDED, *_given(2)), True),
        ((*_given(0, 1), ("buried", 1.0, 0, "0.0", False), _ENDED, *_given(2)), False),
        ((*_given(0, 1, 2), ("buried", 1.0, 0, "0.0", True), _ENDED), False),
        ((*_given(0, 1), _ENDED, *_given(2)), False),
    ],
)
def test_binding_of_a_request_that_failed_while_its_stages_were_given_it(
    log: tuple[tuple[Any, ...], ...], is_upstreams: bool
) -> None:
    """Upstream goes on giving a request to its stages after a death has failed it; any other binding is a defect."""
    outcome = _outcome(log=log)
    assert judge._upstreams_leftover(_fleet(), "bindings of stage 2", "q", outcome) is is_upstreams
    assert not judge._upstreams_leftover(_fleet(async_chunk=False), "bindings of stage 2", "q", outcome)


def test_what_a_stranded_request_gets_first() -> None:
    """All that came before the death."""
    came = ("came", 0.99, Note(("q's",), "q", 1, "1.0", True, False))
    log = (*_given(0, 1), came, ("died", 1.0, 0, "0.0"), ("buried", 1.0, 0, "0.0", False))
    assert "stranded" in judge._of_log(_fleet(), _outcome(log=log), ours=True)[0]


_TWICE = (2, False), (0, False), (1, False), (0, True), (2, True)
_ONCE = (2, False), (0, False), (1, False), (0, False), (2, True)


@pytest.mark.parametrize(
    ("ours", "stock", "same"),
    [
        (_ONCE, _TWICE, True),
        (_TWICE, _TWICE, False),
        (_ONCE[:-1], _TWICE, False),
        ((*_ONCE[:3], *_ONCE[4:]), _TWICE, False),
        (((2, False), (0, False), (1, False), (2, False), (0, True)), _TWICE, False),
        (_ONCE, ((2, False), (0, False), (1, False), (2, True), (2, True)), False),
    ],
)
def test_stocks_second_end_of_an_audio_only_request(
    ours: tuple[tuple[int, bool], ...], stock: tuple[tuple[int, bool], ...], same: bool
) -> None:
    """Where stock's text end and its audio end both say that they are the last, ours may leave out the former alone."""
    fleet = _fleet()
    arms = _outcome(said=ours), _outcome(said=stock)
    assert judge.ends_once(fleet, fleet.requests[0], *arms) is same
    assert not judge.ends_once(_fleet(async_chunk=False), fleet.requests[0], *arms)
    both = replace(fleet.requests[0], final_output_stages=(0, 2))
    assert not judge.ends_once(fleet, both, *arms)
