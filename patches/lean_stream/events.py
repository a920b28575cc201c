"""The text of a token's event: what upstream's models would say, written around the token and its usage.

``Events`` stands for four of upstream's classes in one body of upstream's. What it makes of a plain token is no model;
it becomes one when anything but the event's text is asked of it. Everything else is upstream's own model at once.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from json.encoder import encode_basestring
from typing import Any

NAMES = ("DeltaMessage", "ChatCompletionResponseStreamChoice", "OmniChatCompletionStreamResponse", "UsageInfo")
"""Upstream's classes: a token's text, its choice, its event, and the numbers of tokens so far."""

MOST_FORMS = 4096
"""Forms that are kept, of requests that ended too; a request has one for each of its choices."""

LONGEST_ID = 256
"""Characters of a request's id, which a client may choose: a form outlives its request and would keep a longer one."""

_TEXT = "\ue000text\ue001"
_NUMBERS = (7_310_482_956_173_849, 7_310_482_956_173_857, 7_310_482_956_173_863)
"""Stand for what differs, in the event of which a form is taken."""

_USAGE = frozenset({"prompt_tokens", "total_tokens", "completion_tokens"})
_OF_A_DELTA, _OF_A_CHOICE, _OF_AN_EVENT, _OF_USAGE = 1, 5, 7, 3
"""How many things each is made of, for a plain token; each of them is looked at."""
_AS_UPSTREAM_ASKS = {"exclude_unset": True}
_new, _set = object.__new__, object.__setattr__


class Delta:
    """What upstream's body has of a token's text; whatever else is asked of it is asked of the model."""

    __slots__ = ("_events", "content")

    def __init__(self, events: Events, content: str) -> None:
        self._events = events
        self.content = content

    def __getattr__(self, name: str) -> Any:
        return getattr(self.real(), name)

    def real(self) -> Any:
        """The model, a new one at each call."""
        return self._events.delta_model(content=self.content)


class Choice:
    """The one choice of a token's event.

    Attributes:
        given: What upstream makes it of.
        tool_calls: None: 0.32 takes what is no choice of its own for a delta, and looks for calls to be left out.
    """

    __slots__ = ("_events", "given")
    tool_calls: tuple[()] = ()

    def __init__(self, events: Events, given: dict[str, Any]) -> None:
        self._events = events
        self.given = given

    def __getattr__(self, name: str) -> Any:
        return getattr(self.real(), name)

    def real(self) -> Any:
        """The model, a new one at each call."""
        return self._events.choice_model(**{**self.given, "delta": self.given["delta"].real()})


class Event:
    """A token's event.

    Attributes:
        given: What upstream makes it of.
        usage: Upstream's model of the numbers of tokens; None before upstream set it.
    """

    __slots__ = ("_events", "given", "usage")

    def __init__(self, events: Events, given: dict[str, Any]) -> None:
        self._events = events
        self.given = given
        self.usage: Any = None

    def __getattr__(self, name: str) -> Any:
        return getattr(self.real(), name)

    def real(self) -> Any:
        """The model, a new one at each call."""
        [choice] = self.given["choices"]
        made = self._events.event_model(**{**self.given, "choices": [choice.real()]})
        if self.usage is not None:
            made.usage = self.usage
        return made

    def model_dump_json(self, **how: Any) -> str:
        """Its text."""
        if how == _AS_UPSTREAM_ASKS and (text := self._events.text(self)) is not None:
            return text
        return str(self.real().model_dump_json(**how))


@dataclass(frozen=True, slots=True)
class Form:
    """What is the same in the events of a choice of a request.

    Attributes:
        given: Creation time, model, modality and kind of the request's events.
        pieces: The text before the token, after it, and between and after the numbers, if there are any.
    """

    given: tuple[Any, ...]
    pieces: tuple[str, ...]

    def text(self, content: str, usage: Any) -> str:
        """The text of an event; the numbers are whole."""
        if usage is None:
            before, after = self.pieces
            return f"{before}{encode_basestring(content)}{after}"
        before, first, second, third, after = self.pieces
        return (
            f"{before}{encode_basestring(content)}{first}{usage.prompt_tokens}{second}{usage.total_tokens}"
            f"{third}{usage.completion_tokens}{after}"
        )


class Events:
    """Stands for ``NAMES`` in upstream's body.

    Args:
        names: Upstream's classes by name.
        has_failed: Whether everything is upstream's from now on.
        fail: Told in words of what must not go on.
        counters: ``events`` is counted.
    """

    def __init__(
        self,
        names: Mapping[str, Any],
        has_failed: Callable[[], bool],
        fail: Callable[[str], None],
        counters: dict[str, int],
    ) -> None:
        self.delta_model, self.choice_model, self.event_model, self.usage_model = (names[name] for name in NAMES)
        self._has_failed, self._fail, self._counters = has_failed, fail, counters
        self._forms: dict[tuple[Any, ...], Form] = {}
        self._of_usage = self._blank_usage()

    def stand_ins(self) -> dict[str, Any]:
        """By the name that each takes in upstream's globals."""
        made = (_Called(self.delta_model, self.delta), self.choice, self.event, self.usage)
        return dict(zip(NAMES, made, strict=True))

    def delta(self, **given: Any) -> Any:
        """For ``DeltaMessage(...)``."""
        content = given.get("content")
        if len(given) == _OF_A_DELTA and type(content) is str and not self._has_failed():
            return Delta(self, content)
        return self.delta_model(**given)

    def choice(self, **given: Any) -> Any:
        """For ``ChatCompletionResponseStreamChoice(...)``."""
        delta = given.get("delta")
        if type(delta) is not Delta:
            return self.choice_model(**given)
        try:
            if (
                len(given) == _OF_A_CHOICE
                and given["logprobs"] is given["finish_reason"] is given["token_ids"] is None
                and type(given["index"]) is int
            ):
                return Choice(self, given)
        except KeyError:  # made of others
            pass
        return self.choice_model(**{**given, "delta": delta.real()})

    def event(self, **given: Any) -> Any:
        """For ``OmniChatCompletionStreamResponse(...)``."""
        choices = given.get("choices")
        if type(choices) is not list or len(choices) != 1 or type(choices[0]) is not Choice:
            return self.event_model(**given)
        try:
            if (
                len(given) == _OF_AN_EVENT
                and (given["metrics"] is None or given["metrics"] == {})
                and type(given["created"]) is int
                and type(given["id"]) is type(given["object"]) is type(given["model"]) is type(given["modality"]) is str
                and len(given["id"]) <= LONGEST_ID
            ):
                return Event(self, given)
        except KeyError:
            pass
        return self.event_model(**{**given, "choices": [choices[0].real()]})

    def usage(self, **given: Any) -> Any:
        """For ``UsageInfo(...)``: a real one, without validation where there is nothing to be validated."""
        blank = self._of_usage
        if blank is not None and len(given) == _OF_USAGE:
            try:
                if (
                    type(given["prompt_tokens"])
                    is type(given["total_tokens"])
                    is type(given["completion_tokens"])
                    is int
                ):
                    return self._bare_usage(blank, given)
            except KeyError:
                pass
            except Exception as error:
                self._fail(f"counting an event's tokens failed: {error!r}")
        return self.usage_model(**given)

    def _bare_usage(self, blank: dict[str, Any], given: dict[str, int]) -> Any:
        made = _new(self.usage_model)
        _set(made, "__dict__", {**blank, **given})
        _set(made, "__pydantic_fields_set__", set(given))
        _set(made, "__pydantic_extra__", {})
        _set(made, "__pydantic_private__", None)
        return made

    def _blank_usage(self) -> dict[str, Any] | None:
        """What stands in a model of usage; None where it is not as it is made here."""
        given = dict(zip(sorted(_USAGE), _NUMBERS, strict=True))
        real = self.usage_model(**given)
        blank = dict(vars(real))
        made = self._bare_usage(blank, given)
        same = all(
            getattr(real, name) == getattr(made, name)
            for name in ("__pydantic_fields_set__", "__pydantic_extra__", "__pydantic_private__")
        )
        return blank if same and repr(made) == repr(real) else None

    def text(self, event: Event) -> str | None:
        """The text of an event; None where it is left to upstream's model."""
        try:
            return self._text(event)
        except Exception as error:
            self._fail(f"writing an event failed: {error!r}")
            return None

    def _text(self, event: Event) -> str | None:
        given, usage = event.given, event.usage
        choice = given["choices"][0].given
        content = choice["delta"].content
        if usage is not None and not _is_plain(usage):
            return None
        if not content.isascii() and not _is_whole(content):
            return None  # pydantic's error is the client's, as it says it
        key = given["id"], choice["index"], usage is None, given["metrics"] is None
        form = self._forms.get(key)
        same = given["created"], given["model"], given["modality"], given["object"]
        if form is None or form.given != same:
            form = self._form(event, same)
            if form is None:
                return None
            if len(self._forms) >= MOST_FORMS:
                self._forms.clear()
            self._forms[key] = form
        self._counters["events"] += 1
        return form.text(content, usage)

    def _form(self, event: Event, same: tuple[Any, ...]) -> Form | None:
        """Taken of an event of upstream's, and compared with another."""
        given = event.given
        token = given["choices"][0].given
        choice = self.choice_model(**{**token, "delta": self.delta_model(content=_TEXT)})
        model = self.event_model(**{**given, "choices": [choice]})
        marks = [encode_basestring(_TEXT)]
        if event.usage is not None:
            prompt, total, completion = _NUMBERS
            model.usage = self.usage_model(prompt_tokens=prompt, total_tokens=total, completion_tokens=completion)
            marks += map(str, _NUMBERS)
        left, pieces = model.model_dump_json(**_AS_UPSTREAM_ASKS), []
        for mark in marks:
            if left.count(mark) != 1:  # a request's own words, or another order: it is upstream's to say
                return None
            piece, _, left = left.partition(mark)
            pieces.append(piece)
        form = Form(same, (*pieces, left))
        if form.text(token["delta"].content, event.usage) != event.real().model_dump_json(**_AS_UPSTREAM_ASKS):
            self._fail("an event is not as pydantic writes it")
            return None
        return form


class _Called:
    """A class of upstream's whose calls go elsewhere."""

    def __init__(self, real: Any, call: Callable[..., Any]) -> None:
        self._real, self._call = real, call

    def __call__(self, *args: Any, **given: Any) -> Any:
        return self._real(*args, **given) if args else self._call(**given)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._real, name)


def _is_plain(usage: Any) -> bool:
    """Whether it says the three numbers and nothing else."""
    return (
        usage.__pydantic_fields_set__ == _USAGE
        and not usage.__pydantic_extra__
        and type(usage.prompt_tokens) is type(usage.total_tokens) is type(usage.completion_tokens) is int
    )


def _is_whole(text: str) -> bool:
    """Whether it can be sent: no half of a character stands alone."""
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True
