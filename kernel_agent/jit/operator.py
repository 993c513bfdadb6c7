"""`differentiable`: a stub as a callable that trains, whose backwards are derived when they are first needed."""

from __future__ import annotations

import functools
import inspect
import logging
import threading
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from typing import Any, overload

import torch
from torch import Tensor
from torch.utils._pytree import tree_map
from triton import knobs

from kernel_agent.autodiff import MARK, AutodiffMark
from kernel_agent.compiler.derived import Derived
from kernel_agent.compiler.errors import CannotDerive
from kernel_agent.compiler.kept import KeptPairs, derivation_key, user_pairs
from kernel_agent.compiler.preload import PRELOAD
from kernel_agent.errors import EnvironmentProblem
from kernel_agent.gate.verdict import Verdict
from kernel_agent.ir import ExecOptions, execute
from kernel_agent.ir.capture.capture import SCENE
from kernel_agent.jit.callform import CallForm, bound, call_form, check_arguments, check_signature, wanted_gradients
from kernel_agent.jit.conditions import Objection
from kernel_agent.jit.deriving import PROOF, Progress, Wanted, derived_for, told
from kernel_agent.jit.errors import CannotTrain
from kernel_agent.jit.slices import Slice, slice_of
from kernel_agent.jit.variant import NotThisPair, Variant, real, refuse_written
from kernel_agent.sandbox import Sandbox

LOG = logging.getLogger("kernel_agent.jit")
SLOW_S = 20.0
"""Seconds after which a derivation is worth a line."""
MOST = 8
"""Pairs that one form of calls may come to have."""


class ExactOnCPU(UserWarning):
    """There is no GPU for these tensors: the kernels are executed exactly from their IR, which is right and slow."""


class GradientLeftOut(UserWarning):
    """A tensor requires a gradient and is not among those that may have one: training would leave it as it is."""


@overload
def differentiable(stub: Callable[..., Any], /) -> Differentiable: ...
@overload
def differentiable(*, progress: Progress | None = None) -> Callable[[Callable[..., Any]], Differentiable]: ...


def differentiable(
    stub: Callable[..., Any] | None = None, /, *, progress: Progress | None = None
) -> Differentiable | Callable[[Callable[..., Any]], Differentiable]:
    """A function that launches Triton kernels, as one that PyTorch can train through; also a decorator.

    Nothing else has to be written. At the first call of a configuration (dtypes, ranks, flags, arguments that are None,
    which tensors require gradients) a backward is derived from the kernels, proven on small stand-ins of the call's
    arguments, and kept in the user's cache folder for later processes; this takes seconds. `progress` is told in words
    what is being done. Calls that need no gradient go to the stub as it is.

    A stub with `@autodiff(inputs_require_grad=..., nondiff_outputs=...)` keeps what that says. Raises `TypeError` for a
    Triton kernel, `CannotTrain` for a stub of another kind and, when called, where no proven backward can be had.
    """
    if stub is None:
        return lambda function: Differentiable(function, progress=progress)
    return Differentiable(stub, progress=progress)


class Differentiable:
    """See `differentiable`."""

    def __init__(
        self,
        stub: Callable[..., Any],
        *,
        mark: AutodiffMark | None = None,
        progress: Progress | None = None,
        kept: KeptPairs | None = None,
    ) -> None:
        """`mark`: what `@autodiff` says of the stub, where that has no mark. `kept`: where pairs are kept."""
        if hasattr(stub, "run") and hasattr(stub, "fn"):
            raise TypeError("differentiable takes the function that launches the kernel, not the @triton.jit kernel")
        functools.update_wrapper(self, stub)
        check_signature(stub)
        mark = mark or getattr(stub, MARK, None) or AutodiffMark(None, (), None)
        assert isinstance(mark, AutodiffMark)
        self._mark = mark
        setattr(self, MARK, mark)
        self._stub = inspect.unwrap(stub)
        self._signature = inspect.signature(self._stub)
        self._kept = kept
        self._progress = progress
        self._lock = threading.RLock()
        self._slice: Slice | None = None
        self._variants: dict[tuple[CallForm, bool], list[Variant]] = {}
        self._operators: list[Callable[..., Any]] = []
        self._last: Variant | None = None
        self._made = 0
        """Pairs that were derived in this process."""
        self._said_exact = False
        self._said_left_out: set[str] = set()
        self._interpreted = bool(knobs.runtime.interpret)
        """Whether kernels are made for Triton's interpreter, which takes tensors of the CPU."""

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """As the stub. Raises `CannotTrain`, and whatever the stub raises."""
        if SCENE.actor is not None:  # gradients, outputs, sanitize, cost and the gate speak of the stub itself
            return self._stub(*args, **kwargs)
        given = bound(self._signature, self._stub.__name__, args, kwargs)
        arguments = given.arguments
        exact = self._executes(arguments)
        grads = wanted_gradients(arguments, self._allowed()) if torch.is_grad_enabled() else ()
        leaves_out = self._mark.inputs_require_grad is not None
        if leaves_out and torch.is_grad_enabled() and not torch.compiler.is_compiling():
            self._warn_of_left_out(arguments, grads)
        if not grads:
            check = torch.is_grad_enabled()
            if check:
                check_arguments(self._stub, arguments)
            return self._exactly(given) if exact else self._stub(*args, **kwargs)
        check_arguments(self._stub, arguments)
        form = call_form(arguments, grads)
        place = self._traceable(form.parts, form.grads) if torch.compiler.is_compiling() else -1
        if place >= 0:
            return self._traced(place, arguments, form)
        return self._trained(arguments, form, exact=exact)

    def __reduce__(self) -> str | tuple[Any, ...]:
        """By its name where it took the stub's place, as functions are."""
        return str(self._stub.__qualname__)

    def __repr__(self) -> str:
        return f"<differentiable {self._stub.__qualname__}>"

    # --- what was derived

    @property
    def derived(self) -> tuple[Derived, ...]:
        """Every pair that was used so far in this process."""
        return tuple(variant.derived for some in self._variants.values() for variant in some)

    @property
    def verdict(self) -> Verdict:
        """The gate's verdict on the pair that was used last. Raises `CannotTrain` before the first call."""
        return self._used().derived.verdict

    def source(self) -> str:
        """The pair that was used last, with its operator, as a file. Raises `CannotTrain` before the first call."""
        return self._used().derived.draft.pair

    def explain(self) -> str:
        """Which schedule the pair that was used last has, why no better one, and what was left as it is; and what was
        proven: how many cases, in what less was asked than a standard verdict asks, what was shrunk or left out."""
        derived = self._used().derived
        taken = ", ".join(dict.fromkeys(derived.draft.schedules)) or derived.draft.schedule
        lines = [f"schedule: {taken}", *(f"not taken: {text}" for text in derived.refused)]
        lines += [f"remark: {text}" for text in derived.draft.remarks]
        lines += [derived.verdict.message, *(f"note: {text}" for text in derived.verdict.notes)]
        return "\n".join(lines)

    def _used(self) -> Variant:
        if self._last is None:
            raise CannotTrain(
                f"nothing was derived of `{self._stub.__name__}` yet",
                remedy="Call it once with a tensor that requires a gradient.",
            )
        return self._last

    # --- calls

    def _allowed(self) -> tuple[str, ...] | None:
        wanted = self._mark.inputs_require_grad
        names = [name for name in self._signature.parameters if name != "ctx"]
        return None if wanted is None else tuple(names[one] if isinstance(one, int) else one for one in wanted)

    def _warn_of_left_out(self, arguments: Mapping[str, Any], grads: tuple[str, ...]) -> None:
        for name in wanted_gradients(arguments, None):
            if name not in grads and name not in self._said_left_out:
                self._said_left_out.add(name)
                warnings.warn(
                    f"`{name}` requires a gradient and gets none: `inputs_require_grad` of `{self._stub.__name__}` "
                    f"leaves it out. Name it there, or pass `{name}.detach()` if none is meant.",
                    GradientLeftOut,
                    stacklevel=3,
                )

    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def _trained(self, arguments: Mapping[str, Any], form: CallForm, *, exact: bool) -> Any:
        objection: NotThisPair | None = None
        for number in range(MOST):
            before = self._made
            variant = self._variant(form, exact, number, arguments, objection)
            try:
                return self._run(variant, arguments)
            except NotThisPair as error:
                if self._made > before and objection is not None and error.why is Objection.CONFIGURATION:
                    break  # it was derived for this very call
                objection = self._refused(error)
                if error.why is Objection.FACT:
                    return self._without_facts(form, exact, arguments, error)
        raise CannotTrain(
            f"no pair that was derived of `{self._stub.__name__}` is for this call: {objection}",
            remedy="Split the stub where it branches on sizes or numbers.",
        )

    def _traced(self, place: int, arguments: Mapping[str, Any], form: CallForm) -> Any:
        """What `torch.compile` traces. A call that the pair is not for breaks the graph, and runs as any other."""
        if torch.compiler.is_compiling():
            try:
                return self._operators[place](**arguments)
            except NotThisPair:
                pass
        return self._trained(arguments, form, exact=False)

    @torch.compiler.assume_constant_result  # type: ignore[untyped-decorator]
    def _traceable(self, parts: tuple[tuple[str, str], ...], grads: tuple[str, ...]) -> int:
        """Place among the operators that `torch.compile` can trace of that for a form; -1 where nothing was derived
        for it yet, which cannot be done while tracing, or where results have names, which the operator drops."""
        known = self._variants.get((CallForm(parts, grads), False))
        if not known or known[-1].named is not None:
            return -1
        if known[-1].traceable not in self._operators:
            self._operators.append(known[-1].traceable)
        return self._operators.index(known[-1].traceable)

    def _without_facts(self, form: CallForm, exact: bool, arguments: Mapping[str, Any], error: NotThisPair) -> Any:
        """A call whose layout a schedule does not take: with its tensors contiguous, or by the plain schedule."""
        dense = {name: _contiguous(value) for name, value in arguments.items()}
        if any(dense[name] is not value for name, value in arguments.items()):
            LOG.info("%s: its tensors are made contiguous, since %s", self._stub.__name__, error)
            for variant in list(self._variants[form, exact]):
                try:
                    return self._run(variant, dense)
                except NotThisPair as again:
                    error = self._refused(again)
        LOG.info("%s: the plain schedule is taken, since %s", self._stub.__name__, error)
        variant = self._variant(form, exact, -1, arguments, error)
        try:
            return self._run(variant, arguments)
        except NotThisPair as again:
            raise CannotTrain(
                f"no backward of `{self._stub.__name__}` is proven for this call: {again}",
                remedy="Pass contiguous tensors.",
            ) from again

    def _run(self, variant: Variant, arguments: Mapping[str, Any]) -> Any:
        found = variant(arguments)
        self._last = variant
        return found

    def _refused(self, error: NotThisPair) -> NotThisPair:
        if error.mutates:
            raise CannotTrain(
                f"`{self._stub.__name__}` writes into its arguments, and this call needs another backward than "
                f"earlier ones: {error}",
                remedy="Pass clones, or give this kind of call a stub of its own.",
            ) from error
        return error

    # --- pairs

    def _variant(
        self, form: CallForm, exact: bool, number: int, arguments: Mapping[str, Any], objection: NotThisPair | None
    ) -> Variant:
        """The pair with this number among those of a form; -1 is the plain one. It is loaded or derived when new."""
        with self._lock:
            if self._slice is None or self._slice.stale():
                self._slice = slice_of(self._stub)
                self._variants.clear()
            known = self._variants.setdefault((form, exact), [])
            plain = self._variants.setdefault((_plain(form), exact), []) if number < 0 else known
            at = 0 if number < 0 else number
            if at < len(plain):
                return plain[at]
            way = None if objection is None else objection.way
            wanted = Wanted(
                self._slice,
                self._stub,
                form,
                arguments,
                self._mark.nondiff_outputs,
                way,
                ("plain",) if number < 0 else (),
            )
            plain.append(Variant(self._proven(wanted, at), self._stub.__name__, exact=exact))
            return plain[at]

    def _proven(self, wanted: Wanted, number: int) -> Derived:
        """The pair as it is kept, or a new one, which is kept, as is why there is none. Raises `CannotTrain`."""
        name = self._stub.__name__
        kept = self._kept or user_pairs()
        key = derivation_key(wanted.forward, str(wanted.form), str(number), schedules=wanted.schedules, options=PROOF)
        with ExitStack() as stack:
            try:
                found = kept.get(key)
                if found is None:
                    stack.enter_context(kept.deriving(key))
                    found = kept.get(key)
                refused = kept.refusal(key) if found is None else None
            except EnvironmentProblem as error:
                LOG.warning("%s", error)
                return self._new(wanted)
            if refused is not None:
                raise told(wanted, refused)
            if found is not None:
                LOG.debug("%s: the backward for %s is kept", name, wanted.form)
                return found
            try:
                found = self._new(wanted)
            except CannotTrain as error:
                if isinstance(error.__cause__, CannotDerive):
                    with suppress(EnvironmentProblem):  # the refusal is what is told
                        kept.refuse(key, error.__cause__)
                raise
            try:
                kept.put(key, found)
            except EnvironmentProblem as error:  # proven all the same
                LOG.warning("%s", error)
            return found

    def _new(self, wanted: Wanted) -> Derived:
        LOG.info("deriving a backward of %s for %s", self._stub.__name__, wanted.form)
        with _slow(self._stub.__name__), Sandbox(PRELOAD) as sandbox:
            found = derived_for(wanted, sandbox, self._progress or LOG.debug)
        self._made += 1
        LOG.info("%s: %s, in %.1f s", self._stub.__name__, found.verdict.message, found.seconds)
        return found

    # --- without a GPU

    def _executes(self, arguments: Mapping[str, Any]) -> bool:
        """Whether the kernels have to be executed: all tensors are on the CPU, where Triton runs nothing."""
        tensors = [value for value in arguments.values() if isinstance(value, Tensor)]
        if any(tensor.device.type != "cpu" for tensor in tensors) or self._interpreted:
            return False
        if not self._said_exact:
            self._said_exact = True
            warnings.warn(
                f"the tensors of `{self._stub.__name__}` are on the CPU, where Triton runs no kernel: those are "
                "executed exactly, and slowly, from their IR. Move the tensors to a GPU to train.",
                ExactOnCPU,
                stacklevel=3,
            )
        return True

    def _exactly(self, bound: inspect.BoundArguments) -> Any:
        with torch.no_grad():
            execution = execute(self._stub, bound.args, bound.kwargs, options=ExecOptions(sanitize=False))
        refuse_written(execution, self._stub.__name__)
        return tree_map(real, execution.result)


def _plain(form: CallForm) -> CallForm:
    """Where the plain pair of a form is kept in memory."""
    return CallForm((*form.parts, ("schedule", "plain")), form.grads)


def _contiguous(value: Any) -> Any:
    return value.contiguous() if isinstance(value, Tensor) else value


@contextmanager
def _slow(name: str) -> Iterator[None]:
    """Say once that something takes long, when it does."""
    timer = threading.Timer(
        SLOW_S, LOG.warning, ("still deriving a backward of %s; it is kept for later processes", name)
    )
    timer.daemon = True
    timer.start()
    try:
        yield
    finally:
        timer.cancel()
