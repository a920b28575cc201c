"""Show which patches are on and what they do, and write a deploy YAML or a dashboard.

Only ``status --verify`` and ``seams`` import vllm and vllm-omni.
"""

from __future__ import annotations

import argparse
import contextlib
import functools
import io
import json
import os
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, TextIO

from rich.console import Console

from omni_fastpath import __version__
from omni_fastpath.config import ConfigError, unknown
from omni_fastpath.declare import Patch
from omni_fastpath.patches import PATCHES
from omni_fastpath.releases import vllm_omni_release
from omni_fastpath.tools import overlay, tables, upgrade
from omni_fastpath.tools.findings import REFUSED as REFUSED_START
from omni_fastpath.tools.findings import Severity
from omni_fastpath.tools.status import is_on, status_report

FINE, TROUBLE, REFUSED = 0, 1, 2
AB_MOVED = "ab is not installed any more: run `python -m benchmarks.ab` from a clone (docs/operations.md)"


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line.

    Returns:
        0: no problem. 1: there is an error, or a file cannot be read or written (``doctor``: any finding above
        ``info``; ``status --check``: also a server without a patch, or no server). 2: a usage error, or a start with
        this shell's variables would be refused.
    """
    words = list(sys.argv[1:] if argv is None else argv)
    for stream in (sys.stdout, sys.stderr):
        _write_as(stream, errors="backslashreplace")  # characters that the locale does not have
    if words[:1] == ["ab"]:
        print(f"omni-fastpath: {AB_MOVED}", file=sys.stderr)  # noqa: T201
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

    yaml, refuses = "NAME_OR_PATH", "if a server with this shell's variables or the deploy YAML would refuse to start."
    status = commands.add_parser(
        "status",
        help="this installation and the running servers",
        description=f"Exit code: 0, 1 after an error, 2 for a wrong command line, or {refuses}",
        allow_abbrev=False,
    )
    status.add_argument("--all", action="store_true", help="also show each process separately")
    status.add_argument("--json", action="store_true", help="everything as one JSON document")
    status.add_argument("--verify", action="store_true", help="also compare vLLM-Omni with what the patches expect")
    status.add_argument("--deploy-config", metavar=yaml, help="also show what this YAML and the variables switch on")
    status.add_argument("--check", action="store_true", help="exit code 1 also if a server or its patches are missing")
    status.set_defaults(run=_status)

    examine = commands.add_parser(
        "doctor",
        help="problems of this installation and its running servers, and what to do about them",
        description="Exit code: 0 if there is no finding above info, 1 after a warning or an error, 2 for a wrong "
        f"command line, or {refuses}",
        allow_abbrev=False,
    )
    examine.add_argument("--json", action="store_true", help="the report as one JSON document")
    examine.add_argument("--deploy-config", metavar=yaml, help="also check this YAML with this shell's variables")
    examine.set_defaults(run=_doctor)

    explain = commands.add_parser("explain", help="what a patch does, or one line per patch", allow_abbrev=False)
    explain.add_argument("patch", nargs="?", metavar="PATCH", help="default: all, one line each")
    explain.add_argument("--full", action="store_true", help="also the functions that it relies on, and its releases")
    explain.set_defaults(run=_explain)

    what = "each function that a patch relies on, with file and line, as JSON"
    seams = commands.add_parser("seams", help=what, description=f"Print {what}.", allow_abbrev=False)
    seams.add_argument("patch", nargs="?", metavar="PATCH", help="default: all")
    seams.set_defaults(run=_seams)

    write = commands.add_parser("overlay", help="write a deploy YAML with a fastpath key", allow_abbrev=False)
    write.add_argument("base", nargs="?", metavar=yaml, help="the base: a file, or the name of one of vLLM-Omni's")
    write.add_argument("--list", action="store_true", help="list the names of vLLM-Omni's deploy YAMLs")
    write.add_argument("-o", "--output", metavar="OUT", help="file to write; without it, or with -, standard output")
    form = "PATCH.KEY=VALUE"
    write.add_argument("--set", action="append", default=[], metavar=form, help="or PATCH=true, PATCH=false")
    write.add_argument("--force", action="store_true", help="overwrite OUT")
    write.set_defaults(run=_overlay, parser=write)

    what, default = "write a Grafana dashboard, alert rules, and a compose file for them", "omni-fastpath-dashboard"
    boards = commands.add_parser("dashboard", help=what, allow_abbrev=False)
    boards.add_argument("folder", nargs="?", type=Path, default=default, metavar="DIR", help=f"default: {default}")
    boards.add_argument("--force", action="store_true", help="overwrite files there that differ")
    boards.set_defaults(run=_dashboard)
    return parser


# Output


def _print(text: str) -> None:
    with tables.reader_may_leave(sys.stdout):
        print(text)  # noqa: T201


def _show(report: Any, show: Callable[[Any, Console], None], *, as_json: bool) -> None:
    if as_json:
        _print(json.dumps(report, indent=2))
        return
    with tables.reader_may_leave(sys.stdout):
        show(report, tables.console(sys.stdout))


# status and doctor


def _status(arguments: argparse.Namespace) -> int:
    report = status_report(os.environ, PATCHES, deploy_config=arguments.deploy_config, verify=arguments.verify)
    _show(report, functools.partial(tables.show_status, every=arguments.all), as_json=arguments.json)
    return _code(report, "error") or (TROUBLE if arguments.check and not is_on(report) else FINE)


def _doctor(arguments: argparse.Namespace) -> int:
    with tables.console(sys.stderr).status(
        "Checking the installation and its running servers, for at most ten seconds ..."
    ):
        report = status_report(os.environ, PATCHES, deploy_config=arguments.deploy_config, deep=True)
    _show({**report, "issue": tables.issue(report)}, tables.show_doctor, as_json=arguments.json)
    return _code(report, "error", "warning")


def _code(report: Mapping[str, Any], *trouble: Severity) -> int:
    """The exit code, if findings of these severities are problems."""
    if any(finding["id"] == REFUSED_START for finding in report["findings"]):
        return REFUSED
    return TROUBLE if any(finding["severity"] in trouble for finding in report["findings"]) else FINE


# explain


def _explain(arguments: argparse.Namespace) -> int:
    named = _named("explain", arguments.patch)
    if arguments.patch is None:
        _show(named, tables.show_patches, as_json=False)
    else:
        _show(named[0], functools.partial(tables.show_patch, full=arguments.full), as_json=False)
    return FINE


def _named(command: str, name: str | None) -> Sequence[Patch]:
    """The patch of that name, or all patches."""
    declared = {patch.name: patch for patch in PATCHES}
    if name is None:
        return PATCHES
    if name not in declared:
        raise unknown(command, name, declared, found=f"an unknown patch {name!r}")
    return (declared[name],)


# seams


def _seams(arguments: argparse.Namespace) -> int:
    named, found = _named("seams", arguments.patch), vllm_omni_release()
    if found is None:
        raise ConfigError("vllm-omni is not installed")
    # vllm logs to standard output while it is imported, but standard output is for the JSON.
    with contextlib.redirect_stdout(sys.stderr):
        found_seams = [upgrade.compare(patch, found.version) for patch in named]
    _print(json.dumps(found_seams, indent=2))
    return FINE


# overlay


def _overlay(arguments: argparse.Namespace) -> int:
    if arguments.list:
        names = overlay.bundled()
        if not names:
            raise ConfigError("vllm-omni, which contains the deploy YAMLs, is not installed")
        _print("\n".join(names))
        return FINE
    if arguments.base is None:
        arguments.parser.error("name a file or one of vLLM-Omni's deploy YAMLs, or use --list")
    output = None if arguments.output in (None, "-") else Path(arguments.output)
    base = overlay.find(arguments.base)
    text = overlay.build(base, arguments.set, PATCHES, output=output)
    overlay.refuse_as_upstream(base)
    if output is None:
        _write_as(sys.stdout, encoding="utf-8")  # the encoding of a YAML, whatever the locale
        _print(text.rstrip())
        return FINE
    if output.exists() and not arguments.force:
        raise ConfigError(f"{output} exists; --force overwrites it")
    output.write_bytes(text.encode())  # an invalid character is refused before the file is opened
    print(f"wrote {output}, over {base.name}; serve with --deploy-config {output}", file=sys.stderr)  # noqa: T201
    return FINE


# dashboard


def _dashboard(arguments: argparse.Namespace) -> int:
    here = sorted((Path(__file__).parent / "dashboard").iterdir())
    files = {arguments.folder / file.name: file.read_bytes() for file in here}
    others = [str(path) for path, content in files.items() if path.exists() and path.read_bytes() != content]
    if others and not arguments.force:
        raise ConfigError(f"{', '.join(others)}: exists with other content; --force overwrites it")
    arguments.folder.mkdir(parents=True, exist_ok=True)
    for path, content in files.items():
        path.write_bytes(content)
        _print(str(path))
    print("To view them, see the first lines of compose.yaml", file=sys.stderr)  # noqa: T201
    return FINE
