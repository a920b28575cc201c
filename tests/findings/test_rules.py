"""Each rule finds its trouble and nothing else does; where nothing is wrong nothing is found."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Callable
from importlib.metadata import EntryPoint
from pathlib import Path
from typing import Any

import pytest

from omni_fastpath import entrypoint
from omni_fastpath.tools.findings import RULES, Facts, Finding, Severity, judge
from omni_fastpath.tools.findings.facts import Member, Scrape
from omni_fastpath.tools.findings.leftovers import Leftover
from tests.findings.made import (
    DRUM,
    HEALTHY,
    PATCHES,
    REPORT,
    SERVER,
    STAGE,
    UPSTREAMS,
    installation,
    record,
    reporting,
    saying,
    serving,
    snapshot,
)

ERROR, WARNING, INFO = Severity.ERROR, Severity.WARNING, Severity.INFO
INSTALLED = (
    EntryPoint("omni_fastpath", "omni_fastpath.bootstrap:register", ""),
    EntryPoint("vllm_omni_register_models", "vllm_omni.engine.arg_utils:register_omni_models_to_vllm", ""),
)


@pytest.fixture(autouse=True)
def _entry_points(monkeypatch: pytest.MonkeyPatch) -> None:
    """Those of an installation without trouble."""
    monkeypatch.setattr(entrypoint, "entry_points", lambda **_: INSTALLED)


def with_patch(**changed: Any) -> Facts:
    """The first patch in another condition."""
    patches = REPORT["installation"]["patches"]
    return installation(patches={**patches, "drum": {**patches["drum"], **changed}})


def shell(**variables: str) -> Facts:
    """Another environment of this shell's."""
    return dataclasses.replace(HEALTHY, environ={**HEALTHY.environ, **variables})


def started_with(**variables: str) -> Facts:
    """Another environment of the server's."""
    return serving(environ={**(SERVER.environ or {}), **variables})


def left(*sizes: int, kind: Any = "shared memory") -> Facts:
    """Files that dead servers left."""
    files = [Leftover(Path(f"/dev/shm/a b_{n}"), kind, size, 300.0) for n, size in enumerate(sizes)]  # noqa: S108
    return dataclasses.replace(HEALTHY, leftovers=files)


def silent(**changed: Any) -> Facts:
    """A server with a stage and without any state file, which was told to switch something on."""
    return serving(**{"snapshots": (), "members": (STAGE,), "scrape": None, **changed})


UNKNOWN = "vllm-omni 0.99.0 is not among the tested releases: 0.30.0"
WRAPPED = "m:Loop.run: a FunctionWrapper of tracer"

BROKEN: dict[str, tuple[Callable[[], Facts], Severity, str]] = {
    "patch-unsupported": (
        lambda: with_patch(release_tested=False, release_problem=UNKNOWN),
        ERROR,
        f"drum: {UNKNOWN}",
    ),
    "seam-moved": (
        lambda: reporting(verify={"drum": ["m:Loop.run: its body moved"], "flute": []}),
        ERROR,
        "drum: m:Loop.run: its body moved",
    ),
    "seam-wrapped": (lambda: reporting(foreign_wrappers={"drum": [WRAPPED]}), WARNING, "drum: somebody else's wrapper"),
    "entry-point-missing": (lambda: installation(entry_points=[]), ERROR, "no entry point"),
    "plugins-leave-us-out": (lambda: shell(VLLM_PLUGINS="vllm_omni_register_models"), ERROR, "an allow-list without"),
    "plugins-leave-upstream-out": (lambda: shell(VLLM_PLUGINS="omni_fastpath"), WARNING, "vllm_omni_register_models"),
    "variable-unknown": (lambda: shell(OMNI_FASTPATH_DRUMM="1"), WARNING, "did you mean 'OMNI_FASTPATH_DRUM'?"),
    "variable-injected": (lambda: shell(OMNI_FASTPATH_PORT_8000_TCP="tcp://10.0.0.1:1"), INFO, "1 variables"),
    "configuration-refused": (
        lambda: reporting(configuration_error="OMNI_FASTPATH_DRUM: found 'maybe'"),
        ERROR,
        "OMNI_FASTPATH_DRUM: found 'maybe'",
    ),
    "hook-plugin-unusable": (
        lambda: dataclasses.replace(HEALTHY, hooks={"used": [], "unusable": {"logbook": "no"}, "switched_off": {}}),
        WARNING,
        "the hook plugin logbook cannot run and is left out: no",
    ),
    "hook-plugin-switched-off": (
        lambda: saying(hooks={"used": [], "unusable": {}, "switched_off": {"logbook": "on_routed raised E: no"}}),
        WARNING,
        "the hook plugin logbook was switched off: on_routed raised E: no",
    ),
    "patch-not-serving": (
        lambda: saying(stage={"patches": {"drum": record("failed", reason="a seam moved")}}),
        ERROR,
        "drum is failed in process 12 (stage): a seam moved",
    ),
    "server-silent": (silent, ERROR, "it has no state file"),
    "process-silent": (
        lambda: serving(members=(*SERVER.members, dataclasses.replace(STAGE, pid=13))),
        WARNING,
        "1 of its processes say nothing",
    ),
    "stage-without-server": (
        lambda: dataclasses.replace(HEALTHY, stray=(snapshot(40, "stage"),)),
        WARNING,
        "1 stage processes live on",
    ),
    "versions-mixed": (
        lambda: saying(stage={"omni_fastpath": "0.0.9"}),
        ERROR,
        "versions of omni-fastpath: 0.0.9, 0.1.0",
    ),
    "yaml-mixed": (lambda: saying(source="/a.yaml", stage={"source": "/b.yaml"}), WARNING, "different deploy YAMLs"),
    "yaml-changed": (lambda: HEALTHY, WARNING, "its deploy YAML has changed"),  # made below: it needs a file
    "patch-idle": (
        lambda: saying(patches={"drum": record(count=0)}, stage={"patches": {"drum": record(count=0)}}),
        WARNING,
        "drum is applied and idle: beats is 0",
    ),
    "server-unreadable": (lambda: serving(environ=None), INFO, "cannot be read"),
    "server-elsewhere": (lambda: silent(is_elsewhere=True), INFO, "are not seen from here"),
    "metrics-folder": (lambda: started_with(PROMETHEUS_MULTIPROC_DIR="/nowhere"), WARNING, "is no folder"),
    "metrics-without-us": (lambda: serving(scrape=Scrape({UPSTREAMS: 100.0})), WARNING, "no series of omni-fastpath"),
    "metrics-silent": (
        lambda: serving(scrape=Scrape(problem="/metrics does not answer: timed out", timed_out=True)),
        WARNING,
        "does not answer /metrics within",
    ),
    "metrics-stats-off": (
        lambda: serving(command=(*(SERVER.command or ()), "--disable-log-stats")),
        INFO,
        "--disable-log-stats",
    ),
    "state-folder-unusable": (
        lambda: dataclasses.replace(HEALTHY, folder_problem="/run/x is no folder"),
        ERROR,
        "/run/x is no folder",
    ),
    "state-folder-shared": (lambda: dataclasses.replace(HEALTHY, other_namespaces=2), INFO, "2 state files"),
    "shared-memory-left": (lambda: left(2**26, 4096), WARNING, "2 files of 67112960 bytes"),
    "device-locks-left": (lambda: left(0, kind="lock"), INFO, "1 device locks"),
}


def ids(found: list[Finding]) -> list[str]:
    """The findings' rules."""
    return [each.id for each in found]


def test_every_rule_is_broken_once() -> None:
    """No rule is without a case, and ids are slugs that no two rules share."""
    known = [rule.id for rule in RULES]
    assert sorted(BROKEN) == sorted(set(known)) == sorted(known)


def test_nothing_is_found_where_nothing_is_wrong() -> None:
    """A healthy installation with a healthy server: no finding at all."""
    assert judge(HEALTHY) == []


@pytest.mark.parametrize("rule", [each for each in BROKEN if each != "yaml-changed"])
def test_a_rule_finds_its_trouble_and_no_other_does(rule: str) -> None:
    """One thing is wrong: one finding, with the threshold and what to do."""
    broken, severity, what = BROKEN[rule]
    [found] = judge(broken())
    assert (found.id, found.severity) == (rule, severity)
    assert what in found.what
    assert found.threshold
    assert found.do


@pytest.mark.parametrize("asked", [True, False])
def test_a_patch_that_nobody_asked_for_may_be_unsupported(asked: bool) -> None:
    """Its release matters where it is wanted."""
    broken = dataclasses.replace(
        with_patch(release_tested=False, release_problem=UNKNOWN), asked=frozenset({"drum"} if asked else ())
    )
    assert [each.severity for each in judge(broken)] == [ERROR if asked else INFO]


def test_a_release_that_is_not_known_is_found_once() -> None:
    """``verify`` says the same of it: no second finding."""
    facts = with_patch(release_tested=False, release_problem=UNKNOWN)
    facts = dataclasses.replace(facts, report={**facts.report, "verify": {"drum": [UNKNOWN], "flute": []}})
    assert ids(judge(facts)) == ["patch-unsupported"]


def test_an_environment_without_vllm_omni_is_one_finding() -> None:
    """Asked in the wrong environment: not one error a patch, and no advice that cannot help there."""
    facts = installation(vllm_omni=None, patches=with_patch(release_tested=False).report["installation"]["patches"])
    (finding,) = judge(dataclasses.replace(facts, asked=frozenset({"drum", "flute"})))
    assert (finding.id, finding.severity) == ("patch-unsupported", ERROR)
    assert "the environment that your server runs in" in finding.do


def test_a_foreign_wrapper_that_keeps_a_patch_off_is_an_error_and_found_once() -> None:
    """The verdict of ``verify`` is about that wrapper."""
    problem = "m:Loop.run: holds somebody else's wrapper <x>, which the patch would go past"
    [found] = judge(reporting(foreign_wrappers={"drum": [WRAPPED]}, verify={"drum": [problem]}))
    assert (found.id, found.severity) == ("seam-wrapped", ERROR)


def test_a_foreign_wrapper_in_a_live_server_is_found_once_for_all_processes() -> None:
    """Each process says it for itself."""
    wrapped = {"foreign_wrappers": {"drum": [f"{WRAPPED} on top of ours"]}}
    [found] = judge(saying(stage=wrapped, **wrapped))
    assert (found.id, found.severity, found.subject) == ("seam-wrapped", WARNING, "server 10")


@pytest.mark.parametrize(
    ("variables", "expected"),
    [
        ({"VLLM_PLUGINS": "vllm_omni_register_models"}, ["plugins-leave-us-out"]),
        ({"VLLM_PLUGINS": "omni_fastpath"}, ["plugins-leave-upstream-out"]),
        ({"OMNI_FASTPATH_DRUM__LUOD": "1"}, ["variable-unknown"]),
        ({"OMNI_FAST_PATH": "1"}, ["variable-unknown"]),
        ({"omni_fastpath_drum": "1"}, ["variable-unknown"]),
        ({"OMNI_FASTPATH_SERVICE_HOST": "10.0.0.1"}, ["variable-injected"]),
        ({"OMNI_FASTPATH": "0", "OMNI_FASTPATH_DRUMM": "1"}, []),
        ({"_OMNI_FASTPATH_HANDOFF": "{}"}, []),
    ],
)
def test_a_server_is_judged_by_its_own_variables(variables: dict[str, str], expected: list[str]) -> None:
    """Found of the server, and not of the shell, which has others; under OMNI_FASTPATH=0 nothing is looked at."""
    found = judge(started_with(**variables))
    assert ids(found) == expected
    assert {each.subject for each in found} <= {"server 10"}


@pytest.mark.parametrize("text", ["fastpath: {drum: {loud: 4}}", "fastpath: {}", "fastpath: {drum: true, flute: true}"])
def test_a_yaml_that_was_edited_is_found(tmp_path: Path, text: str) -> None:
    """A value, a patch less, a patch more: the running server has what it read."""
    file = tmp_path / "deploy.yaml"
    file.write_text(text)
    origin = f"fastpath.drum in {file}"
    patches = {"drum": record(origin=origin), "flute": record("off", count=0)}
    facts = saying(source=str(file), patches=patches)
    server = dataclasses.replace(
        facts.servers[0], environ={}, command=("vllm", "serve", "m", "--deploy-config", file.name), cwd=tmp_path
    )
    [found] = judge(dataclasses.replace(facts, servers=(server,)))
    assert (found.id, found.severity) == ("yaml-changed", WARNING)
    file.write_text("fastpath: {drum: true}")
    assert judge(dataclasses.replace(facts, servers=(server,))) == []


def test_a_yaml_that_would_be_refused_now_is_found(tmp_path: Path) -> None:
    """The next start would fail, whatever runs."""
    file = tmp_path / "deploy.yaml"
    file.write_text("fastpath: {drum: {loudd: 4}}")
    facts = serving(environ={}, command=("vllm", "serve", "m", "--deploy-config", str(file)))
    [found] = judge(facts)
    assert found.id == "yaml-changed"
    assert "a restart would be refused" in found.what
    assert "did you mean 'loud'?" in str(found.evidence["differences"])


def test_what_a_variable_says_is_no_change_of_the_yaml(tmp_path: Path) -> None:
    """It may have been set inside the process, where nobody sees it."""
    file = tmp_path / "deploy.yaml"
    file.write_text("stages: []")
    patches = {"drum": record(origin="default set (OMNI_FASTPATH=1)")}
    facts = saying(source=str(file), patches=patches)
    server = dataclasses.replace(
        facts.servers[0], environ={}, command=("vllm", "serve", "m", "--deploy-config", str(file))
    )
    assert judge(dataclasses.replace(facts, servers=(server,))) == []


@pytest.mark.parametrize(
    ("changed", "expected"),
    [
        ({"members": (dataclasses.replace(STAGE, age_s=30.0),)}, []),
        ({"members": ()}, []),  # it downloads its model, whose deploy YAML it reads afterwards
        ({"members": SERVER.members[:1]}, []),
        ({"environ": {}}, []),
        ({"environ": {"OMNI_FASTPATH": "0"}}, []),
        ({"environ": {"OMNI_FASTPATH": "1", "VLLM_PLUGINS": "vllm_omni_register_models"}}, ["plugins-leave-us-out"]),
        ({"folder_problem": "/x is no folder"}, ["server-silent", "state-folder-unusable"]),
    ],
)
def test_a_server_is_silent_only_where_it_was_told_to_speak(changed: dict[str, Any], expected: list[str]) -> None:
    """Not one that has just started, that nobody asked anything of, or that leaves us out."""
    assert ids(judge(silent(**changed))) == expected


@pytest.mark.parametrize(
    ("title", "age_s", "expected"),
    [
        ("VLLM::APIServer_1", 300.0, ["process-silent"]),
        ("vLLM-Omni::DiffusionWorker-0", 300.0, ["process-silent"]),
        ("VLLM::Worker_TP1", 300.0, ["process-silent"]),
        ("VLLM::Worker_TP1", 20.0, []),
        ("VLLM::DPCoordinator", 300.0, []),
        ("python -c from multiprocessing.spawn import spawn_main", 300.0, []),
    ],
)
def test_which_processes_must_report(title: str, age_s: float, expected: list[str]) -> None:
    """Those that load plugins, once they have had time for it."""
    assert ids(judge(serving(members=(*SERVER.members, Member(50, title, age_s))))) == expected


def test_nobody_must_report_where_everything_is_off() -> None:
    """A stock server's stages have no state file."""
    off = {"drum": record("off", count=0)}
    facts = serving(snapshots=(snapshot(10, patches=off),), members=(STAGE,))
    assert judge(facts) == []


IDLE: dict[str, Any] = {"patches": {"drum": record(count=0)}}


@pytest.mark.parametrize(
    ("scrape", "expected"),
    [
        (Scrape({UPSTREAMS: 20.0, "omni_fastpath_x": 1.0}), [("patch-idle", WARNING)]),
        (Scrape({UPSTREAMS: 19.0, "omni_fastpath_x": 1.0}), []),
        (Scrape({"omni_fastpath_x": 1.0}), [("patch-idle", INFO)]),
        (Scrape(problem="its state file names no port"), [("patch-idle", INFO)]),
        (None, []),
    ],
)
def test_idle_is_judged_by_upstreams_counter(scrape: Scrape | None, expected: list[Any]) -> None:
    """Enough of it moved, not yet enough, no such counter, nobody answers, nobody asked."""
    facts = saying(stage=IDLE, **IDLE)
    facts = dataclasses.replace(facts, servers=(dataclasses.replace(facts.servers[0], scrape=scrape),))
    assert [(each.id, each.severity) for each in judge(facts)] == expected


def test_a_patch_without_a_counter_of_upstreams_is_not_judged_and_that_is_said() -> None:
    """Nobody knows whether the load has called for it."""
    [found] = judge(saying(patches={"flute": record(count=0)}, stage={"patches": {}}))
    assert (found.id, found.severity) == ("patch-idle", INFO)
    assert found.evidence["idle"] == ["flute: upstream has no counter that must move with it"]


def test_one_process_in_which_it_took_effect_is_enough() -> None:
    """The parent of several API servers serves nobody."""
    assert judge(saying(patches={"drum": record(count=0)})) == []


@pytest.mark.parametrize(
    ("sizes", "severity"), [((4096,), INFO), ((2**26,), WARNING), ((2**25, 2**25), WARNING), ((2**24,), INFO)]
)
def test_what_is_left_weighs_by_its_size(sizes: tuple[int, ...], severity: Severity) -> None:
    """From 64 MiB on a warning, and from a tenth of the folder."""
    [found] = judge(left(*sizes))
    assert found.severity is severity
    small = dataclasses.replace(left(*sizes), shared_memory_bytes=10 * sum(sizes))
    assert judge(small)[0].severity is WARNING


def test_the_command_removes_those_files_and_no_others() -> None:
    """Names are quoted; many are listed anew when the command runs."""
    [found] = judge(left(1, 1))
    assert "rm -- '/dev/shm/a b_0' '/dev/shm/a b_1'" in found.do
    [found] = judge(left(*[1] * 21))
    assert "omni-fastpath doctor --leftovers | xargs -0 rm --" in found.do


@pytest.mark.parametrize(
    ("environ", "severity"),
    [
        ({"OMNI_FASTPATH": "1"}, ERROR),
        ({"OMNI_FASTPATH": "maybe"}, ERROR),  # a start with us would be refused: something was asked for
        ({"OMNI_FASTPATH": "0"}, INFO),
        ({}, INFO),
    ],
)
def test_who_asked_for_nothing_may_leave_us_out(environ: dict[str, str], severity: Severity) -> None:
    """A server that is stock on purpose is no trouble."""
    stock = silent(environ={**environ, "VLLM_PLUGINS": "vllm_omni_register_models"}, members=())
    assert [each.severity for each in judge(stock) if each.id == "plugins-leave-us-out"] == [severity]


def test_a_shell_with_everything_off_may_leave_us_out() -> None:
    """OMNI_FASTPATH=0 says the same."""
    [found] = judge(shell(OMNI_FASTPATH="0", VLLM_PLUGINS="vllm_omni_register_models"))
    assert (found.id, found.severity) == ("plugins-leave-us-out", INFO)


def test_a_state_file_of_another_version_is_no_silence() -> None:
    """Of the server and of its stage: told as what it is, once."""
    for facts in (silent(unreadable=frozenset({10, 12})), saying()):
        server = dataclasses.replace(facts.servers[0], snapshots=facts.servers[0].snapshots[:1])
        server = dataclasses.replace(server, unreadable=frozenset({12} if server.snapshots else {10, 12}))
        [found] = judge(dataclasses.replace(facts, servers=(server,)))
        assert (found.id, found.severity) == ("server-unreadable", WARNING)
        assert "a state file of another version" in found.what


def test_a_variable_in_a_yaml_is_the_servers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Upstream resolves ``${oc.env:...}`` in the server: neither its lack here nor another value is a change."""
    pytest.importorskip("omegaconf")
    file = tmp_path / "deploy.yaml"
    file.write_text("output_dir: ${oc.env:MY_DIR}\nfastpath: {drum: {loud: '${oc.decode:${oc.env:LOUD}}'}}")
    patches = {"drum": record(origin=f"fastpath.drum in {file}"), "flute": record("off", count=0)}
    facts = saying(source=str(file), patches=patches)
    server = dataclasses.replace(
        facts.servers[0],
        environ={"MY_DIR": "/x", "LOUD": "3"},
        command=("vllm", "serve", "m", "--deploy-config", str(file)),
    )
    monkeypatch.delenv("MY_DIR", raising=False)
    monkeypatch.setenv("LOUD", "4")
    before = dict(os.environ)
    assert judge(dataclasses.replace(facts, servers=(server,))) == []
    assert dict(os.environ) == before
    server = dataclasses.replace(server, environ={"MY_DIR": "/x", "LOUD": "5"})
    assert ids(judge(dataclasses.replace(facts, servers=(server,)))) == ["yaml-changed"]


def test_who_refuses_to_be_asked_does_not_hang() -> None:
    """Nothing listens yet while a model is loaded; and one that has just begun is left in peace."""
    assert judge(serving(scrape=Scrape(problem="/metrics does not answer: Connection refused"))) == []
    assert (
        judge(serving(age_s=20.0, scrape=Scrape(problem="/metrics does not answer: timed out", timed_out=True))) == []
    )


def test_a_server_with_other_files_is_not_judged_by_ours(tmp_path: Path) -> None:
    """Of a container's server its silence is no trouble, nor are its paths."""
    environ = {"OMNI_FASTPATH": "1", "PROMETHEUS_MULTIPROC_DIR": "/nowhere"}
    [found] = judge(silent(is_elsewhere=True, environ=environ, folder_problem="/x is no folder"))
    assert (found.id, found.severity) == ("server-elsewhere", INFO)
    file = tmp_path / "deploy.yaml"
    file.write_text("fastpath: {drum: {loudd: 4}}")  # what is there by that name here
    facts = serving(environ={}, command=("vllm", "serve", "m", "--deploy-config", str(file)), is_elsewhere=True)
    assert judge(facts) == []


def test_in_a_container_nobody_is_told_to_remove_what_others_may_use() -> None:
    """They share its /dev/shm and are not seen: no warning, no command, nothing about dead servers."""
    [found] = judge(dataclasses.replace(left(2**26), contained=True))
    assert found.severity is INFO
    assert "dead" not in found.what
    assert "rm " not in found.do
    assert "others may share its /dev/shm" in found.do


def test_a_stage_in_which_everything_is_off_is_nobodys() -> None:
    """Under OMNI_FASTPATH=0 a plain vLLM's engine writes a state file and the server above it none."""
    off = snapshot(40, "stage", patches={"drum": record("off", count=0)})
    assert judge(dataclasses.replace(HEALTHY, stray=(off,))) == []
    [found] = judge(dataclasses.replace(HEALTHY, stray=(off, snapshot(41, "stage"))))
    assert found.do.endswith("kill 41")


def test_several_troubles_are_told_by_weight() -> None:
    """Errors first; each rule keeps its own."""
    broken = dataclasses.replace(left(0), other_namespaces=1, folder_problem="no folder")
    assert ids(judge(broken)) == ["state-folder-unusable", "state-folder-shared", "shared-memory-left"]


def test_a_rule_that_fails_hides_no_other() -> None:
    """What it could not judge is told under its id."""
    broken = dataclasses.replace(saying(vllm=["a list"]), folder_problem="no folder")
    facts = dataclasses.replace(
        broken, servers=(dataclasses.replace(broken.servers[0], cwd=None, snapshots=({"pid": 10},)),)
    )
    found = judge(facts)
    assert found[0].id == "state-folder-unusable"
    assert {each.severity for each in found[1:]} == {WARNING}
    assert all("this rule failed: KeyError" in each.what for each in found[1:])


def test_no_rule_names_a_patch() -> None:
    """What is particular stands in declarations."""
    from omni_fastpath import patches as shipped
    from omni_fastpath.tools.findings import facts, rules

    text = "".join(Path(str(module.__file__)).read_text() for module in (facts, rules))
    assert [patch.name for patch in shipped.PATCHES if patch.name in text] == []
    assert DRUM in PATCHES
