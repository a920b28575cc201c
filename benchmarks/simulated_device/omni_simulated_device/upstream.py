"""What differs between the releases of vLLM-Omni that light engines run on."""

from typing import Any

try:
    from vllm_omni.core.sched.omni_ar_scheduler import _should_emit_engine_output as emits_output
except ImportError:  # on 0.28 every stage sends what it makes

    def emits_output(model_config: Any, *, stopped: bool, has_control: bool) -> bool:  # noqa: ARG001
        """Whether a stage sends an output that ends nothing."""
        return True


__all__ = ["emits_output"]
