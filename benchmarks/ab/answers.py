"""Compare the answers of two arms to the same requests, by bytes if possible.

On a GPU the composition of a batch changes low-order bits, so two starts of one arm may answer differently. Then bytes
cannot be compared. The following must still be true: the same requests fail with the same errors, each answer ends
once and nothing follows its end, and lengths differ between the arms no more than between starts of one arm.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from benchmarks.ab.capture import answers_differ

Answer = Mapping[str, Any]
Answers = Sequence[Answer]
"""The results of `Capture.answer` for a start, in the order of the requests."""

_MUST_HOLD = ("status", "error", "error_code", "finished")
_LONGEST_LINE = 300


def compare(a: Sequence[Answers], b: Sequence[Answers]) -> tuple[list[str], str]:
    """The differences between the starts of two arms, one line each, and how they were looked for, in words."""
    if len(a) > 1 and not any(answers_differ(each, a[0]) for each in a[1:]):
        found = [line[:_LONGEST_LINE] for each in b for line in answers_differ(each, a[0])]
        how = "byte by byte, because all starts of A answered identically"
    else:
        found, how = _loose_differences(a, b), "by errors, ends and lengths, because A was not seen to repeat itself"
    failed = sum(answer["status"] != 200 or bool(answer["error"]) for each in (*a, *b) for answer in each)
    said = f"{len(found)} DIFFERENCES, the first: {found[0]}" if found else "alike"
    return found, f"Answers: {said}. {len(a[0])} requests in each start were compared {how}; {failed} failed."


def _loose_differences(a: Sequence[Answers], b: Sequence[Answers]) -> list[str]:
    """The differences that batching cannot explain. With a single start of *a*, lengths are not compared."""
    pairs = list(enumerate(zip(zip(*a, strict=True), zip(*b, strict=True), strict=True)))
    found = []
    for index, (mine, others) in pairs:
        for key in _MUST_HOLD:
            known, new = _values(key, mine), _values(key, others)
            if new - known:
                values = f"{' or '.join(sorted(known))} in A, {' or '.join(sorted(new - known))} in B"
                found.append(f"request {index}: {key}: {values}"[:_LONGEST_LINE])
    for key in ("text", "audio_bytes") if len(a) > 1 else ():
        lengths = [(index, _lengths(key, mine), _lengths(key, others)) for index, (mine, others) in pairs]
        widest = max(most / least for _, (least, most), _ in lengths)
        found += [
            f"request {index}: length of {key}: {least} to {most} in A, {low} to {high} in B"
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
