"""Values of patches: what is allowed, how text becomes a value, and what a refusal says.

Pydantic does the validation; this module turns its verdicts into messages that name the key's path, where it stands,
what was found, what is allowed and the nearest spelling.
"""

from __future__ import annotations

import difflib
import enum
import json
import math
import re
import types
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Annotated, Any, Literal, Union, get_args, get_origin

from pydantic import ByteSize, ValidationError
from pydantic.fields import FieldInfo

from omni_fastpath.declare import Options
from omni_fastpath.master import boolean

_INTEGER = re.compile(r"[+-]?[0-9]+(_[0-9]+)*")
_SHOWN_CHARACTERS = 80

Place = Callable[[str], str]
"""Where the value of a key stands, for a message: ``fastpath.<patch>.<key> in FILE`` or a variable's name."""


class ConfigError(ValueError):
    """A configuration that is refused.

    The message names the key's path, its file or variable, what was found, what is allowed and, for an unknown name,
    the nearest spelling.
    """


def refusal(
    place: str, *, found: str, allowed: str, nearest: str | None = None, gone: str | None = None
) -> ConfigError:
    """The error for one place.

    Args:
        place: Where the value or the name stands.
        found: What stands there.
        allowed: What may stand there.
        nearest: The spelling that was probably meant.
        gone: What became of a name that earlier versions took; it is said instead of ``nearest``.
    """
    hint = f"; it is gone: {gone}" if gone else f"; did you mean {nearest!r}?" if nearest else ""
    return ConfigError(f"{place}: found {found}; allowed: {allowed}{hint}")


def shown(value: object) -> str:
    """The ``repr`` of a value, cut where it would flood a log line."""
    try:
        text = repr(value)
    except (ValueError, RecursionError):  # an integer of more digits than Python writes
        return f"a value of type {type(value).__name__} that cannot be shown"
    return text if len(text) <= _SHOWN_CHARACTERS else f"{text[: _SHOWN_CHARACTERS - 3]}..."


def to_json(value: Mapping[str, Any]) -> str:
    """JSON that every reader takes: bytes of a path or variable that are no text become question marks."""
    return json.dumps(value, default=str, ensure_ascii=False).encode(errors="replace").decode()


def nearest(word: object, known: Iterable[str]) -> str | None:
    """The known name that is spelt most like ``word``, whatever its case; None when none is close."""
    return next(iter(close(word, known)), None)


def close(word: object, known: Iterable[str]) -> list[str]:
    """The known names that are spelt like ``word``, the nearest first."""
    by_lower = {name.lower(): name for name in known}
    return [by_lower[match] for match in difflib.get_close_matches(str(word).lower(), list(by_lower))]


def unknown(
    place: str, word: object, known: Iterable[str], *, found: str | None = None, gone: str | None = None
) -> ConfigError:
    """The error for an unknown name at ``place``; ``gone`` says what became of one that earlier versions took."""
    names = list(known)
    return refusal(
        place,
        found=found or f"an unknown key {shown(word)}",
        allowed=", ".join(names) or "no keys",
        nearest=nearest(word, names),
        gone=gone,
    )


def parse(options: type[Options], key: str, text: str) -> Any:
    """Read ``text`` as the field's type; text that does not read as it stays text, for the validation to refuse."""
    field = options.model_fields[key]
    text = text.strip()
    for member in _members(field.annotation):
        value = _parse_as(member, text)
        if value is not None:
            return None if value is _NULL else value
    return text


class _Null(enum.Enum):
    NULL = "null"


_NULL = _Null.NULL


def _parse_as(member: Any, text: str) -> Any:
    """``text`` as one member of a union, None when it does not read as that, ``_NULL`` when it reads as null."""
    value: Any = None
    if member is type(None):
        value = _NULL if text.lower() == "null" else None
    elif member is bool:
        value = boolean(text)
    elif get_origin(member) is Literal:
        value = next((choice for choice in get_args(member) if str(choice) == text), None)
    elif isinstance(member, type) and not issubclass(member, enum.Enum):
        if issubclass(member, int):
            value = _read_as(int, text) if _INTEGER.fullmatch(text) else None
        elif issubclass(member, float):
            value = _read_as(float, text)
    return value


def _read_as(number: type[int | float], text: str) -> float | None:
    try:
        return number(text)
    except ValueError:  # not a number, or one of more digits than Python reads
        return None


def _members(annotation: Any) -> Iterator[Any]:
    """The members of a union, without their ``Annotated`` shells."""
    origin = get_origin(annotation)
    if origin is Annotated:
        yield from _members(get_args(annotation)[0])
    elif origin in (Union, types.UnionType):
        for member in get_args(annotation):
            yield from _members(member)
    else:
        yield annotation


def _constraints(field: FieldInfo) -> Iterator[Any]:
    """The constraints of a field, also those inside a union's members."""
    yield from field.metadata
    pending = [field.annotation]
    while pending:
        annotation: Any = pending.pop()
        if get_origin(annotation) is Annotated:
            for extra in get_args(annotation)[1:]:
                yield from extra.metadata if isinstance(extra, FieldInfo) else (extra,)
        pending.extend(get_args(annotation) if get_origin(annotation) is not Literal else ())


def allowed(options: type[Options], key: str) -> str:
    """What the field takes, in words: its types, its limits and its description."""
    field = options.model_fields[key]
    text = type_and_limits(options, key)
    return f"{text} ({field.description})" if field.description else text


def type_and_limits(options: type[Options], key: str) -> str:
    """``allowed`` without the description."""
    field = options.model_fields[key]
    members = list(_members(field.annotation))
    null = " or null" if type(None) in members else ""
    return " or ".join(_named(member) for member in members if member is not type(None)) + _limits(field) + null


def _named(member: Any) -> str:
    names = {
        bool: "true or false",
        int: "an integer",
        float: "a number",
        str: "a string",
        ByteSize: "a size in bytes such as 256MiB",
    }
    if member in names:
        return names[member]
    if get_origin(member) is Literal:
        return " or ".join(repr(choice) for choice in get_args(member))
    if isinstance(member, type) and issubclass(member, enum.Enum):
        return " or ".join(repr(choice.value) for choice in member)
    return getattr(member, "__name__", str(member))


def _limits(field: FieldInfo) -> str:
    bounds: dict[str, Any] = {}
    for limit in _constraints(field):
        # The constraints are annotated-types objects, each with one of these attributes.
        for name in ("ge", "gt", "le", "lt", "multiple_of"):
            bound = getattr(limit, name, None)
            if bound is not None:
                bounds[name] = bound
    both = "ge" in bounds and "le" in bounds
    words = [f"from {bounds.pop('ge')} to {bounds.pop('le')}"] if both else []
    named = {"ge": "at least", "gt": "above", "le": "at most", "lt": "below", "multiple_of": "a multiple of"}
    words += [f"{word} {bounds[name]}" for name, word in named.items() if name in bounds]
    return f" {' and '.join(words)}" if words else ""


def check(options: type[Options], values: Mapping[str, Any], place: Place, *, complete: bool = True) -> Options | None:
    """Validate the values of one patch.

    Args:
        options: The patch's options model.
        values: Keys and values as YAML or ``parse`` gave them.
        place: Names the place of a key for the message.
        complete: Whether these are all values. One file of a chain holds some: each is judged, and rules over several
            keys are left to the whole.

    Returns:
        The options; None when ``complete`` is false.

    Raises:
        ConfigError: One line for each key that is refused.
    """
    problems = []
    for key, value in values.items():
        if not _is_field(options, key):
            problems.append(str(unknown(place(str(key)), key, options.model_fields, gone=options.gone.get(key))))
        elif isinstance(value, float) and not math.isfinite(value):
            # JSON, which carries the values between processes, has no infinity, and no key means anything by it.
            problems.append(str(refusal(place(key), found=shown(value), allowed=allowed(options, key))))
    if problems:
        raise ConfigError("\n".join(problems))
    try:
        # By way of JSON, because strict validation of Python objects would want enum members and byte sizes ready-made.
        checked = options.model_validate_json(json.dumps(values, default=str))
    except ValidationError as error:
        found = error.errors()
        if any(details["type"] == "json_invalid" for details in found):  # text that is no Unicode: a byte in a variable
            raise _unwritable(options, values, place) from None
        problems = [_problem(options, details, place) for details in found if details["loc"] or complete]
        if problems:
            raise ConfigError("\n".join(dict.fromkeys(problems))) from None
        return None
    except (TypeError, ValueError, RecursionError):  # keys that are no text, a value inside itself, endless digits
        raise _unwritable(options, values, place) from None
    return checked if complete else None


def _unwritable(options: type[Options], values: Mapping[str, Any], place: Place) -> ConfigError:
    """The error for values that JSON, which carries them between processes, cannot carry."""
    bad = [key for key, value in values.items() if not _is_json(value)] or list(values)
    lines = [str(refusal(place(key), found=shown(values[key]), allowed=allowed(options, key))) for key in bad]
    return ConfigError("\n".join(lines))


def _is_json(value: object) -> bool:
    try:
        json.dumps(value, default=str, ensure_ascii=False).encode()
    except (TypeError, ValueError, RecursionError):
        return False
    return True


def _is_field(options: type[Options], key: object) -> bool:
    return isinstance(key, str) and key in options.model_fields


def _problem(options: type[Options], details: Any, place: Place) -> str:
    """One of pydantic's verdicts in our words; a validator's own message is kept, since only it knows the rule."""
    own_words = details["type"] in ("value_error", "assertion_error")
    if not details["loc"]:
        return f"{place('')}: found {shown(details['input'])}; {details['msg']}"
    key = str(details["loc"][0])
    rule = f"; {details['msg']}" if own_words else ""
    return f"{place(key)}: found {shown(details['input'])}; allowed: {allowed(options, key)}{rule}"
