"""Show which patches are on and what they do, and write a deploy YAML or a dashboard.

Only ``status --verify``, ``--deploy-config`` and ``overlay`` import vllm and vllm-omni.
"""

from __future__ import annotations

import argparse
import io
import itertools
import json
import os
import shutil
import sys
import textwrap
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, TextIO

from omni_fastpath import __version__
from omni_fastpath.config import ConfigError, unknown
from omni_fastpath.patches import PATCHES
from omni_fastpath.tools import overlay, tables
from omni_fastpath.tools.findings import Severity
from omni_fastpath.tools.status import is_on, status_report

FINE, TROUBLE, REFUSED = 0, 1, 2
REMOVED = {
    "ab": "ab is not installed any more: run `python -m benchmarks.ab` from a clone (docs/operations.md)",
    "seams": "seams was removed: `explain PATCH --full` lists the functions, `status --verify` compares them",
}


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line.

    Returns:
        0: no problem. 1: there is an error, or a file cannot be written (``doctor``: any finding above ``info``;
        ``status --check``: also a server without a patch, or no server). 2: a usage error, or a start with this
        shell's variables, or with the given file, would be refused.
    """
    words = list(sys.argv[1:] if argv is None else argv)
    for stream in (sys.stdout, sys.stderr):
        _write_as(stream, errors="backslashreplace")  # characters that the locale does not have
    if words and words[0] in REMOVED:
        print(f"omni-fastpath: {REMOVED[words[0]]}", file=sys.stderr)  # noqa: T201
        return REFUSED
    try:
        arguments = _parser().parse_args(words)
        code: int = arguments.run(arguments)
    except (ConfigError, OSError, UnicodeError) as error:  # UnicodeError: a file name that is not UTF-8
        print(f"omni-fastpath: {error}", file=sys.stderr)  # noqa: T201
        return TROUBLE if isinstance(error, OSError) else REFUSED
    return code


def _write_as(stream: TextIO, *, encoding: str | None = None, errors: str | None = None) -> None:
    if isinstance(stream, io.TextIOWrapper):
        stream.reconfigure(encoding=encoding, errors=errors)


def _parser() -> argparse.ArgumentParser:
    about = (__doc__ or "").partition("\n")[0]
    parser = argparse.ArgumentParser(prog="omni-fastpath", description=about, allow_abbrev=False)
    parser.add_argument("--version", action="version", version=f"omni-fastpath {__version__}")
    commands = parser.add_subparsers(title="commands", metavar="COMMAND", required=True)

    def command(name: str, run: Callable[[argparse.Namespace], int], what: str, codes: str = "") -> Any:
        about = f"{what}. Exit code: 0, 1 {codes}, 2 if a start is refused." if codes else what
        added = commands.add_parser(name, help=what, description=about, allow_abbrev=False)
        added.set_defaults(run=run, parser=added)
        return added

    yaml = "NAME_OR_PATH"
    status = command("status", _status, "this installation and the running servers", "after an error")
    status.add_argument("--all", action="store_true", help="also show each process separately")
    status.add_argument("--json", action="store_true", help="everything as one JSON document")
    status.add_argument("--verify", action="store_true", help="also compare vLLM-Omni with what the patches expect")
    status.add_argument("--deploy-config", metavar=yaml, help="also show what this YAML and the variables switch on")
    status.add_argument("--check", action="store_true", help="exit code 1 also if a server or its patches are missing")

    what = "problems of this installation and its running servers, and what to do about them"
    examine = command("doctor", _doctor, what, "after a warning or an error")
    examine.add_argument("--json", action="store_true", help="the report as one JSON document")
    examine.add_argument("--deploy-config", metavar=yaml, help="also check this YAML with this shell's variables")

    explain = command("explain", _explain, "what a patch does, or one line per patch")
    explain.add_argument("patch", nargs="?", metavar="PATCH", help="default: all, one line each")
    explain.add_argument("--full", action="store_true", help="also the functions that it relies on, and its releases")

    write = command("overlay", _overlay, "write a deploy YAML with a fastpath key")
    write.add_argument("base", nargs="?", metavar=yaml, help="the base: a file, or the name of one of vLLM-Omni's")
    write.add_argument("--list", action="store_true", help="list the names of vLLM-Omni's deploy YAMLs")
    write.add_argument("-o", "--output", metavar="OUT", help="file to write; without it, or with -, standard output")
    form = "PATCH.KEY=VALUE"
    write.add_argument("--set", action="append", default=[], metavar=form, help="or PATCH=true, PATCH=false")
    write.add_argument("--force", action="store_true", help="overwrite OUT")

    boards = command("dashboard", _dashboard, "write a Grafana dashboard, alert rules, and a compose file for them")
    default = "omni-fastpath-dashboard"
    boards.add_argument("folder", nargs="?", type=Path, default=default, metavar="DIR", help=f"default: {default}")
    boards.add_argument("--force", action="store_true", help="overwrite files there that differ")

    return parser


def _print(lines: Iterable[str]) -> None:
    """Print lines. If the reader of a pipe closes it early (``| head``, ``| grep -q``), the rest is dropped."""
    try:
        print(*lines, sep="\n", flush=True)  # noqa: T201
    except BrokenPipeError:
        with open(os.devnull, "wb") as nowhere:  # noqa: PTH123 - else Python writes the rest at exit
            os.dup2(nowhere.fileno(), sys.stdout.fileno())


def _wrapped(lines: Iterable[str]) -> Iterator[str]:
    """The lines of a terminal. In a pipe a sentence stays on one line, so that ``grep`` finds it."""
    width = _width() if sys.stdout.isatty() else sys.maxsize
    for line in itertools.chain.from_iterable(each.split("\n") for each in lines):
        yield from [line] if len(line) <= width else textwrap.wrap(line, width, break_on_hyphens=False)


def _width() -> int:
    """The width of tables: that of the terminal, or 100 in a pipe, a file or a log."""
    return shutil.get_terminal_size().columns if sys.stdout.isatty() else 100


def _status(arguments: argparse.Namespace) -> int:
    report = status_report(PATCHES, arguments.deploy_config, verify=arguments.verify, deep=False)
    lines = _wrapped(tables.status(report, _width(), every=arguments.all))
    _print([json.dumps(report, indent=2)] if arguments.json else lines)
    return _code(report, "error") or (TROUBLE if arguments.check and not is_on(report) else FINE)


def _doctor(arguments: argparse.Namespace) -> int:
    if sys.stderr.isatty():
        print("Checking the installation and its running servers, for some seconds ...", file=sys.stderr)  # noqa: T201
    report = status_report(PATCHES, arguments.deploy_config, verify=False, deep=True)
    _print([json.dumps(report, indent=2)] if arguments.json else _wrapped(tables.doctor(report)))
    return _code(report, "error", "warning")


def _code(report: Mapping[str, Any], *trouble: Severity) -> int:
    """The exit code, if findings of these severities are problems."""
    if any(finding["id"] == "start-refused" for finding in report["findings"]):
        return REFUSED
    return TROUBLE if any(finding["severity"] in trouble for finding in report["findings"]) else FINE


def _explain(arguments: argparse.Namespace) -> int:
    declared, name = {patch.name: patch for patch in PATCHES}, arguments.patch
    if name is not None and name not in declared:
        raise unknown("explain", name, declared, found=f"an unknown patch {name!r}")
    lines = tables.patch(declared[name], _width(), full=arguments.full) if name else tables.patches(PATCHES, _width())
    _print(_wrapped(lines))
    return FINE


def _overlay(arguments: argparse.Namespace) -> int:
    if arguments.list:
        names = overlay.bundled()
        if not names:
            raise ConfigError("vllm-omni, which contains the deploy YAMLs, is not installed")
        _print(names)
        return FINE
    if arguments.base is None:
        arguments.parser.error("name a file or one of vLLM-Omni's deploy YAMLs, or use --list")
    output = None if arguments.output in (None, "-") else Path(arguments.output)
    base = overlay.find(arguments.base)
    text = overlay.build(base, arguments.set, PATCHES, output=output)
    if output is None:
        _write_as(sys.stdout, encoding="utf-8")  # the encoding of a YAML, whatever the locale
        _print([text.rstrip()])
        return FINE
    if output.exists() and not arguments.force:
        raise ConfigError(f"{output} exists; --force overwrites it")
    output.write_bytes(text.encode())  # an invalid character is refused before the file is opened
    print(f"wrote {output}, over {base.name}; serve with --deploy-config {output}", file=sys.stderr)  # noqa: T201
    return FINE


def _dashboard(arguments: argparse.Namespace) -> int:
    here = sorted((Path(__file__).parent / "dashboard").iterdir())
    files = {arguments.folder / file.name: file.read_bytes() for file in here}
    others = [str(path) for path, content in files.items() if path.exists() and path.read_bytes() != content]
    if others and not arguments.force:
        raise ConfigError(f"{', '.join(others)}: exists with other content; --force overwrites it")
    arguments.folder.mkdir(parents=True, exist_ok=True)
    for path, content in files.items():
        path.write_bytes(content)
    _print(map(str, files))
    print("To view them, see the first lines of compose.yaml", file=sys.stderr)  # noqa: T201
    return FINE
