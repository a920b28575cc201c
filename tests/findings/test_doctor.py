"""``omni-fastpath doctor``: the report, its schema, its exit codes, and what goes into an issue."""

from __future__ import annotations

import dataclasses
import getpass
import json
import os
import socket
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pydantic
import pytest

from omni_fastpath import processid
from omni_fastpath.tools import cli, doctor, findings
from omni_fastpath.tools.findings import Facts, leftovers
from omni_fastpath.tools.findings.leftovers import Leftover
from omni_fastpath.tools.findings.model import SCHEMA_FILE, Doctor
from tests.findings.made import HEALTHY, installation, saying, serving
from tests.findings.made import record as made_record

Run = Callable[..., tuple[int, str]]


@pytest.fixture
def run(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Run:
    """The command on these facts; its exit code and output."""

    def _run(facts: Facts, *arguments: str) -> tuple[int, str]:
        asked: list[dict[str, Any]] = []

        def look(*_: Any, **how: Any) -> Facts:
            asked.append(how)
            return facts

        monkeypatch.setattr(cli, "look", look)
        code = cli.main(["doctor", *arguments])
        assert [how["deep"] for how in asked] in ([], [True])
        return code, capsys.readouterr().out

    return _run


INFO = serving(environ=None)
WARNING = dataclasses.replace(HEALTHY, environ={**HEALTHY.environ, "OMNI_FASTPATHX": "1"})
ERROR = installation(entry_points=[])
REFUSED = dataclasses.replace(HEALTHY, report={**HEALTHY.report, "configuration_error": "no"})


@pytest.mark.parametrize(("facts", "code"), [(HEALTHY, 0), (INFO, 0), (WARNING, 1), (ERROR, 1), (REFUSED, 2)])
def test_exit_codes(run: Run, facts: Facts, code: int) -> None:
    """0 where nothing weighs more than info, 1 after a warning or an error, 2 where a start would be refused."""
    assert run(facts)[0] == run(facts, "--json")[0] == code


def test_a_finding_is_told_in_full(run: Run) -> None:
    """Id, subject, sentence, evidence, threshold and what to do."""
    [found] = findings.judge(WARNING)
    _, out = run(WARNING)
    for part in (
        "warning variable-unknown: installation",
        found.what,
        "variable: OMNI_FASTPATHX",
        found.threshold,
        found.do,
    ):
        assert part in out
    assert "1 live server; 1 warning" in out
    assert "nothing found" in run(HEALTHY)[1]


def test_the_schema_is_the_models() -> None:
    """What is published beside the code is what comes out; `python -m tests.findings.test_doctor` writes it."""
    if tuple(map(int, pydantic.VERSION.split(".")[:2])) < (2, 10):
        pytest.skip("pydantic before 2.10 words schemas otherwise")
    assert json.loads(SCHEMA_FILE.read_text()) == schema()


def schema() -> dict[str, Any]:
    """Of the report."""
    return Doctor.model_json_schema(by_alias=True, mode="serialization")


@pytest.mark.parametrize("facts", [HEALTHY, INFO, WARNING, ERROR, REFUSED])
def test_the_report_fits_the_published_schema(run: Run, facts: Facts) -> None:
    """Any JSON Schema validator reads it."""
    jsonschema = pytest.importorskip("jsonschema")
    _, out = run(facts, "--json")
    jsonschema.validate(json.loads(out), json.loads(run(facts, "--json-schema")[1]))


def test_the_report_has_servers_and_versions(run: Run) -> None:
    """How many processes report, what they run and what each patch is there."""
    found = json.loads(run(HEALTHY, "--json")[1])
    [server] = found["servers"]
    assert (server["processes"], server["reporting"]) == (3, 2)
    assert server["patches"] == {"drum": "applied x2", "flute": "off x2"}
    assert server["versions"] == ["omni_fastpath 0.1.0, vllm_omni 0.30.0, vllm vllm 0.30.0"]
    assert found["versions"]["vllm_omni"] == "vllm-omni 0.30.0"
    assert found["schema"] == 1


def test_an_issue_has_no_names_of_users_and_hosts(run: Run, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Home folders, this host, this user and addresses are taken out; values of others' variables never go in."""
    monkeypatch.setattr(socket, "gethostname", lambda: "gpu-box-17")
    monkeypatch.setattr(socket, "getfqdn", lambda: "gpu-box-17.example.org")
    monkeypatch.setattr(getpass, "getuser", lambda: "alice")
    monkeypatch.setenv("HOME", "/data/alice")
    reason = "no /home/bob/x, /root/y, /data/alice/z, /srv/alice/q on gpu-box-17.example.org or gpu-box-17 at 10.1.2.3"
    facts = saying(patches={"drum": made_record("failed", reason=reason)}, stage={"patches": {}})
    server = dataclasses.replace(
        facts.servers[0],
        environ={
            "OMNI_FASTPATH": "1",
            "TOKEN": "SECRET",
            "VLLM_PLUGINS": "SECRET,omni_fastpath",
            "OMNI_FASTPATHX": "SECRET",
        },
    )
    _, out = run(dataclasses.replace(facts, servers=(server,)), "--json")
    issue = json.loads(out)["issue"]
    assert "no ~/x, ~/y, ~/z, /srv/USER/q on HOST or HOST at ADDRESS" in issue
    assert "OMNI_FASTPATH=1" in issue
    assert "variable: OMNI_FASTPATHX" in issue
    for secret in ("alice", "bob", "gpu-box", "10.1.2.3", "SECRET"):
        assert secret not in issue
    assert doctor.redacted("127.0.0.1 is everybody's, and so is 0.30.0") == "127.0.0.1 is everybody's, and so is 0.30.0"
    assert tmp_path.exists()


def test_a_variable_of_ours_that_nobody_documents_goes_into_an_issue_by_name(run: Run) -> None:
    """Whatever begins like our names may hold a token."""
    named = {"OMNI_FASTPATH_DRUM": "1", "OMNI_FASTPATH_HF_TOKEN": "hf_SECRET"}
    issue = json.loads(run(installation(environment=named), "--json")[1])["issue"]
    assert "variables: OMNI_FASTPATH_DRUM=1, OMNI_FASTPATH_HF_TOKEN\n" in issue
    assert "SECRET" not in issue


def test_a_user_without_a_home_has_a_report(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    """A pod's user often has neither HOME nor an entry among the users."""
    monkeypatch.setattr(Path, "home", lambda: (_ for _ in ()).throw(RuntimeError("no home directory")))
    assert run(HEALTHY)[0] == 0


def test_bytes_that_are_no_text_break_nothing(run: Run) -> None:
    """A variable's name that is no Unicode is shown escaped, as JSON too."""
    name = os.fsdecode(b"OMNI_FASTPATH_CAF\xe9")
    facts = installation(environment={name: os.fsdecode(b"\xe9")})
    facts = dataclasses.replace(facts, environ={name: os.fsdecode(b"\xe9")})
    code, out = run(facts, "--json")
    assert code == 1
    assert "OMNI_FASTPATH_CAF\\udce9" in json.loads(out)["environment"]
    assert "OMNI_FASTPATH_CAF\\udce9" in run(facts)[1]


def test_leftovers_are_listed_for_a_pipe(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """With NUL between them, shared memory only: device locks are not for wholesale removal."""
    left = [
        Leftover(Path("/dev/shm/a b"), "shared memory", 1, 100.0),  # noqa: S108
        Leftover(Path("/tmp/vllm_omni_device_0_init.lock"), "lock", 1, 100.0),  # noqa: S108
        Leftover(Path("/dev/shm/c"), "shared memory", 1, 100.0),  # noqa: S108
    ]
    monkeypatch.setattr(leftovers, "find", lambda: left)
    for contained in (True, False):
        monkeypatch.setattr(processid, "is_contained", lambda: contained)  # noqa: B023 - called in this round
        assert cli.main(["doctor", "--leftovers"]) == 0
        out, err = capsys.readouterr()
        assert out == f"{left[0].path}\0{left[2].path}\0"
        assert ("may use these files" in err) is contained


if __name__ == "__main__":
    SCHEMA_FILE.write_text(json.dumps(schema(), indent=2) + "\n", encoding="utf-8")
