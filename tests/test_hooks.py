"""Hook plugins: found, checked, guarded; one that raises costs nobody anything."""

# ruff: noqa: PLW0108 - pluggy goes by the names of a hook's parameters
from __future__ import annotations

import asyncio
import functools
import logging
import os
import signal
import threading
from collections.abc import AsyncIterator, Callable, Iterator
from typing import Any

import pluggy
import pytest

from omni_fastpath.declare import State
from omni_fastpath.hooks import HOOKS, HookManager, PassReport, RawOutputView, hookimpl
from omni_fastpath.hooks.observers import Recorder
from omni_fastpath.hooks.specs import ENTRY_POINT_GROUP
from tests.patches.content import endings, sequences
from tests.patches.drive import options, run

VIEW = RawOutputView(0, 0, True, "raw", (), {})
CALLS: dict[str, dict[str, Any]] = {
    "on_dequeued": {"stage_id": 1, "replica_id": 0, "raw_outputs": "raw"},
    "on_pass_end": {"report": PassReport(0, 0, 1, "empty", 0, 1.0)},
    "on_routed": {"stage_id": 1, "replica_id": 0, "output": "output"},
}


def never(_view: RawOutputView) -> bool:
    """A default policy."""
    return False


class Plugin:
    """Holds hooks; hashable, as pluggy needs it."""


def answering(answer: bool | None, seen: list[Any], note: Any = None) -> Callable[..., Any]:
    """A policy that notes a word, or else the view, and gives this answer."""

    def is_routable(view: RawOutputView) -> bool | None:
        seen.append(note or view)
        return answer

    return is_routable


def plugin(**hooks: Callable[..., Any]) -> Plugin:
    """A plugin with these hooks; one that is marked already stays as it is marked."""
    made = Plugin()
    for name, function in hooks.items():
        setattr(made, name, function if hasattr(function, "omni_fastpath_impl") else hookimpl(function))
    return made


# ---- Registration ----


@pytest.mark.parametrize(
    ("implementation", "error", "message"),
    [
        ({"on_dequeud": lambda stage_id: None}, pluggy.PluginValidationError, "unknown hook 'on_dequeud'"),
        ({"on_routed": lambda stage: None}, pluggy.PluginValidationError, "stage"),
        ({"on_routed": hookimpl(wrapper=True)(lambda output: (yield))}, ValueError, "hook wrapper"),
        ({"on_routed": hookimpl(hookwrapper=True)(lambda output: (yield))}, ValueError, "hook wrapper"),
    ],
)
def test_wrong_plugin_is_refused_whole(implementation: Any, error: type[Exception], message: str) -> None:
    """An unknown hook, wrong parameters or a wrapper refuses the plugin, its good hooks too; others register still."""
    manager, called = HookManager(), []
    wrong = plugin(on_pass_end=lambda report: called.append(report), **implementation)
    with pytest.raises(error, match=message):
        manager.register(wrong, "wrong")
    assert manager.observer("on_pass_end") is None
    assert manager.observer("on_routed") is None
    manager.register(Recorder())
    observer = manager.observer("on_pass_end")
    assert observer is not None
    observer(report="report")
    assert called == []


async def _async(report: Any) -> None:
    """A hook that somebody would have to await."""


async def _async_generator(report: Any) -> AsyncIterator[None]:
    """A hook that somebody would have to iterate."""
    yield


def _generator(report: Any) -> Iterator[None]:
    """A hook that somebody would have to iterate."""
    yield


class _AsyncCallable:
    async def __call__(self, report: Any) -> None:
        """A hook that somebody would have to await."""


class _Callable:
    def __call__(self, report: Any) -> None:
        """What pluggy does not take for a hook."""


class _AsyncMethod:
    @hookimpl
    async def on_pass_end(self, report: Any) -> None:
        """A hook that somebody would have to await."""


class _AsyncStatic:
    @staticmethod
    @hookimpl
    async def on_pass_end(report: Any) -> None:
        """A hook that somebody would have to await."""


class _ClassPartial:
    on_pass_end: Any = functools.partialmethod(_async)


hookimpl(vars(_ClassPartial)["on_pass_end"])


NEVER_RUN: dict[str, tuple[Any, str]] = {
    "method": (_AsyncMethod(), "on_pass_end is an async function; a hook is called, and neither awaited nor"),
    "static": (_AsyncStatic(), "on_pass_end is an async function"),
    "function": (plugin(on_pass_end=_async), "on_pass_end is an async function"),
    "async generator": (plugin(on_pass_end=_async_generator), "on_pass_end is an async generator function"),
    "generator": (plugin(on_pass_end=_generator), "on_pass_end is a generator function"),
    "object": (plugin(on_pass_end=_AsyncCallable()), "on_pass_end is a _AsyncCallable object of an async function"),
    "partial": (
        plugin(on_pass_end=functools.partial(_async)),
        "on_pass_end is a partial object of an async function; make it a plain function or method",
    ),
    "partial of an object": (
        plugin(on_pass_end=functools.partial(_AsyncCallable())),
        "on_pass_end is a partial object of an async function",
    ),
    "partialmethod": (_ClassPartial(), "on_pass_end is a partialmethod object of an async function"),
    "passed over": (plugin(on_pass_end=_Callable()), "on_pass_end is a _Callable object; make it a plain"),
}


@pytest.mark.parametrize("kind", NEVER_RUN)
def test_a_hook_that_would_never_run_is_refused_in_words(kind: str) -> None:
    """What would be awaited or iterated, or passed over by pluggy in silence, is refused, and nothing of it stays."""
    manager = HookManager()
    wrong, words = NEVER_RUN[kind]
    with pytest.raises(ValueError, match="wrong: " + words):
        manager.register(wrong, "wrong")
    assert all(manager.observer(name) is None for name in CALLS)


def test_a_plugins_properties_are_not_run() -> None:
    """Looking for hooks does not ask attributes of the plugin that are none."""

    class Shy:
        @property
        def on_everything(self) -> Any:
            raise SystemExit("asked")

        @hookimpl
        def on_pass_end(self, report: Any) -> None:
            """A hook."""

    manager = HookManager()
    if pluggy.__version__ >= "1.7":  # earlier ones ask themselves
        manager.register(Shy())
        assert manager.observer("on_pass_end") is not None


def test_plugin_registers_once() -> None:
    """A second registration is refused and the first stays."""
    manager, recorder = HookManager(), Recorder()
    manager.register(recorder)
    with pytest.raises(ValueError, match="already registered"):
        manager.register(recorder)
    manager.on_patch_state("drum", State.APPLIED, "yes")
    assert recorder.of("state") == [("drum", "applied", "yes")]


def test_unregistered_plugin_is_silent() -> None:
    """What was taken out is not called, by nobody."""
    manager, recorder = HookManager(), Recorder()
    manager.register(recorder)
    manager.unregister(recorder)
    assert all(manager.observer(name) is None for name in CALLS)


class _EntryPoint:
    def __init__(self, name: str, load: Callable[[], Any]) -> None:
        self.name, self.load = name, load


def test_entry_points_are_loaded_once_and_broken_ones_left_out(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Plugins of the group are registered; one that cannot be imported or does not fit is reported and left out."""
    recorder, asked = Recorder(), []

    def broken() -> Any:
        raise ModuleNotFoundError("no such plugin")

    def found(*, group: str) -> list[_EntryPoint]:
        asked.append(group)
        wrong = plugin(on_everything=lambda: None)
        return [
            _EntryPoint("broken", broken),
            _EntryPoint("wrong", lambda: wrong),
            _EntryPoint("good", lambda: recorder),
        ]

    monkeypatch.setattr("importlib.metadata.entry_points", found)
    manager = HookManager()
    manager.load()
    manager.load()
    manager.on_patch_state("drum", State.OFF, "no")
    told = manager.told()
    assert (told["used"], told["switched_off"]) == (["good"], {})
    assert told["unusable"]["broken"] == "ModuleNotFoundError: no such plugin"
    assert "on_everything" in told["unusable"]["wrong"]
    assert asked == [ENTRY_POINT_GROUP]
    assert recorder.of("state") == [("drum", "off", "no")]
    reported = [r.getMessage() for r in caplog.records if r.levelno == logging.ERROR]
    assert reported == [
        "omni-fastpath: the hook plugin broken cannot be used; it is left out",
        "omni-fastpath: the hook plugin wrong cannot be used; it is left out",
    ]


@pytest.mark.parametrize("fatal", [SystemExit(3), asyncio.CancelledError(), GeneratorExit(), KeyboardInterrupt()])
def test_a_plugin_that_ends_everything_while_it_is_loaded_is_left_out(
    monkeypatch: pytest.MonkeyPatch, fatal: BaseException
) -> None:
    """A module that calls ``sys.exit`` on import does not stop the server; a real Ctrl-C meanwhile does."""
    recorder = Recorder()

    def ends() -> Any:
        raise fatal

    monkeypatch.setattr(
        "importlib.metadata.entry_points",
        lambda *, group: [_EntryPoint("ends", ends), _EntryPoint("good", lambda: recorder)],
    )
    manager = HookManager()
    if isinstance(fatal, KeyboardInterrupt):
        with pytest.raises(KeyboardInterrupt):
            manager.load()
        return
    manager.load()
    manager.on_patch_state("drum", State.OFF, "no")
    assert recorder.of("state") == [("drum", "off", "no")]


# ---- What a plugin raises ----


@pytest.mark.parametrize("name", ["is_routable", *CALLS])
@pytest.mark.parametrize("fatal", [SystemExit, asyncio.CancelledError, GeneratorExit, KeyboardInterrupt])
def test_nothing_that_a_plugin_raises_gets_through_to_the_drain(name: str, fatal: type[BaseException]) -> None:
    """On the orchestrator's thread, where no signal is handled, any exception switches the plugin off."""
    manager, calls = HookManager(), []

    def breaks() -> None:
        calls.append(name)
        raise fatal

    manager.register(plugin(**{name: breaks}), "broken")
    call = functools.partial(manager.policy(never), VIEW)
    if name != "is_routable":
        observer = manager.observer(name)
        assert observer is not None
        call = functools.partial(observer, **CALLS[name])
    answers: list[Any] = []
    thread = threading.Thread(target=lambda: answers.extend((call(), call())))
    thread.start()
    thread.join()
    assert len(calls) == 1
    assert [bool(answer) for answer in answers] == [False, False]


@pytest.mark.parametrize("fatal", [SystemExit, asyncio.CancelledError, GeneratorExit])
def test_nothing_that_a_plugin_raises_stops_the_main_thread(fatal: type[BaseException]) -> None:
    """Nor does it at registration time, when the states of the patches are told on the main thread."""
    manager, calls = HookManager(), []

    def breaks() -> None:
        calls.append(fatal)
        raise fatal

    manager.register(plugin(on_patch_state=breaks))
    for _ in range(2):
        manager.on_patch_state("drum", State.APPLIED, "yes")
    assert calls == [fatal]


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_that_arrives_in_a_plugin_is_obeyed(number: signal.Signals) -> None:
    """Ctrl-C, and what upstream's handler of SIGTERM raises, end the process as without the plugin, which stays on."""
    manager, calls = HookManager(), []

    class Server:
        def stop(self, _number: int, _frame: Any) -> None:
            raise SystemExit(5)

    def is_interrupted() -> None:
        calls.append(number)
        if len(calls) == 1:
            os.kill(os.getpid(), number)

    handler = signal.default_int_handler if number == signal.SIGINT else functools.partial(Server().stop)
    manager.register(plugin(on_patch_state=is_interrupted))
    before = signal.signal(number, handler)
    try:
        with pytest.raises(KeyboardInterrupt if number == signal.SIGINT else SystemExit):
            manager.on_patch_state("drum", State.APPLIED, "yes")
    finally:
        signal.signal(number, before)
    manager.on_patch_state("drum", State.APPLIED, "yes")
    assert len(calls) == 2


def test_an_answer_that_is_a_coroutine_switches_the_plugin_off(caplog: pytest.LogCaptureFixture) -> None:
    """A plain function around an async one is seen at its first call: no answer, and nothing is left unawaited."""
    manager = HookManager()

    async def work(view: RawOutputView) -> bool:
        return False

    manager.register(plugin(is_routable=lambda view: work(view), on_routed=lambda: _async(None)), "wraps")
    manager.register(plugin(on_routed=lambda: (n for n in [1])), "iterates")
    routed = manager.observer("on_routed")
    assert routed is not None
    assert manager.policy(never)(VIEW) is False
    routed(**CALLS["on_routed"])
    told = [record.exc_info[1] for record in caplog.records if record.exc_info]
    assert [str(error) for error in told] == [
        "returned a coroutine: a hook is called, and neither awaited nor iterated",
        "returned a generator: a hook is called, and neither awaited nor iterated",
    ]
    assert all(manager.observer(name) is None for name in CALLS)


# ---- The policy ----


def test_default_is_bound_directly() -> None:
    """When nobody has a say the loop gets the default itself, and observers are None."""
    manager = HookManager()
    assert manager.policy(never) is never
    assert all(manager.observer(name) is None for name in CALLS)
    manager.register(Recorder())
    assert manager.policy(never) is never


def test_first_answer_wins() -> None:
    """The plugin that registered last is asked first, and nobody after one that answers."""
    manager = HookManager()
    asked: list[Any] = []
    for name, answer in (("first", True), ("second", False), ("third", None)):
        manager.register(plugin(is_routable=answering(answer, asked, name)), name)
    assert manager.policy(lambda _: pytest.fail("the default was asked"))(VIEW) is False
    assert asked == ["third", "second"]


def test_none_falls_through_to_the_default() -> None:
    """When every plugin leaves it open the default decides, on the same view."""
    manager = HookManager()
    seen: list[Any] = []
    manager.register(plugin(is_routable=answering(None, seen)))
    assert manager.policy(answering(True, seen))(VIEW) is True
    assert seen == [VIEW, VIEW]


def test_policy_that_raises_is_switched_off_and_others_go_on(caplog: pytest.LogCaptureFixture) -> None:
    """It is reported once; the next plugin decides at once, and later calls do not reach the broken one."""
    manager, calls = HookManager(), []

    def breaks(view: RawOutputView) -> bool:
        calls.append(view)
        raise RuntimeError("broken policy")

    manager.register(plugin(is_routable=lambda view: True), "good")
    manager.register(plugin(is_routable=breaks), "broken")
    decide = manager.policy(never)
    caplog.clear()
    assert [decide(VIEW) for _ in range(3)] == [True, True, True]
    assert calls == [VIEW]
    [record] = caplog.records
    assert record.getMessage() == "omni-fastpath: hook is_routable of plugin broken raised; the plugin is switched off"
    assert record.exc_info is not None
    assert manager.told() == {
        "used": ["good"],
        "unusable": {},
        "switched_off": {"broken": "is_routable raised RuntimeError: broken policy"},
    }


def test_default_takes_over_from_a_broken_policy() -> None:
    """A lookup made before the plugin broke answers with the default from then on; a later one is the default."""
    manager = HookManager()
    manager.register(plugin(is_routable=lambda view: 1 / 0))
    decide = manager.policy(lambda _: True)
    assert [decide(VIEW), decide(VIEW)] == [True, True]
    assert manager.policy(never) is never


# ---- Observers ----


@pytest.mark.parametrize("name", [*CALLS, "on_patch_state"])
def test_observer_that_raises_is_switched_off_and_others_go_on(name: str, caplog: pytest.LogCaptureFixture) -> None:
    """For every observer hook: reported once, never called again, and the others get every call."""
    manager, before, after, calls = HookManager(), Recorder(), Recorder(), []

    def breaks() -> None:
        calls.append(name)
        raise RuntimeError("broken observer")

    manager.register(before, "before")
    manager.register(plugin(**{name: breaks}), "broken")
    manager.register(after, "after")
    caplog.clear()
    for _ in range(3):
        if name == "on_patch_state":
            manager.on_patch_state("drum", State.APPLIED, "yes")
        else:
            observer = manager.observer(name)
            assert observer is not None
            observer(**CALLS[name])
    assert (len(calls), len(before.events), len(after.events)) == (1, 3, 3)
    assert [record.getMessage() for record in caplog.records] == [
        f"omni-fastpath: hook {name} of plugin broken raised; the plugin is switched off"
    ]


def test_all_hooks_of_a_broken_plugin_are_switched_off() -> None:
    """One hook that raises silences the plugin's other hooks, in lookups made before too."""
    manager, calls = HookManager(), []
    manager.register(plugin(on_routed=lambda output: 1 / 0, on_pass_end=lambda report: calls.append(report)))
    routed, ended = manager.observer("on_routed"), manager.observer("on_pass_end")
    assert routed is not None
    assert ended is not None
    ended(**CALLS["on_pass_end"])
    routed(**CALLS["on_routed"])
    ended(**CALLS["on_pass_end"])
    assert len(calls) == 1
    assert manager.observer("on_pass_end") is None


def test_hook_may_take_fewer_parameters() -> None:
    """A plugin names only what it wants to know."""
    manager, seen = HookManager(), []
    manager.register(plugin(on_routed=lambda output: seen.append(output), on_dequeued=lambda: seen.append("taken")))
    for name in ("on_dequeued", "on_routed"):
        observer = manager.observer(name)
        assert observer is not None
        observer(**CALLS[name])
    assert seen == ["taken", "output"]


def test_recorder_keeps_the_last_events() -> None:
    """The built-in observer is bounded and keeps the newest."""
    recorder = Recorder(limit=2)
    for number in range(3):
        recorder.on_routed(0, 0, number)
    assert recorder.of("routed") == [(0, 0, 1), (0, 0, 2)]


# ---- On the real orchestrator ----


@pytest.fixture
def hooks(installed: None) -> Iterator[HookManager]:
    """This process's plugins, without those that the test adds when it is over; the stages take turns."""
    before = HOOKS._pluggy.get_plugins()
    with options(order="stage_order"):
        yield HOOKS
    for added in HOOKS._pluggy.get_plugins() - before:
        HOOKS.unregister(added)


def _messages() -> list[Any]:
    from vllm.v1.engine import FinishReason

    from benchmarks.rigs.inprocess import Pipeline, audio, batch, codes, silent, text

    pipeline = Pipeline()
    for request in ("a", "b"):
        pipeline.add_request(request)
        last = FinishReason.STOP
        pipeline.put(0, *(batch(text(request, n, finish=last if n == 9 else None)) for n in range(10)))
        pipeline.put(1, *(batch(codes(request, finish=last if n == 9 else None)) for n in range(10)))
        pipeline.put(2, *(batch(silent(request)) for _ in range(5)), batch(audio(request, 0.5, 0.25)))

    def end(pipeline: Any) -> None:
        for request in ("a", "b"):
            pipeline.put(2, batch(silent(request)), batch(audio(request, 0.75, finish=FinishReason.STOP)))

    return run(pipeline, end)


@pytest.mark.upstream
@pytest.mark.parametrize("name", ["is_routable", *CALLS])
def test_raising_hook_changes_no_message(hooks: HookManager, name: str, caplog: pytest.LogCaptureFixture) -> None:
    """Behind a running orchestrator a hook that raises is called once, and every message is as without it."""
    calls = []

    def breaks() -> None:
        calls.append(name)
        raise RuntimeError("broken")

    without = _messages()
    recorder = Recorder()
    hooks.register(recorder, "good")
    hooks.register(plugin(**{name: breaks}), "broken")
    caplog.clear()
    with_broken = _messages()
    assert sequences(with_broken) == sequences(without)
    assert endings(with_broken) == dict.fromkeys(("a", "b"), (1, "end"))
    assert calls == [name]
    assert sum("broken raised" in record.getMessage() for record in caplog.records) == 1
    assert len(recorder.of("dequeued")) == sum(report.items for (report,) in recorder.of("pass")) == 56


@pytest.mark.upstream
@pytest.mark.parametrize("answer", [True, False, None])
def test_policy_plugin_changes_when_and_never_what(hooks: HookManager, answer: bool | None) -> None:
    """Whatever a plugin answers, every request gets the same messages in the same order."""
    without = _messages()
    seen: list[RawOutputView] = []
    hooks.register(plugin(is_routable=answering(answer, seen)))
    assert sequences(_messages()) == sequences(without)
    assert {view.stage_id for view in seen} == {0, 2}
    assert all(view.final_output for view in seen)


@pytest.mark.upstream
def test_observers_see_what_was_routed(hooks: HookManager) -> None:
    """Everything that is taken is observed once, and what is routed is observed as upstream's own request outputs."""
    recorder = Recorder()
    hooks.register(recorder)
    messages = _messages()
    assert [stage for stage, _, _ in recorder.of("dequeued")].count(1) == 20
    routed = [output for stage, _, output in recorder.of("routed") if stage == 0]
    assert len(routed) == sum(type(m).__name__ == "OutputMessage" and m.stage_id == 0 for m in messages) == 20
