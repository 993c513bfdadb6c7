"""A stand-in for the GPU: import and capture of GPU code on a machine without one.

Files are written for GPUs: they ask torch and Triton for the device, its properties and streams when they are imported
and when their stubs run. Inside `standin()` those questions are answered for one target, and tensors meant for the GPU
are made on the CPU. Nothing stays patched afterwards.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import triton
from torch.overrides import TorchFunctionMode

from kernel_agent.ir.capture.patches import Patch, Scene
from kernel_agent.ir.capture.profiled_ranges import ProfiledRanges
from kernel_agent.ir.lower import TARGET
from kernel_agent.ir.memory import CPU

CUDA = torch.device("cuda", 0)
"""The device that everything claims to be on."""

_START_CUDA = torch.cuda._lazy_init


@dataclass(frozen=True)
class DeviceProperties:
    """What `torch.cuda.get_device_properties` answers: an H100 SXM."""

    name: str = "NVIDIA H100 80GB HBM3 (stand-in)"
    major: int = 9
    minor: int = 0
    multi_processor_count: int = 132
    total_memory: int = 80 << 30
    warp_size: int = 32
    max_threads_per_multi_processor: int = 2048
    shared_memory_per_block: int = 48 << 10
    shared_memory_per_block_optin: int = 227 << 10
    shared_memory_per_multiprocessor: int = 228 << 10
    regs_per_multiprocessor: int = 65536
    L2_cache_size: int = 50 << 20


PROPERTIES = DeviceProperties()
_GENERATOR = torch.Generator
_GET_DEFAULT_DEVICE = torch.get_default_device


class _DriverUtils:
    """What Triton's driver tells of the hardware."""

    def get_device_properties(self, _device: int = 0) -> dict[str, int]:
        """Limits of one multiprocessor; clocks in kHz, bus width in bits."""
        return {
            "max_shared_mem": PROPERTIES.shared_memory_per_block_optin,
            "max_num_regs": PROPERTIES.regs_per_multiprocessor,
            "multiprocessor_count": PROPERTIES.multi_processor_count,
            "warpSize": PROPERTIES.warp_size,
            "sm_clock_rate": 1_980_000,
            "mem_clock_rate": 2_619_000,
            "mem_bus_width": 5120,
        }


class StandInDriver:
    """Triton's active driver without a device behind it."""

    utils = _DriverUtils()

    def get_active_torch_device(self) -> torch.device:
        """The device tensors are to be made on."""
        return CUDA

    def get_current_target(self) -> Any:
        """The `GPUTarget` kernels are lowered for."""
        return TARGET

    def get_current_device(self) -> int:
        """Index of the device."""
        return 0

    def set_current_device(self, _device: int) -> None:
        """There is one device only."""

    def get_current_stream(self, _device: int | None = None) -> int:
        """Handle of the default stream."""
        return 0

    def get_device_interface(self) -> Any:
        """The torch module that manages the device."""
        return torch.cuda

    def get_benchmarker(self) -> Callable[..., list[float]]:
        """A clock that does not run kernels: all configurations are equal."""
        return lambda *_args, **_kwargs: [0.0, 0.0, 0.0]

    def get_empty_cache_for_benchmark(self) -> None:
        """Nothing is timed, so nothing needs flushing."""

    def clear_cache(self, _cache: object) -> None:
        """See `get_empty_cache_for_benchmark`."""


class _Elsewhere:
    """Triton's active driver as threads without a stand-in know it, made when it is first asked for."""

    def __init__(self, active: Any) -> None:
        self._active = active

    def __getattr__(self, name: str) -> Any:
        """An attribute of the driver. Raises what Triton raises on a machine without one."""
        return getattr(self._active or triton.runtime.driver.default, name)


_CUDA_TYPE = 1
"""How torch numbers the kind of device that a stream belongs to."""


class _Scope:
    """`torch.cuda.device`, `torch.cuda.stream` and the like: a context that does nothing."""

    def __init__(self, *_args: object, **_kwargs: object) -> None:
        self.idx = 0

    def __enter__(self) -> _Scope:
        return self

    def __exit__(self, *_exception: object) -> None:
        return None


class _Stream(torch.Stream):  # type: ignore[misc]
    """The default stream, idle. torch checks that what it is given as a stream is one of its own."""

    cuda_stream = 0

    def __new__(cls, *_args: object, **_kwargs: object) -> Any:
        """A handle that no driver is asked for."""
        return super().__new__(cls, stream_id=0, device_index=0, device_type=_CUDA_TYPE)

    def __enter__(self) -> _Stream:
        return self

    def __exit__(self, *_exception: object) -> None:
        return None

    def synchronize(self) -> None:
        """Nothing runs."""

    def wait_stream(self, _other: object) -> None:
        """Nothing runs."""

    def record_event(self, event: object = None) -> object:
        """Nothing runs."""
        return event or _Event()

    def wait_event(self, _event: object) -> None:
        """Nothing runs."""

    def query(self) -> bool:
        """Nothing runs."""
        return True


class _Event:
    """An event that has passed."""

    def __init__(self, *_args: object, **_kwargs: object) -> None:
        self.device = CUDA

    def record(self, _stream: object = None) -> None:
        """Nothing runs."""

    wait = record

    def synchronize(self) -> None:
        """Nothing runs."""

    def query(self) -> bool:
        """Nothing runs."""
        return True

    def elapsed_time(self, _end: object) -> float:
        """Milliseconds between two events; nothing is timed here."""
        return 1.0


def names_gpu(value: Any) -> bool:
    """Whether a device argument names a GPU."""
    if isinstance(value, str):
        return value.split(":")[0] == "cuda"
    return isinstance(value, torch.device) and value.type == "cuda"


class _Place(threading.local):
    """Where the current thread computes what is meant for the GPU."""

    device = CPU
    default: torch.device | None = None
    """What code under the stand-in has made the default device. Nothing is made there."""
    redirects = False
    """Whether a stand-in further out redirects device arguments already: each asked again takes its time."""


_PLACE = _Place()


def placed(value: Any) -> Any:
    """A device argument for the machine at hand: what names a GPU becomes the device of the execution, or the CPU."""
    return _PLACE.device if names_gpu(value) else value


def start_cuda(device: torch.device) -> None:
    """Start torch's CUDA runtime for a device that is really there: under the stand-in torch would not do it."""
    if device.type == "cuda":
        _START_CUDA()


class _CpuTensors(TorchFunctionMode):  # type: ignore[misc]
    """Tensors that code asks for on the GPU are made on the CPU, or where the execution computes."""

    def __torch_function__(
        self, func: Any, _types: Sequence[type], args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Redirect device arguments."""
        if not kwargs and not any(map(names_gpu, args)) and func is not torch.Tensor.cuda:  # as most calls are
            return func(*args)
        if func is torch.device:  # naming the GPU is not using it
            return func(*args, **(kwargs or {}))
        if func is torch.Tensor.cuda:
            return args[0]
        kwargs = {key: placed(value) for key, value in (kwargs or {}).items() if key != "pin_memory"}
        if type(kwargs.get("device")) is int:
            kwargs["device"] = _PLACE.device
        return func(*[placed(value) for value in args], **kwargs)


def _generator(device: Any = "cpu") -> torch.Generator:
    """A generator that lives on the CPU wherever it is asked for."""
    return _GENERATOR(device=CPU if names_gpu(device) else device)


def _set_default_device(device: Any) -> None:
    _PLACE.default = None if device is None else torch.device(device)


def _get_default_device() -> torch.device:
    return _GET_DEFAULT_DEVICE() if _PLACE.default is None else _PLACE.default


def _cuda_answers() -> dict[str, Any]:
    """Replacements of attributes of `torch.cuda`."""
    return {
        "is_available": lambda: True,
        "is_initialized": lambda: True,
        "is_bf16_supported": lambda *_args, **_kwargs: True,
        "device_count": lambda: 1,
        "current_device": lambda: 0,
        "set_device": lambda _device: None,
        "get_device_name": lambda _device=None: PROPERTIES.name,
        "get_device_capability": lambda _device=None: (PROPERTIES.major, PROPERTIES.minor),
        "get_device_properties": lambda _device=None: PROPERTIES,
        "mem_get_info": lambda _device=None: (PROPERTIES.total_memory, PROPERTIES.total_memory),
        "memory_allocated": lambda _device=None: 0,
        "max_memory_allocated": lambda _device=None: 0,
        "memory_reserved": lambda _device=None: 0,
        "reset_peak_memory_stats": lambda _device=None: None,
        "empty_cache": lambda: None,
        "synchronize": lambda _device=None: None,
        "manual_seed": lambda _seed: None,
        "manual_seed_all": lambda _seed: None,
        "is_current_stream_capturing": lambda: False,
        "device": _Scope,
        "device_of": _Scope,
        "stream": _Scope,
        "Stream": _Stream,
        "Event": _Event,
        "current_stream": lambda _device=None: _Stream(),
        "default_stream": lambda _device=None: _Stream(),
        "set_stream": lambda _stream: None,
        # what torch's own functions ask in turn, for modules that bound those before the stand-in
        "_lazy_init": lambda: None,
        "_is_compiled": lambda: True,
        "_nvml_based_avail": lambda: True,
        "_get_device_properties": lambda _device: PROPERTIES,
        "_exchange_device": lambda _device: 0,
        "_maybe_exchange_device": lambda _device: 0,
    }


_C_ANSWERS: dict[str, Any] = {
    "_cuda_getDevice": lambda: 0,
    "_cuda_setDevice": lambda _device: None,
    "_cuda_synchronize": lambda: None,
    "_cuda_getCurrentRawStream": lambda _device: 0,
}
"""Replacements of attributes of `torch._C`."""

_ACCELERATOR_ANSWERS: dict[str, Any] = {
    "is_available": lambda: True,
    "device_count": lambda: 1,
    "current_accelerator": lambda *_args, **_kwargs: torch.device("cuda"),
    "current_device_index": lambda: 0,
    "current_device_idx": lambda: 0,
    "set_device_index": lambda _device: None,
    "set_device_idx": lambda _device: None,
    "synchronize": lambda _device=None: None,
}
"""Replacements of attributes of `torch.accelerator`."""


def _patches() -> list[Patch]:
    answers = [
        (torch.cuda, _cuda_answers()),
        (torch._C, _C_ANSWERS),
        (torch.accelerator, _ACCELERATOR_ANSWERS),
        (torch.cuda.nvtx, {"_nvtx": ProfiledRanges()}),
        (torch._library.triton, {"is_wrap_triton_enabled": lambda: False}),  # nothing is traced: kernels are launched
        (
            torch,
            {
                "Generator": _generator,
                "set_default_device": _set_default_device,
                "get_default_device": _get_default_device,
            },
        ),
    ]
    patches = [Patch(owner, name, answer) for owner, named in answers for name, answer in named.items()]
    driver = triton.runtime.driver
    return [*patches, Patch(driver, "_active", StandInDriver(), elsewhere=_Elsewhere(driver._active))]


SCENE: Scene[bool] = Scene(_patches)
"""Where questions about the GPU are answered by the stand-in."""


@contextlib.contextmanager
def standin(device: torch.device | None = None) -> Iterator[None]:
    """Answer for a GPU on this thread while the block runs. May be nested.

    Tensors meant for the GPU are made on `device`; None: where a stand-in further out makes them, or on the CPU.
    """
    outer, redirected, default = _PLACE.device, _PLACE.redirects, _PLACE.default
    _PLACE.device, _PLACE.redirects = device or outer, True
    try:
        with SCENE.entered(True), contextlib.nullcontext() if redirected else _CpuTensors():
            yield
    finally:
        _PLACE.device, _PLACE.redirects = outer, redirected
        if not redirected:
            _PLACE.default = default
