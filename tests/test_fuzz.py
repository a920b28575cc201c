"""Whatever is given to us is taken or refused: in words that name it, without a traceback, and nothing is half done."""

from __future__ import annotations

import os
import re
import tempfile
from pathlib import Path
from typing import Any

import pytest
import yaml
from hypothesis import example, given, settings
from hypothesis import strategies as st

from omni_fastpath.config import Block, ConfigError, Resolved, resolve, variables
from omni_fastpath.patches import PATCHES
from omni_fastpath.process_role import HANDOFF, master_off
from omni_fastpath.startup import READER
from tests.fakes.processes import isolated
from tests.fakes.registration import NOTHING, engine, ours, raw, read, register, state_files, states

PLAIN = st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5) | st.dates()
VALUES = st.recursive(
    PLAIN, lambda inner: st.lists(inner, max_size=2) | st.dictionaries(st.text(max_size=3), inner, max_size=2)
)
KEYS = [key for patch in PATCHES for key in patch.options.model_fields]
DEFAULTS = [value for patch in PATCHES for value in patch.options().model_dump(mode="json").values()]
WORDS = st.text(max_size=5) | st.integers() | st.just("a\nb")


def _near(names: list[str]) -> st.SearchStrategy[Any]:
    """A name, one that is nearly a name, or anything."""
    return st.sampled_from(names) | st.sampled_from(names).map(lambda name: name[1:]) | WORDS


OPTIONS = st.dictionaries(_near(KEYS), st.sampled_from(DEFAULTS) | VALUES, max_size=3)
NAMES = _near([*(patch.name for patch in PATCHES), "on_unsupported"])
BLOCKS = st.booleans() | VALUES | st.dictionaries(NAMES, st.booleans() | OPTIONS | VALUES, max_size=4)

SERVICE = st.sampled_from(["SERVICE_HOST", "SERVICE_PORT_HTTP", "PORT", "PORT_8091_TCP_ADDR", "X_SERVICE_HOST"])
ENVIRONMENT = st.dictionaries(
    st.sampled_from(variables(PATCHES)) | st.from_regex(r"OMNI_FASTPA?TH?[A-Z_]{0,4}", fullmatch=True),
    st.sampled_from(["1", "0", " ON", "null", "16", "fail", "[" * 100_000, "9" * 5000, "\udcff"]) | st.text(max_size=5),
    max_size=4,
)
HUGE = 16**5000
"""An integer with more digits than Python writes. YAML can contain it."""
NESTED: list[Any] = []
for _ in range(5000):
    NESTED = [NESTED]
LINE = re.compile(r"(fastpath|OMNI_FASTPATH).*?: found .+; allowed: .+|fastpath\.\w+ is on and requires fastpath.+")


@given(BLOCKS, ENVIRONMENT, st.sets(SERVICE))
@example(None, {"OMNI_FASTPATH_BUDGETED_DRAIN__MAX_ITEMS": "[" * 100_000}, set())
def test_settings_are_resolved_or_refused(block: Any, environ: dict[str, str], service: set[str]) -> None:
    """Any block and variables are resolved, and equal in the stages, or refused with one complete line per wrong key.

    Kubernetes' service variables are ignored, and ``0`` refuses nothing.
    """
    made = {f"OMNI_FASTPATH_{name}": "tcp://10.0.0.7:8091" for name in service}
    lines: list[str] = []
    unknown: tuple[str, ...] = ()
    try:
        found = resolve(Block(Path("deploy.yaml"), block), {**made, **environ}, PATCHES)
        assert Resolved.from_json(found.to_json(), PATCHES) == found
        unknown = found.unknown
    except ConfigError as error:
        lines = str(error).splitlines()
    assert all(LINE.fullmatch(line) and len(line) < 5000 for line in lines)
    assert not {line.partition(":")[0] for line in (*lines, *unknown)} & (made.keys() - environ.keys())
    assert not (lines and master_off(environ))


def test_a_value_that_cannot_be_sent_to_the_stages_is_refused() -> None:
    """A value that JSON cannot carry, or a key of any type, is refused by its key."""
    for odd in (HUGE, NESTED, {"x": {1: {(2,): 3}}}, Path("a"), "\ud800"):
        block = {"budgeted_drain": {HUGE: 1, "max_items": odd}, HUGE: odd, "a\nb": odd}
        test_settings_are_resolved_or_refused.hypothesis.inner_test(block, {}, set())  # type: ignore[attr-defined]


ODD = "{stage_id: 0, x: {1: 0.5, 1: 0.7, true: 1, 'true': 2, n: !!python/object/apply:pathlib.Path [a]}}"
TEXTS = st.builds(lambda block: yaml.safe_dump({"stages": [{"stage_id": 0}], "fastpath": block}), BLOCKS)


@pytest.mark.parametrize("examples", [settings().max_examples])
@isolated("warm")
def test_a_refused_start_leaves_nothing(examples: int) -> None:
    """A refused start wraps no seam, sets no state and writes no file. Any other file is read as stock reads it."""
    register()
    file = Path("s.yaml")

    def outcome(reader: Any) -> str:
        try:
            return repr(reader(file))
        except ConfigError:
            raise
        except Exception as error:
            return f"{type(error)}: {error}"[:60]

    @settings(max_examples=examples // 2, derandomize=examples < 1000, database=None, deadline=None)
    @given(TEXTS | st.text(max_size=20))
    @example(f"fastpath: {{budgeted_drain: {{max_items: {16**5000:#x}}}}}")
    @example(f"stages:\n- {ODD}\n")
    @example("stages: [{stage_id: 0, runtime: {fastpath: true}}]\nplatforms: {cuda: {fastpath: 1}}\n")
    @example("n: 3\nx: ${n}\ny: ${oc.env:HOME}\nz: ???\n")
    @example("base_config: s.yaml\n")
    def asks(text: str) -> None:
        file.write_text(text, encoding="utf-8")
        try:
            found = outcome(read)
        except ConfigError:
            with pytest.raises(ConfigError):
                engine(file)
        else:
            assert found == outcome(raw(READER).__wrapped__)
        assert (ours(), states(), state_files(), HANDOFF in os.environ) == (NOTHING, {}, [], False)

    with tempfile.TemporaryDirectory() as folder, pytest.MonkeyPatch.context() as patched:
        patched.chdir(folder)
        asks()
