"""The overlay YAML: what it says, what it refuses, where it finds its base."""

from __future__ import annotations

import contextlib
import io
from pathlib import Path
from typing import Any

import pytest
import yaml

from omni_fastpath import config
from omni_fastpath.config import ABSENT, ConfigError
from omni_fastpath.patches import PATCHES
from omni_fastpath.tools import overlay
from tests.fakes.processes import isolated
from tests.test_config import MADE_UP
from tests.tools.made import plain_read


@pytest.fixture(autouse=True)
def _without_upstream(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    if request.node.get_closest_marker("upstream") is None:
        monkeypatch.setattr(config, "read", plain_read)


@pytest.fixture
def base(tmp_path: Path) -> Path:
    """A deploy YAML without a block."""
    path = tmp_path / "base.yaml"
    path.write_text("stages: []\n")
    return path


def built(base: Path, *sets: str) -> Any:
    """The ``fastpath`` value of the overlay."""
    return yaml.safe_load(overlay.build(base, sets, MADE_UP))["fastpath"]


@pytest.mark.parametrize(
    ("sets", "value"),
    [
        ((), True),
        (("pump.items=3",), {"pipe": True, "pump": {"items": 3}}),
        (("pump.items=3", "pump.eager=no"), {"pipe": True, "pump": {"items": 3, "eager": False}}),
        (("pump=false",), {"pipe": True, "pump": False}),
        (("valve=true",), {"pipe": True, "pump": True, "valve": True}),
        (("on_unsupported=fail",), {"pipe": True, "pump": True, "on_unsupported": "fail"}),
    ],
)
def test_set_starts_from_the_default_set(base: Path, sets: tuple[str, ...], value: Any) -> None:
    """Without ``--set`` the block is ``true``. With it, the block is the default set with the changes."""
    assert built(base, *sets) == value


def test_set_over_an_inherited_block_keeps_it(base: Path) -> None:
    """If the base has a block, the overlay has it with the changes, because it replaces that block as a whole."""
    base.write_text("fastpath: {valve: true}\n")
    assert built(base, "pipe=true") == {"valve": True, "pipe": True}
    assert built(base) == {"valve": True}


@pytest.mark.parametrize(
    ("assignment", "message"),
    [
        ("pump", "patch.key=value"),
        ("pump.items=0", r"fastpath\.pump\.items .*found 0.*at least 1"),
        ("pipe=false", r"fastpath\.pump .*requires fastpath\.pipe"),
    ],
)
def test_what_the_server_would_refuse_is_not_written(base: Path, assignment: str, message: str) -> None:
    """An unknown patch or key, a wrong value and a contradiction are refused as the server would."""
    with pytest.raises(ConfigError, match=message):
        overlay.build(base, [assignment], MADE_UP)


def test_a_file_comes_before_a_bundled_name(base: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """An existing path is used, else a bundled name with or without suffix, else the nearest names are listed."""
    named = tmp_path / "deploy" / "some_model.yaml"
    monkeypatch.setattr(overlay, "bundled", lambda: {"some_model": named, "other": named})
    monkeypatch.chdir(base.parent)
    assert overlay.find("base.yaml") == base
    assert overlay.find("some_model") == overlay.find("some_model.yaml") == named
    with pytest.raises(ConfigError, match="nearest: some_model"):
        overlay.find("some_modl")


def test_an_overlay_follows_links_that_are_replaced(tmp_path: Path) -> None:
    """Over a file of a Kubernetes ConfigMap, or below a ``current`` link, the base is named as given.

    Beside its base an overlay names it by a relative path, so both can be moved together.
    """
    for update in ("..1", "..2"):
        (tmp_path / update).mkdir()
        (tmp_path / update / "deploy.yaml").write_text("stages: []\n")
    data, given = tmp_path / "..data", tmp_path / "deploy.yaml"
    data.symlink_to("..1")
    given.symlink_to("..data/deploy.yaml")
    for output, named in ((tmp_path / "fast.yaml", "deploy.yaml"), (tmp_path / "..2" / "fast.yaml", str(given))):
        output.write_text(overlay.build(overlay.find(str(given)), [], PATCHES, output=output))
        assert yaml.safe_load(output.read_text())["base_config"] == named
        assert (output.parent / named).resolve().parent.name == "..1"


@isolated("warm")
def test_what_upstream_refuses_is_refused(tmp_path: Path) -> None:
    """``status --deploy-config`` and ``overlay`` refuse a file that the installed vLLM-Omni refuses, in its words."""
    from omni_fastpath.tools import cli

    good, bad, output = (tmp_path / name for name in ("good.yaml", "bad.yaml", "out.yaml"))
    good.write_text("stages: []\n")
    bad.write_text("stage_args: []\n")
    assert cli.main(["overlay", str(good), "-o", str(output)]) == 0
    for refused in (["overlay", str(bad), "-o", str(tmp_path / "not.yaml")], ["status", "--deploy-config", str(bad)]):
        out = io.StringIO()
        with contextlib.redirect_stdout(out), contextlib.redirect_stderr(out):
            assert cli.main(refused) == 2
        assert "vLLM-Omni refuses it: Deploy config" in out.getvalue()
    assert not (tmp_path / "not.yaml").exists()


@pytest.mark.upstream
def test_every_bundled_yaml_takes_the_shipped_default_set() -> None:
    """The overlay of each bundled deploy YAML is valid, and none has the key itself."""
    if not overlay.bundled():
        pytest.skip("vllm-omni is not installed")
    for path in overlay.bundled().values():
        assert config.read(path).value is ABSENT
        assert yaml.safe_load(overlay.build(path, [], PATCHES))["fastpath"] is True


def test_an_overlay_never_overwrites_its_base(base: Path) -> None:
    """An output that is the base, however it is spelt, is refused."""
    for output in (base, base.parent / ".." / base.parent.name / base.name):
        with pytest.raises(ConfigError, match="another file than the base"):
            overlay.build(base, [], PATCHES, output=output)
