"""What was asked for takes effect in this process: installed, handed to the stages, and made visible."""

from __future__ import annotations

import os
import sys
import threading
from collections.abc import Callable, Collection, Mapping
from typing import Any

from omni_fastpath import commandline, handoff, install, metrics, spawned
from omni_fastpath.config import Resolved
from omni_fastpath.declare import Process, State
from omni_fastpath.install import RefusedError
from omni_fastpath.ledger import LEDGER, logger
from omni_fastpath.patches import PATCHES
from omni_fastpath.publish import Publisher
from omni_fastpath.variables import HANDOFF


def process_kind() -> Process:
    """What kind of process this is."""
    if spawned.is_engine():
        return Process.STAGE
    if spawned.is_worker():
        return Process.WORKER
    return Process.HEADLESS if commandline.is_headless(sys.argv[1:]) else Process.SERVER


class Activation:
    """What took effect in this process.

    Attributes:
        lock: Held while a configuration takes effect.
        deploy_yaml: The deploy YAML that took effect last; None before the first.
        enabled: The patches that are on by what took effect last.
    """

    def __init__(self) -> None:
        self.lock = threading.RLock()
        self.deploy_yaml: str | None = None
        self.enabled: frozenset[str] = frozenset()
        self._publisher: Publisher | None = None
        self._hooks_listen = False
        self._hooks: Callable[[], Mapping[str, Any]] | None = None

    @property
    def is_shown(self) -> bool:
        """Whether there is a state file of this process: something was asked for, now or before."""
        return self._publisher is not None

    def take_effect(self, resolved: Resolved, source: str | None) -> None:
        """Install in this process, hand the result to the stages that it will spawn, and make it visible.

        Raises:
            RefusedError: A patch that was asked for cannot serve, or an error of ours keeps it from serving, and
                ``on_unsupported`` is ``fail``.
        """
        self._tell_hooks()
        try:
            _install(resolved)
            _hand_on(resolved)
            self.deploy_yaml, self.enabled = source or self.deploy_yaml, frozenset(resolved.enabled)
        finally:
            self._publish_or_say(source)

    def take_over(self) -> None:
        """A spawned stage takes what its parent resolved, or nothing."""
        try:
            resolved = handoff.receive(PATCHES, os.environ)
        except Exception as error:
            logger.exception("omni-fastpath: what the parent handed over cannot be taken; this stage runs as stock")
            self.show_failed(f"what the parent handed over cannot be taken: {error!r}", HANDOFF)
            return
        if resolved is None or not resolved.asked:
            return
        self._tell_hooks()
        try:
            install.apply(resolved, process_kind())
        finally:
            self._publish(resolved.source)

    def show_off(self, reason: str) -> None:
        """Make it visible that everything is off."""
        for patch in PATCHES:
            LEDGER.set(patch, State.OFF, reason)
        self._publish("environment")

    def show_failed(self, reason: str, source: str | None) -> None:
        """State file and ledger for what the log has said: no patch that is not installed serves here."""
        try:
            for patch in PATCHES:
                if not install.is_installed(patch.name):
                    LEDGER.set(patch, State.FAILED, reason, said=True)
        except Exception:
            logger.exception("omni-fastpath: the states of the patches cannot be set")
        self._publish_or_say(source)

    def _tell_hooks(self) -> None:
        """Let hook plugins hear of every change of a patch's state, the first included."""
        if self._hooks_listen:
            return
        self._hooks_listen = True
        try:
            from omni_fastpath.hooks import HOOKS  # noqa: PLC0415 - pluggy, and the patches work without it

            HOOKS.load()
            LEDGER.listen(HOOKS.on_patch_state)
            self._hooks = HOOKS.told
        except Exception:
            logger.exception("omni-fastpath: hook plugins cannot be loaded; the patches work without them")

    def _publish(self, source: str | None) -> None:
        """Start the state file, once, and where something was asked for the metrics; a later call notes the source."""
        with self.lock:
            if self._publisher is not None:
                self._publisher.update(source)
                return
            kind = process_kind()
            is_server = self._hooks_listen and kind is Process.SERVER  # a stage serves no metrics
            self._publisher = Publisher(kind, source, hooks=self._hooks)
            self._publisher.start()
            if is_server:
                try:
                    metrics.export(kind)
                except Exception:
                    logger.exception("omni-fastpath: the metrics cannot be exported")

    def _publish_or_say(self, source: str | None) -> None:
        """``_publish`` for where its failure must not stand in the way of anything."""
        try:
            self._publish(source or "environment")
        except Exception:
            logger.exception("omni-fastpath: the state of the patches cannot be published")


def _install(resolved: Resolved) -> None:
    try:
        install.apply(resolved, process_kind())
    except RefusedError:
        raise
    except Exception as error:
        _own_error(resolved, resolved.enabled, f"installing failed: {error!r}", error)


def _hand_on(resolved: Resolved) -> None:
    if not resolved.asked:
        os.environ.pop(HANDOFF, None)
        return
    try:
        handoff.export(resolved)
    except Exception as error:
        os.environ.pop(HANDOFF, None)  # an earlier configuration's is not this one's
        theirs = {patch.name for patch in PATCHES if Process.STAGE in patch.processes}
        _own_error(resolved, theirs, f"the stages cannot be told: {error!r}", error)


def _own_error(resolved: Resolved, patches: Collection[str], what: str, error: Exception) -> None:
    """The answer to an error of ours: ``failed`` for those of the patches that are on and not installed, or a refusal.

    Raises:
        RefusedError: ``on_unsupported`` is ``fail``.
    """
    logger.error("omni-fastpath: %s", what, exc_info=error)
    for patch in PATCHES:
        if patch.name in patches and patch.name in resolved.enabled and not install.is_installed(patch.name):
            LEDGER.set(patch, State.FAILED, what)
    if resolved.on_unsupported == "fail":
        raise RefusedError(f"omni-fastpath: fastpath.on_unsupported is 'fail' and {what}")


ACTIVATION = Activation()
"""This process's."""
