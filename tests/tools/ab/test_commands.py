"""What a command line asks for: parts, arms, placeholders, and what is refused."""

from __future__ import annotations

import json
import shlex
import sys
from pathlib import Path

import pytest

from omni_fastpath.config import ConfigError
from omni_fastpath.tools import cli
from omni_fastpath.tools.ab import commands, redaction

PYTHON = sys.executable


def test_commands_stand_between_bare_dashes() -> None:
    """Options after ``--`` belong to the command, and a third bare ``--`` is refused."""
    found = commands.parts(["--starts", "2", "--", "vllm", "serve", "--", "vllm", "--x=--"], "usage")
    assert found == [["--starts", "2"], ["vllm", "serve"], ["vllm", "--x=--"]]
    with pytest.raises(ConfigError, match="more than two bare `--`"):
        commands.parts(["--", "a", "--", "b", "--", "c"], "usage")


@pytest.mark.parametrize(
    ("assignments", "expected"),
    [
        (["X=1", "Y=a=b", "X=2"], ("A", {"X": "2", "Y": "a=b"})),
        (["stock=FLAG=0", "http_proxy=http://h?a=b"], ("stock", {"FLAG": "0", "http_proxy": "http://h?a=b"})),
        (["X=1", "no-drain=FLAGS=A=B"], ("no-drain", {"X": "1", "FLAGS": "A=B"})),
        (["HF_TOKEN=ABC=", "PATH=X=1"], ("A", {"HF_TOKEN": "ABC=", "PATH": "X=1"})),
    ],
)
def test_an_arm_has_variables_and_may_have_a_name(assignments: list[str], expected: object) -> None:
    """The name precedes one variable, and ``=`` in a value does not make a name."""
    assert commands.arm("A", "--a", assignments) == expected


def test_only_the_placeholders_are_filled_in() -> None:
    """Braces of JSON, shells and Jinja are not changed."""
    words = ["${EXTRA} --port {port}", "{{bos_token}}", '{"a": {}}', "--out={result}"]
    assert commands.filled(words, 7, "x") == ["${EXTRA} --port 7", "{{bos_token}}", '{"a": {}}', "--out=x"]


def test_the_clients_headers() -> None:
    """The values of the last ``--header`` are split at their first ``=``, as in upstream's client."""
    words = shlex.split("bench --header old=1 --model m --header 'Authorization=Bearer a=b' 'x = 1' --seed 2")
    assert commands.headers(words) == {"Authorization": "Bearer a=b", "x": "1"}
    assert commands.headers([*words, "--header=y=2", "z=3"]) == {"y": "2"}
    assert commands.headers(["bench", "X=1", "--model", "m"]) == {}


SECRETS = [
    "--api-key SECRET SECRET",
    "--api_key=SECRET",
    "--header Authorization=Bearer\\ SECRET x-api-key=SECRET",
    "--header=Cookie=SECRET",
    "-H 'Authorization: Bearer SECRET'",
    "-pSECRET",
    '--extra-body \'{"key": "SECRET"}\'',
    "--base-url https://me:SECRET@host/v1",
    "--endpoint https://host/v1?token=SECRET",
    "--model https://me:SECRET@host/m",
    "env HF_TOKEN=SECRET AWS_ACCESS_KEY=SECRET",
    "bash -c 'export HF_TOKEN=SECRET; vllm serve m'",
    "--a=HF_TOKEN=SECRET",
    "SECRET",
    "--omni SECRET",
    "serve me:SECRET@host/m",
]


@pytest.mark.parametrize("words", SECRETS)
def test_no_way_to_write_a_secret_into_a_command_gets_into_a_report(words: str) -> None:
    """A value is shown only if its option is known to be harmless, but names are shown."""
    command = ["/usr/bin/vllm", *shlex.split(words), "--port", "{port}", "--max-concurrency=16"]
    found = redaction.command(command)
    assert "SECRET" not in " ".join(found)
    assert found[0] == "vllm"
    assert found[-3:] == ["--port", "{port}", "--max-concurrency=16"]


def test_what_makes_a_command_that_command_is_shown() -> None:
    """Programs, the model, option names and values of harmless options are shown."""
    command = "env HF_TOKEN=x python -m vllm_omni.entrypoints.cli.main serve org/model --omni --seed 3 --api-key x"
    told = "env *** *** -m vllm_omni.entrypoints.cli.main serve org/model --omni --seed 3 --api-key ***"
    assert redaction.command(command.split()) == told.split()


def test_of_variables_the_values_are_shown_that_are_ours() -> None:
    """Only values of documented variables and of upstream's mode are shown."""
    environ = {"OMNI_FASTPATH": "1", "OMNI_FASTPATH_HF_TOKEN": "x", "HF_TOKEN": "x", "VLLM_OMNI_EVENT_DRIVEN_ORCH": "1"}
    hidden = {"OMNI_FASTPATH_HF_TOKEN": "***", "HF_TOKEN": "***"}
    assert redaction.variables(environ) == {**environ, **hidden}


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ([], "found 0 bare `--`"),
        (["--starts", "3", "--", "SERVE", "--", "BENCH"], "--starts: found 3; allowed: an even number"),
        (["--a", "OMNI_FASTPATH", "--", "SERVE", "--", "BENCH"], "--a: found 'OMNI_FASTPATH'; allowed: NAME=VALUE"),
        (["--a", "x=FLAG=0", "--b", "x=FLAG=1", "--", "SERVE", "--", "BENCH"], "--b: found the name x;"),
        (["--b", "OMNI_FASTPATH_DRIAN=1", "--", "SERVE", "--", "BENCH"], "OMNI_FASTPATH_DRIAN: found an unknown"),
        (["--", PYTHON, "--", "BENCH"], "serve command: found no {port}"),
        (["--", "SERVE", "--", PYTHON, "{port}"], "bench command: found no {result}"),
        (["--", PYTHON, "{port}", "--host", "10.0.0.5", "--", "BENCH"], "serve command: found --host 10.0.0.5"),
        (["--", PYTHON, "{port}", "--ssl-certfile", "c", "--", "BENCH"], "serve command: found --ssl-certfile"),
        (["--", "no-such-program", "{port}", "--", "BENCH"], "serve command: found 'no-such-program'"),
        (["--", PYTHON, "{port}", "--config", "c", "--", "BENCH"], "serve command: found --config"),
        (["--a", "VLLM_PLUGINS=x", "--a", "OMNI_FASTPATH=0", "--", "SERVE", "--", "BENCH"], "VLLM_PLUGINS: found x"),
        (["--", "SERVE", "--", "BENCH", "--endpoint=/v1/audio/speech", "--extra-body=["], "a JSON object"),
        (["--out", ".", "--", "SERVE", "--", "BENCH"], "--out: found '.'; allowed: a new or empty folder"),
        (["compare", "none.json"], "none.json: found no start"),
    ],
)
def test_usage_errors_name_the_key(arguments: list[str], said: str, capsys: pytest.CaptureFixture[str]) -> None:
    """The exit code is 2, the message has key, found and allowed values, and nothing is started or written."""
    commands = {"SERVE": [PYTHON, "{port}"], "BENCH": [PYTHON, "{port}", "{result}"]}
    words = [each for word in arguments for each in commands.get(word, [word])]
    assert cli.main(["ab", *words]) == 2
    captured = capsys.readouterr()
    assert said in captured.err
    assert captured.err.startswith("omni-fastpath: ")
    assert [path.name for path in Path.cwd().iterdir()] == ["runtime"]


# ---- The fixed requests ----


def test_fixed_requests_go_where_the_clients_go() -> None:
    """Fixed requests use the client's endpoint, model and extra body, and are greedy, seeded and always the same."""
    bench = ["vllm", "bench", "serve", "--model", "m", "--backend", "openai-chat-omni", "--extra-body"]
    sent = commands.fixed([*bench, '{"modalities": ["audio"], "stream": false}'])
    assert len({json.dumps(request.body["messages"][0]["content"]) for request in sent}) == 9
    assert sent[-1].body["messages"][0]["content"][0]["type"] == "input_audio"
    body = sent[0].body
    assert (body["model"], body["modalities"], body["temperature"], body["seed"]) == ("m", ["audio"], 0.0, 0)
    assert body["stream"] is True
    assert sent == commands.fixed([*bench, '{"modalities": ["audio"]}'])
    spoken, *_ = commands.fixed(["--endpoint=/v1/audio/speech", "--extra-body", '{"voice": "anna"}'])
    assert (spoken.path, spoken.body["voice"], spoken.body["seed"]) == ("/v1/audio/speech", "anna", 0)


def test_where_no_request_is_known_none_is_sent() -> None:
    """An endpoint that is not known has no fixed requests."""
    assert commands.fixed(["--endpoint", "/v1/completions"]) == commands.fixed([]) == []


def test_a_missing_dependency_is_named(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """A missing dependency is exit code 2 with a message instead of a traceback."""
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None if name == "aiohttp" else object())
    assert cli.main(["ab", "--help"]) == 2
    assert "ab needs aiohttp" in capsys.readouterr().err
