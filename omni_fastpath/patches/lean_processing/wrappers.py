"""The wrappers of ``lean_processing``, in the order in which a raw output passes them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from vllm.v1.engine.output_processor import OutputProcessorOutput

from omni_fastpath.guard import Call, raised_by_us
from omni_fastpath.ledger import state_of

from .processor import make_lean
from .unseen import attach, unseen_of

_patch = state_of("lean_processing")
_counters = _patch.counters


def wrapped_orchestrator_made(wrapped: Call, instance: Any, args: Any, kwargs: Any) -> None:
    """Record a new orchestrator at the processors of its stages."""
    wrapped(*args, **kwargs)
    attach(instance)


def wrapped_process_outputs(wrapped: Call, instance: Any, args: Any, kwargs: Any) -> Any:
    """Process the entries of a raw output in order. Those that need no output are counted, the others are upstream's.

    Upstream accumulates all payloads of a raw output before it makes the first output. Therefore a raw output with two
    entries of a request is left to it, unless all of its entries are counted.
    """
    if len(args) != 3:
        return wrapped(*args, **kwargs)
    entries = args[0]
    states = instance.request_states
    make_lean(instance)
    _counters["raw_outputs"] += 1
    found = [unseen_of(instance, states.get(entry.request_id), entry) for entry in entries]
    if not any(found) or (not all(found) and len({entry.request_id for entry in entries}) < len(entries)):
        return wrapped(*args, **kwargs)
    return _in_turn(wrapped, instance, found, *args)


def _in_turn(
    wrapped: Callable[..., Any], processor: Any, found: list[Any], entries: list[Any], stamp: Any, statistics: Any
) -> OutputProcessorOutput:
    """Process entries in order. After an exception of the patch upstream processes the rest, and no entry twice."""
    made: list[Any] = []  # the result of each entry, appended by the statement that processes it
    try:
        for unseen, entry in zip(found, entries, strict=True):
            if unseen is None:
                made.append(wrapped([entry], stamp, statistics))
            else:
                _count(processor, unseen, entry, stamp, statistics, made)
        return _joined(made)
    except Exception as error:
        if not raised_by_us(error):
            raise
        _patch.fail("processing a raw output", error)
    return _joined([*made, wrapped(entries[len(made) :], stamp, statistics)])


def _count(processor: Any, unseen: Any, entry: Any, stamp: float | None, statistics: Any, made: list[Any]) -> None:
    """Handle an entry as upstream does, apart from making an output.

    The last line does all of it, so that an exception of the patch finds the entry either untouched or in ``made``.
    """
    state = processor.request_states[entry.request_id]
    count, update, tokens = processor._update_stats_from_output, state.detokenizer.update, entry.new_token_ids
    _counters["not_built"] += 1
    made.append((count(state, entry, stamp, statistics), update(tokens, False), unseen.bare)[-1])


def _joined(made: list[Any]) -> OutputProcessorOutput:
    return OutputProcessorOutput(
        [output for each in made for output in each.request_outputs],
        [request for each in made for request in each.reqs_to_abort],
    )
