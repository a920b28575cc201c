"""Compare the answers of two arms to the same requests, by bytes if possible.

On a GPU the composition of a batch changes low-order bits, so two starts of one arm may answer differently. Then bytes
cannot be compared. The following must still be true: the same requests fail with the same errors, each answer ends
once and nothing follows its end, and lengths differ between the arms no more than between starts of one arm.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from omni_fastpath.tools.ab.capture import answers_differ

Answer = Mapping[str, Any]
Answers = Sequence[Answer]
"""The results of `Capture.answer` for a start, in the order of the requests."""

_MUST_HOLD = ("status", "error", "error_code", "finished")
_LONGEST_LINE = 300


def compare(starts: Sequence[tuple[str, Answers]]) -> dict[str, Any]:
    """Compare every start's answers with the first start's: text, tokens, audio, usage, end.

    Args:
        starts: The arm and the answers of each start, in the order in which they ran.
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
        "failed": sum(answer["status"] != 200 or bool(answer["error"]) for _, each in starts for answer in each),
        "audio_bytes": sum(answer["audio_bytes"] for answer in first),
        "differences": found,
    }


def parity_line(parity: Mapping[str, Any]) -> str:
    """The result of ``compare`` in a sentence."""
    if parity["differences"]:
        return (
            f"THE ANSWERS DIFFER: {len(parity['differences'])} differences in {parity['comparisons']} "
            f"comparisons; the first: {parity['differences'][0]}"
        )
    return (
        f"Answers: {parity['requests']} requests in each of {parity['starts']} starts, {parity['comparisons']} "
        f"comparisons with the first start: byte-identical text and audio ({parity['audio_bytes'] / 1e6:.1f} MB of "
        f"audio per start); {parity['failed']} failed."
    )


def judge(starts: Sequence[tuple[str, Answers]], arms: tuple[str, str]) -> dict[str, Any]:
    """Compare the answers of two arms, on any device.

    Args:
        starts: The arm and the answers of each start, in the order in which they ran.
        arms: The baseline and the other arm.

    Returns:
        ``compare``'s keys, and ``how`` (``bytes``, ``lengths`` or ``nothing``) and ``why`` that.
    """
    sent = [(arm, answers) for arm, answers in starts if answers]
    a, b = ([answers for arm, answers in sent if arm == name] for name in arms)
    if not a or not b:
        why = "there are fixed requests only for chat and speech, and both arms need them"
        return {"differences": [], "how": "nothing", "why": why}
    found = compare(sent)
    if not found["differences"] and not any(_says_anything(answer) for _, each in sent for answer in each):
        return {**found, "how": "nothing", "why": "no answer has text, audio or images"}
    if len(a) > 1 and not any(answers_differ(answers, a[0]) for answers in a[1:]):
        return {**found, "how": "bytes", "why": f"the {len(a)} starts of {arms[0]} answered identically"}
    why = f"the starts of {arms[0]} did not answer identically, as on devices where batching changes bits"
    return {**found, "differences": _loose_differences(a, b, arms), "how": "lengths", "why": why}


def _says_anything(answer: Answer) -> bool:
    return bool(answer["text"] or answer["audio_bytes"] or answer["images"])


def judged_line(judged: Mapping[str, Any]) -> str:
    """The result of ``judge`` in a sentence."""
    if judged["how"] == "nothing":
        return f"Answers: not compared, {judged['why']}."
    if judged["how"] == "bytes" or judged["differences"]:
        by = "bytes" if judged["how"] == "bytes" else "errors, ends and lengths"
        return f"{parity_line(judged)} Compared by {by}: {judged['why']}."
    return (
        f"Answers: {judged['requests']} requests in each of {judged['starts']} starts have the same errors and ends, "
        f"and lengths as between starts of one arm; {judged['failed']} failed. Not compared by bytes: "
        f"{judged['why']}."
    )


def _loose_differences(a: Sequence[Answers], b: Sequence[Answers], arms: tuple[str, str]) -> list[str]:
    """The differences that batching cannot explain. With a single start of *a*, lengths are not compared."""
    pairs = list(enumerate(zip(zip(*a, strict=False), zip(*b, strict=False), strict=False)))
    found = []
    for index, (mine, others) in pairs:
        for key in _MUST_HOLD:
            known, new = _values(key, mine), _values(key, others)
            if new - known:
                values = f"{' or '.join(sorted(known))} in {arms[0]}, {' or '.join(sorted(new - known))} in {arms[1]}"
                found.append(f"request {index}: {key}: {values}"[:_LONGEST_LINE])
    for key in ("text", "audio_bytes") if len(a) > 1 else ():
        lengths = [(index, _lengths(key, mine), _lengths(key, others)) for index, (mine, others) in pairs]
        widest = max(most / least for _, (least, most), _ in lengths)
        found += [
            f"request {index}: length of {key}: {least} to {most} in {arms[0]}, {low} to {high} in {arms[1]}"
            for index, (least, most), (low, high) in lengths
            if low > most * widest or high < least / widest
        ]
    return found


def _values(key: str, answers: Iterable[Answer]) -> set[str]:
    return {json.dumps(answer.get(key)) for answer in answers}


def _lengths(key: str, answers: Iterable[Answer]) -> tuple[int, int]:
    """The minimum and the maximum, at least 1."""
    lengths = [max(1, len(answer["text"]) if key == "text" else int(answer[key])) for answer in answers]
    return min(lengths), max(lengths)
