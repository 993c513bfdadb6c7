"""Follows one call of a stub: every kernel launch in it is lowered and executed instead of going to a GPU.

This is the part that leans on Triton's internals: `JITFunction.run` and `Autotuner.run` are replaced for the duration
of one call. Autotuned kernels run with the first configuration that survives the user's own pruning.
"""

from __future__ import annotations

import contextlib
import inspect
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any
from unittest import mock

import torch
from torch import Tensor
from triton.runtime.autotuner import Autotuner
from triton.runtime.jit import JITFunction

from kernel_agent.ir.errors import CaptureError, LaunchError
from kernel_agent.ir.findings import Findings
from kernel_agent.ir.functions import TORCH_APPLY, capturing
from kernel_agent.ir.images import ImageMode, declared_dtype
from kernel_agent.ir.launch import LaunchOptions, Runner, launch
from kernel_agent.ir.lower import lower
from kernel_agent.ir.memory import ADDRESS_BITS, Buffer
from kernel_agent.ir.program import Module
from kernel_agent.ir.signature import Signature
from kernel_agent.ir.torch_calls import TorchCall
from kernel_agent.ir.views import Geometry

_OPTIONS = frozenset(
    [
        "num_warps",
        "num_stages",
        "num_ctas",
        "maxnreg",
        "debug",
        "warmup",
        "stream",
        "device",
        "enable_fp_fusion",
        "allow_flush_denorm",
        "launch_cooperative_grid",
        "launch_pdl",
        "instrumentation_mode",
        "sanitize_overflow",
        "extern_libs",
        "max_num_imprecise_acc_default",
        "default_dot_input_precision",
        "waves_per_eu",
        "matrix_instr_nonkdim",
        "kpack",
        "ir_override",
    ]
)
"""Keywords of a launch that steer compilation and mean nothing here."""


@dataclass(frozen=True)
class Launch:
    """One kernel launch."""

    kernel: str
    grid: tuple[int, int, int]
    file: str
    """Where the launch stands in the source; empty when that is unknown."""
    line: int | None
    module: Module
    """The lowered kernel."""


@dataclass(frozen=True)
class _Metadata:
    """What a compiled kernel tells of itself."""

    name: str
    shared: int = 16384
    num_warps: int = 4
    num_stages: int = 2
    num_ctas: int = 1


class _Compiled:
    """What a launch or a warm-up returns: code that computes its grid from it gets plausible numbers."""

    n_regs = 32
    n_spills = 0
    n_max_threads = 1024

    def __init__(self, capture: Capture, kernel: Any, constants: dict[str, Any]) -> None:
        self.capture = capture
        self.kernel = kernel
        self.constants = constants
        self.name = kernel.fn.__name__
        self.metadata = _Metadata(self.name)

    def _init_handles(self) -> None:
        """Nothing is loaded."""

    def __getitem__(self, grid: Any) -> Any:
        def run(*args: Any, **kwargs: Any) -> None:
            given = dict(zip(self.kernel.arg_names, args, strict=False))
            self.capture.launch(self.kernel, grid, (), {**self.constants, **given, **kwargs})

        return run


class Capture:
    """Buffers, launches and calls of one execution."""

    def __init__(self, *, grad: bool, poison: bool, options: LaunchOptions, runner: Runner = launch) -> None:
        self.grad = grad
        self.poison = poison
        self.options = options
        self.runner = runner
        """What executes a lowered launch."""
        self.findings = Findings()
        self.launches: list[Launch] = []
        self.calls: dict[TorchCall, None] = {}
        self.buffers: dict[int, Buffer] = {}
        """By the upper bits of their virtual address."""
        self._by_storage: dict[int, Buffer] = {}

    # --- memory

    def buffer(self, tensor: Tensor, *, written: bool = True, name: str = "") -> Buffer:
        """The buffer behind an image, made when it is first met."""
        known = self.known_buffer(tensor)
        if known is not None:
            return known
        with torch._C.DisableTorchFunction(), torch.set_grad_enabled(self.grad):
            base = tensor if tensor._base is None else tensor._base
            elements = tensor.untyped_storage().nbytes() // tensor.element_size()
            whole = base.dim() == 1 and base.is_contiguous() and base.numel() == elements
            root = base if whole else base.as_strided((elements,), (1,), 0)
        buffer = Buffer(name or f"tensor{tuple(tensor.shape)}", root, declared_dtype(tensor), written=written)
        buffer.extents.whole = Geometry.of(base)
        self.buffers[buffer.base >> ADDRESS_BITS] = buffer
        self._by_storage[tensor.untyped_storage()._cdata] = buffer
        return buffer

    def known_buffer(self, tensor: Tensor) -> Buffer | None:
        """The buffer behind an image, if it was met before."""
        return self._by_storage.get(tensor.untyped_storage()._cdata)

    def record(self, call: TorchCall) -> None:
        """A torch function was called."""
        self.calls[call] = None

    # --- launches

    @contextlib.contextmanager
    def running(self) -> Iterator[None]:
        """Intercept launches and run torch code on images while the block runs."""
        capture = self

        def run(self: Any, *args: Any, grid: Any, warmup: bool, **kwargs: Any) -> Any:
            for hook in getattr(self, "pre_run_hooks", ()):
                hook(*args, **kwargs)
            if warmup:
                bound = inspect.signature(self.fn).bind_partial(*args, **_parameters_only(self, kwargs))
                return _Compiled(capture, self, dict(bound.arguments))
            return capture.launch(self, grid, args, kwargs)

        with (
            mock.patch.object(JITFunction, "run", run),
            mock.patch.object(Autotuner, "run", _run_first_configuration),
            capturing(),
            torch.set_grad_enabled(self.grad),
            ImageMode(
                self,
                grad=self.grad,
                poison=self.poison,
                numerics=self.options.numerics,
                device=self.options.device,
            ),
        ):
            yield

    def launch(self, kernel: Any, grid: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> _Compiled:
        """Lower and execute one launch. Raises `LaunchError`, `LoweringError`, `UnsupportedOp`."""
        name = kernel.fn.__name__
        unknown = [key for key in kwargs if key not in kernel.arg_names and key not in _OPTIONS]
        if unknown:
            raise LaunchError(f"kernel {name} has no parameter {unknown[0]}", kernel=name)
        try:
            bound = inspect.signature(kernel.fn).bind(*args, **_parameters_only(kernel, kwargs))
        except TypeError as error:
            raise LaunchError(f"kernel {name} is launched with wrong arguments: {error}", kernel=name) from error
        bound.apply_defaults()
        values = dict(bound.arguments)
        sizes = grid(dict(values)) if callable(grid) else grid
        file, line = _launch_site()
        if self.grad:
            _refuse_foreign_function(name)
        with torch._C.DisableTorchFunction(), torch.set_grad_enabled(self.grad):
            signature = Signature(kernel, values, self.buffer)
            module = lower(kernel, signature.types, signature.constants)
            blocks = _grid(sizes, name)
            self.launches.append(Launch(name, blocks, file, line, module))
            arguments = signature.arguments(module)
            self.runner(module, blocks, arguments, self.buffers, self.findings, self.options)
        return _Compiled(self, kernel, values)


def _parameters_only(kernel: Any, kwargs: dict[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in kwargs.items() if key in kernel.arg_names}


def _grid(sizes: Any, kernel: str) -> tuple[int, int, int]:
    listed = [int(size) for size in (sizes if isinstance(sizes, (tuple, list)) else (sizes,))]
    if not 1 <= len(listed) <= 3 or min(listed) < 0:
        raise LaunchError(f"kernel {kernel} is launched with grid {tuple(listed)}: one to three sizes are needed")
    x, y, z = (*listed, 1, 1)[:3]
    return x, y, z


def _run_first_configuration(self: Any, *args: Any, **kwargs: Any) -> Any:
    """`Autotuner.run` without a clock."""
    self.nargs = dict(zip(self.arg_names, args, strict=False))
    configs = list(self.configs)
    if len(configs) > 1 and self.early_config_prune is not None:
        configs = list(self.early_config_prune(configs, self.nargs, **kwargs)) or configs
    config = configs[0]
    self.best_config = config
    chosen = config.all_kwargs()
    if config.pre_hook is not None:
        config.pre_hook({**self.nargs, **kwargs, **chosen})
    result = self.fn.run(*args, **{**kwargs, **chosen})
    self.nargs = None
    return result


def _refuse_foreign_function(kernel: str) -> None:
    """A launch inside of torch's own `Function.apply` would get its gradient from a backward nobody has proven."""
    frame = sys._getframe(1)
    while frame is not None:
        if frame.f_code is TORCH_APPLY.__code__:
            raise CaptureError(
                f"kernel {kernel} runs inside a torch.autograd.Function whose apply was bound before the stand-in",
                remedy="Import the file with kernel_agent.ir.import_module, or call the function's forward directly.",
                kernel=kernel,
            )
        if frame.f_back is None:
            return
        frame = frame.f_back


def _launch_site() -> tuple[str, int | None]:
    """The innermost frame outside of Triton, torch and this package."""
    frame = sys._getframe(1)
    own = __name__.rpartition(".")[0]
    while frame is not None:
        module = str(frame.f_globals.get("__name__", ""))
        if not module.startswith((own, "triton.", "torch.", "contextlib")):
            return frame.f_code.co_filename, frame.f_lineno
        if frame.f_back is None:
            break
        frame = frame.f_back
    return "", None
