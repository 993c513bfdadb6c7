"""The native tier's rule without a GPU: a pair's own kernels in faithful arithmetic, held against the same truth.

What real kernels may miss the exact gradients by is computed here as it is on the device. The kernels are executed with
every result rounded to its declared type, and with a `draw` their exponentials, logarithms, quotients and roots are
off by what PTX permits a GPU's to be off by.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from types import ModuleType

from torch import Tensor

from kernel_agent.bench.draws import Draws, drawn_errors
from kernel_agent.bench.faithful_child import coarsest_product
from kernel_agent.bench.kinks import at_kinks, remarks
from kernel_agent.bench.kinks_child import moved_gradients
from kernel_agent.bench.narrow import Approximated
from kernel_agent.bench.native import judge_native
from kernel_agent.bench.native_truth import Inputs, NativeGradient, NativeTruth
from kernel_agent.bench.native_truth_child import Truth, truth_of
from kernel_agent.bench.second_look import look
from kernel_agent.gate.judge import Judged, Problem
from kernel_agent.gate.verdict import GradientScore
from kernel_agent.ir import ExecOptions, Numerics, execute
from kernel_agent.oracle.child import Stub
from kernel_agent.pairs.arguments import Arguments
from kernel_agent.pairs.spec import ShapeEntry

_FAITHFUL = ExecOptions(sanitize=False, numerics=Numerics.FAITHFUL)


@dataclass(frozen=True)
class FaithfulVerdict:
    """What the rule of the native tier says of one call in faithful arithmetic."""

    problem: Problem | None
    scores: tuple[GradientScore, ...]
    notes: tuple[str, ...] = ()

    def ratio(self, grad: str) -> float:
        """Worst error of a gradient over the allowed one."""
        return next(score.ratio for score in self.scores if score.grad == grad)


@dataclass(frozen=True)
class FaithfulCall:
    """One call of a user's forward and its truth."""

    stub: Stub
    entry: ShapeEntry
    arguments: Arguments
    truth: Truth
    dot_bits: int | None
    """Of the coarsest product of the forward."""

    @classmethod
    def of(cls, stub: Stub, entry: ShapeEntry, arguments: Arguments, seed: int = 0) -> FaithfulCall:
        """Compute the truth. Raises as `execute` does."""
        forward = execute(stub.function, arguments.args, arguments.kwargs, options=_FAITHFUL)
        bits = coarsest_product([launch.module for launch in forward.launches])
        return cls(stub, entry, arguments, truth_of(stub, arguments, None, seed, bits), bits)

    def judge(self, pair: ModuleType, draw: int | None = None) -> FaithfulVerdict:
        """Run forward and backward of a pair file, that of the stub or another, and apply the rule to its gradients.

        `draw`: approximated functions are off at random, with this seed. Raises as `execute` does.
        """
        with contextlib.nullcontext() if draw is None else Approximated(draw):
            made = execute(pair.forward, self.arguments.args, self.arguments.kwargs, options=_FAITHFUL)
            done = execute(pair.backward, (tuple(made.result[1]), *self.truth.cotangents), options=_FAITHFUL)
        grads = done.result if isinstance(done.result, (tuple, list)) else (done.result,)
        return self.judge_gradients(grads, coarsest_product([launch.module for launch in done.launches]))

    def judge_gradients(self, grads: Iterable[Tensor | None], found_bits: int | None = None) -> FaithfulVerdict:
        """Apply the rule to gradients, in the order of the spec, rounded to the dtypes of the call.

        `found_bits` are those of the coarsest product that made them.
        """
        names = self.stub.spec.grads
        dtypes = {grad.name: grad.dtype for grad in self.truth.grads}
        given = list(grads)
        tensors = {
            str(place): grad.detach().as_subclass(Tensor).to(dtypes[name])
            for place, (name, grad) in enumerate(zip(names, given, strict=False))
            if isinstance(grad, Tensor) and name in dtypes
        }
        returned = tuple("tensor" if isinstance(grad, Tensor) else type(grad).__name__ for grad in given)
        truth = NativeTruth(
            self.entry.label,
            Inputs(self.entry, {}, [], self.dot_bits, {}),
            tuple(NativeGradient(g.name, g.truth, g.dtype, g.scale, g.honest) for g in self.truth.grads),
            notes=self.truth.notes,
        )

        def judged(truth: NativeTruth, kinks: Mapping[str, Tensor]) -> Judged:
            return Judged(*judge_native(returned, tensors, truth, found_bits, names, kinks))

        looked = look(judged, truth, self)
        notes = (*truth.notes, *remarks(self.entry.label, looked.kinks))
        return FaithfulVerdict(looked.judged.problem, looked.judged.scores, notes)

    def kinks(self) -> dict[str, Tensor]:
        """Elements at kinks of the forward, by gradient."""
        moved = [moved_gradients(self.stub, self.arguments, self.truth.cotangents, 0, sign) for sign in (1, -1)]
        found = {grad.name: at_kinks(grad.truth, [grads[grad.name] for grads in moved]) for grad in self.truth.grads}
        return {name: where for name, where in found.items() if where is not None}

    def with_draws(self, truth: NativeTruth, draws: range) -> NativeTruth:
        """`truth` with the errors of further draws."""
        exact = {grad.name: grad.truth for grad in self.truth.grads}
        dtypes = {grad.name: grad.dtype for grad in self.truth.grads}
        drawn = Draws(self.stub, self.arguments, self.truth.cotangents, exact, self.dot_bits)
        return truth.joined(drawn_errors(drawn, dtypes, draws))
