"""The second mode: upstream's own runners on the processor, with a tiny model of random weights.

vLLM's CPU worker and runner below, vLLM-Omni's runners of autoregressive and generation stages on top, so that the
persistent batch, the KV cache, sampling and the connector payloads are the real ones. It is slow and says nothing about
time; it shows what the clock cannot: that the same requests get the same tokens.
"""

import contextlib
import math
import zlib
from typing import Any
from unittest import mock

import torch
from torch import nn
from vllm.model_executor.model_loader import register_model_loader
from vllm.model_executor.model_loader.dummy_loader import DummyModelLoader
from vllm.v1.worker import cpu_worker
from vllm.v1.worker.cpu_model_runner import CPUModelRunner
from vllm_omni.worker.gpu_ar_model_runner import GPUARModelRunner
from vllm_omni.worker.gpu_generation_model_runner import GPUGenerationModelRunner
from vllm_omni.worker.mixins import OmniWorkerMixin

LOAD_FORMAT = "random_by_name"


@register_model_loader(LOAD_FORMAT)
class RandomLoader(DummyModelLoader):  # type: ignore[misc]
    """Random weights of a useful size, each from its name alone.

    vLLM's own dummy weights are all below a thousandth: what a layer adds is nothing beside the embedding, and the
    tokens would not depend on the KV cache, so that no comparison of tokens could fail.
    """

    def load_weights(self, model: nn.Module, model_config: Any) -> None:  # noqa: ARG002
        """Fill every parameter and persistent buffer of *model*."""
        persistent = model.state_dict().keys()
        with torch.no_grad():
            for name, parameter in model.named_parameters():
                _fill(name, parameter.data, torch.Generator().manual_seed(zlib.crc32(name.encode())))
            for name, buffer in model.named_buffers():
                if name in persistent and buffer.is_floating_point():  # counts and sizes that something is divided by
                    buffer.uniform_(0.5, 1.5, generator=torch.Generator().manual_seed(zlib.crc32(name.encode())))


def _fill(name: str, weight: torch.Tensor, generator: torch.Generator) -> None:
    if not weight.is_floating_point():
        return
    if weight.ndim >= 2:
        weight.normal_(0.0, 1.0 / math.sqrt(_inputs(name, weight)), generator=generator)
        return
    weight.uniform_(-0.1, 0.1, generator=generator)
    if not name.endswith("bias"):
        weight.add_(1.0)  # the weight of a norm


def _inputs(name: str, weight: torch.Tensor) -> int:
    """How many values a weight sums up, so that its outputs are of the size of its inputs."""
    if "embed" in name:
        return 1
    if "experts" in name:  # experts, outputs, inputs
        return int(weight.shape[-1])
    return max(1, int(math.prod(weight.shape[1:])))


class _Event:
    """A CUDA event where everything is done when the call that asks for it returns."""

    def __init__(self, *_args: Any, **_kwargs: Any) -> None:
        pass

    def record(self, *_args: Any) -> None:
        """Nothing is under way."""

    def wait(self, *_args: Any) -> None:
        """There is nothing to wait for."""

    def synchronize(self) -> None:
        """There is nothing to wait for."""

    def query(self) -> bool:
        """Always done."""
        return True


class _Stream(_Event):
    """A CUDA stream on the same terms."""

    device = torch.device("cpu")

    def wait_stream(self, _other: Any) -> None:
        """Nothing is under way."""


def _without_cuda() -> None:
    """Let the runners' asynchronous outputs, which are written for CUDA, work in this process.

    vLLM's CPU runner replaces what its constructor needs; with async scheduling each step makes events and streams.
    """
    cuda: Any = torch.cuda
    cuda.Event = cuda.Stream = _Stream
    cuda.current_stream = cuda.default_stream = lambda *_args: _Stream()
    cuda.stream = lambda _stream: contextlib.nullcontext()
    cuda.set_device = lambda _device: None
    torch.Event = _Event


class _NoGraphs:
    """Before vLLM-Omni's runner in the order of resolution."""

    compilation_config: Any

    def _init_talker_mtp(self) -> None:
        if self.compilation_config.max_cudagraph_capture_size is None:
            self.compilation_config.max_cudagraph_capture_size = 0  # upstream takes a maximum with it
        super()._init_talker_mtp()  # type: ignore[misc]


class RealARModelRunner(_NoGraphs, GPUARModelRunner, CPUModelRunner):  # type: ignore[misc]
    """Runner of thinker and talker stages."""


class RealGenerationModelRunner(_NoGraphs, GPUGenerationModelRunner, CPUModelRunner):  # type: ignore[misc]
    """Runner of code2wav stages."""


class _RealWorker(OmniWorkerMixin, cpu_worker.CPUWorker):  # type: ignore[misc]
    model_runner_cls: type[CPUModelRunner]

    def init_device(self) -> None:
        """As upstream's CPU worker, which names its runner's class itself, with ours in its place."""
        _without_cuda()
        self.use_v2_model_runner = False
        with mock.patch.object(cpu_worker, "CPUModelRunner", self.model_runner_cls):
            super().init_device()

    def encoder_loaded(self) -> bool:
        """Asked before multimodal input."""
        loaded = getattr(self.model_runner.model, "encoder_loaded", None)
        return bool(loaded()) if callable(loaded) else True


class RealARWorker(_RealWorker):
    """Worker of thinker and talker stages."""

    model_runner_cls = RealARModelRunner


class RealGenerationWorker(_RealWorker):
    """Worker of code2wav stages."""

    model_runner_cls = RealGenerationModelRunner
