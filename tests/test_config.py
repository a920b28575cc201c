"""What a block and the environment come to: words and values, refusals, transport."""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal

import pytest
from pydantic import ByteSize, Field

from omni_fastpath import config
from omni_fastpath.config import ABSENT, Block, ConfigError, Resolved, resolve
from omni_fastpath.declare import Options
from omni_fastpath.process_role import BOOLEAN_WORDS, HANDOFF, master_off
from tests.fakes.upstream import patch


class PumpOptions(Options):
    """Values of every kind that a declaration has."""

    items: int = Field(default=16, ge=1, le=64, description="items that one pass takes")
    floor: float = Field(default=0.1, gt=0, lt=0.5)
    eager: bool = True
    order: Literal["near_first", "far_first"] = "near_first"
    tasks: int | None = Field(default=8, ge=1)
    size: ByteSize | None = Field(default=ByteSize(1024), ge=2)


PIPE = patch("pipe")
PUMP = patch("pump", options=PumpOptions, requires=("pipe",))
VALVE = patch("valve", options=PumpOptions, default_on=False)
MADE_UP = (PIPE, PUMP, VALVE)


def block(value: Any) -> Block:
    """A block with this value."""
    return Block(Path("file0.yaml"), value)


def outcome(value: Any = ABSENT, environ: Mapping[str, str] | None = None) -> dict[str, dict[str, Any]]:
    """What is on, with the values that are not the defaults."""
    resolved = resolve(block(value), environ or {}, MADE_UP)
    return {name: options.model_dump(exclude_defaults=True) for name, options in resolved.enabled.items()}


def refused(value: Any = ABSENT, environ: Mapping[str, str] | None = None) -> str:
    """The message with which they are refused."""
    with pytest.raises(ConfigError) as error:
        resolve(block(value), environ or {}, MADE_UP)
    return str(error.value)


DEFAULT_SET: dict[str, Any] = {"pipe": {}, "pump": {}}


@pytest.mark.parametrize(
    ("value", "environ", "expected"),
    [
        (True, {}, ("warn", None)),
        ({"on_unsupported": "fail", "on_unlisted": "same_code"}, {}, ("fail", "same_code")),
        ({"on_unsupported": "warn"}, {"OMNI_FASTPATH_ON_UNSUPPORTED": "FAIL"}, ("fail", None)),
    ],
)
def test_two_keys_are_rules(value: Any, environ: dict[str, str], expected: tuple[str, str | None]) -> None:
    """The environment wins over the keys, and stages get them."""
    found = Resolved.from_json(resolve(block(value), environ, MADE_UP).to_json(), MADE_UP)
    assert (found.on_unsupported, found.on_unlisted) == expected


@pytest.mark.parametrize(
    ("value", "environ", "expected"),
    [
        *[(off, {}, {}) for off in (ABSENT, False, None, {})],
        (True, {}, DEFAULT_SET),
        ({"pump": {"items": 3}}, {}, {"pipe": {}, "pump": {"items": 3}}),
        ({"valve": {}}, {}, {"valve": {}}),
        ({"valve": False, "pipe": True}, {}, {"pipe": {}}),
        (ABSENT, {"OMNI_FASTPATH": "1"}, DEFAULT_SET),
        ({"valve": True}, {"OMNI_FASTPATH": "1"}, {"valve": {}}),
        ({"pump": False, "pipe": False}, {"OMNI_FASTPATH": "1"}, DEFAULT_SET),
        (ABSENT, {"OMNI_FASTPATH": "1", "OMNI_FASTPATH_PUMP": "0"}, {"pipe": {}}),
        (True, {"OMNI_FASTPATH": "0", "OMNI_FASTPATH_VALVE": "1"}, {}),
        ({"pipe": True}, {"OMNI_FASTPATH_VALVE": "on"}, {"pipe": {}, "valve": {}}),
        (ABSENT, {"OMNI_FASTPATH_VALVE__ITEMS": "3"}, {}),
        ({"valve": {"items": 3}}, {"OMNI_FASTPATH_VALVE__ITEMS": "4"}, {"valve": {"items": 4}}),
    ],
)  # fmt: skip
def test_what_is_on(value: Any, environ: dict[str, str], expected: dict[str, Any]) -> None:
    """Off, the default set, or the listed patches with their values. Variables win over each kind of block."""
    assert outcome(value, environ) == expected


@pytest.mark.parametrize(
    ("value", "environ", "origin", "reason"),
    [
        (ABSENT, {}, "", "not asked for"),
        (None, {}, "", "fastpath in file0.yaml is null"),
        (True, {}, "", "not in the default set (fastpath: true in file0.yaml)"),
        ({"pipe": True}, {}, "", "not listed under fastpath in file0.yaml"),
        ({"valve": False}, {}, "fastpath.valve in file0.yaml", "fastpath.valve in file0.yaml is false"),
        ({"valve": True}, {"OMNI_FASTPATH_VALVE": "0"}, "OMNI_FASTPATH_VALVE=0", "OMNI_FASTPATH_VALVE=0"),
        ({"valve": True}, {}, "fastpath.valve in file0.yaml", None),
    ],
)
def test_origin_and_reason(value: Any, environ: dict[str, str], origin: str, reason: str | None) -> None:
    """The origin and the reason name the file, variable or default set that decided."""
    resolved = resolve(block(value), environ, MADE_UP)
    assert (resolved.origins["valve"], resolved.off.get("valve")) == (origin, reason)
    assert set(resolved.off) | set(resolved.enabled) == {"pipe", "pump", "valve"}


# Requirements


@pytest.mark.parametrize(
    ("value", "environ"),
    [
        ({"pipe": False, "pump": True}, {}),
        (ABSENT, {"OMNI_FASTPATH_PIPE": "0", "OMNI_FASTPATH": "1"}),
        ({"pump": True}, {"OMNI_FASTPATH_PIPE": "0"}),
    ],
)
def test_contradictions_are_refused(value: Any, environ: dict[str, str]) -> None:
    """A patch that is on while what it requires is off by name, in files or variables, names both keys."""
    message = refused(value, environ)
    assert message.startswith("fastpath.pump is on and requires fastpath.pipe, which is off: ")
    assert "OMNI_FASTPATH_PIPE=1" in message


@pytest.mark.parametrize(("value", "environ"), [({"mill": True}, {}), (ABSENT, {"OMNI_FASTPATH_MILL": "1"})])
def test_a_patch_brings_what_it_requires(value: Any, environ: dict[str, str]) -> None:
    """A patch enables all patches that it requires, and their origin names it."""
    resolved = resolve(block(value), environ, (PIPE, PUMP, patch("mill", requires=("pump",))))
    assert list(resolved.enabled) == ["pipe", "pump", "mill"]
    assert (resolved.origins["pipe"], resolved.origins["pump"]) == ("required by pump", "required by mill")


# What a block may hold


@pytest.mark.parametrize(
    ("value", "parts"),
    [
        (3, ["fastpath in file0.yaml", "found 3", "true, false or a mapping"]),
        ({"POMP": True}, ["fastpath.POMP in file0.yaml", "(did you mean 'pump'?); allowed: pipe, pump, valve, on_un"]),
        ({"on_unsupported": "fial"}, ["on_unsupported in", "found 'fial'", "warn or fail", "did you mean 'fail'?"]),
        ({"valve": 3}, ["fastpath.valve in file0.yaml", "found 3", "true, false or a mapping of items, floor"]),
        ({"pipe": {"items": 1}}, ["fastpath.pipe.items", "allowed: no keys"]),
        ({"valve": {"item": 3}}, ["fastpath.valve.item in file0.yaml", "'item' (did you mean 'items'?); allowed"]),
        ({"valve": {"items": 0}}, ["valve.items in file0.yaml", "found 0", "an integer at least 1 and at most 64"]),
        ({"valve": {"items": "3"}}, ["found '3'"]),
        ({"valve": {"floor": float("inf")}}, ["fastpath.valve.floor", "found inf"]),
        ({"valve": {"eager": 1}}, ["fastpath.valve.eager", "found 1", "true or false"]),
        ({"valve": {"order": "far"}}, ["fastpath.valve.order", "found 'far'", "'near_first' or 'far_first'"]),
        ({"valve": {"size": "lots"}}, ["found 'lots'", "a size such as 256MiB, at least 2 or null"]),
        ({"valve": {"items": "x" * 500}}, ["found 'xxx", "..."]),
    ],
)  # fmt: skip
def test_wrong_blocks_are_refused_with_everything_one_needs(value: Any, parts: list[str]) -> None:
    """A refusal names the path, the file, what was found, what is allowed and the nearest spelling."""
    message = refused(value)
    assert [part for part in parts if part not in message] == []
    assert "x" * 100 not in message


def test_a_refusal_names_every_wrong_key() -> None:
    """The message has a line for each wrong key of the file and of variables."""
    environ = {"OMNI_FASTPATH_PIPE": "maybe", "OMNI_FASTPATH_VALVE__ORDER": "up", "OMNI_FASTPATH_VALV": "1"}
    found = refused({"valve": {"items": 0, "floor": 2}, "x": 1}, environ=environ).splitlines()
    names = "fastpath.valve.items fastpath.valve.floor fastpath.x OMNI_FASTPATH_PIPE OMNI_FASTPATH_VALVE__ORDER"
    assert [re.split("[ :]", line)[0] for line in found] == [*names.split(), "OMNI_FASTPATH_VALV"]


# What a variable may hold


@pytest.mark.parametrize(("words", "on"), [("1 true on yes TRUE On", True), ("0 false off no FALSE nO", False)])
def test_boolean_words(words: str, on: bool) -> None:
    """These words switch, whatever their case."""
    for word in (*words.split(), f" {words.split(maxsplit=1)[0]} "):
        assert (outcome(environ={"OMNI_FASTPATH_PIPE": word}) == {"pipe": {}}) is on
        assert master_off({"OMNI_FASTPATH": word}) is not on


@pytest.mark.parametrize("word", ["-", "2", "enable"])
@pytest.mark.parametrize("name", ["OMNI_FASTPATH", "OMNI_FASTPATH_PIPE"])
def test_other_words_are_refused(name: str, word: str) -> None:
    """Any other word is refused by the variable's name and does not mean off."""
    assert refused(environ={name: word}) == f"{name}: found {word!r}; allowed: {BOOLEAN_WORDS}"


@pytest.mark.parametrize("empty", ["", " "])
def test_an_empty_variable_is_not_set(empty: str) -> None:
    """Variables with empty values, which compose files and Helm charts create, count as unset."""
    names = ("", "_PIPE", "_VALVE__ITEMS", "_ON_UNSUPPORTED", "_ON_UNLISTED", "_NO_SUCH")
    environ = {f"OMNI_FASTPATH{name}": empty for name in names}
    assert resolve(None, environ, MADE_UP) == resolve(None, {}, MADE_UP)
    assert outcome(True, environ=environ) == DEFAULT_SET
    assert config.set_variables(environ, MADE_UP) == []


@pytest.mark.parametrize(
    ("key", "text", "value"),
    [
        ("items", " 3 ", 3),
        ("floor", "1e-3", 0.001),
        ("eager", "off", False),
        ("order", "far_first", "far_first"),
        ("tasks", "null", None),
        ("size", "256MiB", 256 * 2**20),
    ],
)
def test_values_are_read_by_their_type(key: str, text: str, value: Any) -> None:
    """The text of a variable becomes a value of the key's type and does not switch the patch on."""
    environ = {f"OMNI_FASTPATH_VALVE__{key.upper()}": text}
    assert not resolve(None, environ, MADE_UP).enabled
    found = getattr(resolve(block({"valve": True}), environ, MADE_UP).enabled["valve"], key)
    assert found == value
    assert isinstance(found, type(value))


REMOVED = r"(__ORDER|\.order in .*): removed in 0\.4, .*; leave it out$"


def test_what_was_removed_is_refused_with_a_sentence() -> None:
    """In a YAML and as a variable: what to do instead, and not the list of what is allowed."""
    from omni_fastpath.patches import PATCHES

    with pytest.raises(ConfigError, match=REMOVED):
        resolve(block({"budgeted_drain": {"order": "visible_first"}}), {}, PATCHES)
    with pytest.raises(ConfigError, match=REMOVED):
        resolve(None, {"OMNI_FASTPATH": "1", "OMNI_FASTPATH_BUDGETED_DRAIN__ORDER": "0"}, PATCHES)


@pytest.mark.parametrize(
    ("name", "nearest"),
    [
        ("OMNI_FASTPATH_pump", "OMNI_FASTPATH_PUMP"),
        ("OMNI_FASTPATH_PUMP_ITEMS", "OMNI_FASTPATH_PUMP__ITEMS"),
        ("OMNI_FASTPATH_PORTS", "OMNI_FASTPATH"),
    ],
)
def test_an_unknown_variable_refuses_beside_what_is_on(name: str, nearest: str) -> None:
    """A misspelt variable is reported with the nearest name, and refuses the start if a patch is on."""
    environ = {name: "1"}
    for off in (ABSENT, False, {"pipe": False}):
        [line] = resolve(block(off), environ, MADE_UP).unknown
        assert line.startswith(f"{name}: found an unknown variable (did you mean {nearest!r}?); allowed: OMNI_")
    assert refused({"pipe": True}, environ=environ) == line
    assert refused(environ={**environ, "OMNI_FASTPATH": "1"}) == line


def test_a_misspelt_name_that_would_have_no_effect_is_a_warning() -> None:
    """A key or variable whose name is close to ours never refuses a start, but is told. Others are not."""
    environ = {"OMNI_FASTPAHT_PIPE": "1", "omni_fastpath": "0", "OMNI_PATH": "1", "PATH": "/bin", HANDOFF: "{}"}
    misspelt = config.block_of("a.yaml", {"stages": [], "omni_fastpath": True, "async_chunk": 1})
    told = [line.partition(" has no effect")[0] for line in resolve(misspelt, environ, MADE_UP).unknown]
    assert told == ["'omni_fastpath' in a.yaml", "OMNI_FASTPAHT_PIPE", "omni_fastpath"]
    assert resolve(config.block_of("a.yaml", {"fastpath": True, "fast_path": 1}), {}, MADE_UP).unknown == ()
