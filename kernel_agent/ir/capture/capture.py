"""Follows one call of a stub: every kernel launch in it is lowered and executed instead of going to a GPU.

This is the part that leans on Triton's internals: `JITFunction.run` and `Autotuner.run` answer differently on the
capturing thread. Autotuned kernels run with the first configuration that their own pruning leaves and Triton accepts.
"""

from __future__ import annotations

import contextlib
import inspect
import sys
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.utils.checkpoint
from torch import Tensor
from triton.runtime.autotuner import Autotuner
from triton.runtime.interpreter import InterpretedFunction
from triton.runtime.jit import JITFunction
from triton.tools.tensor_descriptor import TensorDescriptor

from kernel_agent.ir.capture.build import Build, refuse_keywords
from kernel_agent.ir.capture.configurations import Turns
from kernel_agent.ir.capture.early_launch import EARLY, begins_too_early
from kernel_agent.ir.capture.functions import apply_patch
from kernel_agent.ir.capture.grid import grid_of
from kernel_agent.ir.capture.image_mode import ImageMode
from kernel_agent.ir.capture.images import Images, declared_dtype, is_image, real_parts
from kernel_agent.ir.capture.patches import CodePatch, Patch, Scene
from kernel_agent.ir.capture.plain_kernels import refuse_exchanged
from kernel_agent.ir.capture.signature import Address, Signature
from kernel_agent.ir.capture.torch_calls import TorchCall
from kernel_agent.ir.errors import CaptureError, LaunchError, LoweringError
from kernel_agent.ir.launch import LaunchOptions, Runner, launch
from kernel_agent.ir.lower import lower
from kernel_agent.ir.memory import ADDRESS_BITS, Buffer
from kernel_agent.ir.program import Module
from kernel_agent.ir.recorded.recorder import Recorder
from kernel_agent.ir.sanitizer.findings import Findings
from kernel_agent.ir.sanitizer.views import Geometry


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
    build: Build
    """What Triton compiles for it."""
    shared: tuple[frozenset[str], ...] = ()
    """Parameters whose tensors lie in one storage, where that is more than one."""


@dataclass(frozen=True)
class _Metadata:
    """What a compiled kernel tells."""

    name: str
    shared: int = 16384
    num_warps: int = 4
    num_stages: int = 2
    num_ctas: int = 1


class Compiled:
    """What a launch or a warm-up returns: code that computes its grid from it gets plausible numbers."""

    n_regs = 32
    n_spills = 0
    n_max_threads = 1024

    def __init__(self, kernel: Any, values: dict[str, Any]) -> None:
        self.kernel = kernel
        self.constants = {
            parameter.name: values[parameter.name]
            for parameter in kernel.params
            if parameter.is_constexpr and parameter.name in values
        }
        self.name = kernel.fn.__name__
        self.metadata = _Metadata(self.name)

    def _init_handles(self) -> None:
        """Nothing is loaded."""

    def __getitem__(self, grid: Any) -> Any:
        """Launch it in whatever capture runs then: libraries keep compiled kernels for later calls."""

        def run(*args: Any, **kwargs: Any) -> None:
            given = dict(zip(self.kernel.arg_names, args, strict=False))
            self.kernel[grid](**{**self.constants, **given, **kwargs})

        return run


class Capture:
    """Buffers, launches and calls of one execution."""

    def __init__(
        self,
        *,
        grad: bool,
        poison: bool,
        options: LaunchOptions,
        runner: Runner = launch,
        configs: Mapping[str, int] | None = None,
        turns: Turns | None = None,
    ) -> None:
        self.grad = grad
        self.poison = poison
        self.options = options
        self.runner = runner
        """What executes a lowered launch."""
        self.on_call: Callable[[TorchCall], None] | None = None
        """Told of every torch function."""
        self.configs = configs or {}
        """Which configuration an autotuned kernel runs with, by its name; 0 for others, or what `turns` says."""
        self.turns = turns
        self.tuned: dict[str, tuple[str, ...]] = {}
        """The configurations that every autotuned kernel that was launched has after pruning."""
        self.recorder: Recorder | None = None  # who writes the call down
        self.functions = 0
        """How many `autograd.Function`s the stub is inside of."""
        self.images = Images(options.numerics, options.device)
        self._adopted: dict[int, tuple[Tensor, Tensor]] = {}
        self._tuners: dict[int, tuple[Any, dict[str, Any]]] = {}
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
            tensor, base = real_parts(tensor), real_parts(base)
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
        with torch._C.DisableTorchFunction():  # asking whoever watches torch takes longer than the answer
            return self._by_storage.get(tensor.untyped_storage()._cdata)

    def record(self, call: TorchCall) -> None:
        """A torch function was called."""
        self.calls[call] = None
        if self.on_call is not None:
            self.on_call(call)

    def adopt(self, tensor: Tensor, image: Tensor | None = None) -> Tensor:
        """The image of a tensor that is no argument: a module's parameter, a table among the globals.

        The same tensor has the same image throughout, and tensors that share storage have images that do. `image` says
        which one it shall be.
        """
        if image is not None:
            self._adopted[id(tensor)] = (tensor, image)
        if is_image(tensor):
            return tensor
        known = self._adopted.get(id(tensor))
        if known is None:
            with torch._C.DisableTorchFunction():
                # torch code that the mode cannot see computed it from images: it is connected to them
                ours = tensor.grad_fn is not None and tensor.dtype == torch.float64
                known = self._adopted[id(tensor)] = (tensor, tensor if ours else self.images.adopted(tensor))
        return known[1]

    @contextlib.contextmanager
    def inside_function(self) -> Iterator[None]:
        """The stub runs the forward of an `autograd.Function`, where torch records nothing."""
        self.functions += 1
        try:
            with torch.no_grad():
                yield
        finally:
            self.functions -= 1

    # --- launches

    @contextlib.contextmanager
    def running(self) -> Iterator[None]:
        """Intercept launches on this thread and run torch code on images while the block runs."""
        with (
            SCENE.entered(self),
            torch.set_grad_enabled(self.grad),
            self.mode(),
        ):
            try:
                yield
            finally:
                for tuner, before in self._tuners.values():
                    vars(tuner).pop("best_config", None)
                    vars(tuner).update(before)

    def tune(self, tuner: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """`Autotuner.run` without a clock. Hooks that only its benchmark calls are not called.

        Raises `LaunchError` when no configuration is left, and `LoweringError` when Triton refuses all of them.
        """
        name = tuner.base_fn.__name__
        if self.recorder is not None:
            refuse_exchanged(tuner)
        configs = list(tuner.configs)
        given = dict(zip(tuner.arg_names, args, strict=False))
        if len(configs) > 1 and tuner.early_config_prune is not None:
            configs = list(tuner.early_config_prune(configs, given, **kwargs))
        if not configs:
            raise LaunchError(f"kernel {name}: pruning leaves no autotune configuration", kernel=name)
        self.tuned[name] = tuple(str(config) for config in configs)
        place = self.turns.place(tuner, configs, args, kwargs) if self.turns else self.configs.get(name, 0)
        refused: LoweringError | None = None
        for config in configs[place:] + (configs[:place] if self.turns else []):
            chosen = config.all_kwargs()
            if twice := ", ".join(sorted(chosen.keys() & kwargs.keys())):
                raise LaunchError(f"kernel {name}: {twice} comes from autotune and from the launch", kernel=name)
            self._tuners.setdefault(
                id(tuner), (tuner, {key: vars(tuner)[key] for key in ("best_config",) if key in vars(tuner)})
            )
            tuner.best_config = config
            if config.pre_hook is not None:
                config.pre_hook({**given, **kwargs, **chosen})
            try:
                return tuner.fn.run(*args, **kwargs, **chosen)
            except LoweringError as error:
                if name in self.configs:
                    raise
                refused = refused or error
        raise refused or LaunchError(f"kernel {name} has no such autotune configuration", kernel=name)

    def mode(self) -> ImageMode:
        """What runs torch code between launches."""
        return ImageMode(
            self,
            grad=self.grad,
            poison=self.poison,
            numerics=self.options.numerics,
            device=self.options.device,
            recorder=self.recorder,
        )

    def launch(self, kernel: Any, grid: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Compiled:
        """Lower and execute one launch. Raises `LaunchError`, `LoweringError`, `UnsupportedOp`."""
        name = kernel.fn.__name__
        refuse_keywords(kernel, kwargs)
        if self.recorder is not None:  # what the user's own forward is launched by is the user's affair
            refuse_exchanged(kernel)
        try:
            bound = inspect.signature(kernel.fn).bind(*args, **_parameters_only(kernel, kwargs))
        except TypeError as error:
            raise LaunchError(f"kernel {name} is launched with wrong arguments: {error}", kernel=name) from error
        bound.apply_defaults()
        values = {key: self._argument(value) for key, value in bound.arguments.items()}
        sizes = grid(dict(values)) if callable(grid) else grid
        file, line = _launch_site()
        with torch._C.DisableTorchFunction(), torch.set_grad_enabled(self.grad):
            signature = Signature(kernel, values, self.buffer, self.buffers)
            module = lower(kernel, signature.types, signature.constants)
            blocks = grid_of(sizes, name)
            build = Build.of(kernel, signature.types, signature.constants, values, kwargs)
            self.launches.append(Launch(name, blocks, file, line, module, build, shared_memory(values)))
            arguments = signature.arguments(module)
            if self.recorder is not None:
                told = {name: kwargs[name] for name in (EARLY,) if kwargs.get(name)}
                self.recorder.launched(kernel, blocks, values, {**build.options, **told})
            early = begins_too_early(module, kwargs)
            if early is not None:
                self.findings.add(early)
            self.runner(module, blocks, arguments, self.buffers, self.findings, self.options)
        return Compiled(kernel, values)

    def _argument(self, value: Any) -> Any:
        """A launch argument; tensors in it as images."""
        if isinstance(value, Tensor):
            return self.adopt(value)
        if isinstance(value, (tuple, list)):
            parts = [self._argument(part) for part in value]
            return type(value)(*parts) if hasattr(value, "_fields") else type(value)(parts)
        if isinstance(value, TensorDescriptor):
            return replace(value, base=self.adopt(value.base))
        if hasattr(value, "data_ptr") and hasattr(value, "dtype"):
            return Address(int(value.data_ptr()), value.dtype)
        return value


def shared_memory(values: Mapping[str, Any]) -> tuple[frozenset[str], ...]:
    """Arguments that share memory."""
    names: dict[int, set[str]] = {}
    for name, value in values.items():
        tensor = value.base if isinstance(value, TensorDescriptor) else value
        if isinstance(tensor, Tensor):
            names.setdefault(tensor.untyped_storage()._cdata, set()).add(name)
    return tuple(frozenset(some) for some in names.values() if len(some) > 1)


def _parameters_only(kernel: Any, kwargs: dict[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in kwargs.items() if key in kernel.arg_names}


def _launch_site() -> tuple[str, int | None]:
    """The innermost frame outside of Triton, torch and this package."""
    frame = sys._getframe(1)
    own = "kernel_agent.ir."
    while frame is not None:
        module = str(frame.f_globals.get("__name__", ""))
        if not module.startswith((own, "triton.", "torch.", "contextlib")):
            return frame.f_code.co_filename, frame.f_lineno
        if frame.f_back is None:
            break
        frame = frame.f_back
    return "", None


# --- what the capturing thread meets instead of Triton and torch


def _actor() -> Capture:
    capture = SCENE.actor
    if capture is None:
        raise CaptureError("a launch was captured outside of any capture")
    return capture


def _run(self: Any, *args: Any, grid: Any, warmup: bool, **kwargs: Any) -> Compiled:
    """`JITFunction.run`."""
    for hook in getattr(self, "pre_run_hooks", ()):
        hook(*args, **kwargs)
    if warmup:
        bound = inspect.signature(self.fn).bind_partial(*args, **_parameters_only(self, kwargs))
        return Compiled(self, dict(bound.arguments))
    return _actor().launch(self, grid, args, kwargs)


def _tune(self: Any, *args: Any, **kwargs: Any) -> Any:
    """`Autotuner.run`."""
    return _actor().tune(self, args, kwargs)


def _interpret(self: Any, *_args: Any, **_kwargs: Any) -> Any:
    """`InterpretedFunction.run`: what it wraps has been rewritten for NumPy and has no IR."""
    name = self.fn.__name__
    raise CaptureError(
        f"kernel {name} was made for Triton's interpreter",
        remedy="Unset TRITON_INTERPRET before the file is imported.",
        kernel=name,
    )


def _uncompiled(model: Any = None, **_options: Any) -> Any:
    """`torch.compile`: what it is given runs as it is written."""
    return model if model is not None else lambda model: model


def _kept(*_args: Any, **_kwargs: Any) -> Iterator[None]:
    """What `torch.utils.checkpoint` wraps around a call: nothing is dropped to be computed again."""
    yield


def _patches() -> list[Patch | CodePatch]:
    patches: list[Patch | CodePatch] = [
        apply_patch(),
        Patch(JITFunction, "run", _run),
        Patch(Autotuner, "run", _tune),
        Patch(InterpretedFunction, "run", _interpret),
        Patch(torch, "compile", _uncompiled),
        Patch(torch.utils.checkpoint, "_checkpoint_without_reentrant_generator", _kept),
    ]
    compiler = sys.modules.get("torch._dynamo.eval_frame")
    if compiler is not None:  # functions that were compiled at import ask it at every call
        answers = {
            "_callback_from_stance": lambda _callback: None,
            "set_fullgraph_compiled_frame_count": lambda _count: 0,
        }
        patches += [Patch(compiler, name, answer) for name, answer in answers.items() if hasattr(compiler, name)]
    return patches


SCENE: Scene[Capture] = Scene(_patches)
"""Where launches go to the current thread's capture."""
