"""An exception in a patch, at any line: users receive what stock gives, and the state is failed.

Each patch has a small scenario on upstream's own objects. It is played on stock, with the patch, and 25 times (500 with
``--hypothesis-profile long``) with an exception at another line.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import random
from collections import Counter
from collections.abc import Callable, Iterator
from io import BytesIO
from typing import Any
from unittest.mock import ANY

import pytest
from hypothesis import settings

from omni_fastpath.declare import Process, State
from omni_fastpath.install import is_installed
from omni_fastpath.ledger import LEDGER
from omni_fastpath.patches import PATCHES
from tests.patches.content import sequences
from tests.patches.drive import front_end_takes, only, run, silent
from tests.patches.lines import FailsAt, Line, traced
from tests.patches.small_stage import SmallStage

pytestmark = [pytest.mark.upstream, pytest.mark.timeout(7200)]

Play = Callable[[pytest.MonkeyPatch, Any], Any]
"""Gives what users got, as plain data; it is given the configuration of a stage."""


# ---- The scenarios ----


def messages_arrive(monkeypatch: pytest.MonkeyPatch, _config: Any) -> Any:
    """What the front end takes in each mode, queued, with turns between, and waited for."""
    monkeypatch.setattr("omni_fastpath.patches.delivery.wrappers.BATCH", 8)
    return [asyncio.run(front_end_takes(20, event_driven=event_driven, later=10)) for event_driven in (True, False)]


def places(_monkeypatch: pytest.MonkeyPatch, _config: Any) -> Any:
    """Answers to HTTP and a web socket, of a full server too, and answers afterwards; each may also be a refusal."""
    from tests.patches.test_admission_limit import CHAT, LIMIT, ONE, Served, busy

    async def script() -> list[Any]:
        served = Served()
        found: list[Any] = []

        async def ask(path: str, body: Any) -> None:
            status, headers, text = await served.ask(path, body)
            is_refusal = status == 503 and json.loads(text) == busy()
            found.append(ANY if is_refusal else (status, headers.get(b"retry-after"), text))

        served.go.set()
        served.engine.request_states = dict.fromkeys(("one", "two"))
        if is_installed("admission_limit"):
            from omni_fastpath.patches.admission_limit import wrappers

            wrappers._places.of = None
            wrappers._places._reserved = 0  # an error in giving back leaves it, after which nobody is asked
            served.state.args.max_num_queued_reqs, served.state.engine_client = LIMIT, served.engine
        for path in (CHAT, "/v1/made"):
            await ask(path, ONE)
        [said] = await served.speak()
        found.append(ANY if said == "QueueOverflowError" else said)
        for _ in range(3):
            await ask(CHAT, ONE)
        await ask("/v1/made", {})
        await ask(CHAT, {**ONE, "n": 2})
        found.append(len(served.engine.request_states))
        return found

    return asyncio.run(script())


def stage(_monkeypatch: pytest.MonkeyPatch, config: Any) -> Any:
    """A stage's chunks for the next one, and the part of its outputs that users receive."""
    with SmallStage(config) as found:
        found.add_all({"a": 12, "b": 20, "c": 7})
        found.open.clear()
        for _ in range(8):
            found.step()
        found.abort("c")
        found.open.set()
        found.run()
        assert found.adapter.save_thread.is_alive()
    found.outputs.pop("c", None)  # how far an aborted request was is a matter of time
    found.chunks.pop(found.stream("c"), None)
    return dict(found.chunks), {name: (found.tokens(name), found.said(name)) for name in found.outputs}


def raw_outputs(monkeypatch: pytest.MonkeyPatch, _config: Any) -> Any:
    """Random raw outputs through the orchestrator's processing and routing, with texts and without."""
    from tests.patches import lean_processing_script as script

    found = []
    for setting in (script.Setting(3, "DELTA"), script.Setting(100, "mixed", detokenizer="fast")):
        with monkeypatch.context() as patched:
            found.append(repr(script.Play(setting, patched).run()))
    return found


def front_end(monkeypatch: pytest.MonkeyPatch, _config: Any) -> Any:
    """Summaries in the log, and chunks of audio."""
    import soundfile  # type: ignore[import-untyped]

    from tests.patches import test_lean_front_end as front

    monkeypatch.setattr("time.time", lambda: 1_700_000_000.25)
    with front.logged() as lines:
        found: list[Any] = [front.aggregator(seed).build_and_log_summary() for seed in range(4)]
    found.append(lines)
    for form in ("WAV", "WAV", "WAV", "RAW", "RAW"):
        file = BytesIO()
        soundfile.write(file, front._samples(7), 24_000, format=form, subtype="PCM_16")
        found.append((file.getvalue(), file.tell()))
    return found


def observed(_monkeypatch: pytest.MonkeyPatch, _config: Any) -> Any:
    """What an orchestrator sends, while figures are read."""
    from tests.patches.test_queue_metrics import filled

    def looks(_pipeline: Any) -> None:
        LEDGER.snapshot()

    return sequences(run(filled(event_driven=False, replicas=1), looks))


def first_outputs(_monkeypatch: pytest.MonkeyPatch, _config: Any) -> Any:
    """What the front end hands to a request."""
    from tests.patches.test_first_output import _content, answered

    return _content(answered())


def requests_are_submitted(monkeypatch: pytest.MonkeyPatch, _config: Any) -> Any:
    """One that is aborted, one that is answered, and one whose submission fails: alone, or with the orchestrator.

    Another thread removes their chunks meanwhile.
    """
    from tests.patches.test_submission_errors import SURROGATE, begun, refuse, serves, submit

    removal: Any = None
    if is_installed("abandoned_chunks"):
        from omni_fastpath.patches.abandoned_chunks import wrappers as removal

        monkeypatch.setattr(removal, "EVERY_S", 0.0)
        monkeypatch.setattr(removal, "KEEP_S", 0.0)
    with contextlib.closing(begun(event_driven=False)) as world:
        submit(world, "left")
        world.abort("left", waits=True)
        world.advance(0.01)
        found: list[Any] = [len(world.answers()), serves(world, "good"), world.left()]
        refuse(world, 0, SURROGATE)
        try:
            submit(world, "bad")
            found.append(bool(world.got["bad"].errors))
        except AssertionError as error:
            found.append("UnicodeEncodeError" in str(error))
    thread = removal and removal._thread
    if thread is not None and thread.ident is not None:
        thread.join(60)
    return found


SCENARIOS: dict[str, tuple[Play, ...]] = {
    "connections": (places, first_outputs),
    "delivery": (messages_arrive,),
    "admission_limit": (places,),
    "submission_errors": (requests_are_submitted,),
    "abandoned_chunks": (requests_are_submitted,),
    "save_queue_cap": (stage,),
    "forward_gate": (stage,),
    "lean_processing": (raw_outputs,),
    "lean_front_end": (front_end,),
    "queue_metrics": (observed, first_outputs),
}
ELSEWHERE = {"budgeted_drain", "nonblocking_dequeue"}
"""Patches whose exceptions are in ``tests/schedules``, and one without a line that can fail."""
BESIDE: dict[Play, str] = {places: "admission_limit", first_outputs: "queue_metrics"}
"""What follows connections in a scenario."""
OPTIONS: dict[str, dict[str, Any]] = {"save_queue_cap": {"max_tasks": 1}}


def test_every_patch_has_a_scenario() -> None:
    """Each patch has one, but those that are named."""
    assert {patch.name for patch in PATCHES} == SCENARIOS.keys() | ELSEWHERE


# ---- Their lines ----


@pytest.fixture(autouse=True, scope="module")
def _quiet_api_server() -> Iterator[None]:
    """Import the API server, whose slots are written only where it is imported, and log no errors."""
    import vllm_omni.entrypoints.openai.api_server  # noqa: F401

    with silent():
        yield


@pytest.mark.parametrize(("patch", "play"), [(patch, play) for patch, plays in SCENARIOS.items() for play in plays])
def test_an_exception_changes_nothing(patch: str, play: Play, monkeypatch: pytest.MonkeyPatch, config: Any) -> None:
    """Users receive what stock gives, and the state is failed."""
    process, options = Process.STAGE if play is stage else Process.SERVER, OPTIONS.get(patch, {})

    def played(at: Callable[[Line], None]) -> tuple[Any, State]:
        names = dict.fromkeys((BESIDE.get(play, patch), patch))
        with only(*names, process=process, **options) as entry, monkeypatch.context() as patched:
            with traced(patch, at):
                found = play(patched, config)
            return found, entry.state

    with monkeypatch.context() as patched:
        stock = play(patched, config)
    reached = Counter[Line]()
    assert played(lambda line: reached.update([line])) == (stock, State.APPLIED)
    rng = random.Random(patch)
    lines, wanted = sorted(reached), min(settings().max_examples // 2, 500)
    chosen = [(line, 1) for line in rng.sample(lines, k=min(len(lines), wanted))]
    chosen += [(line, rng.randint(1, reached[line])) for line in rng.choices(lines, k=wanted - len(chosen))]
    raised = 0
    for line, time in chosen:
        at = FailsAt([line], time)
        try:
            found, state = played(at)
        except Exception as error:
            raise AssertionError(line, time) from error
        assert found == stock, (line, time)
        assert state is (State.FAILED if at.at else State.APPLIED), (line, time)
        raised += at.at is not None
    hit = len({line for line, _ in chosen})
    print(f"{patch}, {play.__name__}: {raised} exceptions at {hit} of {len(lines)} lines")  # noqa: T201
    assert raised > wanted / 2
