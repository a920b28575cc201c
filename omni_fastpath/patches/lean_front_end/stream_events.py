"""The text of a token's event as upstream's model would write it, with the token and its usage filled in.

Upstream's generator of a streamed answer gets a subclass of its class of an event. The text of a plain token's event is
a *form* that is filled in. A form is taken from an event of upstream with marks in the places of the token and the
numbers, and compared with another event before it is used.
"""

from __future__ import annotations

from json.encoder import encode_basestring
from typing import Any

from omni_fastpath.ledger import runtime

_runtime = runtime("lean_front_end")

MOST_FORMS = 1024
"""Forms that are kept, 0.8 kB each, including those of ended requests. A request has one for each of its choices. More
than an API process has streams at once."""

LONGEST_ID = 256
"""Characters of a request's id, which a client may choose. A form outlives its request and would keep a longer one."""

_TEXT = "\ue000text\ue001"
_NUMBERS = (7_310_482_956_173_849, 7_310_482_956_173_857, 7_310_482_956_173_863)
"""Marks for the token and the numbers, in the event from which a form is taken."""

_OF_TOKEN = frozenset({"content"})
_OF_CHOICE = frozenset({"index", "delta", "logprobs", "finish_reason", "token_ids"})
_OF_USAGE = frozenset({"prompt_tokens", "completion_tokens", "total_tokens"})
"""The arguments from which upstream makes the models of a plain token."""

_AS_UPSTREAM_ASKS = {"exclude_unset": True}


class Events:
    """Writes the events of upstream's generator.

    Args:
        model: Upstream's class of an event.

    Attributes:
        replacement: A subclass, for the class's name in upstream's globals.
    """

    def __init__(self, model: Any) -> None:
        self._forms: dict[tuple[Any, ...], tuple[str, ...]] = {}
        self._model = model
        text_of = self._text

        class Event(model):  # type: ignore[misc]
            def model_dump_json(self, **how: Any) -> str:
                try:
                    text = text_of(self) if how == _AS_UPSTREAM_ASKS and not _runtime.has_failed else None
                    if text is not None:
                        return text
                except Exception as error:
                    _runtime.fail("writing an event", error)
                return str(super().model_dump_json(**how))

        self.replacement = Event

    def _text(self, event: Any) -> str | None:
        """The text of an event, or None if it is left to upstream's model."""
        if not _is_a_tokens(event):
            return None
        choice, usage = event.choices[0], event.usage
        key = event.id, choice.index, event.created, event.model, event.modality, usage is None, event.metrics is None
        form = self._forms.get(key)
        if form is None:
            form = self._form(event)
            if form is None:
                return None
            if len(self._forms) >= MOST_FORMS:
                self._forms.clear()
            self._forms[key] = form
        _runtime.counters["events"] += 1
        return _filled_in(form, choice.delta.content, usage)

    def _form(self, event: Any) -> tuple[str, ...] | None:
        """The text before the token, after it, and between and after the numbers, if there are any."""
        marked = event.model_copy(deep=True)
        marked.choices[0].delta.content = _TEXT
        marks = [encode_basestring(_TEXT)]
        if event.usage is not None:
            usage = marked.usage
            usage.prompt_tokens, usage.total_tokens, usage.completion_tokens = _NUMBERS
            marks += map(str, _NUMBERS)
        left, pieces = self._upstreams_text(marked), []
        for mark in marks:
            if left.count(mark) != 1:  # the request's own text has it too, or the order differs
                return None
            piece, _, left = left.partition(mark)
            pieces.append(piece)
        form = (*pieces, left)
        if _filled_in(form, event.choices[0].delta.content, event.usage) != self._upstreams_text(event):
            raise ValueError("an event is not as pydantic writes it")
        return form

    def _upstreams_text(self, event: Any) -> str:
        return str(self._model.model_dump_json(event, **_AS_UPSTREAM_ASKS))


def _is_a_tokens(event: Any) -> bool:
    """Whether an event has one choice with a plain token, which can be encoded, and nothing else."""
    if len(event.choices) != 1 or event.metrics or len(event.id) > LONGEST_ID:
        return False
    choice, usage = event.choices[0], event.usage
    if choice.__pydantic_fields_set__ != _OF_CHOICE or choice.delta.__pydantic_fields_set__ != _OF_TOKEN:
        return False
    if not (choice.logprobs is choice.finish_reason is choice.token_ids is None):
        return False
    if usage is not None and (usage.__pydantic_fields_set__ != _OF_USAGE or usage.__pydantic_extra__):
        return False
    content = choice.delta.content
    return type(content) is str and (content.isascii() or _is_whole(content))


def _is_whole(text: str) -> bool:
    """Whether a text can be encoded. If it has a lone surrogate, upstream's model raises pydantic's error."""
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True


def _filled_in(form: tuple[str, ...], content: str, usage: Any) -> str:
    """The text of an event. The numbers are integers."""
    token = encode_basestring(content)
    if usage is None:
        before, after = form
        return f"{before}{token}{after}"
    before, first, second, third, after = form
    numbers = f"{usage.prompt_tokens}{second}{usage.total_tokens}{third}{usage.completion_tokens}"
    return f"{before}{token}{first}{numbers}{after}"
