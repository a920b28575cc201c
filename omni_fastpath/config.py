"""The configuration: the ``fastpath:`` block of a deploy YAML, overridden by environment variables.

The environment overrides the YAML, so that settings can be compared without changing a file. Its booleans are
``1 true on yes`` and ``0 false off no``, in any case. Any other word is refused. An empty variable counts as unset.

``OMNI_FASTPATH=0``
    Everything is off, and nothing is validated.
``OMNI_FASTPATH=1``
    The YAML's settings if they enable a patch, else the default set.
``OMNI_FASTPATH_<PATCH>=1`` or ``0``
    Enables that patch and those that it requires, with the YAML's values or the defaults, or disables it.
``OMNI_FASTPATH_<PATCH>__<KEY>=V``
    One value of a patch. It enables nothing. ``null`` is accepted if the key accepts it.
``OMNI_FASTPATH_ON_UNSUPPORTED=warn`` or ``fail``, ``OMNI_FASTPATH_ON_UNLISTED=same_code`` or ``unsupported``
    As the keys ``fastpath.on_unsupported`` and ``fastpath.on_unlisted``.

If a deploy YAML overlays another, its block replaces that of its base, as every top-level block (upstream's
``resolve_deploy_yaml``). A ``fastpath`` key below the top level refuses the start.

A refusal names every invalid key, one per line. An unknown ``OMNI_FASTPATH...`` variable refuses the start if a patch
is enabled. Other variables and keys that are probably misspelt (``OMNI_FASTPAHT``, ``fastpaht``) are warned about. The
variables that Kubernetes creates for a Service named ``omni-fastpath`` are ignored, unless a key has
that variable.
"""

from __future__ import annotations

import contextlib
import dataclasses
import difflib
import importlib
import json
import re
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import NoneType
from typing import Any, Final, Literal, get_args

from pydantic import ByteSize

from omni_fastpath import process_role
from omni_fastpath.declare import Options, Patch
from omni_fastpath.process_role import MASTER, RefusedError, boolean, master_off, own_variables

KEY = "fastpath"
"""The top-level key in a deploy YAML."""

ABSENT: Final = object()
"""The value of a missing ``fastpath`` key. ``null`` is a value and means off."""

OnUnsupported = Literal["warn", "fail"]
OnUnlisted = Literal["same_code", "unsupported"]
RULES: Mapping[str, tuple[str, ...]] = {
    "on_unsupported": get_args(OnUnsupported),
    "on_unlisted": get_args(OnUnlisted),
}
"""The keys of the block that are not patches, with their allowed values."""
_RULE_VARIABLES = {f"{MASTER}_{key.upper()}": key for key in RULES}

_OF_A_SERVICE = re.compile(r"_SERVICE_HOST$|_SERVICE_PORT(_|$)|_PORT(_[0-9]+_|$)")
_PLAIN = re.compile(r"[\w-]{1,80}")
_SHOWN_CHARACTERS = 80

# Refusals


class ConfigError(RefusedError):
    """An invalid configuration. The message has one line per invalid key: place, value found, values allowed."""


def refusal(place: str, *, found: str, allowed: str, nearest: str | None = None) -> ConfigError:
    """The error for one place.

    Args:
        place: The key, variable or option.
        found: The value or name found there.
        allowed: The values or names allowed there.
        nearest: The spelling that was probably meant.
    """
    hint = f" (did you mean {nearest!r}?)" if nearest else ""
    return ConfigError(f"{place}: found {found}{hint}; allowed: {allowed}")


def unknown(place: str, word: object, known: Iterable[str], *, found: str | None = None) -> ConfigError:
    """The error for an unknown name. ``found`` is as in ``refusal``."""
    names = list(known)
    found = found or f"an unknown key {short_repr(word)}"
    return refusal(place, found=found, allowed=", ".join(names) or "no keys", nearest=nearest(word, names))


def short_repr(value: object) -> str:
    """The ``repr`` of a value, shortened for a log line."""
    try:
        text = repr(value)
    except (ValueError, RecursionError):  # more digits or nested lists than Python can write
        text = f"<{type(value).__name__} that is too large>"
    return text if len(text) <= _SHOWN_CHARACTERS else f"{text[: _SHOWN_CHARACTERS - 3]}..."


def close(word: object, known: Iterable[str], cutoff: float = 0.6) -> list[str]:
    """The known names with a similar spelling in any case, the nearest first. ``cutoff`` is difflib's."""
    by_lower = {name.lower(): name for name in known}
    letters = (word if isinstance(word, str) else short_repr(word)).lower()
    return [by_lower[match] for match in difflib.get_close_matches(letters, list(by_lower), cutoff=cutoff)]


def nearest(word: object, known: Iterable[str]) -> str | None:
    """The known name with the nearest spelling. None if no spelling is similar."""
    return next(iter(close(word, known)), None)


# Values


def parse(options: type[Options], key: str, text: str) -> Any:
    """The value of a variable's text: a boolean, JSON, or the text itself."""
    text = text.strip()
    if options.model_fields[key].annotation is bool:
        on = boolean(text)
        return text if on is None else on
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        return text


def allowed(options: type[Options], key: str) -> str:
    """The allowed values of a key, in words: its types and limits."""
    field = options.model_fields[key]
    types = get_args(field.annotation) or (field.annotation,)
    names = {bool: "true or false", int: "an integer", float: "a number", ByteSize: "a size such as 256MiB,"}
    words = " or ".join(names.get(each, repr(each)) for each in types if each is not NoneType)
    signs = {"ge": "at least", "gt": "above", "le": "at most", "lt": "below"}
    found = {name: getattr(limit, name) for name in signs for limit in field.metadata if hasattr(limit, name)}
    limits = " and ".join(f"{signs[name]} {limit}" for name, limit in found.items())
    return f"{words} {limits}".strip() + (" or null" if NoneType in types else "")


def _built(options: type[Options], values: Mapping[str, Any]) -> Options:
    # From JSON, as in the stages. In pydantic's strict mode Python values would need ready-made types such as ByteSize.
    return options.model_validate_json(json.dumps(values))


# Variables


def value_variable(patch: Patch, key: str) -> str:
    """The variable that sets one value of a patch."""
    return f"{patch.env}__{key.upper()}"


def variables(patches: Iterable[Patch]) -> list[str]:
    """Every variable that may be set. Those of values are last."""
    patches = list(patches)
    of_values = [value_variable(patch, key) for patch in patches for key in patch.options.model_fields]
    return [MASTER, *_RULE_VARIABLES, *(patch.env for patch in patches), *of_values]


def set_variables(environ: Mapping[str, str], patches: Iterable[Patch]) -> list[str]:
    """The ``OMNI_FASTPATH...`` variables that are set, known or not, sorted, without Kubernetes' Service variables."""
    known = variables(patches)
    return sorted(name for name in own_variables(environ) if name in known or not _OF_A_SERVICE.search(name))


# A block and variables


@dataclass(frozen=True)
class Block:
    """The ``fastpath`` block of a deploy YAML.

    Attributes:
        path: The file.
        value: The value of its ``fastpath`` key, or ``ABSENT``.
        misplaced: Where the key is below the top level, for example ``stages[0].fastpath``. It is refused.
        similar: Top-level keys with a similar spelling, if there is no such key.
    """

    path: Path
    value: Any
    misplaced: tuple[str, ...] = ()
    similar: tuple[str, ...] = ()

    def place(self, *keys: object) -> str:
        """The name of a key of this block in messages, on one line."""
        words = (key if isinstance(key, str) and _PLAIN.fullmatch(key) else short_repr(key) for key in keys)
        return f"{'.'.join((KEY, *words))} in {self.path}"


@dataclass(frozen=True)
class _Asked:
    """The settings of one patch so far. Its values are kept when it is off, for a variable that switches it on.

    Attributes:
        on: Whether it is on.
        origin: The setting that switched it on or off. Empty if no setting mentions it.
        reason: Why it is off.
        values: Its values that are set.
    """

    on: bool = False
    origin: str = ""
    reason: str = "not asked for"
    values: Mapping[str, Any] = field(default_factory=dict)


class _Settings:
    """The settings of a block and of the environment.

    Attributes:
        asked: The settings of every patch, by name.
        rules: The values of the ``RULES`` keys that are set.
        problems: Invalid settings.
    """

    def __init__(self, patches: Sequence[Patch]) -> None:
        self._declared = {patch.name: patch for patch in patches}
        self.problems: list[ConfigError] = []
        self.rules: dict[str, Any] = {}
        self.asked = dict.fromkeys(self._declared, _Asked())

    def _change(self, name: str, **changes: Any) -> None:
        self.asked[name] = dataclasses.replace(self.asked[name], **changes)

    def _default_set(self, by: str) -> None:
        for name, patch in self._declared.items():
            origin = f"default set ({by})" if patch.default_on else ""
            self._change(name, on=patch.default_on, origin=origin, reason=f"not in the default set ({by})")

    def add_block(self, block: Block) -> None:
        """Apply the deploy YAML's block: off, the default set, or the listed patches."""
        value = block.value
        for place in block.misplaced:
            self.problems.append(ConfigError(f"{place} in {block.path}: {KEY} must be a top-level key of the file"))
        if value is True:
            self._default_set(f"{KEY}: true in {block.path}")
        elif value is None or value is False or isinstance(value, dict):
            why = f"not listed under {block.place()}" if value else f"{block.place()} is {json.dumps(value)}"
            for name in self._declared:
                self._change(name, reason=why)
            for key, wanted in value.items() if value else ():
                self._add_key(block, key, wanted)
        elif value is not ABSENT:
            self._refuse(block.place(), value, "true, false or a mapping of patches")

    def _add_key(self, block: Block, key: Any, wanted: object) -> None:
        origin = block.place(key)
        if key in RULES:
            self._set_rule(key, origin, wanted)
        elif key not in self._declared:
            self.problems.append(unknown(origin, key, [*self._declared, *RULES]))
        elif isinstance(wanted, bool):
            self._change(key, on=wanted, origin=origin, reason=f"{origin} is false")
        elif isinstance(wanted, dict):
            self._change(key, on=True, origin=origin)
            for each, value in wanted.items():
                self._set_value(key, each, value, block.place(key, each))
        else:
            keys = ", ".join(self._declared[key].options.model_fields)
            self._refuse(origin, wanted, f"true, false or a mapping of {keys}" if keys else "true or false")

    def add_environment(self, environ: Mapping[str, str]) -> None:
        """Apply the environment, after the block."""
        if self._switch(MASTER, environ) and not any(asked.on for asked in self.asked.values()):
            self._default_set(f"{MASTER}={environ[MASTER]}")
        for name, patch in self._declared.items():
            on = self._switch(patch.env, environ)
            if on is not None:
                origin = f"{patch.env}={environ[patch.env]}"
                self._change(name, on=on, origin=origin, reason=origin)
            for key in patch.options.model_fields:
                variable = value_variable(patch, key)
                if variable in environ:
                    value = parse(patch.options, key, environ[variable])
                    self._set_value(name, key, value, f"{variable} ({KEY}.{name}.{key})")
        for variable, key in _RULE_VARIABLES.items():
            if variable in environ:
                self._set_rule(key, variable, environ[variable].strip().lower())

    def _switch(self, name: str, environ: Mapping[str, str]) -> bool | None:
        on = boolean(environ.get(name, ""))
        if on is None and name in environ:
            self._refuse(name, environ[name], process_role.BOOLEAN_WORDS)
        return on

    def _set_rule(self, key: str, place: str, value: object) -> None:
        if value in RULES[key]:
            self.rules[key] = value
        else:
            self._refuse(place, value, " or ".join(RULES[key]), nearest(value, RULES[key]))

    def _set_value(self, name: str, key: Any, value: object, place: str) -> None:
        options, removed = self._declared[name].options, self._declared[name].removed
        if key not in options.model_fields:
            gone = ConfigError(f"{place}: {removed[key]}") if key in removed else None
            self.problems.append(gone or unknown(place, key, options.model_fields))
            return
        try:
            _built(options, {key: value})
        except (TypeError, ValueError, RecursionError):  # pydantic's error is a ValueError
            self._refuse(place, value, allowed(options, key))
        else:
            self._change(name, values={**self.asked[name].values, key: value})

    def _refuse(self, place: str, value: object, takes: str, near: str | None = None) -> None:
        self.problems.append(refusal(place, found=short_repr(value), allowed=takes, nearest=near))

    def settle_requirements(self) -> None:
        """Enable the requirements of enabled patches. A requirement that was switched off by name is an error."""
        for patch in reversed(self._declared.values()):
            for name in patch.requires if self.asked[patch.name].on else ():
                required = self.asked[name]
                if not required.on and required.origin:
                    why = f"{KEY}.{patch.name} is on and requires {KEY}.{name}, which is off: {required.reason}"
                    remedy = f"switch {name} on ({self._declared[name].env}=1) or {patch.name} off"
                    self.problems.append(ConfigError(f"{why}; {remedy}"))
                elif not required.on:
                    self._change(name, on=True, origin=f"required by {patch.name}")


# The result


@dataclass(frozen=True)
class Resolved:
    """The result of YAML and environment.

    Attributes:
        enabled: The enabled patches with their values, in the order of their declarations.
        off: Every other patch with the reason.
        origins: The setting that switched each patch on or off. Empty for a patch that no setting mentions.
        on_unsupported: Whether a patch that cannot serve refuses the start.
        on_unlisted: Which releases without a row are served (``Patch.candidates``). None if it is not set.
        source: The deploy YAML. None if there is none.
        unknown: Warnings, one line each: unknown variables if no patch is enabled, and names like ours.
    """

    enabled: Mapping[str, Options]
    off: Mapping[str, str]
    origins: Mapping[str, str]
    on_unsupported: OnUnsupported = "warn"
    on_unlisted: OnUnlisted | None = None
    source: str | None = None
    unknown: tuple[str, ...] = ()

    def to_json(self) -> str:
        """JSON, for ``from_json`` in a process with the same declarations."""
        enabled = {name: options.model_dump(mode="json") for name, options in self.enabled.items()}
        return json.dumps({**vars(self), "enabled": enabled})

    @classmethod
    def from_json(cls, text: str, patches: Sequence[Patch]) -> Resolved:
        """Read the text of ``to_json``. Any exception is possible if the text or the declarations do not match."""
        declared = {patch.name: patch.options for patch in patches}
        wire = json.loads(text)
        enabled = {name: _built(declared[name], given) for name, given in wire["enabled"].items()}
        return cls(**{**wire, "enabled": enabled, "unknown": tuple(wire["unknown"])})


def unknown_lines(environ: Mapping[str, str], patches: Sequence[Patch]) -> list[str]:
    """A message for each unknown ``OMNI_FASTPATH...`` variable that is set."""
    known = variables(patches)
    removed = {value_variable(patch, key): words for patch in patches for key, words in patch.removed.items()}

    def told(name: str) -> str:
        words = removed.get(name)
        return f"{name}: {words}" if words else str(unknown(name, name, known, found="an unknown variable"))

    return [told(name) for name in set_variables(environ, patches) if name not in known]


def resolve(block: Block | None, environ: Mapping[str, str], patches: Sequence[Patch]) -> Resolved:
    """The settings of a block and the environment.

    Args:
        block: The block. None without a deploy YAML.
        environ: The environment, which overrides the block.
        patches: The declarations. A patch follows those that it requires.

    Raises:
        ConfigError: There is an invalid key or value, an unknown variable while a patch is enabled, or an enabled patch
            whose requirement was switched off by name.
    """
    environ = {name: text for name, text in environ.items() if text.strip()}
    source = None if block is None else str(block.path)
    if master_off(environ):
        why = dict.fromkeys((patch.name for patch in patches), f"{MASTER}={environ[MASTER]}")
        return Resolved({}, off=why, origins=why, source=source)
    settings = _Settings(patches)
    if block is not None:
        settings.add_block(block)
    settings.add_environment(environ)
    settings.settle_requirements()
    on = {name: asked.values for name, asked in settings.asked.items() if asked.on}
    enabled = {patch.name: _built(patch.options, on[patch.name]) for patch in patches if patch.name in on}
    unknown_variables = unknown_lines(environ, patches)
    lines = [*(str(problem) for problem in settings.problems), *(unknown_variables if enabled else ())]
    if lines:
        raise ConfigError("\n".join(lines))
    similar = [f"{key!r} in {source} has no effect; did you mean {KEY!r}?" for key in (block.similar if block else ())]
    others = [name for name in environ if not name.startswith((MASTER, process_role.HANDOFF))]
    near = [name for name in others if close(name[: len(MASTER)], [MASTER], 0.83)]
    similar += [f"{name} has no effect, because its name does not begin with {MASTER}" for name in near]
    return Resolved(
        enabled=enabled,
        off={name: asked.reason for name, asked in settings.asked.items() if not asked.on},
        origins={name: asked.origin for name, asked in settings.asked.items()},
        **settings.rules,
        source=source,
        unknown=(*unknown_variables, *similar),
    )


# The file


def resolve_file(path: str | Path | None, environ: Mapping[str, str], patches: Sequence[Patch]) -> Resolved:
    """``resolve`` for a deploy YAML, which is not opened under ``OMNI_FASTPATH=0``.

    Raises:
        ConfigError: As ``read`` and ``resolve``.
    """
    return resolve(None if path is None or master_off(environ) else read(path), environ, patches)


def read(path: str | Path) -> Block:
    """The block of a deploy YAML as the installed vLLM-Omni reads it, which is imported.

    Raises:
        ConfigError: vLLM-Omni refuses the file, or cannot be imported.
    """
    try:
        with contextlib.redirect_stdout(sys.stderr):  # vllm logs while it is imported
            upstream = importlib.import_module("vllm_omni.config.stage_config")
        upstream.load_deploy_config(path)
        return block_of(path, upstream.resolve_deploy_yaml(path))
    except Exception as error:  # of any kind
        raise ConfigError(f"{path}: vLLM-Omni refuses it: {error}") from error


def block_of(path: str | Path, data: Mapping[Any, Any]) -> Block:
    """The block of a deploy YAML's content."""
    similar = () if KEY in data else tuple(str(key) for key in data if close(key, [KEY]))
    return Block(Path(path), data.get(KEY, ABSENT), tuple(place for place in _places(data) if place != KEY), similar)


def _places(data: Any, at: str = "") -> Iterator[str]:
    """Where the key is in a deploy YAML."""
    for key, value in data.items() if isinstance(data, dict) else ():
        place = f"{at}.{key}".removeprefix(".")
        yield from [place] if key == KEY else _places(value, place)
    for index, value in enumerate(data if isinstance(data, list) else ()):
        yield from _places(value, f"{at}[{index}]")
