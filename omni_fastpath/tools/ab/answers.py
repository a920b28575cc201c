"""Whether two arms answered the same requests alike: byte by byte where that can be asked, else by what must hold.

On a GPU the batch itself changes bits, so that two starts of one arm may answer differently. There nothing can be said
of bytes. What must still hold: the same requests fail, with the same errors; each answer ends once, and nothing comes
after its end; lengths differ between the arms by no more than they do between starts of one arm.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from omni_fastpath.tools.ab.capture import answers_differ

Answer = Mapping[str, Any]
Answers = Sequence[Answer]
"""What the requests of a start were answered, as `Capture.answer` says it, in the order of the requests."""

_MUST_HOLD = ("status", "error", "error_code", "finished", "order")
_LENGTHS: Mapping[str, Callable[[Answer], int]] = {
    "text": lambda answer: len(answer["text"]),
    "audio_bytes": lambda answer: int(answer["audio_bytes"]),
}
_LONGEST_LINE = 300


def compare(starts: Sequence[tuple[str, Answers]]) -> dict[str, Any]:
    """Whether every start answered as the first one did, request by request: text, tokens, audio, usage, end.

    Args:
        starts: Arm and answers of each, in the order of running.
    """
    (arm, first), *others = starts
    found = [
        f"start {place} ({other}) against start 1 ({arm}): {line[:_LONGEST_LINE]}"
        for place, (other, answers) in enumerate(others, 2)
        for line in answers_differ(answers, first)
    ]
    return {
        "starts": len(starts),
        "requests": len(first),
        "comparisons": len(first) * len(others),
        "failed": sum(failed(answers) for _, answers in starts),
        "audio_bytes": sum(answer["audio_bytes"] for answer in first),
        "differences": found,
    }


def parity_line(parity: Mapping[str, Any]) -> str:
    """What the comparison of the answers says, in a sentence."""
    if parity["differences"]:
        return (
            f"THE ARMS DID NOT ANSWER ALIKE: {len(parity['differences'])} differences in {parity['comparisons']} "
            f"comparisons; the first: {parity['differences'][0]}"
        )
    return (
        f"Answers: {parity['requests']} requests in each of {parity['starts']} starts, {parity['comparisons']} "
        f"comparisons with the first start: byte-identical text and audio ({parity['audio_bytes'] / 1e6:.1f} MB of "
        f"audio a start); {parity['failed']} failed."
    )


def failed(answers: Answers) -> int:
    """How many of the requests were not answered to their end."""
    return sum(_failed(answer) for answer in answers)


def _failed(answer: Answer) -> bool:
    return answer["status"] != 200 or bool(answer["error"])


def _says(answer: Answer) -> bool:
    """Whether there is anything in it of which bytes could be compared."""
    return bool(answer["text"] or answer.get("token_ids") or answer["audio_bytes"] or answer.get("other"))


def judge(starts: Sequence[tuple[str, Answers]], arms: tuple[str, str], *, simulated: bool) -> dict[str, Any]:
    """What can be said of the answers of two arms on any device, as plain data.

    Args:
        starts: Arm and answers of each, in the order of running.
        arms: The first is what the second is judged against.
        simulated: The device is the simulated one, which answers alike whatever the batch.

    Returns:
        ``compare``'s keys, and ``how`` (``bytes``, ``lengths`` or ``nothing``), ``why`` that, and ``notes``.
    """
    sent = [(arm, answers) for arm, answers in starts if answers]
    of = {name: [answers for arm, answers in sent if arm == name] for name in arms}
    if not all(of.values()):
        nothing = {"starts": len(sent), "requests": 0, "comparisons": 0, "failed": 0, "audio_bytes": 0}
        return {**nothing, "differences": [], "how": "nothing", "why": "not both arms were asked", "notes": []}
    a, b = (of[name] for name in arms)
    found: dict[str, Any] = {**compare(sent), "notes": []}
    if failed(a[0]) == len(a[0]):
        found["notes"] = [f"every request of the first start failed, the first with {a[0][0]['error']}"]
    mute = sum(not _says(answer) and not _failed(answer) for answer in a[0])
    if mute:
        found["notes"].append(f"{mute} of {len(a[0])} answers of the first start have nothing that could be compared")
    if not found["differences"] and not any(_says(answer) for _, answers in sent for answer in answers):
        why = "there was nothing to compare: no answer has text, audio or images"
        return {**found, "how": "nothing", "why": why}
    if simulated:
        return {**found, "how": "bytes", "why": "the device is the simulated one"}
    if len(a) > 1 and not any(answers_differ(answers, a[0]) for answers in a[1:]):
        return {**found, "how": "bytes", "why": f"the {len(a)} starts of {arms[0]} were identical to each other"}
    apart = "a single start" if len(a) == 1 else "starts that differ from each other"
    why = f"{arms[0]} has {apart}, on a device whose bits may depend on the batch"
    differences, notes = _loosely(a, b, arms)
    notes = [*found["notes"], *notes]
    return {**found, "differences": differences, "how": "lengths", "why": why, "notes": notes}


def judged_line(judged: Mapping[str, Any]) -> str:
    """What ``judge`` found, in a sentence."""
    if judged["how"] == "nothing":
        return f"Answers: not compared, {judged['why']}."
    if judged["how"] == "bytes" or judged["differences"]:
        by = "bytes" if judged["how"] == "bytes" else "errors, ends and lengths"
        return f"{parity_line(judged)} Compared by {by}: {judged['why']}."
    return (
        f"Answers: {judged['requests']} requests in each of {judged['starts']} starts: the same errors, each end once "
        f"and last, lengths as between starts of one arm; {judged['failed']} failed. Not compared by bytes: "
        f"{judged['why']}."
    )


def _loosely(a: Sequence[Answers], b: Sequence[Answers], arms: tuple[str, str]) -> tuple[list[str], list[str]]:
    """Where *b* differs from what must hold even where bits do not: differences, and notes that are none."""
    differences, notes = [], []
    requests = list(enumerate(zip(zip(*a, strict=False), zip(*b, strict=False), strict=False)))
    for index, (mine, others) in requests:
        for key in _MUST_HOLD:
            known, new = ({json.dumps(answer.get(key)) for answer in answers} for answers in (mine, others))
            if new - known:
                said = f"{' or '.join(sorted(known))} in {arms[0]}, {' or '.join(sorted(new - known))} in {arms[1]}"
                differences.append(f"request {index}: {key}: {said}"[:_LONGEST_LINE])
    for key, length in _LENGTHS.items():
        lengths = [
            (index, sorted(map(length, mine)), sorted(map(length, others))) for index, (mine, others) in requests
        ]
        widest = max(max(1, mine[-1]) / max(1, mine[0]) for _, mine, _ in lengths)
        lines = [
            f"request {index}: length of {key}: {mine[0]} to {mine[-1]} in {arms[0]}, "
            f"{others[0]} to {others[-1]} in {arms[1]}"
            for index, mine, others in lengths
            if others[0] > mine[-1] * widest or others[-1] < mine[0] / widest
        ]
        if len(a) > 1:
            differences += lines
        elif lines:
            notes.append(f"{len(lines)} lengths of {key} differ, and one start has no spread to judge by: {lines[0]}")
    return differences, notes
