"""Installing made-up patches on a made-up upstream: all or nothing, and back exactly."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import logging
import re
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from pydantic import Field
from wrapt import FunctionWrapper

from omni_fastpath.bodies import fingerprint
from omni_fastpath.declare import (
    AnyRow,
    AnySeam,
    Call,
    Fit,
    NotApplicable,
    Options,
    Patch,
    Pin,
    Process,
    Replace,
    State,
    Superseded,
    Wrap,
)
from omni_fastpath.install import (
    RefusedError,
    apply,
    foreign_wrappers,
    foreign_wrappers_of_imported,
    install,
    is_installed,
    modules_of,
    release_problem,
    uninstall,
    verify_all,
    verify_patch,
)
from omni_fastpath.ledger import LEDGER, runtime
from tests.fakes.upstream import (
    ADDED,
    CHECK,
    LISTEN,
    MAKE,
    MODULE,
    MOVED,
    RUN,
    RUN_BODY,
    TESTED,
    Upstream,
    passes,
    patch,
    resolved,
    states,
    upstream,
)

__all__ = ["upstream"]

FOUR = patch("four", RUN, MAKE, CHECK, LISTEN)
REPLACING = Replace(MODULE, "Loop.run", ("self", "rounds"), wrapper="passes", fingerprints=(RUN_BODY,))


def assert_same_slots(upstream: Upstream, before: dict[str, dict[str, Any]]) -> None:
    """Every owner holds exactly the objects that it held before, and nothing more."""
    after = upstream.slots()
    for owner, held in before.items():
        assert after[owner].keys() == held.keys()
        assert all(after[owner][name] is value for name, value in held.items())


def foreign(function: Any) -> Any:
    """Somebody else's wrapper, made as most are made."""

    @functools.wraps(function)
    def wrapper(*args: Any, **kwargs: Any) -> Any:
        return ("theirs", function(*args, **kwargs))

    return wrapper


# ---- Install and undo ----


def test_installed_slots_hold_ours(upstream: Upstream) -> None:
    """Every slot is wrapped, whatever its kind, and still binds and answers as upstream's."""
    assert install(FOUR) is State.APPLIED
    module, loop = upstream.module, upstream.module.Loop
    assert loop().run(3) == ("ours", ("stock", 3))
    assert loop.make(3) == ("ours", (loop, 3))
    assert loop.check(3) == loop().check(3) == ("ours", 3)
    assert module.listen(3) == ("ours", ("listening", 3, 5))
    assert LEDGER.entry(FOUR).reason == "4 slots hold ours"
    assert is_installed("four")


def test_undo_is_exact(upstream: Upstream) -> None:
    """After the undo every slot holds the very object that it held, and what was added is gone."""
    upstream.wrappers.added = lambda _self: "added"  # type: ignore[attr-defined]
    both = patch("both", RUN, MAKE, CHECK, LISTEN, ADDED)
    before = upstream.slots()
    install(both)
    assert upstream.module.Loop().added() == "added"
    uninstall(both)
    assert_same_slots(upstream, before)
    assert states() == {"both": State.OFF}


def test_second_install_does_nothing(upstream: Upstream) -> None:
    """An installed patch is not wrapped again, and the second undo is no error."""
    before = upstream.slots()
    install(FOUR)
    once = upstream.slots()
    assert install(FOUR) is State.APPLIED
    assert_same_slots(upstream, once)
    uninstall(FOUR)
    uninstall(FOUR)
    assert_same_slots(upstream, before)


def test_two_patches_on_a_slot_come_off_in_reverse(upstream: Upstream) -> None:
    """The lower patch cannot be taken off below the upper; in reverse order both go, exactly."""
    lower, upper = patch("lower", RUN), patch("upper", RUN, MAKE)
    before = upstream.slots()
    install(lower)
    install(upper)
    assert upstream.module.Loop().run(1) == ("ours", ("ours", ("stock", 1)))
    uninstall(lower)
    assert is_installed("lower")
    uninstall(upper)
    uninstall(lower)
    assert_same_slots(upstream, before)


def test_patches_stack_on_a_replaced_slot(upstream: Upstream) -> None:
    """A replacing patch may stand on another of ours: nothing foreign is lost by that."""
    install(patch("lower", RUN))
    assert install(patch("upper", REPLACING)) is State.APPLIED
    assert LEDGER.named("upper").reason == "1 slot holds ours"


# ---- All or nothing ----


@pytest.mark.parametrize("seams", [(RUN, MAKE, MOVED), (MOVED, RUN), (RUN, Call(MODULE, "Loop.constant", ()))])
def test_nothing_is_written_when_a_seam_moved(upstream: Upstream, seams: tuple[AnySeam, ...]) -> None:
    """One seam of several that moved, wherever it stands, leaves every slot alone and names itself."""
    before = upstream.slots()
    moved = patch("moved", *seams)
    assert install(moved) is State.UNSUPPORTED
    assert_same_slots(upstream, before)
    assert LEDGER.entry(moved).reason.startswith("a seam moved: made_up_upstream:Loop.")
    assert not is_installed("moved")


def test_missing_wrapper_puts_everything_back(upstream: Upstream, caplog: pytest.LogCaptureFixture) -> None:
    """A wrapper that the wrappers module lacks, found after slots were written, undoes them."""
    before = upstream.slots()
    broken = patch("broken", RUN, MAKE, Wrap(MODULE, "listen", ("port", "backlog"), wrapper="missing"))
    assert install(broken) is State.FAILED
    assert_same_slots(upstream, before)
    assert "everything was put back" in LEDGER.entry(broken).reason
    assert "missing" in caplog.text


def test_missing_wrappers_module_fails_the_patch(upstream: Upstream) -> None:
    """Wrappers that cannot be imported are the patch's failure, not the process's."""
    before = upstream.slots()
    assert install(patch("broken", RUN, wrappers_module="made_up_missing")) is State.FAILED
    assert_same_slots(upstream, before)


@pytest.mark.parametrize(
    ("line", "told"),
    [
        ("from vllm_omni.gone import Thing", "vllm_omni.gone: "),
        ("from vllm_omni import Thing", "vllm_omni: "),
    ],
)
def test_what_the_wrappers_import_of_upstream_is_gone(
    upstream: Upstream, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, line: str, told: str
) -> None:
    """The patch does not fit this release: unsupported, naming the module; before an install it is told as well."""
    monkeypatch.setitem(sys.modules, "vllm_omni", ModuleType("vllm_omni"))
    (tmp_path / "made_up_importing.py").write_text(f"{line}\n")
    monkeypatch.syspath_prepend(tmp_path)
    before = upstream.slots()
    importing = patch("importing", RUN, wrappers_module="made_up_importing")
    [problem] = verify_patch(importing)
    assert install(importing) is State.UNSUPPORTED
    assert_same_slots(upstream, before)
    assert LEDGER.entry(importing).reason == f"a seam moved: {problem}"
    assert problem.startswith(told)
    assert ": what the patch imports from it cannot be had (" in problem


class _Refuses(type):
    """A class that lets nobody set ``make``."""

    def __setattr__(cls, name: str, value: Any) -> None:
        if name == "make" and not isinstance(value, classmethod | type(None)):
            raise AttributeError("read only")
        super().__setattr__(name, value)


class _Copies(type):
    """A class that keeps something else than what is set."""

    def __setattr__(cls, name: str, value: Any) -> None:
        super().__setattr__(name, foreign(value) if isinstance(value, FunctionWrapper) and name == "make" else value)


@pytest.mark.parametrize("metaclass", [_Refuses, _Copies])
def test_write_that_fails_half_way_puts_everything_back(upstream: Upstream, metaclass: type) -> None:
    """A slot that refuses to be written, or keeps something else, undoes the slots before it and itself."""
    loop = upstream.module.Loop
    body = {name: value for name, value in vars(loop).items() if name not in ("__dict__", "__weakref__")}
    # A plain function in the slot, so that what is set shows as what it is.
    body["make"] = body["make"].__func__
    setattr(upstream.module, "Loop", metaclass("Loop", loop.__bases__, body))  # noqa: B010 - a made-up module
    before = upstream.slots()
    broken = patch("broken", RUN, LISTEN, Wrap(MODULE, "Loop.make", ("cls", "size"), wrapper="passes"))
    assert install(broken) is State.FAILED
    assert_same_slots(upstream, before)
    assert not is_installed("broken")


def test_error_while_verifying_fails_the_patch(upstream: Upstream, monkeypatch: pytest.MonkeyPatch) -> None:
    """An upstream module that breaks on import in its own way is this patch's failure only."""

    def breaks(_name: str) -> Any:
        raise RuntimeError("half an install")

    monkeypatch.setattr("omni_fastpath.seams.importlib.import_module", breaks)
    broken = patch("broken", RUN)
    assert install(broken) is State.FAILED
    assert "half an install" in LEDGER.entry(broken).reason


# ---- Adding ----


def test_upstreams_own_is_asked_and_kept(upstream: Upstream) -> None:
    """An attribute that upstream has, even by inheritance, is judged by the probe and never overwritten."""
    for owner, difference, expected in (
        (upstream.module.Loop, None, State.SUPERSEDED),
        (upstream.module.Base, "it waits", State.UNSUPPORTED),
    ):
        owner.added = lambda _self: "upstream's"
        asked: list[Any] = []

        def probe(owner: Any, asked: list[Any] = asked, difference: str | None = difference) -> str | None:
            asked.append(owner)
            return difference

        upstream.wrappers.difference = probe  # type: ignore[attr-defined]
        before = upstream.slots()
        adding = patch(f"adding_{expected.value}", RUN, ADDED)
        assert install(adding) is expected
        assert_same_slots(upstream, before)
        assert asked == [upstream.module.Loop]
        assert (difference or "behaves as ours would") in LEDGER.entry(adding).reason
        del owner.added


def test_probe_that_raises_fails_the_patch(upstream: Upstream) -> None:
    """A probe that cannot cope with upstream's attribute writes nothing."""
    upstream.module.Loop.added = 5
    before = upstream.slots()
    assert install(patch("adding", RUN, ADDED)) is State.FAILED  # the wrappers module has no probe
    assert_same_slots(upstream, before)


# ---- Somebody else's wrappers ----


@pytest.mark.parametrize("wrap", [foreign, lambda raw: FunctionWrapper(raw, passes)], ids=["functools", "wrapt"])
@pytest.mark.parametrize("below", [False, True], ids=["theirs alone", "theirs on ours"])
def test_replacing_under_a_foreign_wrapper_is_refused(upstream: Upstream, wrap: Any, below: bool) -> None:
    """A wrapper that does not call what it wraps must not silence somebody else's, however theirs is made."""
    if below:
        install(patch("below", RUN))
    upstream.module.Loop.run = wrap(vars(upstream.module.Loop)["run"])
    before = upstream.slots()
    replacing = patch("replacing", LISTEN, REPLACING)
    assert install(replacing) is State.UNSUPPORTED
    assert_same_slots(upstream, before)
    assert "Loop.run: holds somebody else's wrapper" in LEDGER.entry(replacing).reason


@pytest.mark.parametrize("wrap", [foreign, lambda raw: FunctionWrapper(raw, passes)], ids=["functools", "wrapt"])
def test_pinned_body_under_a_foreign_wrapper_is_refused(upstream: Upstream, wrap: Any) -> None:
    """Where a body is relied on, a wrapper around it is another body; where only the name matters it is not."""
    body = fingerprint(upstream.module.Loop.run)
    upstream.module.Loop.run = wrap(vars(upstream.module.Loop)["run"])
    pinned = patch("pinned", LISTEN, Pin(MODULE, "Loop.run", ("self", "rounds"), fingerprints=(body,)))
    assert install(pinned) is State.UNSUPPORTED
    assert install(patch("named", LISTEN, Call(MODULE, "Loop.run", ("self", "rounds")))) is State.APPLIED


def test_wrapping_a_foreign_wrapper_is_fine(upstream: Upstream) -> None:
    """A wrapper that calls what it wraps stands on anybody's and comes off again."""
    theirs = foreign(upstream.module.Loop.run)
    upstream.module.Loop.run = theirs
    wrapping = patch("wrapping", RUN, MAKE)
    assert install(wrapping) is State.APPLIED
    assert LEDGER.named("wrapping").reason == f"2 slots hold ours; on somebody else's wrapper of {RUN.path}"
    assert upstream.module.Loop().run(1) == ("ours", ("theirs", ("stock", 1)))
    uninstall(wrapping)
    assert vars(upstream.module.Loop)["run"] is theirs


@pytest.mark.parametrize("wrap", [foreign, lambda raw: FunctionWrapper(raw, passes)], ids=["functools", "wrapt"])
def test_foreign_wrappers_are_told(upstream: Upstream, wrap: Any) -> None:
    """Those below ours and those on top, by slot and by the module that they come from."""
    upstream.module.Loop.run = wrap(vars(upstream.module.Loop)["run"])
    install(FOUR)
    install(patch("above", RUN))
    below = r"made_up_upstream:Loop\.run: a \w+ of tests\.[\w.]+ below ours"
    assert foreign_wrappers().keys() == {"four", "above"}
    assert all(re.fullmatch(below, told) for [told] in foreign_wrappers().values())
    upstream.module.Loop.make = wrap(vars(upstream.module.Loop)["make"])
    [_, on_top] = foreign_wrappers()["four"]
    assert re.fullmatch(r"made_up_upstream:Loop\.make: a \w+ of tests\.[\w.]+ on top of ours", on_top)
    assert [each.partition(": ")[0] for each in foreign_wrappers_of_imported([FOUR])["four"]] == [RUN.path, MAKE.path]


def test_no_foreign_wrappers_where_there_are_none(upstream: Upstream) -> None:
    """Two patches on one slot are both ours, and upstream's own decorators are upstream's."""
    upstream.module.Loop.check = staticmethod(contextlib.contextmanager(vars(upstream.module.Loop)["check"].__func__))
    upstream.wrappers.added = lambda _self: "added"  # type: ignore[attr-defined]
    gone = patch("gone", Call(MODULE, "Loop.gone", ("self",)))
    assert [install(each) for each in (FOUR, patch("above", RUN), patch("adding", ADDED))] == [State.APPLIED] * 3
    assert foreign_wrappers() == {}
    assert foreign_wrappers_of_imported([FOUR, gone]) == {}


@pytest.mark.parametrize("wrap", [foreign, lambda raw: FunctionWrapper(raw, passes)], ids=["functools", "wrapt"])
def test_undo_under_a_foreign_wrapper_is_refused(
    upstream: Upstream, wrap: Any, caplog: pytest.LogCaptureFixture
) -> None:
    """With theirs on top nothing is taken off, not even the other slots; the state stays true and the log says it."""
    install(FOUR)
    upstream.module.Loop.make = theirs = wrap(vars(upstream.module.Loop)["make"])
    before = upstream.slots()
    for again in range(2):
        caplog.clear()
        if again:
            apply(resolved(off=(FOUR,)), Process.SERVER, [FOUR])
        else:
            uninstall(FOUR)
        assert_same_slots(upstream, before)
        assert (is_installed("four"), states()) == (True, {"four": State.APPLIED})
        assert "cannot be taken off: made_up_upstream:Loop.make" in LEDGER.named("four").reason
        assert [record.levelno for record in caplog.records].count(logging.ERROR) == 1
        assert (
            "four cannot be taken off: made_up_upstream:Loop.make was written by someone else after us" in caplog.text
        )
    upstream.module.Loop.make = theirs.__wrapped__
    uninstall(FOUR)
    assert states() == {"four": State.OFF}


def test_patch_in_use_is_not_taken_off(upstream: Upstream) -> None:
    """What the declared function says is in use stays, with its words as the reason; the other is told of the undo."""
    told: list[str] = []
    user: list[str | None] = ["an orchestrator runs"]
    upstream.wrappers.in_use = lambda: user[0]  # type: ignore[attr-defined]
    upstream.wrappers.taken_off = lambda: told.append("off")  # type: ignore[attr-defined]
    used = patch("used", RUN, MAKE, in_use="in_use", taken_off="taken_off")
    install(used)
    uninstall(used)
    assert (is_installed("used"), told) == (True, [])
    assert LEDGER.named("used").reason == "2 slots hold ours; cannot be taken off: an orchestrator runs"
    user[0] = None
    uninstall(used)
    assert (is_installed("used"), told) == (False, ["off"])


@pytest.mark.parametrize("missing", ["in_use", "taken_off"])
def test_declared_function_that_is_missing_fails_the_patch(upstream: Upstream, missing: str) -> None:
    """What a declaration names and its wrappers module lacks is found before anything is written."""
    before = upstream.slots()
    named: dict[str, Any] = {missing: "nowhere"}
    broken = patch("broken", RUN, **named)
    assert install(broken) is State.FAILED
    assert_same_slots(upstream, before)
    assert "nowhere" in LEDGER.named("broken").reason


def test_requirement_of_an_installed_patch_is_not_taken_off(upstream: Upstream) -> None:
    """What an installed patch requires stays as long as that one does."""
    install(A)
    install(B)
    uninstall(A)
    assert LEDGER.named("a").reason.endswith("cannot be taken off: b requires it")
    uninstall(B)
    uninstall(A)
    assert states() == {"a": State.OFF, "b": State.OFF}


# ---- Apply ----


A = patch("a", RUN)
B = patch("b", MAKE, requires=("a",))
C = patch("c", CHECK, requires=("b",))
D = patch("d", LISTEN)
ALL = (A, B, C, D)


def test_apply_installs_what_is_on(upstream: Upstream) -> None:
    """The patches that are on are applied, the others are off with the reason; all know who decided."""
    apply(resolved(A, off=(B, C, D)), Process.SERVER, ALL)
    assert states() == {"a": State.APPLIED, "b": State.OFF, "c": State.OFF, "d": State.OFF}
    assert (LEDGER.named("d").reason, LEDGER.named("d").origin) == ("made off", "a test")
    assert LEDGER.named("a").origin == "a test"


@pytest.mark.parametrize(
    ("required", "state", "reason"),
    [
        (patch("a", MOVED), State.UNSUPPORTED, "a seam moved"),
        (patch("a", RUN, releases=("0.28.0",)), State.UNSUPPORTED, "not among the tested"),
        (patch("a", RUN, wrappers_module="made_up_missing"), State.FAILED, "everything was put back"),
        (patch("a", RUN, processes=frozenset({Process.STAGE})), State.NOT_APPLICABLE, "used in the stage process"),
    ],
)
def test_dependants_follow_their_requirement(upstream: Upstream, required: Patch, state: State, reason: str) -> None:
    """What requires a patch that cannot serve gets its state, down the chain; the others are applied."""
    apply(resolved(required, B, C, D), Process.SERVER, (required, B, C, D))
    assert states() == {"a": state, "b": state, "c": state, "d": State.APPLIED}
    assert LEDGER.named("b").reason.startswith(f"requires a, which is {state.value}: ")
    assert LEDGER.named("c").reason.startswith(f"requires b, which is {state.value}: requires a, ")
    assert reason in LEDGER.named("c").reason
    assert not is_installed("b")


def test_dependant_of_what_is_off_is_off(upstream: Upstream) -> None:
    """A configuration that switches only the dependant on gives it its requirement's state."""
    apply(resolved(B, off=(A, C, D)), Process.SERVER, ALL)
    assert states()["b"] is State.OFF
    assert LEDGER.named("b").reason == "requires a, which is off: made off"


def test_only_what_was_asked_for_is_missed(upstream: Upstream, caplog: pytest.LogCaptureFixture) -> None:
    """A patch that is off for want of another is a warning, whatever the words; one that nobody wants is none."""
    given = dataclasses.replace(resolved(off=(A, B, C, D)), lacking=frozenset({"b"}))
    apply(given, Process.SERVER, ALL)
    told = [record.getMessage() for record in caplog.records if record.levelno >= logging.WARNING]
    assert told == ["omni-fastpath: b stays off: it made off"]


def test_superseded_requirement_serves(upstream: Upstream) -> None:
    """Where upstream does itself what is required, the dependant is applied."""
    upstream.module.Loop.added = lambda _self: None
    upstream.wrappers.difference = lambda _owner: None  # type: ignore[attr-defined]
    required = patch("a", ADDED)
    apply(resolved(required, B), Process.SERVER, (required, B))
    assert states() == {"a": State.SUPERSEDED, "b": State.APPLIED}


def test_other_process_touches_nothing(upstream: Upstream) -> None:
    """In a process without its slots a patch is not applicable, and upstream's modules are not even looked at."""
    before = upstream.slots()
    elsewhere = patch(
        "elsewhere", Call("made_up_missing", "x", ()), processes=frozenset({Process.SERVER, Process.STAGE})
    )
    apply(resolved(elsewhere), Process.HEADLESS, (elsewhere,))
    assert states() == {"elsewhere": State.NOT_APPLICABLE}
    assert LEDGER.named("elsewhere").reason == ("its slots are used in the server or stage process; this is a headless")
    assert_same_slots(upstream, before)


def test_applied_again_with_less_takes_off(upstream: Upstream) -> None:
    """A later configuration takes off what it does not switch on, dependants first, and leaves the rest as it is."""
    before = upstream.slots()
    apply(resolved(*ALL), Process.SERVER, ALL)
    assert set(states().values()) == {State.APPLIED}
    kept = vars(upstream.module)["listen"]
    apply(resolved(D, off=(A, B, C)), Process.SERVER, ALL)
    assert states() == {"a": State.OFF, "b": State.OFF, "c": State.OFF, "d": State.APPLIED}
    assert vars(upstream.module)["listen"] is kept
    apply(resolved(off=ALL), Process.SERVER, ALL)
    assert_same_slots(upstream, before)


class _Values(Options):
    size: int = Field(default=1, ge=1)


def test_applied_again_with_other_values(upstream: Upstream) -> None:
    """A later configuration's values are in force without another wrapper."""
    valued = patch("valued", RUN, options=_Values)
    apply(resolved(valued), Process.SERVER, (valued,))
    once = upstream.slots()
    assert runtime("valued").options.size == 1
    apply(resolved(valued, options={"valued": _Values(size=7)}), Process.SERVER, (valued,))
    assert runtime("valued").options.size == 7
    assert_same_slots(upstream, once)


def test_trouble_that_passed_is_applied_the_next_time(upstream: Upstream) -> None:
    """What was unsupported is tried again by the next configuration."""
    upstream.release("0.29.0")
    apply(resolved(A), Process.SERVER, (A,))
    assert states() == {"a": State.UNSUPPORTED}
    upstream.release("0.30.0")
    apply(resolved(A), Process.SERVER, (A,))
    assert states() == {"a": State.APPLIED}


@pytest.mark.parametrize("broken", [patch("e", MOVED), patch("e", RUN, wrappers_module="made_up_missing")])
def test_refusal_takes_everything_off(upstream: Upstream, broken: Patch) -> None:
    """Under ``on_unsupported: fail`` trouble is an error that names patch and reason, and no slot stays written."""
    before = upstream.slots()
    with pytest.raises(RefusedError, match=r"fastpath\.on_unsupported is 'fail' and e is (unsupported|failed): "):
        apply(resolved(*ALL, broken, on_unsupported="fail"), Process.SERVER, (*ALL, broken))
    assert_same_slots(upstream, before)
    assert not any(is_installed(each.name) for each in ALL)


def test_refusal_names_every_trouble(upstream: Upstream) -> None:
    """The error names dependants too, each with its reason."""
    required = patch("a", MOVED)
    with pytest.raises(RefusedError, match=r"a is unsupported: .*; b is unsupported: requires a"):
        apply(resolved(required, B, on_unsupported="fail"), Process.SERVER, (required, B))


def test_only_trouble_refuses(upstream: Upstream) -> None:
    """Off, superseded and not applicable are no reason to refuse."""
    upstream.module.Loop.added = lambda _self: None
    upstream.wrappers.difference = lambda _owner: None  # type: ignore[attr-defined]
    superseded, elsewhere = patch("s", ADDED), patch("e", RUN, processes=frozenset({Process.STAGE}))
    apply(resolved(superseded, elsewhere, off=(A,), on_unsupported="fail"), Process.SERVER, (A, superseded, elsewhere))
    assert states() == {"a": State.OFF, "s": State.SUPERSEDED, "e": State.NOT_APPLICABLE}


# ---- Releases ----


@pytest.mark.parametrize("version", ["0.30.0", "0.30", "0.30.0+cpu", "v0.30.0"])
def test_tested_release_passes(upstream: Upstream, version: str) -> None:
    """The release itself, however it is spelt and whatever its local version."""
    upstream.release(version)
    assert release_problem(A) is None
    assert install(A) is State.APPLIED


@pytest.mark.parametrize(
    "version",
    [
        None,
        "0.30.1",
        "0.31.0",
        "0.29.0",
        "0.30.0rc1",
        "0.30.0.dev4",
        "0.30.0.dev4+cpu",
        "0.30.0.post1",
        "1!0.30.0",
        "main",
    ],
)
def test_other_release_is_unsupported(upstream: Upstream, version: str | None) -> None:
    """Older, newer, pre-release, development, post-release, unreadable or not installed: nothing is written."""
    upstream.release(version)
    before = upstream.slots()
    assert install(A) is State.UNSUPPORTED
    assert_same_slots(upstream, before)
    assert LEDGER.named("a").reason.endswith(": 0.30.0")
    assert (f"{version} (by a test)" if version else "not installed") in LEDGER.named("a").reason


def test_each_release_has_its_own_seams_and_wrappers(upstream: Upstream) -> None:
    """What is verified and written is the row's of the installed release, whatever the others say."""
    old = Fit(releases=("0.22.0", "0.24.0"), seams=(MOVED,))
    new = Fit(releases=("0.30.0",), seams=(RUN,), wrappers="made_up_newer_wrappers")
    newer = ModuleType("made_up_newer_wrappers")
    newer.passes = lambda *_: "newer"  # type: ignore[attr-defined]
    upstream.module_is(newer)
    both = patch("both", rows=(old, new))
    assert both.releases == ("0.22.0", "0.24.0", "0.30.0")
    assert install(both) is State.APPLIED
    assert upstream.module.Loop().run(1) == "newer"
    uninstall(both)
    upstream.release("0.24.0")
    assert install(both) is State.UNSUPPORTED
    assert LEDGER.named("both").reason.startswith("a seam moved: made_up_upstream:Loop.gone")


@pytest.mark.parametrize(
    ("row", "state", "reason"),
    [
        (Fit(releases=(TESTED,), seams=(RUN,)), State.APPLIED, "1 slot holds ours"),
        (Fit(releases=(TESTED,), seams=(RUN,), note="one lane"), State.APPLIED, "1 slot holds ours; one lane"),
        (Fit(releases=(TESTED,), seams=(RUN,), preview=True), State.APPLIED, "1 slot holds ours; preview"),
        (
            Fit(releases=(TESTED,), seams=(RUN,), preview=True, note="one lane"),
            State.APPLIED,
            "1 slot holds ours; preview; one lane",
        ),
        (Superseded(releases=(TESTED,), by="upstream waits itself"), State.SUPERSEDED, "upstream waits itself"),
        (NotApplicable(releases=(TESTED,), because="it has no queue"), State.NOT_APPLICABLE, "it has no queue"),
        (
            NotApplicable(releases=(TESTED,), because="it has no queue", preview=True),
            State.NOT_APPLICABLE,
            "preview; it has no queue",
        ),
    ],
)
def test_a_row_says_what_a_patch_is(upstream: Upstream, row: AnyRow, state: State, reason: str) -> None:
    """State and reason are the row's, with the word preview; upstream's own code runs unless it is applied."""
    before = upstream.slots()
    told = patch("told", rows=(row,))
    apply(resolved(told, on_unsupported="fail"), Process.SERVER, (told,))
    assert (states(), LEDGER.named("told").reason) == ({"told": state}, reason)
    assert is_installed("told") == (state is State.APPLIED)
    assert verify_patch(told) == []
    if state is not State.APPLIED:
        assert modules_of(told) == frozenset()
        assert_same_slots(upstream, before)


@pytest.mark.parametrize(
    ("row", "state"),
    [
        (Superseded(releases=(TESTED,), by="upstream waits itself"), State.APPLIED),
        (NotApplicable(releases=(TESTED,), because="it has no queue"), State.NOT_APPLICABLE),
    ],
)
def test_a_requirement_that_upstream_meets_is_met(upstream: Upstream, row: AnyRow, state: State) -> None:
    """What requires a superseded patch is applied; what requires one with nothing to do has nothing to do."""
    required = patch("a", rows=(row,))
    apply(resolved(required, B), Process.SERVER, (required, B))
    assert states()["b"] is state


def test_what_is_superseded_needs_no_other(upstream: Upstream) -> None:
    """A patch that upstream leaves nothing to do is that, whatever the one that it requires is."""
    required, over = patch("a", MOVED), patch("b", rows=(Superseded(releases=(TESTED,), by="x"),), requires=("a",))
    apply(resolved(required, over), Process.SERVER, (required, over))
    assert states() == {"a": State.UNSUPPORTED, "b": State.SUPERSEDED}


@pytest.mark.parametrize(
    ("version", "known"),
    [("0.32.0rc1", True), ("0.32.0rc1+cpu", True), ("0.32.0rc2", False), ("0.32.0", False), ("0.32.0rc1.dev3", False)],
)
def test_a_preview_is_that_one_only(upstream: Upstream, version: str, known: bool) -> None:
    """The candidate that was looked at is supported; neither the next nor the release is."""
    upstream.release(version)
    preview = patch("preview", rows=(Fit(releases=("0.32.0rc1",), seams=(RUN,), preview=True),))
    assert install(preview) is (State.APPLIED if known else State.UNSUPPORTED)


def test_a_stage_patch_that_upstream_supersedes_refuses_nothing(upstream: Upstream) -> None:
    """Under ``fail`` a server looks at the seams of its stages' patches: where there are none, nothing is wrong."""
    row = Superseded(releases=(TESTED,), by="upstream's own")
    theirs = patch("theirs", rows=(row,), processes=frozenset({Process.STAGE}))
    apply(resolved(theirs, on_unsupported="fail"), Process.SERVER, (theirs,))
    assert states() == {"theirs": State.NOT_APPLICABLE}


def test_verification_reports_everything(upstream: Upstream) -> None:
    """Every seam that moved is listed, or that the release is not known, and nothing is written."""
    before = upstream.slots()
    bad = patch("bad", MOVED, RUN, Call(MODULE, "listen", ("port",)))
    problems = verify_patch(bad)
    assert [each.split(" ")[0] for each in problems] == ["made_up_upstream:Loop.gone:", "made_up_upstream:listen:"]
    assert verify_all([A, bad]) == {"a": [], "bad": problems}
    upstream.release("0.31.0")
    assert verify_patch(bad) == [release_problem(bad)]
    assert_same_slots(upstream, before)


def test_modules_of_a_patch_are_those_of_its_seams(upstream: Upstream) -> None:
    """What must be imported before the patch can be installed, what is only looked at included."""
    armed = patch("x", RUN, MAKE, Call("elsewhere", "f", ()))
    assert modules_of(armed) == {MODULE, "elsewhere"}
    upstream.release("0.31.0")
    assert modules_of(armed) == frozenset()


def _two_sided(upstream: Upstream) -> tuple[Patch, Any]:
    """A patch with a slot in the server and one in the stages, and the stages' module."""
    stages: Any = ModuleType("made_up_stages")
    exec("def save(task):\n    return task\n", vars(stages))  # noqa: S102 - a function whose module it is
    stages.save.__module__ = stages.__name__
    upstream.module_is(stages)
    save = Wrap(stages.__name__, "save", ("task",), wrapper="passes")
    row = Fit(releases=(TESTED,), seams=(LISTEN, save), of_stages=(stages.__name__,))
    return patch("both", rows=(row,), processes=frozenset({Process.SERVER, Process.STAGE})), stages


@pytest.mark.parametrize("process", [Process.SERVER, Process.STAGE, None])
def test_a_process_has_its_own_slots_alone(upstream: Upstream, process: Process | None) -> None:
    """Of a patch for servers and for stages each verifies and writes its own; nobody's kind, all."""
    both, stages = _two_sided(upstream)
    own, before = upstream.module.listen, stages.save
    if process is None:
        install(both)
    else:
        apply(resolved(both), process, (both,))
    written = (upstream.module.listen is not own, stages.save is not before)
    assert written == (process is not Process.STAGE, process is not Process.SERVER)
    assert modules_of(both) == {MODULE}
    assert verify_patch(both) == []


def test_the_stages_slots_refuse_a_servers_start(upstream: Upstream) -> None:
    """Under ``fail`` the parent looks at them too; a stage can refuse nothing any more."""
    both, stages = _two_sided(upstream)
    del stages.save
    apply(resolved(both), Process.SERVER, (both,))
    assert states() == {"both": State.APPLIED}
    with pytest.raises(RefusedError, match="in the stages: made_up_stages:save"):
        apply(resolved(both, on_unsupported="fail"), Process.SERVER, (both,))


def test_figures_are_there_while_it_is_installed(upstream: Upstream, caplog: pytest.LogCaptureFixture) -> None:
    """What a patch gives stands in the snapshot; one that raises is said once and asked no more."""
    given: list[Any] = [{"waiting": [{"labels": {}, "value": 3}]}, ZeroDivisionError()]

    def figures() -> Any:
        found = given.pop(0)
        if isinstance(found, Exception):
            raise found
        return found

    upstream.wrappers.figures = figures  # type: ignore[attr-defined]
    told = patch("told", LISTEN, figures="figures")
    install(told)
    assert LEDGER.snapshot()["told"]["figures"] == {"waiting": [{"labels": {}, "value": 3}]}
    for _ in range(2):
        assert "figures" not in LEDGER.snapshot()["told"]
    assert caplog.text.count("what told has for /metrics cannot be read") == 1
    uninstall(told)
    assert LEDGER.entry(told).figures is None


def test_trouble_is_a_state_and_no_exception(upstream: Upstream) -> None:
    """Neither install nor apply raises for a patch's own trouble."""
    for broken in (patch("m", MOVED), patch("w", RUN, wrappers_module="made_up_missing")):
        install(broken)
        apply(resolved(broken), Process.SERVER, (broken,))
        uninstall(broken)
    assert set(states().values()) == {State.UNSUPPORTED, State.FAILED}
