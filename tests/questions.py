"""What the tests of whole servers ask, one of each kind."""

from __future__ import annotations

from benchmarks.ab.capture import Request, chat_request


def of_each_kind() -> list[Request]:
    """Text and audio, text alone, one token, a long one that is sampled, and one that is not streamed.

    Not audio alone, whose last piece a busy stock server loses (``docs/upstream-defects.md``): parity has it.
    """
    return [
        chat_request("Hello"),
        chat_request("Hello there, my friend.", max_tokens=8),
        chat_request("Only text", modalities=["text"], max_tokens=5),
        chat_request("One", max_tokens=1),
        chat_request("On and on", max_tokens=40, ignore_eos=True, temperature=0.7, seed=5),
        chat_request("All at once", max_tokens=12, stream=False),
    ]
