"""Each rule finds its trouble and nothing else does; where nothing is wrong nothing is found."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable, Sequence
from typing import Any

import pytest

from omni_fastpath.patches.queue_metrics import PATCH, SECONDS
from omni_fastpath.tools import cli, status
from omni_fastpath.tools.findings import FEWEST, RULES, Facts, Severity, judge
from tests.tools.made import HEALTHY, REPORT, SERVER, installation, record, reporting, saying, serving


def with_patch(**changed: Any) -> Facts:
    """The first patch in another condition."""
    patches = REPORT["installation"]["patches"]
    return installation(patches={**patches, "drum": {**patches["drum"], **changed}})


def shell(**variables: str) -> Facts:
    """Another environment of this shell's."""
    return dataclasses.replace(HEALTHY, environ={**HEALTHY.environ, **variables})


def showing(metric: str, *samples: Any) -> Facts:
    """A server whose first patch has these samples of a metric."""
    return saying(patches={"drum": {**record(), "figures": {f"omni_fastpath_{metric}": samples}}})


def ringing(counts: Sequence[int], before: Sequence[int] = (0, 0, 0, 0), where: str = "hall") -> Facts:
    """A server that has counted this, and this some minutes ago, with the bounds 0.5, 1 and 4."""
    return showing("ring_seconds", {"labels": {"where": where}, "counts": counts, "before": before})


def hanging(value: float) -> Facts:
    """A server with this value of a gauge, which is said if it is above 0."""
    return showing("hanging", {"labels": {"stage": "1"}, "value": 0.0}, {"labels": {"stage": "2"}, "value": value})


UNKNOWN = "vllm-omni 0.99.0 (by a test) is not among the tested releases: 0.30.0"
FAILED = {"patches": {"drum": record("failed", reason="a seam moved")}}
BUSY = {"front_end": 0.5, "orchestrator": 0.4}

BROKEN: dict[str, tuple[Callable[[], Facts], Severity, str]] = {
    "start-refused": (lambda: dataclasses.replace(HEALTHY, refused="found 'maybe'"), "error", "found 'maybe'"),
    "upstream-missing": (lambda: installation(vllm_omni=None, patches={}), "error", "vllm-omni is not installed"),
    "patch-unsupported": (lambda: with_patch(release_problem=UNKNOWN), "error", f"drum: {UNKNOWN}"),
    "seam-moved": (lambda: reporting(verify={"drum": ["m:run: moved"]}), "error", "drum: m:run: moved"),
    "plugins-leave-us-out": (lambda: shell(VLLM_PLUGINS="vllm_omni_register_models"), "error", "an allow-list without"),
    "variable-unknown": (lambda: shell(OMNI_FASTPATH_DRUMM="1"), "warning", "did you mean 'OMNI_FASTPATH_DRUM'?)"),
    "patch-not-serving": (lambda: saying(stage=FAILED), "error", "drum is failed in process 12 (stage): a seam moved"),
    "api-process-full": (lambda: serving(busy=BUSY), "warning", "is full (front end 0.50, orchestrator 0.40):"),
    "advice": (lambda: hanging(3.0), "warning", "3.0 in 2"),
}


def test_nothing_is_wrong_where_nothing_is() -> None:
    """A healthy server has no finding, and every rule has a case below."""
    assert judge(HEALTHY) == judge(hanging(0.0)) == []
    assert BROKEN.keys() == {rule.__name__.replace("_", "-") for rule in RULES}
    for busy in ({**BUSY, "front_end": 0.44}, {"front_end": 0.12, "orchestrator": 0.86}):  # the last one starts
        assert judge(serving(busy=busy)) == []


@pytest.mark.parametrize("rule", BROKEN)
def test_a_rule_finds_its_trouble_and_no_other_does(rule: str) -> None:
    """One problem is one finding, with its advice. A metric's advice has an id of its own."""
    broken, severity, what = BROKEN[rule]
    [found] = judge(broken())
    assert (found.id, found.severity) == ({"advice": "hanging"}.get(rule, rule), severity)
    assert what in found.what
    assert found.do


@pytest.mark.parametrize(
    ("facts", "expected"),
    [
        (ringing((500, 0, 60, 0), (500, 0, 0, 0)), ["4.0 s"]),  # of the last minutes
        (ringing((500, 0, 40, 0), (500, 0, 0, 0)), ["4.0 s"]),  # of all, because the last minutes are too few
        (ringing((500, 3, 0, 0)), []),
        (ringing((0, 0, 0, 49)), ["rings long: too few to judge (at most 49 of a kind, 50 are needed)"]),
        (ringing((0, 0, 0, 99), where="bath"), []),
    ],
)
def test_a_histogram_is_told_by_its_99th_percentile(facts: Facts, expected: list[str]) -> None:
    """The upper bound of its bucket counts, of the last minutes if they have 50 values, else of the whole time."""
    assert [each.what for each in judge(facts)] == expected


@pytest.mark.parametrize("audios", [0, 49, 50])
def test_too_few_first_outputs_are_said_in_one_line(audios: int) -> None:
    """Neither once per part and kind, nor if there is enough of one kind: a server may make only audio."""
    parts: dict[str, dict[str, str]] = {"api_process_seconds": {}, "leg_seconds": {"leg": "engines"}}
    empty = [0] * len(SECONDS)
    figures: dict[str, Any] = {
        f"omni_fastpath_first_output_{part}": [
            {"labels": {"output": output, **leg}, "counts": [*empty, number], "before": [*empty, 0]}
            for output, number in (("audio", audios), ("text", 0))
        ]
        for part, leg in parts.items()
    }
    facts = saying(patches={PATCH.name: {**record(), "figures": figures}})
    found = judge(dataclasses.replace(facts, patches=[PATCH]))
    assert {(each.id, each.severity) for each in found} == {("first-output", "info")}
    lines = [each.what for each in found]
    if audios < FEWEST:
        assert lines == [f"first output: too few to judge (at most {audios} of a kind, {FEWEST} are needed)"]
    else:
        assert [line.partition(":")[0] for line in lines] == ["first audio"] * 2


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
    found = [(each.id, each.severity, each.what) for each in judge(facts)]
    assert found == [("patch-unsupported", "error", "drum: unlisted; 2 of 3 seams")]


@pytest.mark.parametrize(
    ("variables", "expected"),
    [
        ({"VLLM_PLUGINS": "", "OMNI_FASTPATH": "maybe"}, [("plugins-leave-us-out", "error")]),
        ({"VLLM_PLUGINS": "", "OMNI_FASTPATH": "0"}, [("plugins-leave-us-out", "info")]),
        ({"VLLM_PLUGINS": "omni_fastpath,other"}, []),
        ({"OMNI_FASTPATH_DRUM__LUOD": "1"}, [("variable-unknown", "warning")]),
        ({"OMNI_FASTPATH_SERVICE_HOST": "10.0.0.1"}, []),
        ({"OMNI_FASTPATH": "0", "OMNI_FASTPATH_DRUMM": "1"}, []),
    ],
)
def test_a_server_is_judged_by_its_own_variables(variables: dict[str, str], expected: list[Any]) -> None:
    """Findings are about the server's variables, not the shell's, and there are none under ``OMNI_FASTPATH=0``."""
    found = judge(serving(environ={**(SERVER.environ or {}), **variables}))
    assert [(each.id, each.severity) for each in found] == expected
    assert {each.subject for each in found} <= {"server 10"}


# ---- doctor ----


@pytest.fixture
def doctor(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Callable[..., tuple[int, str]]:
    """Return a function that runs ``doctor`` on facts and returns exit code and output."""

    def run(facts: Facts, *options: str) -> tuple[int, str]:
        monkeypatch.setattr(status, "collect", lambda *_, **__: facts)
        code = cli.main(["doctor", *options])
        return code, capsys.readouterr().out

    return run


MISSPELT = shell(OMNI_FASTPATHX="1")


def test_doctor_tells_a_finding_in_full(doctor: Any) -> None:
    """It prints what was found and what to do. A warning is exit code 1."""
    [found] = judge(MISSPELT)
    of_no_use = dataclasses.replace(with_patch(release_problem=UNKNOWN), asked=frozenset())
    assert doctor(HEALTHY)[0] == doctor(of_no_use)[0] == 0
    code, out = doctor(MISSPELT)
    assert code == 1
    assert f"warning variable-unknown: installation\n  {found.what}\n  do: {found.do}\n" in out
    assert json.loads(doctor(MISSPELT, "--json")[1])["findings"] == [dataclasses.asdict(found)]
