"""Each rule finds its trouble and nothing else does; where nothing is wrong nothing is found."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from omni_fastpath import patches as shipped
from omni_fastpath.tools import cli, findings, status
from omni_fastpath.tools.findings import RULES, Facts, Finding, Severity, judge
from tests.tools.made import HEALTHY, REPORT, SERVER, UPSTREAMS, installation, record, reporting, saying, serving


def with_patch(**changed: Any) -> Facts:
    """The first patch in another condition."""
    patches = REPORT["installation"]["patches"]
    return installation(patches={**patches, "drum": {**patches["drum"], **changed}})


def shell(**variables: str) -> Facts:
    """Another environment of this shell's."""
    return dataclasses.replace(HEALTHY, environ={**HEALTHY.environ, **variables})


def ids(found: list[Finding]) -> list[str]:
    """The findings' rules."""
    return [each.id for each in found]


UNKNOWN = "vllm-omni 0.99.0 (by a test) is not among the tested releases: 0.30.0"
IDLE: dict[str, Any] = {"patches": {"drum": record(count=0)}}

BROKEN: dict[str, tuple[Callable[[], Facts], Severity, str]] = {
    "upstream-missing": (lambda: installation(vllm_omni=None, patches={}), "error", "vllm-omni is not installed"),
    "patch-unsupported": (
        lambda: with_patch(release_problem=UNKNOWN),
        "error",
        f"drum: {UNKNOWN}",
    ),
    "seam-moved": (
        lambda: reporting(verify={"drum": ["m:Loop.run: its body moved"], "flute": []}),
        "error",
        "drum: m:Loop.run: its body moved",
    ),
    "entry-point-missing": (lambda: installation(entry_points=[]), "error", "no entry point"),
    "plugins-leave-us-out": (lambda: shell(VLLM_PLUGINS="vllm_omni_register_models"), "error", "an allow-list without"),
    "variable-unknown": (lambda: shell(OMNI_FASTPATH_DRUMM="1"), "warning", "did you mean 'OMNI_FASTPATH_DRUM'?"),
    "configuration-refused": (
        lambda: reporting(configuration_error="OMNI_FASTPATH_DRUM: found 'maybe'"),
        "error",
        "OMNI_FASTPATH_DRUM: found 'maybe'",
    ),
    "hook-plugin-off": (
        lambda: dataclasses.replace(HEALTHY, hooks={"used": [], "unusable": {"logbook": "no"}, "switched_off": {}}),
        "warning",
        "the hook plugin logbook cannot run: no",
    ),
    "patch-not-serving": (
        lambda: saying(stage={"patches": {"drum": record("failed", reason="a seam moved")}}),
        "error",
        "drum is failed in process 12 (stage): a seam moved",
    ),
    "versions-mixed": (
        lambda: saying(stage={"omni_fastpath": "0.0.9"}),
        "error",
        "versions of omni-fastpath: 0.0.9, 0.1.0",
    ),
    "yaml-changed": (lambda: serving(edited_yaml="deploy.yaml"), "warning", "was written after it started"),
    "patch-idle": (lambda: saying(stage=IDLE, **IDLE), "warning", "drum is applied and idle: beats is 0"),
    "metrics-without-us": (lambda: serving(metrics={UPSTREAMS: 100.0}), "warning", "no series of omni-fastpath"),
}


def test_nothing_is_wrong_where_nothing_is() -> None:
    """A healthy installation with a healthy server has no finding at all, and every rule has a case here."""
    assert judge(HEALTHY) == []
    assert BROKEN.keys() == RULES.keys()


@pytest.mark.parametrize("rule", BROKEN)
def test_a_rule_finds_its_trouble_and_no_other_does(rule: str) -> None:
    """One thing is wrong: one finding, with the threshold and what to do."""
    broken, severity, what = BROKEN[rule]
    [found] = judge(broken())
    assert (found.id, found.severity) == (rule, severity)
    assert what in found.what
    assert found.threshold
    assert found.do


def test_a_patch_that_was_not_asked_for_may_be_unsupported() -> None:
    """Its release matters where it is wanted; what ``verify`` says of it too is no second finding."""
    facts = with_patch(release_problem=UNKNOWN)
    facts = dataclasses.replace(facts, report={**facts.report, "verify": {"drum": [UNKNOWN], "flute": []}})
    assert [(each.id, each.severity) for each in judge(facts)] == [("patch-unsupported", "error")]
    assert [each.severity for each in judge(dataclasses.replace(facts, asked=frozenset()))] == ["info"]


@pytest.mark.parametrize(
    ("variables", "expected"),
    [
        ({"VLLM_PLUGINS": "vllm_omni_register_models"}, [("plugins-leave-us-out", "error")]),
        ({"VLLM_PLUGINS": "", "OMNI_FASTPATH": "maybe"}, [("plugins-leave-us-out", "error")]),
        ({"VLLM_PLUGINS": "", "OMNI_FASTPATH": "0"}, [("plugins-leave-us-out", "info")]),
        ({"VLLM_PLUGINS": "omni_fastpath,other"}, []),
        ({"OMNI_FASTPATH_DRUM__LUOD": "1"}, [("variable-unknown", "warning")]),
        ({"OMNI_FAST_PATH": "1"}, [("variable-unknown", "warning")]),
        ({"omni_fastpath_drum": "1"}, [("variable-unknown", "warning")]),
        ({"OMNI_FASTPATH_SERVICE_HOST": "10.0.0.1"}, []),
        ({"OMNI_FASTPATH": "0", "OMNI_FASTPATH_DRUMM": "1"}, []),
        ({"_OMNI_FASTPATH_HANDOFF": "{}"}, []),
    ],
)
def test_a_server_is_judged_by_its_own_variables(variables: dict[str, str], expected: list[Any]) -> None:
    """Found of the server, and not of the shell, which has others; under OMNI_FASTPATH=0 nothing is looked at."""
    found = judge(serving(environ={**(SERVER.environ or {}), **variables}))
    assert [(each.id, each.severity) for each in found] == expected
    assert {each.subject for each in found} <= {"server 10"}


def test_a_plugin_that_a_server_switched_off_is_found() -> None:
    """Once for each server, however many of its processes say so."""
    hooks = {"used": [], "unusable": {}, "switched_off": {"logbook": "on_routed raised E: no"}}
    [found] = judge(saying(hooks=hooks, stage={"hooks": hooks}))
    assert (found.id, found.subject) == ("hook-plugin-off", "server 10")
    assert "the hook plugin logbook was switched off: on_routed raised E: no" in found.what


@pytest.mark.parametrize(("reached", "expected"), [(20.0, ["patch-idle"]), (19.0, [])])
def test_idle_is_judged_by_upstreams_counter(reached: float, expected: list[str]) -> None:
    """Enough of it moved, or not yet enough; one process in which the patch took effect is enough."""
    idle = saying(stage=IDLE, **IDLE)
    server = dataclasses.replace(idle.servers[0], metrics={UPSTREAMS: reached, "omni_fastpath_x": 1.0})
    assert ids(judge(dataclasses.replace(idle, servers=(server,)))) == expected
    assert judge(saying(**IDLE)) == []


def test_no_rule_names_a_patch() -> None:
    """What is particular stands in declarations."""
    text = Path(str(findings.__file__)).read_text()
    assert [patch.name for patch in shipped.PATCHES if patch.name in text] == []


# ---- doctor ----

INFO = dataclasses.replace(with_patch(release_problem=UNKNOWN), asked=frozenset())
REFUSED = reporting(configuration_error="no")


@pytest.mark.parametrize(
    ("facts", "code"),
    [(HEALTHY, 0), (INFO, 0), (shell(OMNI_FASTPATHX="1"), 1), (installation(entry_points=[]), 1), (REFUSED, 2)],
)
def test_exit_codes_of_doctor(monkeypatch: pytest.MonkeyPatch, facts: Facts, code: int) -> None:
    """0 where nothing weighs more than info, 1 after a warning or an error, 2 where a start would be refused."""
    monkeypatch.setattr(status, "look", lambda *_, **__: facts)
    assert cli.main(["doctor"]) == cli.main(["doctor", "--json"]) == code


def test_doctor_tells_a_finding_in_full(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """Id, subject, sentence, evidence, threshold and what to do; as JSON with the block for an issue."""
    facts = shell(OMNI_FASTPATHX="1")
    monkeypatch.setattr(status, "look", lambda *_, **__: facts)
    [found] = judge(facts)
    cli.main(["doctor"])
    out = capsys.readouterr().out
    parts = (
        "warning variable-unknown: installation",
        found.what,
        "variable: OMNI_FASTPATHX",
        found.threshold,
        found.do,
    )
    assert [part for part in parts if part not in out] == []
    cli.main(["doctor", "--json"])
    report = json.loads(capsys.readouterr().out)
    assert report["findings"] == [dataclasses.asdict(found)]
    assert report["issue"] in out


def test_an_issue_has_versions_states_and_names_and_nothing_that_is_somebodys(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """No path, host, address or reason of an exception, and of no variable but a documented one of ours its value."""
    named = {"OMNI_FASTPATH_DRUM": "1", "OMNI_FASTPATH_HF_TOKEN": None}
    failed = {"drum": record("failed", reason="no /home/SECRET on SECRET at 10.1.2.3")}
    environ = {"OMNI_FASTPATH": "1", "TOKEN": "SECRET", "VLLM_PLUGINS": "SECRET", "OMNI_FASTPATHX": "SECRET"}
    server = dataclasses.replace(saying(patches=failed).servers[0], environ=environ)
    installed = {**REPORT["installation"], "environment": named}
    processes = [{**each, "server": 10} for each in server.snapshots]
    facts = dataclasses.replace(reporting(installation=installed, processes=processes), servers=(server,))
    monkeypatch.setattr(status, "look", lambda *_, **__: facts)
    cli.main(["doctor", "--json"])
    issue = json.loads(capsys.readouterr().out)["issue"]
    assert "variables: OMNI_FASTPATH_DRUM=1, OMNI_FASTPATH_HF_TOKEN\n" in issue
    assert "server 10: 2 processes report; omni_fastpath 0.1.0, vllm_omni 0.30.0, vllm vllm 0.30.0\n" in issue
    assert "  drum: failed x1, applied x1\n" in issue
    assert "error patch-not-serving (server 10): patch drum, state failed" in issue
    assert "variable OMNI_FASTPATHX" in issue
    assert "vllm-omni: vllm-omni 0.30.0" in issue
    assert "SECRET" not in issue
    assert "10.1.2.3" not in issue
