"""Whether an engine of this process may start: what it asks for is resolved and takes effect, or it is refused.

Three things can go wrong, and each has its answer. What somebody set is bad: refused, always. A patch cannot serve:
``on_unsupported`` decides. We ourselves fail: the same, with the patches ``failed``; never a stock server in silence,
and never a refusal where nobody asked for anything.
"""

from __future__ import annotations

import functools
import os
from typing import Any

from omni_fastpath import config, deploy_yaml, ownerror
from omni_fastpath.activation import ACTIVATION, Activation, process_kind
from omni_fastpath.config import ConfigError, Resolved
from omni_fastpath.gates import ENGINE_MODULE, GATE, Gate, when_imported
from omni_fastpath.install import RefusedError, modules_of
from omni_fastpath.ledger import logger, warn_once
from omni_fastpath.patches import PATCHES
from omni_fastpath.variables import HANDOFF


class Admission:
    """The judgement on the engines of this process.

    Args:
        activation: Where an admitted configuration takes effect.
        gate: Where a refused engine is stopped, and one that nobody could judge before is judged.
    """

    def __init__(self, activation: Activation, gate: Gate) -> None:
        self._activation = activation
        self._gate = gate
        self._has_judged = False
        gate.before_stages = self._before_stages

    def judge(self, source: str | None, deploy: Any) -> None:
        """Let a deploy YAML and the environment take effect, or refuse the server.

        Args:
            source: The file; None for an engine that has none.
            deploy: What upstream made of it.

        Raises:
            ConfigError: The block or a variable is wrong. The server does not start.
            RefusedError: A patch that was asked for cannot serve, or an error of ours keeps it from serving, and
                ``on_unsupported`` is ``fail``.
        """
        self._has_judged = True
        try:
            self._resolve_and_take_effect(source, deploy)
        except Exception as error:
            refusal = self._refusal(error, source, deploy)
            if refusal is not None:
                self._gate.close(source, refusal)
                if refusal is error:
                    raise
                raise refusal from error
        self._gate.open(source)

    def read_environment(self) -> None:
        """Judge what variables of ours say before any stage, and install what they switch on by themselves.

        That is done when its modules are there, without a deploy YAML.
        """
        if not config.said(os.environ, PATCHES):
            return
        self._gate.arm()
        try:
            resolved = config.resolve([], os.environ, PATCHES, partial=True)
        except ConfigError:
            return  # a server refuses before it spawns a stage; a plain vLLM process is not our business
        if resolved.asked:
            self._install_when_imported(resolved)

    def _install_when_imported(self, resolved: Resolved) -> None:
        # What other processes' patches patch may never be imported here; the gate tells the stages.
        here = [patch for patch in PATCHES if patch.name in resolved.enabled and process_kind() in patch.processes]
        needed = frozenset[str]().union(*(modules_of(patch) for patch in here))
        if needed:  # plain vLLM has those of vLLM's own, and is not our business
            needed |= {ENGINE_MODULE}
        imported: set[str] = set()

        def one_more(name: str, _module: Any) -> None:
            imported.add(name)
            if imported != needed or self._has_judged:
                return  # some are missing, or a deploy YAML decides: the import may be its own, in the middle of it
            try:
                self._take_effect(resolved, None)
            except RefusedError as error:
                # An import is no place to refuse in; the reading of the YAML and the gate are: they resolve again.
                logger.error("%s", error)

        for name in needed:
            when_imported(name, functools.partial(one_more, name))

    def _before_stages(self, source: str | None) -> None:
        """An engine that was not refused is about to spawn its stages: it counts as started.

        One without a deploy YAML is judged here by the environment alone, unless one took effect in this process.

        Raises:
            ConfigError: As ``judge``.
            RefusedError: As ``judge``.
        """
        if source is None and self._activation.deploy_yaml is None:
            self.judge(None, None)

    def _resolve_and_take_effect(self, source: str | None, deploy: Any) -> None:
        blocks = [] if source is None else deploy_yaml.blocks_of(source, deploy)
        resolved = config.resolve(blocks, os.environ, PATCHES)
        for line in resolved.unknown:
            warn_once(line)
        with self._activation.lock:
            if not resolved.asked and not self._activation.is_shown:
                os.environ.pop(HANDOFF, None)  # in a fork of another server there is that one's
                return  # nobody asked for anything, now or before: stay invisible
            self._take_effect(resolved, source)

    def _take_effect(self, resolved: Resolved, source: str | None) -> None:
        self._activation.take_effect(resolved, source)
        if resolved.asked:
            self._gate.arm()

    def _refusal(self, error: Exception, source: str | None, deploy: Any) -> Exception | None:
        """Say what went wrong and show it; what refuses the server, or None where it goes on without us."""
        if isinstance(error, RefusedError):
            return error  # the ledger has the states with their reasons
        if isinstance(error, deploy_yaml.UnreadableError) or not isinstance(error, ConfigError):
            show = functools.partial(self._activation.show_failed, source=source)
            return ownerror.refusal(error, deploy, RefusedError, show)
        logger.error("omni-fastpath: the configuration is refused: %s", error)
        if not self._activation.enabled:  # else this is about an engine that does not start, and not about the running
            self._activation.show_failed(f"the configuration is refused: {error}", source)
        return error


ADMISSION = Admission(ACTIVATION, GATE)
"""This process's."""
