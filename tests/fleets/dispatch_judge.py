"""What a fleet's arms must have in common, and what each must keep to.

Between two arms, per request: one that ended of itself on both has the same messages of each stage, in the same order.
Of any other (aborted, failed, or stranded by a death) one arm's messages of a stage are a beginning of the other's.
"""

from __future__ import annotations

from collections import defaultdict, deque
from dataclasses import dataclass, field
from typing import Any

from tests.fleets import dispatch_script as script
from tests.fleets.dispatch_script import Fleet
from tests.fleets.dispatch_world import Note, Outcome
from tests.fleets.report import difference

Messages = dict[int | None, list[Any]]


@dataclass
class Request:
    """What one request got on one arm.

    Attributes:
        stages: Its messages by stage, without errors and what an abort gave back.
        errors: Its errors.
        given_back: What an abort gave back.
        ends: The stages of the messages that said that they were the last.
        last_is_end: Its very last message said so.
    """

    stages: Messages = field(default_factory=lambda: defaultdict(list))
    errors: list[Any] = field(default_factory=list)
    given_back: list[Any] = field(default_factory=list)
    ends: list[int | None] = field(default_factory=list)
    last_is_end: bool = False

    @property
    def finals(self) -> int:
        """How many messages said that they were the last."""
        return len(self.ends)


def requests_of(outcome: Outcome) -> dict[str, Request]:
    """Each request's messages, including those that came as an abort's answer."""
    found: dict[str, Request] = defaultdict(Request)
    for each in outcome.messages:
        request = found[each.request]
        if each.ends:
            request.ends.append(each.stage)
        request.last_is_end = each.ends
        if each.kind == "error":
            request.errors.append((each.stage, *each.text))
        elif each.kind == "abort":
            request.given_back.append((each.stage, *each.text))
        else:
            request.stages[each.stage].append(each.text)
    return found


def _aborted(fleet: Fleet) -> set[str]:
    return {request.name for request in fleet.requests if request.abort_at is not None}


# ---- One arm ----


def of_one(fleet: Fleet, outcome: Outcome, *, ours: bool) -> list[str]:
    """What an arm broke that holds for any; with ``ours``, what holds for ours besides."""
    if outcome.crash is not None:
        return [f"the orchestrator ended: {outcome.crash!r}"]
    if outcome.stuck is not None:
        return [f"never came to an end: {outcome.stuck}; left {outcome.left}"]
    problems = [
        f"left behind: {place}: {name}"
        for place, names in outcome.left.items()
        for name in names
        if not _upstreams_leftover(fleet, place, name, outcome)
    ]
    aborted = _aborted(fleet)
    of = requests_of(outcome)
    for request in fleet.requests:
        got = of[request.name]
        if request.name in aborted:
            if got.finals > 1 or (got.finals and not got.last_is_end):
                problems.append(f"{request.name}: aborted, {got.finals} ends, at the end {got.last_is_end}")
        elif got.finals != 1 or not got.last_is_end:
            problems.append(f"{request.name}: {got.finals} ends ({got.errors}), at the end {got.last_is_end}")
    answered = {getattr(each, "rpc_id", None) for each in outcome.rpc}
    problems += [
        f"{request.name}: who aborted it was not answered"
        for request in fleet.requests
        if request.abort_at is not None and request.abort_rpc and request.name not in answered
    ]
    problems += _of_log(fleet, outcome, ours=ours)
    if ours != bool(outcome.facts.get("ours")):
        problems.append(f"not the arm that it says it is: {outcome.facts}")
    return problems


def _upstreams_leftover(fleet: Fleet, place: str, name: str, outcome: Outcome) -> bool:
    """Whether what is left of a request is upstream's, in either arm.

    An abort does not reach the output processor of a stage whose replica is gone (``StagePool.abort_requests``), and
    what a stage sends of a request that has ended is still counted by its pool before it is dropped
    (``record_output_timestamps``). A session without async-chunk ends with its asked stages' ends, and no output
    processor is told (``_cleanup_request_ids`` without ``abort``): one whose stage was at work on more keeps it, in
    stock too. And where a death is heard while a new request is being given to its stages one after the other
    (``_prewarm_async_chunk_stages``), it fails the request, and the stages behind are given it all the same.
    """
    what, _, stage = place.rpartition(" of stage ")
    if not what:
        return False
    dead: set[str] = {more[1] for event, _, *more in outcome.log if event == "died"}
    over = dispatching = cut = False
    session = any(request.name == name and request.session for request in fleet.requests)
    if session and not fleet.async_chunk and what in {"processor", "external"}:
        return not _sent_its_end(name, int(stage), outcome)
    for event, _, *more in outcome.log:
        if event == "submitted" and more[:2] == [name, int(stage)] and more[2] in dead and what != "bindings":
            return True
        if event == "submitted" and more[:2] == [name, int(stage)] and cut:
            return fleet.async_chunk
        if event == "buried":
            dispatching = more[2]
        if event == "ended" and more[0] == name:
            over, cut = True, dispatching
        if over and event == "went" and any((note.request, note.stage) == (name, int(stage)) for note in more[0]):
            return what in {"timestamps", "first_timestamps", "frames", "rates"}
    return False


def _sent_its_end(name: str, stage: int, outcome: Outcome) -> bool:
    """Whether what a stage was last given of a request brought its end."""
    ended = False
    for event, _, *more in outcome.log:
        if event == "submitted" and more[:2] == [name, stage]:
            ended = False
        elif event == "came" and (more[0].request, more[0].stage) == (name, stage):
            ended |= more[0].ends
    return ended


def _of_log(fleet: Fleet, outcome: Outcome, *, ours: bool) -> list[str]:  # noqa: PLR0912 - one branch an event
    """First in, first out; no end before what had come before it; who is stranded gets what had come before the death.

    The last two are ours: stock's poll loop promises neither.
    """
    problems: list[str] = []
    waiting: dict[tuple[str, str], deque[Note]] = defaultdict(deque)
    came_at: dict[Any, int] = {}
    died: dict[str, tuple[int, float]] = {}
    in_front: dict[str, float] = {}
    heard: set[str] = set()
    bound: dict[tuple[str, int], str] = {}
    over: set[str] = set()
    grace_s = _round_s(fleet)
    for place, (what, when, *more) in enumerate(outcome.log):
        if what == "came":
            note: Note = more[0]
            waiting[note.replica, note.request].append(note)
            came_at[note.uid] = place
        elif what == "went":
            for note in more[0]:
                line = waiting[note.replica, note.request]
                if note.request in over:
                    line.clear() if note not in line else line.remove(note)
                    continue
                if not line or line[0] != note:
                    problems.append(f"{note.request}: {note.uid} went before {list(line)[:2]}")
                    if note in line:
                        line.remove(note)
                    continue
                line.popleft()
                if ours and note.ends:
                    problems += _overtaken(fleet, note, waiting, came_at, died, bound)
        elif what == "died":
            died[more[1]] = place, when
        elif what == "in front":
            in_front[more[1]] = when
        elif what == "heard":
            heard.add(more[1])
        elif what == "submitted":
            bound[more[0], more[1]] = more[2]
        elif (
            what == "refused" and more[2] in died and bound.get((more[0], more[1])) != more[2]
        ):  # more of a session stays
            # The news of a death stands in the replica's queue behind what it sent before, in upstream too, and that is
            # read first, each when the order comes to it. From then on the news is the next to be read.
            late = when - in_front.get(more[2], when)
            if ours and more[2] in heard:
                problems.append(f"{more[0]}: sent to {more[2]} after its death was heard")
            elif late > grace_s and (ours or not outcome.arm.event_driven):
                problems.append(
                    f"{more[0]}: sent to {more[2]} {late:.4f} s after the news of its death was the next to be read, "
                    f"a round is {grace_s:.4f}"
                )
        elif what == "buried":
            stage, name, while_dispatching = more
            if ours and not while_dispatching and name in died:
                stranded = {request for (request, at), replica in bound.items() if (at, replica) == (stage, name)}
                for (replica, request), line in waiting.items():
                    early = [each.uid for each in line if came_at[each.uid] < died[name][0] and _matters(fleet, each)]
                    if request in stranded - over and early and (replica == name or replica not in died):
                        problems.append(f"{request}: stranded on {name} before {early[:3]} of {replica} went")
        elif what == "ended":
            over.add(more[0])
    return problems


def _matters(fleet: Fleet, note: Note) -> bool:
    """Whether what waits is missed when its request fails: by the user, or by who keeps its statistics."""
    return fleet.stages[note.stage][0] or note.ends


def _overtaken(
    fleet: Fleet,
    note: Note,
    waiting: dict[tuple[str, str], deque[Note]],
    came_at: dict[Any, int],
    died: dict[str, Any],
    bound: dict[tuple[str, int], str],
) -> list[str]:
    """What had come of the request at a stage before, when its end at this one came, and has not gone yet."""
    found = []
    for (replica, request), line in waiting.items():
        if request != note.request or replica in died or bound.get((request, int(replica.split(".")[0]))) != replica:
            continue
        early = [
            each.uid
            for each in line
            if each.stage < note.stage
            and came_at[each.uid] < came_at[note.uid]
            and (not note.error or _matters(fleet, each))
        ]
        if early:
            found.append(f"{request}: its end {note.uid} overtook {early[:3]}")
    return found


def _round_s(fleet: Fleet) -> float:
    """What a round over all replicas takes at most, twice: by then the news of a death that is next is read."""
    attached = [attach.stage for attach in fleet.attaches]
    count = [replicas + attached.count(stage) for stage, replicas in enumerate(fleet.replicas)]
    return 0.005 + 2 * sum(n * (0.001 + cost) for n, cost in zip(count, fleet.cost_s, strict=True))


# ---- Two arms ----


def of_two(fleet: Fleet, one: Outcome, other: Outcome) -> dict[str, list[str]]:
    """What differs between two arms that must not, by request."""
    if any(each.crash or each.stuck for each in (one, other)):
        return {}
    ones, others = requests_of(one), requests_of(other)
    found = {
        request.name: _of_request(fleet, request, ones[request.name], others[request.name])
        for request in fleet.requests
    }
    return {name: each for name, each in found.items() if each}


def _of_request(fleet: Fleet, request: script.Request, a: Request, b: Request) -> list[str]:
    problems = []
    free = request.abort_at is not None or bool(a.errors or b.errors)
    for stage in sorted({*a.stages, *b.stages}, key=str):
        x, y = a.stages.get(stage, []), b.stages.get(stage, [])
        if request.session:
            x, y = _of_session(x), _of_session(y)
        if differs := difference(x, y, complete=not (free or _races(fleet, request, stage))):
            problems.append(f"stage {stage}: {differs}")
    if not free and (a.finals, a.last_is_end) != (b.finals, b.last_is_end):
        problems.append(f"ends {a.finals} and {b.finals}")
    if not free and a.errors != b.errors:
        problems.append(f"errors {a.errors} and {b.errors}")
    return problems


def ends_once(fleet: Fleet, request: script.Request, ours: Outcome, stock: Outcome) -> bool:
    """Whether all that differs is an end too many of stock's, at a stage that the user did not ask for.

    A user asks for audio alone, under async-chunk, and the audio ends before the text. Upstream keeps the audio's last
    message until all stages have ended (``pending_final_output``), and takes the text's end for the request's, because
    what was asked for has ended by then. If another stage is still at work, the text's end is kept in the audio's
    place, whose message is lost; if none is, both are sent, each as the last. Stock may do the one in one mode and the
    other in the other. Right is every message of each stage and one end, the one that was asked for, as the very last.
    """
    a, b = requests_of(ours)[request.name], requests_of(stock)[request.name]
    if not fleet.async_chunk or request.session or request.abort_at is not None or a.errors or b.errors:
        return False
    asked = max(request.final_output_stages)
    unasked = {n for n, (seen, _) in enumerate(fleet.stages) if seen and n < asked} - set(request.final_output_stages)
    return (
        a.stages == b.stages
        and a.ends == [asked]
        and a.last_is_end
        and len(b.ends) == 2
        and b.ends[0] in unasked
        and b.ends[1] == asked
        and b.last_is_end
    )


def _of_session(said: list[Any]) -> list[Any]:
    """A session's messages without what depends, in upstream, on when its last input came.

    The output processor takes the last input's word (``resumable=False``) at once, while what its stages sent before
    still waits: whether a segment's end says ``finished``, and at which stage the session's empty end is, follows from
    which was first. Neither has content.
    """
    kept = []
    for each in said:
        if each[0] == "OutputMessage":
            if not any(_has_content(completion) for completion in each[2]) and each[3] is None:
                continue
            kept.append((each[0], None, *each[2:]))
        else:
            kept.append(each)
    return kept


def _has_content(completion: Any) -> bool:
    if completion["text"] or completion["token_ids"]:
        return True
    payload = completion["multimodal"]
    audio = payload.get("audio") if isinstance(payload, dict) else None
    return bool(audio) and (not isinstance(audio, tuple) or bool(audio[2]))


def _races(fleet: Fleet, request: script.Request, stage: int | None) -> bool:
    """Whether a request may end before this stage's last output, which is dropped then, in any arm.

    It ends when the stages that it asked for have ended. Another one may still be at work where the next stage was
    begun on a KV-ready mark, before it ended.
    """
    marked = any(step.kind == "kv" for segment in request.segments for step in segment[0])
    return not fleet.async_chunk and marked and stage not in request.final_output_stages
