"""What the ``fastpath:`` blocks of a deploy YAML's chain and the environment on top of them come to."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from pydantic import BaseModel, ConfigDict, ValidationError

from omni_fastpath import envs, values
from omni_fastpath.declare import Options, Patch
from omni_fastpath.deployyaml import ABSENT, KEY, Block, read_blocks
from omni_fastpath.envs import EnvChoices, OnUnsupported
from omni_fastpath.master import MASTER, master_off
from omni_fastpath.patches import GONE
from omni_fastpath.values import ConfigError, refusal, shown, unknown

__all__ = ["ConfigError", "Resolved", "resolve", "resolve_file"]

NOT_ASKED_FOR = "not asked for"


@dataclass(frozen=True)
class Resolved:
    """What YAML and environment come to.

    Attributes:
        enabled: The patches that are on, in the order of their declarations, with their values.
        off: Every other patch with the reason.
        lacking: Those of them that were asked for, and are off because a patch that they require is.
        origins: Who switched a patch on or off; empty for one that nobody mentions.
        on_unsupported: What an unsupported or failed patch does to the start of the server.
        source: The deploy YAML; None when there is none.
        unknown: Variables in our namespace that mean nothing, one line each, where nothing is on that they could miss.
    """

    enabled: Mapping[str, Options]
    off: Mapping[str, str]
    origins: Mapping[str, str]
    on_unsupported: OnUnsupported = "warn"
    source: str | None = None
    unknown: tuple[str, ...] = ()
    lacking: frozenset[str] = frozenset()

    @property
    def asked(self) -> bool:
        """Whether anything is on."""
        return bool(self.enabled)

    def to_json(self) -> str:
        """This as text, for ``from_json`` in a process with the same declarations."""
        return values.to_json(
            {
                "enabled": {name: options.model_dump(mode="json") for name, options in self.enabled.items()},
                "off": dict(self.off),
                "lacking": sorted(self.lacking),
                "origins": dict(self.origins),
                "on_unsupported": self.on_unsupported,
                "source": self.source,
            }
        )

    @classmethod
    def from_json(cls, text: str, patches: Sequence[Patch]) -> Resolved:
        """Read what ``to_json`` wrote.

        Raises:
            ConfigError: The text is something else, or names a patch or a value that is not declared here.
        """
        try:
            wire = _Wire.model_validate_json(text)
        except ValidationError as error:
            raise ConfigError(f"found no resolved configuration: {error}") from None
        declared = {patch.name: patch for patch in patches}
        for name in (*wire.enabled, *wire.off):
            if name not in declared:
                raise unknown("resolved configuration", name, declared)
        return cls(
            enabled={name: _options(declared[name], given, _wire_place(name)) for name, given in wire.enabled.items()},
            off=wire.off,
            lacking=frozenset(wire.lacking),
            origins=wire.origins,
            on_unsupported=wire.on_unsupported,
            source=wire.source,
        )


class _Wire(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True)

    enabled: dict[str, dict[str, Any]]
    off: dict[str, str]
    lacking: list[str]
    origins: dict[str, str]
    on_unsupported: OnUnsupported
    source: str | None


def _wire_place(name: str) -> Callable[[str], str]:
    return lambda key: f"resolved configuration, {name}.{key}"


# Merging the blocks of a chain


@dataclass(frozen=True)
class _Listed:
    """What the chain so far says about a patch. Its values outlive a ``false``: a later ``true`` finds them again."""

    on: bool
    origin: str
    values: Mapping[str, Any] = field(default_factory=dict)
    places: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class _Merged:
    """The chain so far. ``given`` is false for an absent block and for one that is off as a whole."""

    given: bool = False
    listed: Mapping[str, _Listed] = field(default_factory=dict)
    unlisted: str = NOT_ASKED_FOR
    on_unsupported: OnUnsupported | None = None


def _merge(blocks: Sequence[Block], patches: Sequence[Patch], gone: Mapping[str, str]) -> _Merged:
    """Fold the chain, base first."""
    merged = _Merged()
    for block in blocks:
        merged = _overlaid(merged, block, patches, gone)
    return merged


def _overlaid(inherited: _Merged, block: Block, patches: Sequence[Patch], gone: Mapping[str, str]) -> _Merged:
    """One more file on top: without the key as before, off forgets all below, ``true`` keeps it or is the default set.

    A mapping changes what it names, key by key.
    """
    value = block.value
    if value is ABSENT:
        return inherited
    if value is None or value is False or value == {}:
        return _Merged(unlisted=f"{block.place()} is {json.dumps(value)}")
    if value is True:
        return inherited if inherited.given else _default_set(f"{KEY}: true in {block.path}", patches)
    if not isinstance(value, dict):
        raise refusal(block.place(), found=shown(value), allowed="true, false or a mapping of patches")
    return _key_by_key(inherited if inherited.given else _Merged(), block, patches, gone)


def _default_set(by: str, patches: Sequence[Patch]) -> _Merged:
    return _Merged(
        given=True,
        listed={patch.name: _Listed(on=True, origin=f"default set ({by})") for patch in patches if patch.default_on},
        unlisted=f"not in the default set ({by})",
    )


def _key_by_key(inherited: _Merged, block: Block, patches: Sequence[Patch], gone: Mapping[str, str]) -> _Merged:
    declared = {patch.name: patch for patch in patches}
    listed = dict(inherited.listed)
    on_unsupported = inherited.on_unsupported
    for key, value in block.value.items():
        if key == "on_unsupported":
            on_unsupported = _on_unsupported(block, value)
        elif key in declared:
            listed[key] = _patch_overlaid(listed.get(key), declared[key], block, value)
        else:
            raise unknown(block.place(str(key)), key, [*declared, "on_unsupported"], gone=gone.get(key))
    return _Merged(
        given=True,
        listed=listed,
        unlisted=f"not listed under {block.place()}",
        on_unsupported=on_unsupported,
    )


def _on_unsupported(block: Block, value: object) -> OnUnsupported:
    for word in envs.ON_UNSUPPORTED_WORDS:
        if value == word:
            return word
    words = envs.ON_UNSUPPORTED_WORDS
    raise refusal(
        block.place("on_unsupported"),
        found=shown(value),
        allowed=" or ".join(words),
        nearest=values.nearest(value, words) if isinstance(value, str) else None,
    )


def _patch_overlaid(inherited: _Listed | None, patch: Patch, block: Block, value: object) -> _Listed:
    origin = block.place(patch.name)
    inherited = inherited or _Listed(on=False, origin=origin)
    if isinstance(value, bool):
        return _Listed(value, origin, inherited.values, inherited.places)
    if not isinstance(value, dict):
        keys = ", ".join(patch.options.model_fields)
        takes = f"true, false or a mapping of {keys}" if keys else "true or false"
        raise refusal(origin, found=shown(value), allowed=takes)
    values.check(patch.options, value, lambda key: block.place(patch.name, key), complete=False)
    return _Listed(
        on=True,
        origin=origin,
        values={**inherited.values, **value},
        places={**inherited.places, **{key: block.place(patch.name, key) for key in value}},
    )


# The environment on top, and what a patch requires


@dataclass(frozen=True)
class _Verdict:
    """One patch after YAML and environment.

    Attributes:
        on: Whether it is on.
        origin: Who said so; empty for nobody.
        reason: Why it is off.
        by_env: Whether the environment switched it off.
        is_lacking: Whether it was asked for, and is off because a patch that it requires is.
    """

    on: bool
    origin: str
    reason: str = ""
    by_env: bool = False
    is_lacking: bool = False


def resolve(
    blocks: Sequence[Block],
    environ: Mapping[str, str],
    patches: Sequence[Patch],
    *,
    gone: Mapping[str, str] = GONE,
    partial: bool = False,
) -> Resolved:
    """What the blocks of a chain and the environment come to.

    Args:
        blocks: From ``read_blocks``, the base first; empty without a deploy YAML.
        environ: The environment, which wins over the blocks.
        patches: The declarations.
        gone: Patches of earlier versions by name, with what became of each.
        partial: The YAML is still to come: a patch whose requirement nobody has switched on yet is off until then
            instead of refused.

    Raises:
        ConfigError: Anything that ``values.check`` and ``envs.read`` refuse, an unknown variable where something is on,
            and a patch that is on without one that it requires, unless the environment switched that one off.
    """
    source = str(blocks[-1].path) if blocks else None
    if master_off(environ):
        why = f"{MASTER}={environ[MASTER]}"
        names = [patch.name for patch in patches]
        return Resolved({}, dict.fromkeys(names, why), dict.fromkeys(names, why), source=source)
    choices = envs.read(environ, patches, gone)
    merged = _with_master(_merge(blocks, patches, gone), choices, environ, patches)
    said = {patch.name: _verdict(patch, merged, choices, environ) for patch in patches}
    verdicts = _with_requirements(said, patches, partial=partial)
    stages = len(frozenset[int]().union(*(block.stages for block in blocks)))
    if any(verdict.on for verdict in verdicts.values()):
        envs.refuse_unknown(choices)
    return Resolved(
        enabled={patch.name: _final(patch, merged, choices, stages) for patch in patches if verdicts[patch.name].on},
        off={name: verdict.reason for name, verdict in verdicts.items() if not verdict.on},
        lacking=frozenset(name for name, verdict in verdicts.items() if verdict.is_lacking),
        origins={name: verdict.origin for name, verdict in verdicts.items()},
        on_unsupported=choices.on_unsupported or merged.on_unsupported or "warn",
        source=source,
        unknown=choices.unknown,
    )


def resolve_file(
    path: str | Path | None,
    environ: Mapping[str, str],
    patches: Sequence[Patch],
    *,
    gone: Mapping[str, str] = GONE,
) -> Resolved:
    """``resolve`` for a deploy YAML, which is not even opened under ``OMNI_FASTPATH=0``.

    Raises:
        ConfigError: As ``read_blocks`` and ``resolve``.
    """
    if path is None or master_off(environ):
        return resolve([], environ, patches, gone=gone)
    return resolve(read_blocks(path), environ, patches, gone=gone)


def _with_master(merged: _Merged, choices: EnvChoices, environ: Mapping[str, str], patches: Sequence[Patch]) -> _Merged:
    """``OMNI_FASTPATH=1``: the default set, unless the YAML switches something on; values that it gives stay."""
    if not choices.master or any(listed.on for listed in merged.listed.values()):
        return merged
    default = _default_set(f"{MASTER}={environ[MASTER]}", patches)
    with_values = {
        name: _Listed(on=True, origin=listed.origin, values=said.values, places=said.places)
        if (said := merged.listed.get(name))
        else listed
        for name, listed in default.listed.items()
    }
    return _Merged(True, {**merged.listed, **with_values}, default.unlisted, merged.on_unsupported)


def _verdict(patch: Patch, merged: _Merged, choices: EnvChoices, environ: Mapping[str, str]) -> _Verdict:
    switched = choices.switches.get(patch.name)
    if switched is not None:
        variable = f"{patch.env}={environ[patch.env]}"
        return _Verdict(on=switched, origin=variable, reason="" if switched else variable, by_env=not switched)
    listed = merged.listed.get(patch.name)
    if listed is None:
        return _Verdict(on=False, origin="", reason=merged.unlisted)
    return _Verdict(on=listed.on, origin=listed.origin, reason="" if listed.on else f"{listed.origin} is false")


def _with_requirements(
    verdicts: Mapping[str, _Verdict], patches: Sequence[Patch], *, partial: bool
) -> Mapping[str, _Verdict]:
    """Switch off what requires a patch that the environment switched off; refuse what else lacks a requirement."""
    verdicts = _without_dependants(verdicts, patches, lambda missing: missing.by_env)
    lacking = next(_lacking(verdicts, patches), None)
    if lacking is not None and not partial:
        raise _contradiction(*lacking, verdicts, patches)
    return _without_dependants(verdicts, patches, lambda _: True)


def _lacking(verdicts: Mapping[str, _Verdict], patches: Sequence[Patch]) -> Iterator[tuple[Patch, str]]:
    """Every patch that is on, with each of its requirements that is off."""
    for patch in patches:
        if verdicts[patch.name].on:
            yield from ((patch, name) for name in patch.requires if not verdicts[name].on)


def _without_dependants(
    verdicts: Mapping[str, _Verdict], patches: Sequence[Patch], counts: Callable[[_Verdict], bool]
) -> Mapping[str, _Verdict]:
    """Switch off dependants until none is left; one that goes off may be what another requires."""
    verdicts = dict(verdicts)
    lacking = [(patch, missing) for patch, missing in _lacking(verdicts, patches) if counts(verdicts[missing])]
    while lacking:
        patch, missing = lacking[0]
        why = verdicts[missing]
        verdicts[patch.name] = _Verdict(
            on=False,
            origin=why.origin,
            reason=f"requires {missing}, which is off: {why.reason}",
            by_env=why.by_env,
            is_lacking=True,
        )
        lacking = [(patch, missing) for patch, missing in _lacking(verdicts, patches) if counts(verdicts[missing])]
    return verdicts


def _contradiction(
    patch: Patch, missing: str, verdicts: Mapping[str, _Verdict], patches: Sequence[Patch]
) -> ConfigError:
    required = next(each for each in patches if each.name == missing)
    return ConfigError(
        f"{KEY}.{patch.name} is on ({verdicts[patch.name].origin}) and requires {KEY}.{missing}, "
        f"which is off: {verdicts[missing].reason}; switch {missing} on ({KEY}.{missing}: true or {required.env}=1) "
        f"or {patch.name} off"
    )


def _final(patch: Patch, merged: _Merged, choices: EnvChoices, stages: int) -> Options:
    """The values of a patch that is on: its defaults, the YAML's, the environment's. ``stages`` is 0 if not known."""
    listed = merged.listed.get(patch.name) or _Listed(on=True, origin="")
    from_env = choices.values.get(patch.name, {})
    places = {**listed.places, **{key: envs.place(patch, key) for key in from_env}}
    # A rule over several keys has no place of its own; it names all that were given.
    everywhere = ", ".join(dict.fromkeys(places.values())) or f"{KEY}.{patch.name}"
    options = _options(patch, {**listed.values, **from_env}, lambda key: places.get(key, everywhere))
    broken = options.broken_rule(stages)
    if broken is not None:
        key, rule = broken
        raise refusal(places.get(key, everywhere), found=shown(getattr(options, key)), allowed=rule)
    return options


def _options(patch: Patch, given: Mapping[str, Any], place: Callable[[str], str]) -> Options:
    checked = values.check(patch.options, given, place)
    assert checked is not None, "check returns the options of a complete set of values"
    return checked
