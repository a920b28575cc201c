"""What is wrong with an installation and its live servers: findings, each by a rule with a stable id.

A rule sees ``Facts`` and nothing else, and knows no particular patch. Its id and its threshold are promises: people
write them into scripts. What is healthy gives nothing above ``info``.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from omni_fastpath import config, process_role
from omni_fastpath.declare import Patch, Process, State
from omni_fastpath.process_role import MASTER, NAMESPACE, ON_UNLISTED, master_off
from omni_fastpath.tools import entrypoint, servers
from omni_fastpath.tools.servers import Server

Severity = Literal["error", "warning", "info"]
"""``error``: something that was asked for does not happen. ``warning``: it happens, and something beside it is wrong.
``info``: to know, and nothing to do at once."""
SEVERITIES: tuple[Severity, ...] = ("error", "warning", "info")

HERE = "installation"
START = "start-up"
"""In the report of ``--verify``: the slots by which a configuration takes effect, which are no patch's."""
FEWEST_ANSWERS = 20
"""Answers from which on the average underrun is judged."""
FULL, ALONE = 0.85, 0.2
"""Of a core: an API process's two threads wait for each other long before they have all of it. While a server starts,
one of them works alone, and the other takes less than the second."""
UNDERRUN_S, UNDERRUN = 0.1, "vllm_omni:audio_underrun_s"
"""From where on upstream itself calls an answer interrupted, and its histogram of each answer's longest silence."""
API_PROCESS_S, ENGINES_S = 0.05, 0.3
"""From where on a listener gains something when the API process, or the engines, take less of a first output, unless
the other takes ten times as much."""
FEWEST = 50
"""First outputs of which 99 of 100 can be told."""
SHARED_MEMORY = 0.8
HELD_BY_NOBODY = ("--max-num-queued-tokens",)
"""Options that vLLM-Omni takes, and nothing of ours makes true."""


@dataclass(frozen=True)
class Facts:
    """Everything that the rules see.

    Attributes:
        patches: The declarations.
        environ: This shell's variables.
        report: What ``status`` shows (``omni_fastpath.tools.status``), without findings.
        asked: The patches whose release matters here.
        servers: The live ones of this user.
        misspelt: Top-level keys of deploy YAMLs that are nearly ours, each after whose YAML it is.
        unramped: Servers, as findings name them, whose audio chunks could grow and do not (``overlay.lacks_ramp``).
        refused: Why a server that is started here and now would refuse; empty where it would not.
    """

    patches: Sequence[Patch]
    environ: Mapping[str, str] = field(default_factory=dict)
    report: Mapping[str, Any] = field(default_factory=dict)
    asked: frozenset[str] = frozenset()
    servers: Sequence[Server] = ()
    misspelt: Sequence[tuple[str, str]] = ()
    unramped: Sequence[str] = ()
    refused: str = ""


@dataclass(frozen=True)
class Finding:
    """One thing that is not as it should be, or that is to be known.

    Attributes:
        severity: How much it weighs.
        subject: What it is about: ``installation`` or ``server PID``.
        what: The finding in a sentence.
        do: What to do about it.
        evidence: What was seen, by name.
        id: The rule's, which never changes its meaning; ``judge`` sets it.
        threshold: From what on it is a finding; ``judge`` sets it.
    """

    severity: Severity
    subject: str
    what: str
    do: str
    evidence: Mapping[str, Any] = field(default_factory=dict)
    id: str = ""
    threshold: str = ""


_Look = Callable[[Facts], Iterator[Finding]]
RULES: dict[str, tuple[str, _Look]] = {}
"""Each rule's id, with its threshold and the function that yields what it finds."""


def _rule(name: str, *, threshold: str) -> Callable[[_Look], _Look]:
    def register(look: _Look) -> _Look:
        RULES[name] = (threshold, look)
        return look

    return register


def judge(facts: Facts) -> list[Finding]:
    """All findings, the heaviest first, else in the order of the rules."""
    found = [
        dataclasses.replace(each, id=name, threshold=threshold)
        for name, (threshold, look) in RULES.items()
        for each in look(facts)
    ]
    return sorted(found, key=lambda finding: SEVERITIES.index(finding.severity))


# ---- This installation ----

REFUSED = "start-refused"


@_rule(REFUSED, threshold="a server that is started with these variables, or this deploy YAML, would refuse")
def start_refused(facts: Facts) -> Iterator[Finding]:
    """What a server would say to what this shell asks for."""
    if facts.refused:
        yield Finding("error", HERE, facts.refused, "Correct what it names; servers that run are not concerned.")


@_rule("upstream-missing", threshold="vllm-omni is not installed in this environment")
def upstream_missing(facts: Facts) -> Iterator[Finding]:
    """There is nothing here to patch: another environment runs the server."""
    if facts.report["installation"]["vllm_omni"] is None:
        what = "vllm-omni is not installed in this environment"
        do = "Install omni-fastpath into the environment that your server runs in, and ask there."
        yield Finding("error" if facts.asked else "info", HERE, what, do)


@_rule("patch-unsupported", threshold="the installed release is none of the patch's, nor the same code as one")
def patch_unsupported(facts: Facts) -> Iterator[Finding]:
    """A patch whose behaviour on the installed release nobody has read: stock runs."""
    do = (
        "`omni-fastpath status --verify` says what still fits. Install one of the tested releases, or a newer "
        f"omni-fastpath, or set {ON_UNLISTED}=same_code, which applies a patch where every function is as in a tested "
        "release; until then upstream's own code runs."
    )
    for name, patch in facts.report["installation"]["patches"].items():
        differs = (facts.report["verify"] or {}).get(name) if patch.get("may_be") else None
        problem = "; ".join(differs or ()) or patch["release_problem"]
        if facts.report["installation"]["vllm_omni"] is not None and problem:
            severity: Severity = "error" if name in facts.asked else "info"
            evidence = {"patch": name, "tested": list(patch["tested"])}
            yield Finding(severity, HERE, f"{name}: {problem}", do, evidence)


@_rule("release-unlisted", threshold="a patch is applied as on a release that the installed one is not")
def release_unlisted(facts: Facts) -> Iterator[Finding]:
    """The same code under another name: a vendor's build, a post-release, or any release where that was asked for."""
    do = "Nothing, if you meant to run this release. `omni-fastpath status --verify` compares every function."
    for server in facts.servers:
        same = {
            (name, record["same_as"])
            for each in server.snapshots
            for name, record in each["patches"].items()
            if record.get("same_as")
        }
        for known in sorted({known for _, known in same}):
            names = sorted(name for name, each in same if each == known)
            what = f"served as on {known}, with every function as there: {', '.join(names)}"
            yield Finding("info", server.subject, what, do, {"patch": names})


@_rule("seam-moved", threshold="a function is not as the patch's row for this release says (looked at with --verify)")
def seam_moved(facts: Facts) -> Iterator[Finding]:
    """The release is known, and what is installed differs from it: a vendor's change, or a mixed installation."""
    do = (
        "vllm and vllm-omni must be as released. Install them again; if they are a vendor's build, or another "
        "plugin wraps the function, switch the patch off."
    )
    for name, moved in (facts.report["verify"] or {}).items():
        declared = facts.report["installation"]["patches"].get(name, {})
        if moved and not (declared.get("release_problem") or declared.get("may_be")):
            yield Finding("error", HERE, f"{name}: {'; '.join(moved)}", do, {"patch": name, "seams": moved})


@_rule("entry-point-missing", threshold="no entry point `omni_fastpath` in vLLM's plugin groups")
def entry_point_missing(facts: Facts) -> Iterator[Finding]:
    """The package can be imported and is not installed, so that vLLM never loads it."""
    if not facts.report["installation"]["entry_points"]:
        what = "no entry point of omni-fastpath is visible in this environment: vllm never loads it"
        do = "Install omni-fastpath (its wheel, or `pip install .` in a clone) where the server runs."
        yield Finding("error", HERE, what, do, {"groups": list(entrypoint.GROUPS)})


@_rule("plugins-leave-us-out", threshold=f"{entrypoint.ALLOW_LIST} is set and has no `{entrypoint.ENTRY_POINT}`")
def plugins_leave_us_out(facts: Facts) -> Iterator[Finding]:
    """An allow-list without our name: every server under it runs as upstream made it, which may be what is wanted."""
    do = f"Unset {entrypoint.ALLOW_LIST}, or add {entrypoint.ENTRY_POINT} to it, unless stock is what you want there."
    for subject, environ in _shell_and_servers(facts):
        allowed = environ.get(entrypoint.ALLOW_LIST)
        if entrypoint.is_left_out(allowed):
            is_asked = subject == HERE or bool(config.said(environ, facts.patches))
            severity: Severity = "error" if is_asked and not master_off(environ) else "info"
            where = "vllm never loads omni-fastpath" if subject == HERE else "it was started so, and runs as stock"
            what = f"{entrypoint.ALLOW_LIST} is an allow-list without {entrypoint.ENTRY_POINT}: {where}"
            yield Finding(severity, subject, what, do, {entrypoint.ALLOW_LIST: allowed})


@_rule("variable-unknown", threshold=f"a name in or beside the namespace {NAMESPACE} that means nothing")
def variable_unknown(facts: Facts) -> Iterator[Finding]:
    """A variable that looks like one of ours and is none: misspelt, or of another version."""
    known = config.variables(facts.patches)
    for subject, environ in _shell_and_servers(facts):
        if master_off(environ):
            continue  # nothing is looked at
        ours = set(config.said(environ, facts.patches)).difference(known)
        for name in sorted(each for each in environ if each in ours or config.is_beside(each)):
            meant = config.nearest(name, known) or MASTER
            consequence = "refuses to start with it" if name.startswith(NAMESPACE) else "ignores it"
            hint = f"did you mean {meant!r}? A server with something on {consequence}"
            what = f"the variable {name} means nothing; {hint}"
            evidence = {"variable": name, "nearest": meant}
            yield Finding("warning", subject, what, f"Rename it to {meant}, or unset it.", evidence)


@_rule("key-misspelt", threshold=f"a top-level key of a deploy YAML that is nearly `{config.KEY}`")
def key_misspelt(facts: Facts) -> Iterator[Finding]:
    """A block that nobody reads: vLLM-Omni ignores it, and so do we."""
    for subject, key in facts.misspelt:
        what = f"the top-level key {key!r} of the deploy YAML is ignored; did you mean {config.KEY!r}?"
        yield Finding("warning", subject, what, f"Rename it to {config.KEY}, or remove it.", {"key": key})


# ---- Live servers ----


@_rule(
    "patch-not-serving", threshold=f"one process in which a patch is {State.UNSUPPORTED.value} or {State.FAILED.value}"
)
def patch_not_serving(facts: Facts) -> Iterator[Finding]:
    """A patch that was asked for in a live server and does not serve there."""
    do = "The reason says why; the server's log has the traceback of an exception. Upstream's own code runs."
    for server in facts.servers:
        seen: dict[tuple[str, str, str], list[str]] = {}
        for snapshot in server.snapshots:
            for name, record in snapshot["patches"].items():
                if State(record["state"]).is_trouble:
                    process = f"{snapshot['pid']} ({snapshot['role']})"
                    seen.setdefault((name, record["state"], record["reason"]), []).append(process)
        for (name, state, reason), where in seen.items():
            what = f"{name} is {state} in process {', '.join(where)}: {reason}"
            yield Finding("error", server.subject, what, do, {"patch": name, "state": state, "processes": where})


@_rule("option-not-held", threshold="a server was started with an option that vLLM-Omni takes and nothing makes true")
def option_not_held(facts: Facts) -> Iterator[Finding]:
    """A limit that somebody set and that does not limit: upstream takes it, and the patch for it does not serve."""
    options = dict.fromkeys(HELD_BY_NOBODY, "")
    options |= {patch.upstream_option: patch.name for patch in facts.patches if patch.upstream_option}
    for server in facts.servers:
        for option, name in options.items():
            states = {State(each["patches"][name]["state"]) for each in server.snapshots if name in each["patches"]}
            is_held = any(state.satisfies_requirement for state in states)
            if process_role.value(server.command, option) is not None and not is_held:
                what = f"it was started with {option}, which vLLM-Omni takes and does not hold"
                do = f"Switch {name} on, or see why it does not serve." if name else "Start the server without it."
                severity: Severity = "error" if server.is_on else "info"
                yield Finding(severity, server.subject, what, do, {"option": option, "patch": name or None})


@_rule(
    "api-process-full", threshold=f"front end and orchestrator take more than {FULL} of a core, each more than {ALONE}"
)
def api_process_full(facts: Facts) -> Iterator[Finding]:
    """Its two threads have about one core together: outputs wait, whatever the GPUs could do."""
    for server in facts.servers:
        shares = {name: round(share, 2) for name, share in server.busy.items()}
        if sum(shares.values()) > FULL and min(shares.values()) > ALONE:
            told = ", ".join(f"{name.replace('_', ' ')} {share:.2f}" for name, share in shares.items())
            what = f"its API process is full: {told}; its two threads share Python's lock, and so about one core"
            do = f"Take work off it: {'; '.join(_relief(server, facts))}."
            yield Finding("warning", server.subject, what, do, shares)


def _relief(server: Server, facts: Facts) -> Iterator[str]:
    """What takes work off a full API process, the most first."""
    given = {word.partition("=")[0].replace("_", "-") for word in server.command if word.startswith("--")}
    more = "a higher `--api-server-count`" if "--api-server-count" in given else "`--api-server-count 2`"
    yield f"{more} (vLLM-Omni from 0.30 on, which refuses to start where its other options do not allow it)"
    states = [each["patches"] for each in server.snapshots if each["role"] == Process.SERVER.value]
    on = {name for each in states for name, record in each.items() if record["state"] != State.OFF.value}
    patches = (each for each in facts.patches if each.default_on and Process.SERVER in each.processes)
    off = [each.name for each in patches if each.name not in on]
    if off:
        yield f"switch on what is off here: {', '.join(off)}" if on else f"{MASTER}=1: nothing of ours is on here"
    if "--disable-log-stats" not in given:
        yield "`--disable-log-stats`, which ends vLLM-Omni's own metrics too"


@_rule(
    "audio-runs-dry",
    threshold=f"{UNDERRUN} above {UNDERRUN_S} on average of {FEWEST_ANSWERS} answers or more, of Qwen3-TTS or Breeze "
    "without a ramp of chunk sizes",
)
def audio_runs_dry(facts: Facts) -> Iterator[Finding]:
    """Listeners hear silence within answers, and upstream has a remedy that is off."""
    do = (
        "Put `codec_chunk_ramp` into the `extra` of the connector between its stages, in the deploy YAML: sizes that "
        "grow up to codec_chunk_frames, such as [4, 4, 8, 16, 25]. Qwen3-TTS also takes `codec_chunk_adaptive: true`."
    )
    for server in facts.servers:
        silent_s, answers = (server.metrics.get(f"{UNDERRUN}_{part}", 0.0) for part in ("sum", "count"))
        if server.subject in facts.unramped and answers >= FEWEST_ANSWERS and silent_s > UNDERRUN_S * answers:
            what = f"the longest silence within an answer was {silent_s / answers:.2f} s, on average"
            yield Finding("warning", server.subject, what, do, {"answers": answers})


_FIRST = "omni_fastpath_first_output"
_PARTS: tuple[tuple[str, str, Mapping[str, str]], ...] = (
    ("engines", "leg_seconds", {"leg": "engines"}),
    ("api_process", "api_process_seconds", {}),
)


@_rule("first-output", threshold="one streamed answer, in a server that measures them")
def first_output(facts: Facts) -> Iterator[Finding]:
    """Where the time of first audio and first text goes, and what would make it less."""
    for server in facts.servers:
        for output in ("audio", "text"):
            whole = servers.histogram(server.figures(f"{_FIRST}_seconds", output=output), FEWEST)
            if 0 < whole.count < FEWEST:
                what = (
                    f"where the time of first {output} goes cannot be told before {FEWEST} answers: {whole.count} yet"
                )
                yield Finding("info", server.subject, what, "Ask again later.", {"answers": whole.count})
            elif whole.count:
                seconds = {}
                for part, name, labels in _PARTS:
                    samples = server.figures(f"{_FIRST}_{name}", output=output, **labels)
                    seconds[part] = round(servers.histogram(samples, FEWEST).quantile(0.99), 2)
                when = "last 5 minutes" if whole.is_recent else "since it started"
                what = (
                    f"first {output}, {when}: within {whole.quantile(0.99):.2f} s for 99 of 100, the engines' part "
                    f"within {seconds['engines']:.2f}, the API process's within {seconds['api_process']:.2f}"
                )
                do = " ".join(_sooner(server, facts, **seconds))
                yield Finding("info", server.subject, what, do, {"answers": whole.count, **seconds})


def _sooner(server: Server, facts: Facts, engines: float, api_process: float) -> Iterator[str]:
    """What would make a first output come sooner, if anything; of parts that are a tenth of the other, nothing."""
    is_api_process = api_process > max(API_PROCESS_S, engines / 10)
    if is_api_process:
        relief = "; ".join(_relief(server, facts))
        yield f"The API process takes more than {API_PROCESS_S} s. Less of it: {relief}."
    if engines > max(ENGINES_S, api_process / 10):
        yield (
            f"The engines take more than {ENGINES_S} s. More GPU, or more replicas, if requests wait there "
            "(`vllm_omni:num_requests_waiting`). If none waits, the model takes so long, and whether a faster GPU "
            "helps cannot be told from here. Neither this package nor another API server changes that part."
        )
    elif not is_api_process:
        yield "Nothing: neither this package, nor another API server, nor more GPU makes it sooner for a listener."


@_rule("requests-without-output", threshold="one request without an output of any stage for 30 seconds")
def requests_without_output(facts: Facts) -> Iterator[Finding]:
    """Requests that a stage does not answer; a session that waits for its client is none."""
    do = (
        "Look at that replica's process and log. It may be stopped or hang, or wait for a chunk that the stage before "
        "does not send. In a server that is full, requests wait so for their turn."
    )
    for server in facts.servers:
        for sample in server.figures("omni_fastpath_requests_without_output"):
            if sample["value"] > 0:
                where = sample["labels"]
                [longest, *_] = server.figures("omni_fastpath_longest_without_output_seconds", **where)
                what = (
                    f"{sample['value']} requests wait for stage {where['stage']} replica {where['replica']} and had no "
                    f"output for 30 s, the longest for {longest['value']:.0f} s"
                )
                yield Finding("warning", server.subject, what, do, {**where, "requests": sample["value"]})


@_rule("shared-memory", threshold=f"more than {SHARED_MEMORY} of shared memory used, or one chunk that nobody fetches")
def shared_memory(facts: Facts) -> Iterator[Finding]:
    """Room that stages need for their chunks; without it they fail."""
    for server in facts.servers:
        fill, orphans = (
            max((each["value"] for each in server.figures(f"omni_fastpath_shared_memory_{name}")), default=0)
            for name in ("used_ratio", "orphans")
        )
        if fill > SHARED_MEMORY:
            own = sum(each["value"] for each in server.figures("omni_fastpath_shared_memory_chunk_bytes"))
            what = (
                f"shared memory is {fill:.0%} full, {own / 2**20:.0f} MiB of it with chunks of this server's requests"
            )
            do = "Give the container a larger /dev/shm (`--shm-size`, or an emptyDir of medium Memory)."
            yield Finding("warning", server.subject, what, do, {"used_ratio": round(fill, 3), "chunk_bytes": own})
        if orphans:
            what = f"shared memory has {orphans} chunks of unknown requests that nobody has fetched for ten minutes"
            do = "Earlier servers or requests left them. Remove them from /dev/shm if no other server uses that."
            yield Finding("warning", server.subject, what, do, {"orphans": orphans})


# ---- What several rules need ----


def _shell_and_servers(facts: Facts) -> Iterator[tuple[str, Mapping[str, str]]]:
    yield HERE, facts.environ
    yield from ((each.subject, each.environ) for each in facts.servers if each.environ is not None)
