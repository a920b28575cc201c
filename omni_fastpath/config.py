"""What was asked for: the ``fastpath:`` blocks of a deploy YAML and its bases, and the environment on top of them.

The environment wins over the YAML, for comparisons without touching a file. Its booleans are ``1 true on yes`` and
``0 false off no``, whatever their case; anything else is refused. An empty variable is not set.

``OMNI_FASTPATH=0``
    Everything is off and nothing is validated.
``OMNI_FASTPATH=1``
    What the YAML says if it switches anything on, else the default set.
``OMNI_FASTPATH_<PATCH>=1`` or ``0``
    That patch on, with the YAML's values or the defaults and with what it requires, or off.
``OMNI_FASTPATH_<PATCH>__<KEY>=V``
    One value of a patch; ``null`` where the key takes it. Switches nothing on.
``OMNI_FASTPATH_ON_UNSUPPORTED=warn`` or ``fail``, ``OMNI_FASTPATH_ON_UNLISTED=same_code`` or ``unsupported``
    As the keys ``fastpath.on_unsupported`` and ``fastpath.on_unlisted``.

Upstream replaces a top-level block whole when a deploy YAML overlays another (``resolve_deploy_yaml`` in
``vllm_omni/config/stage_config.py``), so the chain of ``base_config`` is walked here, and the blocks are merged key by
key. Upstream ignores top-level keys that it does not know, so that a misspelt ``fastpath`` is told, as is a variable
whose name is nearly in our namespace; neither refuses.

A refusal names every wrong key, one line each. An unknown variable refuses where something is on. The variables that
Kubernetes makes of a Service named ``omni-fastpath`` are ignored, unless a key's variable has that name.
"""

from __future__ import annotations

import dataclasses
import difflib
import json
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import NoneType
from typing import Any, Final, Literal, get_args

from omegaconf import OmegaConf
from pydantic import ByteSize

from omni_fastpath.declare import Options, Patch
from omni_fastpath.process_role import (
    BOOLEAN_WORDS,
    HANDOFF,
    MASTER,
    NAMESPACE,
    ON_UNLISTED,
    ON_UNSUPPORTED,
    boolean,
    master_off,
    ours,
)

KEY = "fastpath"
"""The top-level key in a deploy YAML."""

ABSENT: Final = object()
"""The value of a ``fastpath`` key that is not there; ``null`` is a value and means off."""

OnUnsupported = Literal["warn", "fail"]
OnUnlisted = Literal["same_code", "unsupported"]
RULES: Mapping[str, tuple[str, ...]] = {
    "on_unsupported": get_args(OnUnsupported),
    "on_unlisted": get_args(OnUnlisted),
}
"""The keys of the block that are no patch, and the words that each takes."""
_RULE_VARIABLES = {ON_UNSUPPORTED: "on_unsupported", ON_UNLISTED: "on_unlisted"}

_OF_A_SERVICE = re.compile(r"_SERVICE_HOST$|_SERVICE_PORT(_|$)|_PORT(_[0-9]+_|$)")
_PLAIN = re.compile(r"[\w-]{1,80}")
_SHOWN_CHARACTERS = 80
_LOOKALIKE_RATIO = 0.75
_VARIABLE_RATIO = 0.85

# What a refusal says


class ConfigError(ValueError):
    """A configuration that is refused; one line for each wrong key: its place, what was found and what is allowed."""


class UnreadableError(ConfigError):
    """A deploy YAML that our reader cannot read. Where upstream read it, that is our trouble and not the file's."""


def refusal(place: str, *, found: str, allowed: str, nearest: str | None = None) -> ConfigError:
    """The error for one place.

    Args:
        place: Where the value or the name is.
        found: What is there.
        allowed: What may be there.
        nearest: The spelling that was probably meant.
    """
    hint = f" (did you mean {nearest!r}?)" if nearest else ""
    return ConfigError(f"{place}: found {found}{hint}; allowed: {allowed}")


def unknown(place: str, word: object, known: Iterable[str], *, found: str | None = None) -> ConfigError:
    """The error for an unknown name; ``found`` as in ``refusal``."""
    names = list(known)
    found = found or f"an unknown key {shown(word)}"
    return refusal(place, found=found, allowed=", ".join(names) or "no keys", nearest=nearest(word, names))


def shown(value: object) -> str:
    """The ``repr`` of a value, cut where it would flood a log line."""
    try:
        text = repr(value)
    except (ValueError, RecursionError):  # of more digits, or lists in lists, than Python writes
        text = f"<{type(value).__name__} that is too large>"
    return text if len(text) <= _SHOWN_CHARACTERS else f"{text[: _SHOWN_CHARACTERS - 3]}..."


def close(word: object, known: Iterable[str]) -> list[str]:
    """The known names that are spelt like ``word``, whatever its case, the nearest first."""
    by_lower = {name.lower(): name for name in known}
    letters = (word if isinstance(word, str) else shown(word)).lower()
    return [by_lower[match] for match in difflib.get_close_matches(letters, list(by_lower))]


def nearest(word: object, known: Iterable[str]) -> str | None:
    """The first of ``close``; None when no name is close."""
    return next(iter(close(word, known)), None)


# Values


def parse(options: type[Options], key: str, text: str) -> Any:
    """The value that the text of a variable stands for: a boolean word, JSON, or the text itself."""
    text = text.strip()
    if options.model_fields[key].annotation is bool:
        on = boolean(text)
        return text if on is None else on
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        return text


def allowed(options: type[Options], key: str) -> str:
    """What a key takes, in words: its types and limits."""
    field = options.model_fields[key]
    types = get_args(field.annotation) or (field.annotation,)
    names = {bool: "true or false", int: "an integer", float: "a number", ByteSize: "a size such as 256MiB"}
    words = " or ".join(names.get(each, repr(each)) for each in types if each is not NoneType)
    limits = " and ".join(
        f"{word} {getattr(limit, name)}"
        for name, word in {"ge": "at least", "gt": "above", "le": "at most", "lt": "below"}.items()
        for limit in field.metadata
        if hasattr(limit, name)
    )
    return f"{words} {limits}".strip() + (" or null" if NoneType in types else "")


def _built(options: type[Options], values: Mapping[str, Any]) -> Options:
    # By way of JSON, which carries the values to the stages; strict Python would want a byte size ready-made.
    return options.model_validate_json(json.dumps(values))


# Variables


def value_variable(patch: Patch, key: str) -> str:
    """The variable that sets one value of a patch."""
    return f"{patch.env}__{key.upper()}"


def variables(patches: Iterable[Patch]) -> list[str]:
    """Every variable that may be set, those of values last."""
    patches = list(patches)
    of_values = [value_variable(patch, key) for patch in patches for key in patch.options.model_fields]
    return [MASTER, *_RULE_VARIABLES, *(patch.env for patch in patches), *of_values]


def said(environ: Mapping[str, str], patches: Iterable[Patch]) -> list[str]:
    """The variables that were set for us, known or not, sorted; without those that Kubernetes makes of a Service."""
    known = variables(patches)
    return sorted(name for name in ours(environ) if name in known or not _OF_A_SERVICE.search(name))


def is_beside(name: str) -> bool:
    """Whether a variable's name would be in our namespace if it were spelt right: OMNI_FASTPAHT, omni_fastpath."""
    prefix, letters = NAMESPACE.replace("_", ""), re.sub(r"[^A-Z0-9]", "", name.upper()).removeprefix("VLLM")
    alike = difflib.SequenceMatcher(None, letters[: len(prefix)], prefix)
    return not name.startswith((NAMESPACE, HANDOFF)) and alike.ratio() >= _VARIABLE_RATIO


def _unknown_variables(environ: Mapping[str, str], patches: Sequence[Patch]) -> Iterator[str]:
    """A line for each variable in our namespace that means nothing."""
    known = variables(patches)
    for name in said(environ, patches):
        if name not in known:
            yield str(unknown(name, name, known, found="an unknown variable"))


# Blocks and variables, one on top of the other


@dataclass(frozen=True)
class Block:
    """What one file of a ``base_config`` chain says.

    Attributes:
        path: The file.
        value: Its ``fastpath`` value as it stands there, or ``ABSENT``.
        misspelt: Top-level keys of the file that are nearly ours, and ignored.
    """

    path: Path
    value: Any
    misspelt: tuple[str, ...] = ()

    def place(self, *keys: object) -> str:
        """How a message names a key of this block, in one line."""
        words = (key if isinstance(key, str) and _PLAIN.fullmatch(key) else shown(key) for key in keys)
        return f"{'.'.join((KEY, *words))} in {self.path}"


@dataclass(frozen=True)
class _Asked:
    """What is asked of one patch so far. Its values outlive a ``false``: a later ``true`` finds them again.

    Attributes:
        on: Whether it is on.
        origin: What said so; empty where nothing mentions it.
        reason: Why it is off.
        values: Its values that are not the defaults.
    """

    on: bool = False
    origin: str = ""
    reason: str = ""
    values: Mapping[str, Any] = field(default_factory=dict)


class _Layers:
    """What the files and the environment ask for, the base first.

    Attributes:
        asked: Every declared patch by name.
        rules: The words of ``RULES`` that were given.
        problems: What is refused.
    """

    def __init__(self, patches: Sequence[Patch]) -> None:
        self._declared = {patch.name: patch for patch in patches}
        self.problems: list[ConfigError] = []
        self._clear("not asked for")

    def _clear(self, reason: str) -> None:
        self._given = False
        self.rules: dict[str, Any] = {}
        self.asked = dict.fromkeys(self._declared, _Asked(reason=reason))

    def _change(self, name: str, **changes: Any) -> None:
        self.asked[name] = dataclasses.replace(self.asked[name], **changes)

    def _default_set(self, by: str) -> None:
        self._given = True
        for name, patch in self._declared.items():
            origin = f"default set ({by})" if patch.default_on else ""
            self._change(name, on=patch.default_on, origin=origin, reason=f"not in the default set ({by})")

    def add_block(self, block: Block) -> None:
        """One more file on top.

        Without the key nothing changes. Off forgets all below. ``true`` keeps what is below, or is the default set
        over nothing. A mapping changes what it names, key by key.
        """
        value = block.value
        if value is None or value is False or value == {}:
            self._clear(f"{block.place()} is {json.dumps(value)}")
        elif value is True and not self._given:
            self._default_set(f"{KEY}: true in {block.path}")
        elif isinstance(value, dict):
            if not self._given:
                self._clear(f"not listed under {block.place()}")
            self._given = True
            for key, wanted in value.items():
                self._add_key(block, key, wanted)
        elif value is not True and value is not ABSENT:
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
        """The environment on top of all files."""
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
            self._refuse(name, environ[name], BOOLEAN_WORDS)
        return on

    def _set_rule(self, key: str, place: str, value: object) -> None:
        if value in RULES[key]:
            self.rules[key] = value
        else:
            self._refuse(place, value, " or ".join(RULES[key]), nearest(value, RULES[key]))

    def _set_value(self, name: str, key: Any, value: object, place: str) -> None:
        options = self._declared[name].options
        if key not in options.model_fields:
            self.problems.append(unknown(place, key, options.model_fields))
            return
        try:
            _built(options, {key: value})
        except (TypeError, ValueError, RecursionError):  # pydantic's error is a ValueError
            self._refuse(place, value, allowed(options, key))
        else:
            self._change(name, values={**self.asked[name].values, key: value})

    def _refuse(self, place: str, value: object, takes: str, near: str | None = None) -> None:
        self.problems.append(refusal(place, found=shown(value), allowed=takes, nearest=near))

    def settle_requirements(self) -> None:
        """Switch on what a patch that is on requires; refuse the patch where that was switched off by name."""
        for patch in reversed(self._declared.values()):
            for name in patch.requires if self.asked[patch.name].on else ():
                required = self.asked[name]
                if not required.on and required.origin:
                    why = f"{KEY}.{patch.name} is on and requires {KEY}.{name}, which is off: {required.reason}"
                    remedy = f"switch {name} on ({self._declared[name].env}=1) or {patch.name} off"
                    self.problems.append(ConfigError(f"{why}; {remedy}"))
                elif not required.on:
                    self._change(name, on=True, origin=f"required by {patch.name}")


# What both come to


@dataclass(frozen=True)
class Resolved:
    """What YAML and environment come to.

    Attributes:
        enabled: The patches that are on, in the order of their declarations, with their values.
        off: Every other patch with the reason.
        origins: What switched a patch on or off; empty for a patch that nothing mentions.
        on_unsupported: What an unsupported or failed patch does to the start of the server.
        on_unlisted: What a patch is on a release that no row names; None where nothing says so (``Patch.candidates``).
        source: The deploy YAML; None when there is none.
        unknown: What means nothing and was not refused, one line each: variables in our namespace where nothing is on,
            variables beside it, and top-level keys that are nearly ours.
    """

    enabled: Mapping[str, Options]
    off: Mapping[str, str]
    origins: Mapping[str, str]
    on_unsupported: OnUnsupported = "warn"
    on_unlisted: OnUnlisted | None = None
    source: str | None = None
    unknown: tuple[str, ...] = ()

    @property
    def asked(self) -> bool:
        """Whether anything is on."""
        return bool(self.enabled)

    def below(self, first: Resolved | None) -> Resolved:
        """What the stages of a later engine get: as in this process, what an earlier one has stays, with its values."""
        if first is None:
            return self
        enabled = {**self.enabled, **first.enabled}
        return dataclasses.replace(self, enabled=enabled, on_unlisted=first.on_unlisted)

    def to_json(self) -> str:
        """This as text, for ``from_json`` in a process with the same declarations."""
        enabled = {name: options.model_dump(mode="json") for name, options in self.enabled.items()}
        return json.dumps({**vars(self), "enabled": enabled})

    @classmethod
    def from_json(cls, text: str, patches: Sequence[Patch]) -> Resolved:
        """Read what ``to_json`` wrote; any error where the text is something else, or of other declarations."""
        declared = {patch.name: patch.options for patch in patches}
        wire = json.loads(text)
        enabled = {name: _built(declared[name], given) for name, given in wire["enabled"].items()}
        return cls(**{**wire, "enabled": enabled, "unknown": tuple(wire["unknown"])})


def resolve(blocks: Sequence[Block], environ: Mapping[str, str], patches: Sequence[Patch]) -> Resolved:
    """What the blocks of a chain and the environment come to.

    Args:
        blocks: The base first; empty without a deploy YAML.
        environ: The environment, which wins over the blocks.
        patches: The declarations; a patch stands after those that it requires.

    Raises:
        ConfigError: A wrong key, value or word anywhere, an unknown variable where something is on, and a patch that
            is on while one that it requires is off by name.
    """
    environ = {name: text for name, text in environ.items() if text.strip()}
    source = str(blocks[-1].path) if blocks else None
    if master_off(environ):
        why = dict.fromkeys((patch.name for patch in patches), f"{MASTER}={environ[MASTER]}")
        return Resolved({}, off=why, origins=why, source=source)
    layers = _Layers(patches)
    for block in blocks:
        layers.add_block(block)
    layers.add_environment(environ)
    layers.settle_requirements()
    on = {name: asked.values for name, asked in layers.asked.items() if asked.on}
    enabled = {patch.name: _built(patch.options, on[patch.name]) for patch in patches if patch.name in on}
    unknown_variables = tuple(_unknown_variables(environ, patches))
    lines = [*(str(problem) for problem in layers.problems), *(unknown_variables if enabled else ())]
    if lines:
        raise ConfigError("\n".join(lines))
    known = variables(patches)
    nearly = [str(unknown(name, name, known, found="an unknown variable")) for name in environ if is_beside(name)]
    for block in blocks:
        nearly += [
            f"{block.path}: the top-level key {key!r} is ignored; did you mean {KEY!r}?" for key in block.misspelt
        ]
    return Resolved(
        enabled=enabled,
        off={name: asked.reason for name, asked in layers.asked.items() if not asked.on},
        origins={name: asked.origin for name, asked in layers.asked.items()},
        **layers.rules,
        source=source,
        unknown=(*unknown_variables, *nearly),
    )


# The files


def resolve_file(path: str | Path | None, environ: Mapping[str, str], patches: Sequence[Patch]) -> Resolved:
    """``resolve`` for a deploy YAML, which is not even opened under ``OMNI_FASTPATH=0``.

    Raises:
        ConfigError: As ``read_blocks`` and ``resolve``.
    """
    blocks = [] if path is None or master_off(environ) else read_blocks(path)
    return resolve(blocks, environ, patches)


def blocks_of(path: str | Path, deploy: Mapping[Any, Any] | None) -> list[Block]:
    """The blocks of a deploy YAML.

    Args:
        path: The file.
        deploy: What upstream made of it and its bases; None where that was not seen. A top-level key of any of them is
            in it; without ours no file is opened a second time.

    Raises:
        UnreadableError: As ``read_blocks``, where the key is there.
    """
    return read_blocks(path) if deploy is None or KEY in deploy else [_block(Path(path), deploy)]


def read_blocks(path: str | Path) -> list[Block]:
    """Read the ``fastpath`` value of a deploy YAML and of the files that it builds on; as ``read_chain``."""
    return [_block(file, data) for file, data in read_chain(path).items()]


def read_chain(path: str | Path) -> dict[Path, Mapping[Any, Any]]:
    """Read a deploy YAML and the files that it builds on, the base first.

    ``base_config`` is relative to the directory of the file that names it, as in upstream's ``resolve_deploy_yaml``.

    Raises:
        UnreadableError: A file cannot be read, or the chain comes back to a file.
    """
    files: list[tuple[Path, Mapping[Any, Any]]] = []
    current: Path | None = Path(path)
    while current is not None:
        data = _load(current)  # first: of what can be read the path can be resolved
        if current.resolve() in {file.resolve() for file, _ in files}:
            chain = " -> ".join(str(each) for each in [*(file for file, _ in files), current])
            raise UnreadableError(f"base_config in {files[-1][0]}: the chain comes back to a file: {chain}")
        files.append((current, data))
        base = data.get("base_config")
        if not isinstance(base, str | None):
            wrong = refusal(f"base_config in {current}", found=shown(base), allowed="the path of a deploy YAML")
            raise UnreadableError(str(wrong))
        current = None if base is None else current.parent / base
    return dict(files[::-1])


def _load(path: Path) -> Mapping[Any, Any]:
    try:
        data = OmegaConf.to_container(OmegaConf.load(path), resolve=True)
    except Exception as error:  # OmegaConf has its own tree of errors
        raise UnreadableError(f"{path}: cannot be read as a deploy YAML: {error}") from error
    if not isinstance(data, dict):
        wrong = refusal(str(path), found=shown(data), allowed="a mapping at the top level of a deploy YAML")
        raise UnreadableError(str(wrong))
    return data


def _block(path: Path, data: Mapping[Any, Any]) -> Block:
    words = (key for key in data if isinstance(key, str))
    alike = (word for word in words if difflib.get_close_matches(word.lower(), [KEY], cutoff=_LOOKALIKE_RATIO))
    return Block(path, data.get(KEY, ABSENT), tuple(key for key in alike if key != KEY))
