"""The ``fastpath:`` blocks of a chain: merging, the environment on top, requirements, values, transport."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar, Literal

import pytest
import yaml
from pydantic import ByteSize, Field, model_validator

from omni_fastpath.config import ConfigError, Resolved, resolve, resolve_file
from omni_fastpath.declare import Counter, Fit, Options, Patch, Process
from omni_fastpath.deployyaml import ABSENT, Block, read_blocks
from omni_fastpath.patches import PATCHES


class PumpOptions(Options):
    """Values of every kind that a declaration may have."""

    items: int = Field(default=16, ge=1, le=64, description="items that one pass takes")
    floor: float = Field(default=0.1, gt=0, lt=0.5)
    pace: float = Field(default=1.0, ge=0)
    eager: bool = True
    order: Literal["near_first", "far_first"] = "near_first"
    tasks: int | None = Field(default=8, ge=1)
    size: ByteSize = Field(default=ByteSize(1024))

    @model_validator(mode="after")
    def _near_is_small(self) -> PumpOptions:
        if self.order == "near_first" and self.items > 32:
            raise ValueError("near_first takes at most 32 items")
        return self


def made_up(name: str, **extra: Any) -> Patch:
    """A declaration that no process installs."""
    return Patch(
        name=name,
        summary=f"{name} in a line",
        processes=frozenset({Process.SERVER}),
        rows=(Fit(releases=("0.30.0",), seams=()),),
        docs="",
        counters=(Counter("done", "work done"),),
        **extra,
    )


PIPE = made_up("pipe")
PUMP = made_up("pump", options=PumpOptions, requires=("pipe",))
VALVE = made_up("valve", options=PumpOptions, default_on=False)
MADE_UP = (PIPE, PUMP, VALVE)


def chain(*overlays: Any) -> list[Block]:
    """Blocks with these values, the base first."""
    return [Block(Path(f"file{index}.yaml"), value) for index, value in enumerate(overlays)]


def outcome(
    *overlays: Any, environ: Mapping[str, str] | None = None, patches: Sequence[Patch] = MADE_UP
) -> dict[str, dict[str, Any]]:
    """What is on, with the values that are not the defaults."""
    resolved = resolve(chain(*overlays), environ or {}, patches)
    return {name: options.model_dump(exclude_defaults=True) for name, options in resolved.enabled.items()}


DEFAULT_SET: dict[str, Any] = {"pipe": {}, "pump": {}}


OFF: tuple[Any, ...] = (False, None, {})


@pytest.mark.parametrize(
    ("overlays", "expected"),
    [
        ((), {}),
        ((ABSENT,), {}),
        ((True, ABSENT), DEFAULT_SET),
        (({"pipe": True}, ABSENT), {"pipe": {}}),
        ((False, ABSENT), {}),
        *[((inherited, off), {}) for inherited in (ABSENT, True, {"pipe": True}, False) for off in OFF],
        ((True,), DEFAULT_SET),
        *[((off, True), DEFAULT_SET) for off in (ABSENT, *OFF)],
        (({"valve": {"items": 3}}, True), {"valve": {"items": 3}}),
        ((True, True), DEFAULT_SET),
        *[((off, {"pipe": True}), {"pipe": {}}) for off in (ABSENT, *OFF)],
        (
            ({"pipe": True, "pump": {"items": 3}}, {"pump": {"floor": 0.2}}),
            {"pipe": {}, "pump": {"items": 3, "floor": 0.2}},
        ),
        (({"pipe": True, "pump": {"items": 3}}, {"pump": {"items": 4}}), {"pipe": {}, "pump": {"items": 4}}),
        (({"pipe": True}, {"valve": True}), {"pipe": {}, "valve": {}}),
        ((True, {"valve": True}), {**DEFAULT_SET, "valve": {}}),
        ((True, {"pump": False}), {"pipe": {}}),
        ((True, {"pump": {"items": 3}}), {"pipe": {}, "pump": {"items": 3}}),
        ((True, {"on_unsupported": "fail"}), DEFAULT_SET),
        (({"valve": {"items": 3}}, {"valve": False}), {}),
        (({"valve": {"items": 3}}, {"valve": True}), {"valve": {"items": 3}}),
        (({"valve": False}, {"valve": True}), {"valve": {}}),
        (({"valve": False}, {"valve": {"items": 3}}), {"valve": {"items": 3}}),
        (({"valve": {}},), {"valve": {}}),
        (({"valve": {"items": 3}}, {"valve": False}, {"valve": True}), {"valve": {"items": 3}}),
        (({"valve": {"items": 3}}, False, {"valve": True}), {"valve": {}}),
        (({"valve": {"items": 3}}, ABSENT, {"valve": {"floor": 0.2}}), {"valve": {"items": 3, "floor": 0.2}}),
        (({"valve": False}, True), {}),
        (({"on_unsupported": "fail"},), {}),
    ],
)
def test_blocks_merge_by_the_table(overlays: tuple[Any, ...], expected: dict[str, Any]) -> None:
    """Each row of the merge table, and rows chained, give exactly these patches and values."""
    assert outcome(*overlays) == expected


@pytest.mark.parametrize(
    ("overlays", "environ", "expected"),
    [
        ((), {}, "warn"),
        (({"on_unsupported": "fail"},), {}, "fail"),
        (({"on_unsupported": "fail"}, True), {}, "fail"),
        (({"on_unsupported": "fail"}, {"pipe": True}), {}, "fail"),
        (({"on_unsupported": "fail"}, {"on_unsupported": "warn"}), {}, "warn"),
        (({"on_unsupported": "fail"}, False, True), {}, "warn"),
        ((True,), {"OMNI_FASTPATH_ON_UNSUPPORTED": "fail"}, "fail"),
        (({"on_unsupported": "fail"},), {"OMNI_FASTPATH_ON_UNSUPPORTED": "warn"}, "warn"),
    ],
)
def test_on_unsupported_merges_like_a_key(overlays: tuple[Any, ...], environ: dict[str, str], expected: str) -> None:
    """The key is inherited, overlaid, forgotten when the block is off, and the environment wins."""
    assert resolve(chain(*overlays), environ, MADE_UP).on_unsupported == expected


@pytest.mark.parametrize(
    ("overlays", "environ", "expected"),
    [
        ((), {"OMNI_FASTPATH": "1"}, DEFAULT_SET),
        ((False,), {"OMNI_FASTPATH": "1"}, DEFAULT_SET),
        (({"valve": True},), {"OMNI_FASTPATH": "1"}, {"valve": {}}),
        (({"pump": False, "pipe": False},), {"OMNI_FASTPATH": "1"}, DEFAULT_SET),
        (({"pipe": True, "pump": {"items": 3}}, {"pipe": False, "pump": False}), {"OMNI_FASTPATH": "1"},
         {"pipe": {}, "pump": {"items": 3}}),
        ((), {"OMNI_FASTPATH": "1", "OMNI_FASTPATH_VALVE": "1"}, {**DEFAULT_SET, "valve": {}}),
        ((), {"OMNI_FASTPATH": "1", "OMNI_FASTPATH_PUMP": "0"}, {"pipe": {}}),
        ((True,), {"OMNI_FASTPATH": "0"}, {}),
        ((), {"OMNI_FASTPATH": "0", "OMNI_FASTPATH_VALVE": "1"}, {}),
        ((), {"OMNI_FASTPATH_VALVE": "1"}, {"valve": {}}),
        ((False,), {"OMNI_FASTPATH_VALVE": "1"}, {"valve": {}}),
        (({"valve": {"items": 3}}, {"valve": False}), {"OMNI_FASTPATH_VALVE": "on"}, {"valve": {"items": 3}}),
        ((True,), {"OMNI_FASTPATH_PUMP": "no"}, {"pipe": {}}),
        ((), {"OMNI_FASTPATH_VALVE__ITEMS": "3"}, {}),
        ((), {"OMNI_FASTPATH_VALVE__ITEMS": "3", "OMNI_FASTPATH_VALVE": "1"}, {"valve": {"items": 3}}),
        (({"valve": {"items": 3}},), {"OMNI_FASTPATH_VALVE__ITEMS": "4"}, {"valve": {"items": 4}}),
        (({"valve": {"items": 3}},), {"OMNI_FASTPATH_VALVE__FLOOR": "0.2"}, {"valve": {"items": 3, "floor": 0.2}}),
    ],
)  # fmt: skip
def test_environment_wins_over_the_blocks(
    overlays: tuple[Any, ...], environ: dict[str, str], expected: dict[str, Any]
) -> None:
    """Each row of the table of variables over each kind of block gives exactly these patches and values."""
    assert outcome(*overlays, environ=environ) == expected


def test_master_off_validates_nothing(tmp_path: Path) -> None:
    """Under ``OMNI_FASTPATH=0`` wrong variables, wrong blocks and an unreadable YAML do not stop a server."""
    environ = {"OMNI_FASTPATH": "off", "OMNI_FASTPATH_NOBODY": "maybe", "OMNI_FASTPATH_PUMP__ITEMS": "x"}
    resolved = resolve(chain({"nobody": 3}), environ, MADE_UP)
    assert not resolved.asked
    assert set(resolved.off.values()) == {"OMNI_FASTPATH=off"}
    assert not resolve_file(tmp_path / "missing.yaml", environ, MADE_UP).asked


@pytest.mark.parametrize(
    ("overlays", "environ", "origins"),
    [
        (({"pipe": True},), {}, {"pipe": "fastpath.pipe in file0.yaml", "pump": "", "valve": ""}),
        (({"pipe": True}, {"pipe": False}), {}, {"pipe": "fastpath.pipe in file1.yaml", "pump": "", "valve": ""}),
        (
            (True,),
            {"OMNI_FASTPATH_VALVE": "yes"},
            {
                "pipe": "default set (fastpath: true in file0.yaml)",
                "pump": "default set (fastpath: true in file0.yaml)",
                "valve": "OMNI_FASTPATH_VALVE=yes",
            },
        ),
        (
            (),
            {"OMNI_FASTPATH": "1"},
            {"pipe": "default set (OMNI_FASTPATH=1)", "pump": "default set (OMNI_FASTPATH=1)", "valve": ""},
        ),
    ],
)
def test_origins_say_who_switched(overlays: tuple[Any, ...], environ: dict[str, str], origins: dict[str, str]) -> None:
    """A patch's origin is the last file, the variable or the default set that decided; empty if nobody did."""
    assert resolve(chain(*overlays), environ, MADE_UP).origins == origins


@pytest.mark.parametrize(
    ("overlays", "environ", "reason"),
    [
        ((), {}, "not asked for"),
        ((False,), {}, "fastpath in file0.yaml is false"),
        ((None,), {}, "fastpath in file0.yaml is null"),
        (({},), {}, "fastpath in file0.yaml is {}"),
        ((True,), {}, "not in the default set (fastpath: true in file0.yaml)"),
        (({"pipe": True},), {}, "not listed under fastpath in file0.yaml"),
        (({"valve": False},), {}, "fastpath.valve in file0.yaml is false"),
        (({"valve": True},), {"OMNI_FASTPATH_VALVE": "0"}, "OMNI_FASTPATH_VALVE=0"),
        (({"valve": True},), {"OMNI_FASTPATH": "0"}, "OMNI_FASTPATH=0"),
    ],
)
def test_off_says_why(overlays: tuple[Any, ...], environ: dict[str, str], reason: str) -> None:
    """A patch that is off says which file, variable or silence left it off."""
    resolved = resolve(chain(*overlays), environ, MADE_UP)
    assert resolved.off["valve"] == reason
    assert set(resolved.off) | set(resolved.enabled) == {"pipe", "pump", "valve"}


@pytest.mark.parametrize(
    ("overlays", "environ"),
    [
        (({"pump": True},), {}),
        (({"pump": {"items": 3}, "pipe": False},), {}),
        (({"pipe": True, "pump": True}, {"pipe": False}), {}),
        ((True, {"pipe": False}), {}),
        ((), {"OMNI_FASTPATH_PUMP": "1"}),
        (({"pipe": False},), {"OMNI_FASTPATH_PUMP": "1"}),
    ],
)
def test_contradictions_are_refused(overlays: tuple[Any, ...], environ: dict[str, str]) -> None:
    """A patch that is on without its requirement, which the environment did not switch off, names both keys."""
    with pytest.raises(ConfigError) as refused:
        resolve(chain(*overlays), environ, MADE_UP)
    message = str(refused.value)
    for part in ("fastpath.pump", "fastpath.pipe", "OMNI_FASTPATH_PIPE=1"):
        assert part in message


@pytest.mark.parametrize(
    ("overlays", "environ", "on"),
    [
        ((True,), {"OMNI_FASTPATH_PIPE": "0"}, []),
        ((), {"OMNI_FASTPATH_PIPE": "0", "OMNI_FASTPATH_PUMP": "1"}, []),
        (({"pump": True},), {"OMNI_FASTPATH_PIPE": "0"}, []),
        (({"pump": True},), {"OMNI_FASTPATH_PIPE": "1"}, ["pipe", "pump"]),
        (({"pump": True},), {"OMNI_FASTPATH_PUMP": "0"}, []),
    ],
)
def test_the_environment_settles_requirements(
    overlays: tuple[Any, ...], environ: dict[str, str], on: list[str]
) -> None:
    """A requirement off by environment takes its dependants along; one on by environment makes a block whole."""
    assert list(resolve(chain(*overlays), environ, MADE_UP).enabled) == on


def test_a_chain_of_requirements_goes_off_together() -> None:
    """What requires a patch that went off for want of its own requirement goes off too, and says so."""
    patches = (PIPE, PUMP, made_up("mill", requires=("pump",)))
    resolved = resolve(chain(True), {"OMNI_FASTPATH_PIPE": "0"}, patches)
    assert not resolved.asked
    assert resolved.lacking == {"pump", "mill"}
    assert Resolved.from_json(resolved.to_json(), patches).lacking == {"pump", "mill"}
    assert resolved.off["pump"] == "requires pipe, which is off: OMNI_FASTPATH_PIPE=0"
    assert resolved.off["mill"].startswith("requires pump, which is off: requires pipe")
    assert resolved.origins["mill"] == "OMNI_FASTPATH_PIPE=0"


def test_partial_waits_for_the_yaml() -> None:
    """Before the YAML is read, a dependant whose requirement it may bring is off, not refused."""
    environ = {"OMNI_FASTPATH_PUMP": "1"}
    assert not resolve([], environ, MADE_UP, partial=True).asked
    assert list(resolve(chain({"pipe": True}), environ, MADE_UP).enabled) == ["pipe", "pump"]


@pytest.mark.parametrize(
    ("block", "parts"),
    [
        (3, ["fastpath in file0.yaml", "found 3", "true, false or a mapping"]),
        (1, ["fastpath in file0.yaml", "found 1"]),
        ("true", ["fastpath in file0.yaml", "found 'true'"]),
        ([], ["fastpath in file0.yaml", "found []"]),
        (["pump"], ["found ['pump']"]),
        ({"pomp": True}, ["fastpath.pomp in file0.yaml", "pipe, pump, valve, on_unsupported", "did you mean 'pump'?"]),
        ({"PUMP": True}, ["fastpath.PUMP", "did you mean 'pump'?"]),
        ({3: True}, ["fastpath.3 in file0.yaml", "an unknown key 3"]),
        ({"on_unsuported": "fail"}, ["did you mean 'on_unsupported'?"]),
        ({"on_unsupported": "fial"}, ["on_unsupported in", "found 'fial'", "warn or fail", "did you mean 'fail'?"]),
        ({"on_unsupported": True}, ["fastpath.on_unsupported", "found True"]),
        ({"on_unsupported": None}, ["fastpath.on_unsupported", "found None"]),
        ({"valve": 3}, ["fastpath.valve in file0.yaml", "found 3", "true, false or a mapping of items, floor"]),
        ({"valve": None}, ["fastpath.valve", "found None"]),
        ({"valve": []}, ["fastpath.valve", "found []"]),
        ({"valve": "on"}, ["fastpath.valve", "found 'on'"]),
        ({"pipe": {"items": 1}}, ["fastpath.pipe.items", "allowed: no keys"]),
        ({"pipe": 1}, ["fastpath.pipe", "allowed: true or false"]),
        ({"valve": {"item": 3}}, ["fastpath.valve.item in file0.yaml", "'item'", "did you mean 'items'?"]),
        ({"valve": {None: 3}}, ["fastpath.valve.None", "an unknown key None"]),
        ({"valve": {"items": 0}}, ["valve.items in file0.yaml", "found 0", "an integer from 1 to 64", "one pass"]),
        ({"valve": {"items": 65}}, ["found 65"]),
        ({"valve": {"items": True}}, ["fastpath.valve.items", "found True", "an integer"]),
        ({"valve": {"items": 3.0}}, ["found 3.0"]),
        ({"valve": {"items": "3"}}, ["found '3'"]),
        ({"valve": {"items": None}}, ["found None"]),
        ({"valve": {"floor": True}}, ["fastpath.valve.floor", "found True", "a number above 0", "below 0.5"]),
        ({"valve": {"pace": float("inf")}}, ["fastpath.valve.pace", "found inf", "a number at least 0"]),
        ({"valve": {"pace": float("nan")}}, ["found nan"]),
        ({"valve": {"eager": 1}}, ["fastpath.valve.eager", "found 1", "true or false"]),
        ({"valve": {"eager": "true"}}, ["found 'true'"]),
        ({"valve": {"order": "far"}}, ["fastpath.valve.order", "found 'far'", "'near_first' or 'far_first'"]),
        ({"valve": {"tasks": 0}}, ["fastpath.valve.tasks", "an integer at least 1 or null"]),
        ({"valve": {"size": "lots"}}, ["fastpath.valve.size", "found 'lots'", "256MiB"]),
        ({"valve": {"items": 40}}, ["fastpath.valve.items in file0.yaml", "near_first takes at most 32 items"]),
        ({"valve": {"items": "x" * 500}}, ["found 'xxx", "..."]),
    ],
)  # fmt: skip
def test_wrong_blocks_are_refused_with_everything_one_needs(block: Any, parts: list[str]) -> None:
    """A refusal names the path, the file, what was found, what is allowed and the nearest spelling."""
    with pytest.raises(ConfigError) as refused:
        resolve(chain(block), {}, MADE_UP)
    for part in parts:
        assert part in str(refused.value)
    assert "x" * 100 not in str(refused.value)


def test_a_wrong_base_is_refused_under_a_right_overlay() -> None:
    """A value is judged in the file that has it, even when an overlay replaces it or the patch is off."""
    for top in ({"valve": {"items": 3}}, {"valve": False}):
        with pytest.raises(ConfigError, match=r"fastpath\.valve\.items in file0\.yaml"):
            resolve(chain({"valve": {"items": 0}}, top), {}, MADE_UP)


def test_a_rule_over_several_keys_sees_the_whole() -> None:
    """A rule over two keys is judged on the merged values, not on one file's share of them."""
    assert outcome({"valve": {"items": 40}}, {"valve": {"order": "far_first"}}) == {
        "valve": {"items": 40, "order": "far_first"}
    }


def test_every_problem_of_a_patch_is_told_at_once() -> None:
    """One refusal lists all wrong values of a mapping, a line each."""
    with pytest.raises(ConfigError) as refused:
        resolve(chain({"valve": {"items": 0, "floor": 2}}), {}, MADE_UP)
    assert len(str(refused.value).splitlines()) == 2


def test_values_of_every_kind_arrive() -> None:
    """Strict validation still takes a null, a byte size with a unit, and an integer for a number."""
    enabled = resolve(chain({"valve": {"tasks": None, "size": "1KiB"}}), {}, MADE_UP).enabled["valve"]
    assert isinstance(enabled, PumpOptions)
    assert (enabled.tasks, enabled.size) == (None, 1024)


# What a block and a variable may hold


@pytest.mark.parametrize(
    "value",
    [{(1, 2): 3}, {"x": {1: {(2,): 3}}}, 16**5000, Path("a"), b"a", "\ud800"],
    ids=["tuple key", "inner tuple key", "huge", "path", "bytes", "surrogate"],
)
def test_values_that_no_process_could_be_told_are_refused(value: object) -> None:
    """Whatever a YAML tag or an escape makes of a value, it is refused by its key and is no error of ours."""
    with pytest.raises(ConfigError, match=r"fastpath\.pump\.items in a\.yaml: found .*allowed: "):
        resolve([Block(Path("a.yaml"), {"pump": {"items": value}})], {}, MADE_UP)


def test_an_unknown_variable_refuses_what_the_yaml_asks_for() -> None:
    """Beside a block that switches something on it is refused; beside one that does not it is only told."""
    environ = {"OMNI_FASTPATH_PUMPS": "1"}
    with pytest.raises(ConfigError, match="OMNI_FASTPATH_PUMPS"):
        resolve([Block(Path("a.yaml"), {"pipe": True})], environ, MADE_UP)
    for value in (False, {"pipe": False}, ABSENT):
        [line] = resolve([Block(Path("a.yaml"), value)], environ, MADE_UP).unknown
        assert "OMNI_FASTPATH_PUMPS" in line


# Transport


def test_json_carries_everything() -> None:
    """``from_json`` gives what ``to_json`` was given, values of every kind included."""
    block = {"pipe": True, "pump": {"items": 3, "tasks": None, "size": "1KiB", "floor": 0.25}, "on_unsupported": "fail"}
    resolved = resolve(chain(block), {"OMNI_FASTPATH_VALVE": "0"}, MADE_UP)
    assert Resolved.from_json(resolved.to_json(), MADE_UP) == resolved


@pytest.mark.parametrize(
    "text",
    [
        "",
        "3",
        "{}",
        '{"enabled": {}, "off": {}, "origins": {}, "on_unsupported": "maybe", "source": null}',
        '{"enabled": {"nobody": {}}, "off": {}, "origins": {}, "on_unsupported": "warn", "source": null}',
        '{"enabled": {}, "off": {"nobody": ""}, "origins": {}, "on_unsupported": "warn", "source": null}',
        '{"enabled": {"pump": {"items": 0}}, "off": {}, "origins": {}, "on_unsupported": "warn", "source": null}',
        '{"enabled": {}, "off": {}, "origins": {}, "on_unsupported": "warn", "source": null, "more": 1}',
    ],
)
def test_foreign_json_is_refused(text: str) -> None:
    """Text that is no resolved configuration of these declarations is a ConfigError, nothing else."""
    with pytest.raises(ConfigError):
        Resolved.from_json(text, MADE_UP)


# The shipped declarations


def test_the_shipped_default_set_stands_alone() -> None:
    """``fastpath: true`` is never a contradiction, and switches on exactly what the declarations say."""
    resolved = resolve(chain(True), {}, PATCHES)
    assert set(resolved.enabled) == {patch.name for patch in PATCHES if patch.default_on}


@pytest.mark.parametrize("patch", PATCHES, ids=lambda patch: patch.name)
def test_a_shipped_patch_can_be_switched_alone(patch: Patch) -> None:
    """Every shipped patch can be on by a block with its requirements, with its defaults written out."""
    written = yaml.safe_load(yaml.safe_dump(patch.options().model_dump(mode="json")))
    block = {**dict.fromkeys(patch.requires, True), patch.name: written or True}
    assert resolve(chain(block), {}, PATCHES).enabled[patch.name] == patch.options()


@pytest.mark.parametrize("patch", [patch for patch in PATCHES if patch.requires], ids=lambda patch: patch.name)
def test_a_shipped_requirement_is_enforced(patch: Patch) -> None:
    """A shipped patch on its own is refused by the name of what it requires."""
    with pytest.raises(ConfigError, match=f"requires fastpath.{patch.requires[0]}"):
        resolve(chain({patch.name: True}), {}, PATCHES)


# The rule that needs the number of stages

THREE_STAGES = "stages: [{stage_id: 0}, {stage_id: 1}, {stage_id: 2}]\n"
DRAIN = "fastpath: {{nonblocking_dequeue: true, budgeted_drain: {{floor: {}}}}}\n"
FLOOR_ENV = {"OMNI_FASTPATH": "1", "OMNI_FASTPATH_BUDGETED_DRAIN__FLOOR": "0.2"}


def write(path: Path, content: str) -> Path:
    """Write a file and return its path."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(content, encoding="utf-8")
    return path


def floor(path: Path, environ: Mapping[str, str] | None = None) -> float | None:
    """The floor that a deploy YAML and the environment come to."""
    found: Any = resolve_file(path, environ or {}, PATCHES).enabled["budgeted_drain"]
    value: float | None = found.floor
    return value


def refused_floor(path: Path, environ: Mapping[str, str] | None = None) -> str:
    """The message by which it is refused."""
    with pytest.raises(ConfigError) as refused:
        floor(path, environ)
    return str(refused.value)


def test_floors_that_promise_more_than_half_are_refused(tmp_path: Path) -> None:
    """The refusal names the key and its file, what was found, and what so many stages allow."""
    path = write(tmp_path / "deploy.yaml", THREE_STAGES + DRAIN.format(0.2))
    message = refused_floor(path)
    assert f"fastpath.budgeted_drain.floor in {path}" in message
    assert "found 0.2" in message
    assert "at most 0.167: 3 stages share 0.5" in message


@pytest.mark.parametrize(
    ("stages", "given", "found"),
    [
        (THREE_STAGES, "0.16", 0.16),
        (THREE_STAGES, "null", None),
        (THREE_STAGES, "0.0", 0.0),
        ("stages: [{stage_id: 0}, {stage_id: 1}]\n", "0.25", 0.25),
        ("stages: [{stage_id: 0}]\n", "0.5", 0.5),
        ("stages: [{stage_id: 0}, {stage_id: 0}]\n", "0.5", 0.5),
        ("", "0.5", 0.5),
        ("stages: []\n", "0.5", 0.5),
        ("stages: [{gpus: 1}, 3]\n", "0.5", 0.5),
    ],
)
def test_floors_that_fit_pass(tmp_path: Path, stages: str, given: str, found: float | None) -> None:
    """Up to a half together passes, and so does anything where the YAML names no stages."""
    assert floor(write(tmp_path / "deploy.yaml", stages + DRAIN.format(given))) == found


def test_stages_are_counted_over_the_whole_chain(tmp_path: Path) -> None:
    """A stage that two files name is one; the refusal names the file with the floor, wherever the stages stand."""
    write(tmp_path / "base.yaml", "stages: [{stage_id: 0}, {stage_id: 1}]\n" + DRAIN.format(0.2))
    one = write(tmp_path / "one.yaml", "base_config: base.yaml\nstages: [{stage_id: 1}]\n")
    assert floor(one) == 0.2
    more = write(tmp_path / "more.yaml", "base_config: one.yaml\nstages: [{stage_id: 1}, {stage_id: 2}]\n")
    assert [block.stages for block in read_blocks(more)] == [{0, 1}, {1}, {1, 2}]
    message = refused_floor(more)
    assert f"fastpath.budgeted_drain.floor in {tmp_path / 'base.yaml'}" in message
    assert "3 stages" in message


def test_an_overlays_floor_is_judged_by_its_bases_stages(tmp_path: Path) -> None:
    """The usual overlay names no stages; its floor counts, the base's that it replaces does not."""
    write(tmp_path / "base.yaml", THREE_STAGES + DRAIN.format(0.5))
    overlay_ = write(tmp_path / "top.yaml", "base_config: base.yaml\n" + DRAIN.format(0.1))
    assert floor(overlay_) == 0.1
    write(overlay_, "base_config: base.yaml\n" + DRAIN.format(0.2))
    assert f"fastpath.budgeted_drain.floor in {overlay_}" in refused_floor(overlay_)


def test_a_floor_by_environment_is_refused_by_its_variable(tmp_path: Path) -> None:
    """A variable's value is judged by the YAML's stages, and the refusal names the variable, not the file."""
    path = write(tmp_path / "deploy.yaml", THREE_STAGES)
    message = refused_floor(path, FLOOR_ENV)
    assert "OMNI_FASTPATH_BUDGETED_DRAIN__FLOOR" in message
    assert "found 0.2" in message
    assert "at most 0.167" in message
    assert str(path) not in message
    assert floor(write(path, THREE_STAGES + DRAIN.format(0.1))) == 0.1
    assert "OMNI_FASTPATH_BUDGETED_DRAIN__FLOOR" in refused_floor(path, FLOOR_ENV)


def test_a_floor_by_environment_without_stages_passes(tmp_path: Path) -> None:
    """Without a deploy YAML, or with one that names no stages, the number is not known and nothing is refused."""
    assert floor(write(tmp_path / "deploy.yaml", ""), FLOOR_ENV) == 0.2
    options: Any = resolve_file(None, FLOOR_ENV, PATCHES).enabled["budgeted_drain"]
    assert options.floor == 0.2


def test_a_floor_of_a_patch_that_is_off_is_not_judged(tmp_path: Path) -> None:
    """The rule is about a pipeline that runs with the patch."""
    path = write(tmp_path / "deploy.yaml", THREE_STAGES + DRAIN.format(0.2))
    environ = {"OMNI_FASTPATH_BUDGETED_DRAIN": "0"}
    assert "budgeted_drain" not in resolve_file(path, environ, PATCHES).enabled


def test_a_name_of_an_earlier_version_says_what_became_of_it() -> None:
    """A patch or a key that is gone refuses as unknown, and names its successor or says that it went."""

    class Shrunk(Options):
        gone: ClassVar[Mapping[str, str]] = {"pace": "always on"}

    patches = (PIPE, made_up("valve", options=Shrunk))
    for block, words in (({"valve": {"pace": 1}}, "always on"), ({"faucet": True}, "part of valve")):
        with pytest.raises(ConfigError, match=f"an unknown key .*; it is gone: {words}$"):
            resolve(chain(block), {}, patches, gone={"faucet": "part of valve"})
