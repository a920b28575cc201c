"""Each rule finds its trouble and nothing else does; where nothing is wrong nothing is found."""

from __future__ import annotations

import dataclasses
import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from omni_fastpath import patches as shipped
from omni_fastpath.tools import cli, findings
from omni_fastpath.tools.findings import RULES, Facts, Finding, Severity, judge
from omni_fastpath.tools.servers import Scrape
from tests.tools.made import HEALTHY, REPORT, SERVER, UPSTREAMS, installation, record, reporting, saying, serving


def with_patch(**changed: Any) -> Facts:
    """The first patch in another condition."""
    patches = REPORT["installation"]["patches"]
    return installation(patches={**patches, "drum": {**patches["drum"], **changed}})


def shell(**variables: str) -> Facts:
    """Another environment of this shell's."""
    return dataclasses.replace(HEALTHY, environ={**HEALTHY.environ, **variables})


def with_yaml(file: Path, **environ: str) -> Facts:
    """A server that was started with this deploy YAML, which said ``drum: true``."""
    patches = {"drum": record(origin=f"fastpath.drum in {file}"), "flute": record("off", count=0)}
    facts = saying(source=str(file), patches=patches)
    command = ("vllm", "serve", "m", "--deploy-config", file.name)
    server = dataclasses.replace(facts.servers[0], environ=environ, command=command, cwd=file.parent)
    return dataclasses.replace(facts, servers=(server,))


def ids(found: list[Finding]) -> list[str]:
    """The findings' rules."""
    return [each.id for each in found]


UNKNOWN = "vllm-omni 0.99.0 (by a test) is not among the tested releases: 0.30.0"
IDLE: dict[str, Any] = {"patches": {"drum": record(count=0)}}

BROKEN: dict[str, tuple[Callable[[], Facts], Severity, str]] = {
    "upstream-missing": (lambda: installation(vllm_omni=None, patches={}), "error", "vllm-omni is not installed"),
    "patch-unsupported": (
        lambda: with_patch(release_tested=False, release_problem=UNKNOWN),
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
    "hook-plugin-unusable": (
        lambda: dataclasses.replace(HEALTHY, hooks={"used": [], "unusable": {"logbook": "no"}, "switched_off": {}}),
        "warning",
        "the hook plugin logbook cannot run and is left out: no",
    ),
    "hook-plugin-switched-off": (
        lambda: saying(hooks={"used": [], "unusable": {}, "switched_off": {"logbook": "on_routed raised E: no"}}),
        "warning",
        "the hook plugin logbook was switched off: on_routed raised E: no",
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
    "patch-idle": (lambda: saying(stage=IDLE, **IDLE), "warning", "drum is applied and idle: beats is 0"),
    "metrics-without-us": (lambda: serving(scrape=Scrape({UPSTREAMS: 100.0})), "warning", "no series of omni-fastpath"),
}


def test_nothing_is_wrong_where_nothing_is() -> None:
    """A healthy installation with a healthy server has no finding at all, and every rule has a case here."""
    assert judge(HEALTHY) == []
    assert {*BROKEN, "yaml-changed"} == RULES.keys()


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
    facts = with_patch(release_tested=False, release_problem=UNKNOWN)
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


@pytest.mark.parametrize("text", ["fastpath: {drum: {loud: 4}}", "fastpath: {}", "fastpath: {drum: true, flute: true}"])
def test_a_yaml_that_was_edited_is_found(tmp_path: Path, text: str) -> None:
    """A value, a patch less, a patch more: the running server has what it read. Put back, all is well."""
    file = tmp_path / "deploy.yaml"
    file.write_text(text)
    assert ids(judge(with_yaml(file))) == ["yaml-changed"]
    file.write_text("fastpath: {drum: true}")
    assert judge(with_yaml(file)) == []


def test_a_yaml_that_would_be_refused_now_is_found(tmp_path: Path) -> None:
    """The next start would fail; a server that sees other files is not judged by ours."""
    file = tmp_path / "deploy.yaml"
    file.write_text("fastpath: {drum: {loudd: 4}}")
    [found] = judge(facts := with_yaml(file))
    assert "a restart would be refused" in found.what
    assert "did you mean 'loud'?" in str(found.evidence["differences"])
    elsewhere = dataclasses.replace(facts.servers[0], is_elsewhere=True)
    assert judge(dataclasses.replace(facts, servers=(elsewhere,))) == []


def test_a_variable_in_a_yaml_is_the_servers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Upstream resolves ``${oc.env:...}`` in the server: neither its lack here nor another value is a change."""
    pytest.importorskip("omegaconf")
    file = tmp_path / "deploy.yaml"
    file.write_text("output_dir: ${oc.env:MY_DIR}\nfastpath: {drum: {loud: '${oc.decode:${oc.env:LOUD}}'}}")
    monkeypatch.delenv("MY_DIR", raising=False)
    monkeypatch.setenv("LOUD", "4")
    before = dict(os.environ)
    assert judge(with_yaml(file, MY_DIR="/x", LOUD="3")) == []
    assert dict(os.environ) == before
    assert ids(judge(with_yaml(file, MY_DIR="/x", LOUD="5"))) == ["yaml-changed"]


def test_what_a_variable_says_is_no_change_of_the_yaml(tmp_path: Path) -> None:
    """It may have been set inside the process, where it cannot be seen."""
    file = tmp_path / "deploy.yaml"
    file.write_text("stages: []")
    facts = with_yaml(file)
    patches = {"drum": record(origin="default set (OMNI_FASTPATH=1)")}
    snapshot = {**facts.servers[0].snapshots[0], "patches": patches}
    server = dataclasses.replace(facts.servers[0], snapshots=(snapshot,))
    assert judge(dataclasses.replace(facts, servers=(server,))) == []


@pytest.mark.parametrize(
    ("scrape", "expected"),
    [
        (Scrape({UPSTREAMS: 20.0, "omni_fastpath_x": 1.0}), ["patch-idle"]),
        (Scrape({UPSTREAMS: 19.0, "omni_fastpath_x": 1.0}), []),
        (Scrape(problem="its state file names no port"), []),
        (None, []),
    ],
)
def test_idle_is_judged_by_upstreams_counter(scrape: Scrape | None, expected: list[str]) -> None:
    """Enough of it moved, not yet enough, no answer, not asked; one process in which it took effect is enough."""
    idle = saying(stage=IDLE, **IDLE)
    server = dataclasses.replace(idle.servers[0], scrape=scrape)
    assert ids(judge(dataclasses.replace(idle, servers=(server,)))) == expected
    assert judge(saying(**IDLE)) == []


def test_no_rule_names_a_patch() -> None:
    """What is particular stands in declarations."""
    text = Path(str(findings.__file__)).read_text()
    assert [patch.name for patch in shipped.PATCHES if patch.name in text] == []


# ---- doctor ----

INFO = dataclasses.replace(with_patch(release_tested=False, release_problem=UNKNOWN), asked=frozenset())
REFUSED = reporting(configuration_error="no")


@pytest.mark.parametrize(
    ("facts", "code"),
    [(HEALTHY, 0), (INFO, 0), (shell(OMNI_FASTPATHX="1"), 1), (installation(entry_points=[]), 1), (REFUSED, 2)],
)
def test_exit_codes_of_doctor(monkeypatch: pytest.MonkeyPatch, facts: Facts, code: int) -> None:
    """0 where nothing weighs more than info, 1 after a warning or an error, 2 where a start would be refused."""
    monkeypatch.setattr(cli, "look", lambda *_, **__: facts)
    assert cli.main(["doctor"]) == cli.main(["doctor", "--json"]) == code


def test_doctor_tells_a_finding_in_full(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """Id, subject, sentence, evidence, threshold and what to do; as JSON with servers and versions besides."""
    facts = shell(OMNI_FASTPATHX="1")
    monkeypatch.setattr(cli, "look", lambda *_, **__: facts)
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
    [server] = report["servers"]
    assert (server["processes"], server["patches"]) == (2, {"drum": "applied x2", "flute": "off x2"})
    assert server["versions"] == ["omni_fastpath 0.1.0, vllm_omni 0.30.0, vllm vllm 0.30.0"]
    assert report["versions"]["vllm_omni"] == "vllm-omni 0.30.0"


def test_an_issue_has_versions_states_and_names_and_nothing_that_is_somebodys(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """No path, host, address or reason of an exception, and of no variable but a documented one of ours its value."""
    named = {"OMNI_FASTPATH_DRUM": "1", "OMNI_FASTPATH_HF_TOKEN": None}
    failed = {"drum": record("failed", reason="no /home/SECRET on SECRET at 10.1.2.3")}
    environ = {"OMNI_FASTPATH": "1", "TOKEN": "SECRET", "VLLM_PLUGINS": "SECRET", "OMNI_FASTPATHX": "SECRET"}
    server = dataclasses.replace(saying(patches=failed).servers[0], environ=environ)
    facts = dataclasses.replace(installation(environment=named), servers=(server,))
    monkeypatch.setattr(cli, "look", lambda *_, **__: facts)
    cli.main(["doctor", "--json"])
    issue = json.loads(capsys.readouterr().out)["issue"]
    assert "variables: OMNI_FASTPATH_DRUM=1, OMNI_FASTPATH_HF_TOKEN\n" in issue
    assert "  drum: failed x1, applied x1\n" in issue
    assert "error patch-not-serving (server 10): patch drum, state failed" in issue
    assert "variable OMNI_FASTPATHX" in issue
    assert "vllm-omni: vllm-omni 0.30.0" in issue
    assert "SECRET" not in issue
    assert "10.1.2.3" not in issue
