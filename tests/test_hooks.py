"""Hook plugins are found, checked and guarded. One that fails is switched off."""

# ruff: noqa: PLW0108 - pluggy goes by the names of a hook's parameters
from __future__ import annotations

import asyncio
import functools
import logging
import threading
from collections.abc import AsyncIterator, Callable
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import pluggy
import pytest

from omni_fastpath.declare import State
from omni_fastpath.hooks import HookManager, PassReport, hookimpl
from omni_fastpath.hooks.specs import ENTRY_POINT_GROUP
from tests.fakes.recorder import Recorder

CALLS: dict[str, dict[str, Any]] = {
    "on_dequeued": {"stage_id": 1, "replica_id": 0, "raw_outputs": "raw"},
    "on_pass_end": {"report": PassReport(1, "empty", 0, 1.0)},
    "on_routed": {"stage_id": 1, "replica_id": 0, "output": "output"},
    "on_patch_state": {"patch": "drum", "state": "applied", "reason": "yes"},
}


async def _coroutine() -> bool:
    return False


async def _async_generator() -> AsyncIterator[None]:
    yield


class Plugin:
    """Has hooks, and is hashable because pluggy needs that."""


def plugin(**hooks: Callable[..., Any] | None) -> Plugin:
    """A plugin with these hooks. Functions that are not marked yet are marked."""
    made = Plugin()
    for name, function in hooks.items():
        is_marked = function is None or hasattr(function, "omni_fastpath_impl")
        setattr(made, name, function if is_marked else hookimpl(function))
    return made


def caller(manager: HookManager, name: str) -> Callable[[], Any]:
    """A call of the hook of that name, looked up now."""
    observer = manager.observer(name)
    assert observer is not None
    return functools.partial(observer, **CALLS[name])


# ---- Registration ----


@pytest.mark.parametrize(
    ("implementation", "error", "message"),
    [
        ({"on_dequeud": lambda stage_id: None}, pluggy.PluginValidationError, "unknown hook 'on_dequeud'"),
        ({"on_routed": lambda stage: None}, pluggy.PluginValidationError, "stage"),
        ({"on_routed": hookimpl(wrapper=True)(lambda output: (yield))}, ValueError, "hook wrapper"),
        ({"on_routed": _coroutine}, ValueError, "coroutine function"),
        ({"on_dequeued": _async_generator}, ValueError, "coroutine function"),
        ({"on_pass_end": None}, ValueError, "no function that is marked @hookimpl"),
    ],
)
def test_wrong_plugin_is_refused_whole(implementation: Any, error: type[Exception], message: str) -> None:
    """An unknown hook, wrong parameters or a wrapper refuses the plugin with its good hooks, and others register."""
    manager, called, recorder = HookManager(), [], Recorder()
    wrong = plugin(**{"on_pass_end": lambda report: called.append(report), **implementation})
    with pytest.raises(error, match=message):
        manager.register(wrong, "wrong")
    assert manager.observer("on_pass_end") is None
    manager.register(recorder)
    caller(manager, "on_pass_end")()
    assert (called, len(recorder.of("pass"))) == ([], 1)


def used(manager: HookManager) -> list[str]:
    """The names of the plugins that are called."""
    return [name for name, plugin in manager._pluggy.list_name_plugin() if plugin is not None]


def test_broken_entry_points_are_left_out(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    """A plugin that cannot be imported, calls ``sys.exit`` or is invalid is logged and left out."""
    recorder, asked, wrong = Recorder(), [], plugin(on_everything=lambda: None)

    def found(*, group: str) -> list[Any]:
        asked.append(group)
        return [
            SimpleNamespace(name="broken", load=Mock(side_effect=ModuleNotFoundError("no such plugin"))),
            SimpleNamespace(name="ends", load=Mock(side_effect=SystemExit(3))),
            SimpleNamespace(name="wrong", load=lambda: wrong),
            SimpleNamespace(name="good", load=lambda: recorder),
        ]

    monkeypatch.setattr("importlib.metadata.entry_points", found)
    manager = HookManager()
    manager.load()
    manager.on_patch_state("drum", State.OFF, "no")
    assert used(manager) == ["good"]
    assert (asked, recorder.of("state")) == ([ENTRY_POINT_GROUP], [("drum", "off", "no")])
    reported = [record.getMessage() for record in caplog.records if record.levelno == logging.ERROR]
    assert [line.split()[4] for line in reported] == ["broken", "ends", "wrong"]


# ---- What a plugin raises ----


@pytest.mark.parametrize("name", ["on_dequeued", "on_routed"])
@pytest.mark.parametrize("error", [RuntimeError, SystemExit, asyncio.CancelledError, GeneratorExit, KeyboardInterrupt])
def test_a_plugin_that_raises_is_off(name: str, error: type[BaseException], caplog: pytest.LogCaptureFixture) -> None:
    """Any exception of a hook on the orchestrator's thread is logged once with names, and other plugins are called."""
    manager, recorder, calls = HookManager(), Recorder(), []

    def breaks() -> None:
        calls.append(name)
        raise error

    manager.register(recorder, "good")
    manager.register(plugin(**{name: breaks}), "broken")
    call, answers = caller(manager, name), list[Any]()
    caplog.clear()
    thread = threading.Thread(target=lambda: answers.extend((call(), call())))
    thread.start()
    thread.join()
    assert (len(calls), len(answers)) == (1, 2)
    assert len(recorder.events) == 2
    assert [record.getMessage() for record in caplog.records] == [
        f"omni-fastpath: hook {name} of plugin broken raised, the plugin is switched off"
    ]
    assert used(manager) == ["good"]


def test_ctrl_c_in_a_plugin_passes() -> None:
    """Ctrl-C while a hook runs is raised as without the plugin, which stays on."""
    manager, calls = HookManager(), []

    def is_interrupted() -> None:
        calls.append(1)
        if len(calls) == 1:
            raise KeyboardInterrupt

    manager.register(plugin(on_patch_state=is_interrupted))
    with pytest.raises(KeyboardInterrupt):
        manager.on_patch_state("drum", State.APPLIED, "yes")
    manager.on_patch_state("drum", State.APPLIED, "yes")
    assert len(calls) == 2
