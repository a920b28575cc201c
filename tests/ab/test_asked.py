"""What a command line asks for: parts, arms, placeholders, and what is refused."""

from __future__ import annotations

import socket
import sys
from pathlib import Path

import pytest

from omni_fastpath import cli
from omni_fastpath.ab import asked, requests
from omni_fastpath.values import ConfigError

PYTHON = sys.executable


def test_commands_stand_between_bare_dashes() -> None:
    """What looks like an option stays the command's; a third bare one is refused."""
    found = asked.parts(["--starts", "2", "--", "vllm", "serve", "--", "vllm", "--x=--"], 2, "usage")
    assert found == [["--starts", "2"], ["vllm", "serve"], ["vllm", "--x=--"]]
    with pytest.raises(ConfigError, match="more than 2 bare `--`"):
        asked.parts(["--", "a", "--", "b", "--", "c"], 2, "usage")


def test_only_words_in_braces_are_placeholders() -> None:
    """JSON keeps its braces; a placeholder may stand within a word."""
    words = ["--url=http://{host}:{port}", '{"modalities": {"a": 1}}', "{}"]
    assert asked.filled(words, {"host": "here", "port": 7}) == ["--url=http://here:7", '{"modalities": {"a": 1}}', "{}"]


def test_an_arm_shows_no_secret() -> None:
    """Values of variables and options whose names say that they are secrets are hidden, everywhere."""
    arm = asked.Arm("A", asked.variables("--a", ["HF_TOKEN=abc", "OMNI_FASTPATH=1", "X=a=b"]))
    assert str(arm) == "HF_TOKEN=*** OMNI_FASTPATH=1 X=a=b"
    assert arm.variables["X"] == "a=b"
    command = ["vllm", "--api-key", "abc", "--api-key=abc", "HF_TOKEN=abc", "--max-tokens", "5"]
    assert asked.shield(command) == ["vllm", "--api-key", "***", "--api-key=***", "HF_TOKEN=***", "--max-tokens", "5"]


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ([], "found 0 bare `--`"),
        (["--", "SERVE"], "found 1 bare `--`"),
        (["--starts", "3", "--", "SERVE", "--", "BENCH"], "--starts: found 3; allowed: an even number"),
        (["--starts", "0", "--", "SERVE", "--", "BENCH"], "--starts: found 0"),
        (["--a", "OMNI_FASTPATH", "--", "SERVE", "--", "BENCH"], "--a: found 'OMNI_FASTPATH'; allowed: NAME=VALUE"),
        (
            ["--b", "OMNI_FASTPATH_DRIAN=1", "--", "SERVE", "--", "BENCH"],
            "OMNI_FASTPATH_DRIAN: found an unknown",
        ),
        (["--b", "XDG_RUNTIME_DIR=/x", "--", "SERVE", "--", "BENCH"], "--b: found 'XDG_RUNTIME_DIR=/x'"),
        (["--", PYTHON, "--", "BENCH"], "serve command: found no {port}"),
        (["--", "SERVE", "--", PYTHON, "{result}"], "bench command: found no {port}"),
        (["--", "SERVE", "--", PYTHON, "{port}"], "bench command: found no {result}"),
        (
            ["--", PYTHON, "{prot}", "--", "BENCH"],
            "unknown placeholder {prot}; allowed: {port}, {host}; did you mean",
        ),
        (["--", "no-such-program", "{port}", "--", "BENCH"], "serve command: found 'no-such-program'"),
        (["--", "SERVE", "--", PYTHON, "bench", "serve", "{port}", "{result}"], "found no --save-result"),
        (["--port", "0", "--", "SERVE", "--", "BENCH"], "--port: found 0"),
        (["--primary", "duration", "--", "SERVE", "--", "BENCH"], "--primary: found duration, whose direction"),
        (["--requests", "none.jsonl", "--", "SERVE", "--", "BENCH"], "--requests: found none.jsonl"),
        (["--ready-timeout", "0", "--", "SERVE", "--", "BENCH"], "--ready-timeout: found 0"),
        (["compare", "none.json"], "none.json: found no start"),
        (["measure", "--url", "ftp://x", "--arm", "a", "--out", "f"], "--url: found 'ftp://x'"),
    ],
)
def test_usage_errors_name_the_key(arguments: list[str], said: str, capsys: pytest.CaptureFixture[str]) -> None:
    """One message: what, what was found, what is allowed; exit code 2; nothing was started or written."""
    commands = {"SERVE": [PYTHON, "{port}"], "BENCH": [PYTHON, "{port}", "{result}"]}
    words = [each for word in arguments for each in commands.get(word, [word])]
    assert cli.main(["ab", *words]) == 2
    captured = capsys.readouterr()
    assert said in captured.err
    assert captured.err.startswith("omni-fastpath: ")
    assert [path.name for path in Path.cwd().iterdir()] == ["runtime"]


def test_a_port_in_use_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    """Before anything is started."""
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = str(taken.getsockname()[1])
        code = cli.main(["ab", "--port", port, "--", PYTHON, "{port}", "--", PYTHON, "{port}", "{result}"])
    assert code == 2
    assert f"--port: found {port}, which is in use" in capsys.readouterr().err


def test_the_help_says_what_there_is(capsys: pytest.CaptureFixture[str]) -> None:
    """An example, the placeholders and every exit code; the command stands in the list of commands."""
    for arguments in (["ab", "--help"], ["ab", "measure", "--help"], ["ab", "compare", "--help"]):
        with pytest.raises(SystemExit) as ended:
            cli.main(arguments)
        assert ended.value.code == 0
        said = capsys.readouterr().out
        assert "130 interrupted" in said
    with pytest.raises(SystemExit):
        cli.main(["--help"])
    assert "  ab " in capsys.readouterr().out


# ---- The fixed requests ----


def test_fixed_requests_go_where_the_clients_go() -> None:
    """The endpoint, the model and the extra body are the client's; greedy, with a seed; the same whenever asked for."""
    bench = ["vllm", "bench", "serve", "--model", "m", "--backend", "openai-chat-omni", "--extra-body"]
    sent, none = requests.fixed([*bench, '{"modalities": ["audio"], "stream": false}'], 12)
    assert none == ""
    assert len({request.body["messages"][0]["content"] for request in sent}) == 12
    body = sent[0].body
    assert (body["model"], body["modalities"], body["temperature"], body["seed"]) == ("m", ["audio"], 0.0, 0)
    assert body["stream"] is True
    assert sent == requests.fixed([*bench, '{"modalities": ["audio"]}'], 12)[0]
    spoken, _ = requests.fixed(["--endpoint=/v1/audio/speech", "--extra-body", '{"voice": "anna"}'], 1)
    assert (spoken[0].path, spoken[0].body["voice"]) == ("/v1/audio/speech", "anna")


@pytest.mark.parametrize(
    ("bench", "why"),
    [
        (["--endpoint", "/v1/completions"], "no fixed requests for /v1/completions"),
        (["--backend", "openai-chat", "--extra-body", "{"], "--extra-body is no JSON object"),
        ([], "no fixed requests for this client"),
    ],
)
def test_where_no_request_can_be_made_it_is_said(bench: list[str], why: str) -> None:
    """In words, and nothing is guessed."""
    sent, none = requests.fixed(bench, 8)
    assert sent == []
    assert why in none


def test_requests_of_a_file(tmp_path: Path) -> None:
    """A line each; a line that is none is named with its number."""
    file = tmp_path / "requests.jsonl"
    file.write_text('{"path": "/v1/images", "body": {"prompt": "x"}}\n\n')
    assert [(each.path, each.body) for each in requests.from_file(file)] == [("/v1/images", {"prompt": "x"})]
    file.write_text('{"path": "/v1/images", "body": {}}\n{"path": "images"}\n')
    with pytest.raises(ConfigError, match=r"requests\.jsonl:2: found"):
        requests.from_file(file)


def test_without_what_it_needs_it_says_how_to_get_it(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Exit code 2, and no traceback of an import."""
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None if name == "aiohttp" else object())
    assert cli.main(["ab", "--help"]) == 2
    assert "ab needs aiohttp" in capsys.readouterr().err
