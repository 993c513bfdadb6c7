"""Writes `backward(saved, *grad_outputs)`: the launches of a stub taken back from the last to the first."""

from __future__ import annotations

import ast
import itertools
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field

from torch import Tensor

from kernel_agent.compiler.errors import CannotDerive
from kernel_agent.compiler.plan import BackwardPlan
from kernel_agent.compiler.saved.joint import Joint
from kernel_agent.compiler.ssa.value import Kernel
from kernel_agent.compiler.stub.accesses import Accesses
from kernel_agent.compiler.stub.active import active_before
from kernel_agent.compiler.stub.body import Body
from kernel_agent.compiler.stub.cotangents import Cotangents, Grad
from kernel_agent.compiler.stub.flow import (
    RESHAPED,
    SAME,
    Flow,
    disjoint,
    launch_places,
    storage_of,
    tensors_in,
)
from kernel_agent.compiler.stub.handed_back import apart, whole
from kernel_agent.compiler.stub.held import onto_held, widened
from kernel_agent.compiler.stub.joints import joints
from kernel_agent.compiler.stub.lines import Line
from kernel_agent.compiler.stub.loops import Loop
from kernel_agent.compiler.stub.lying import Lying
from kernel_agent.compiler.stub.names import Names
from kernel_agent.compiler.stub.needs import only_if
from kernel_agent.compiler.stub.planned import Planned, Signature
from kernel_agent.compiler.stub.references import References
from kernel_agent.compiler.stub.remains import Eraser, Remains
from kernel_agent.compiler.stub.source import StubSource
from kernel_agent.compiler.stub.strides import Told
from kernel_agent.compiler.stub.tiles import axes_of_tiles, tiles_of_axes, tiles_of_bounds
from kernel_agent.compiler.stub.trace import LaunchSeen, TorchSeen, Trace
from kernel_agent.compiler.stub.trips import Trips
from kernel_agent.compiler.stub.wording import Launched, Wording

Planner = Callable[[LaunchSeen, frozenset[str], frozenset[str], frozenset[str], Joint | None], BackwardPlan]
"""The plan of a launch, given which tensors want gradients, which have cotangents, which are overwritten later,
and which may shift and scale together."""


@dataclass
class Written:
    """A backward."""

    body: list[Line]
    kernels: list[Kernel]
    """In the order in which they are launched."""
    launched: list[Launched]
    """The launch of the forward that each of them takes back."""
    results: list[str]
    """One expression per gradient, in order."""
    helpers: tuple[str, ...] = ()
    """Functions that the statements call, as text."""
    plans: list[BackwardPlan] = field(default_factory=list)
    steps: list[tuple[BackwardPlan, Kernel]] = field(default_factory=list)
    """The kernels again, each with the plan that launches it."""
    torch_ops: tuple[str, ...] = ()
    """Computing functions of the stub that the backward has the adjoints of."""
    remarks: tuple[str, ...] = ()
    """What is to be told of its loops."""


class BackwardWriter:
    """Takes one traced call of a stub back."""

    def __init__(
        self,
        trace: Trace,
        source: StubSource,
        names: Names,
        kernels: Mapping[int, Kernel],
        planner: Planner,
        eraser: Eraser,
        signature: Signature,
        grads: Sequence[str],
        optional: Collection[str] = (),
    ) -> None:
        """`kernels`: programs of the launches, by position. `grads`: parameters that gradients are wanted of;
        `optional`: those that are None in other calls which launch the same."""
        self.trace = trace
        self.source = source
        self.names = names
        self.planner = planner
        self.eraser = eraser
        self.signature = signature
        self.grads = grads
        self.optional = frozenset(optional)
        self.launches = {
            place: Launched(
                place,
                seen,
                kernels[place],
                source.launch(seen),
                Accesses.of(kernels[place]),
                tiles_of_axes(kernels[place]),
                axes_of_tiles(kernels[place]),
                tiles_of_bounds(kernels[place]),
            )
            for place, seen in launch_places(trace)
        }
        self.flow = Flow(trace, source, grads)
        self.flow.writes |= {
            place: [tensor for name, tensor in one.seen.tensors.items() if name in one.accesses.written]
            for place, one in self.launches.items()
        }
        self.references = References(self.flow, names, source)
        self.body = Body(names)
        self.cotangents = Cotangents(self.flow, self.references, self.body)
        self.before: dict[int, frozenset[int]] = {}
        """Memory that depends on differentiable inputs before each launch."""
        self.joints: dict[int, Joint] = {}
        """See `joints`."""
        self.remains = Remains(self)
        self.trips: Trips | None = None
        """The loop that is written."""
        self.remarks: list[str] = []
        self.replayed: set[int] = set()
        """Launches that the backward does again, by place."""
        self.kernels: list[Kernel] = []
        self.launched: list[Launched] = []
        self.plans: list[BackwardPlan] = []
        self.steps: list[tuple[BackwardPlan, Kernel]] = []

    def write(self, outputs: Sequence[tuple[str, Tensor | None]]) -> Written:
        """The backward. `outputs`: name of the cotangent, and the output where it has one. Raises `CannotDerive`."""
        self.before = active_before(self.trace, self.launches, self.flow)
        several = sum(tensor is not None for _, tensor in outputs) > 1
        found = joints(self.launches, self.flow, [tensor for _, tensor in outputs if tensor is not None])
        self.joints = {place: one for place, one in found.items() if not self._is_of_trips(self.launches[place])}
        for name, output in outputs:
            if output is not None and storage_of(output) in self.flow.active:
                if several:
                    self._instead_of_none(name, output)
                self.cotangents.add(output, Grad(name))
        for loop, part in reversed(self._parts()):
            if loop is not None:
                self.trips = Trips(self, loop, part)
                self.trips.write()
                self.trips = None
                continue
            for place, event in reversed(part):
                self.back_through(place, event)
        results = [
            only_if(self.names.given(name), text) if name in self.optional else text
            for name, text in zip(
                self.grads, apart(self.grads, [self._result(name) for name in self.grads], self.body), strict=True
            )
        ]
        return Written(
            self.body.lines,
            self.kernels,
            self.launched,
            results,
            tuple(self.body.helpers),
            self.plans,
            self.steps,
            tuple(self.cotangents.torch_ops),
            tuple(self.remarks),
        )

    def back_through(self, place: int, event: LaunchSeen | TorchSeen) -> None:
        """Write the backward of one event. Raises `CannotDerive`."""
        if isinstance(event, LaunchSeen):
            self._launch(self.launches[place])
        else:
            self.cotangents.back_through(place, event)

    def _parts(self) -> list[tuple[Loop | None, list[tuple[int, LaunchSeen | TorchSeen]]]]:
        """The events in order: those of a loop, and those around it."""
        loops = [self.source.loop_at(event.site.outer) for event in self.trace.events]
        events = list(zip(loops, enumerate(self.trace.events), strict=True))
        groups = itertools.groupby(events, key=lambda one: one[0])
        return [(loop, [event for _, event in group]) for loop, group in groups]

    def _instead_of_none(self, name: str, output: Tensor) -> None:
        """Zeros for a cotangent that is None. Their shape may be another one where what follows reshapes them."""
        while self.flow.local(output) is None:
            event = self.flow.maker_of(output)
            if event is None or event.name not in RESHAPED | SAME:
                break
            output = tensors_in(event.args)[0]
        like, known = self.flow.like(output), self.flow.local(output)
        if known is None:
            zeros = f"torch.zeros({self.references.shape(output)}, device={self.references.device()})"
        elif like is None:
            shape, dtype, device = (self.names.ask(known, what) for what in ("shape", "dtype", "device"))
            zeros = f"torch.zeros({shape}, dtype={dtype}, device={device})"
        else:
            zeros = f"torch.zeros_like({self.names.tensor(like)})"
        self.body.write(Line(f"if {name} is None:"), Line(f"{name} = {zeros}", depth=1))

    # --- launches

    def _launch(self, launched: Launched) -> None:
        tensors = launched.seen.tensors
        written = [
            name
            for name in tensors
            if name in launched.accesses.written and storage_of(tensors[name]) in self.flow.active
        ]
        homes = {name: self.remains.home(tensors[name]) for name in written}
        roots = {id(root): root for root in homes.values()}
        cotangents: dict[str, Grad] = {}
        held: dict[int, Grad] = {}
        lying = Lying(launched, self.cotangents)
        for key, root in roots.items():
            grad = self.cotangents.settled(root)
            if grad is not None:
                held[key] = lying.held(grad, root, homes)
        if not held:
            return
        for name in written:
            root = homes[name]
            if id(root) in held:
                cotangents[name] = self.remains.part(held[id(root)], root, tensors[name], launched.text.arguments[name])
        outlasting = {} if self.trips is None else self.trips.left
        for key, root in roots.items():
            if key in held and storage_of(root) not in outlasting:
                left = self.remains.left(launched, root, held[key])
                if left is not None:
                    self.cotangents.add(root, left)
        if self.trips is not None:
            self.trips.chains.lend(launched)
        self._take_back(launched, cotangents, lying)
        for root in roots.values():
            if storage_of(root) not in outlasting or self.trips is None:
                continue
            if storage_of(root) in self.trips.chains.held:
                self.trips.spent.append((launched, root))
            else:
                self.remains.take_out(launched, root, outlasting[storage_of(root)])

    def _take_back(self, launched: Launched, cotangents: Mapping[str, Grad], lying: Lying) -> None:
        """Write the plan of a launch. `cotangents`: of what it wrote."""
        seen, tensors = launched.seen, launched.seen.tensors
        read = frozenset(
            name
            for name in launched.accesses.read
            if name in tensors and storage_of(tensors[name]) in self.before[launched.place]
        )
        if not read:
            return
        if self.trips is not None:
            self.trips.refuse_carried(launched)
        self._refuse_aliases(launched, read)
        self._refuse_detached(launched, read)
        stored = launched.accesses.written & tensors.keys()
        lost = frozenset(name for name in stored if self.flow.written_after(launched.place, tensors[name]))
        plan = self.planner(seen, read, frozenset(cotangents), lost, self.joints.get(launched.place))
        plan, anywhere = lying.settled(plan)
        self.plans.append(plan)
        self.write_plan(launched, plan, cotangents, anywhere)

    def write_plan(
        self, launched: Launched, plan: BackwardPlan, cotangents: Mapping[str, Grad], anywhere: Sequence[Told] = ()
    ) -> Wording:
        """The statements of one plan; the words that they have for what it names. `anywhere`: cotangents that lie
        otherwise than what was written."""
        tensors, types = launched.seen.tensors, launched.seen.build.types
        earlier = (one for place, one in self.launches.items() if place < launched.place)
        plan = widened(plan, tensors, ((one.kernel, one.seen.tensors) for one in earlier))
        plan = onto_held(plan, tensors, types, self.cotangents)
        self._refuse_overwritten(launched, plan)
        self._check_clones(launched, plan)
        wording = Wording(launched, plan, self.references, self.names, self.body)
        planned = Planned(wording, self.cotangents, self.signature)
        planned.write(cotangents, anywhere)
        self.kernels += planned.kernels
        self.launched += [launched] * len(planned.kernels)
        self.steps += [(plan, kernel) for kernel in planned.kernels]
        return wording

    def _check_clones(self, launched: Launched, plan: BackwardPlan) -> None:
        """Ask whether clones that kernels read lie in memory as what they are clones of."""
        used = {argument.name for step in plan.steps for argument in step.kernel.arguments}
        for name, clone in launched.seen.clones.items():
            tensor, node = launched.seen.tensors[clone.of], launched.text.arguments[clone.of]
            if name in used and isinstance(node, ast.Name) and not self.flow.always_dense(tensor):
                strides = f"{self.names.tensor(clone.local)}.stride() != {self.names.ask(node.id, 'stride()')}"
                objection = (
                    f"raise ValueError('elements of {node.id} have gaps between them: pass it with .contiguous()')"
                )
                self.body.write(Line(f"if {strides}:"), Line(objection, depth=1))

    def _refuse_aliases(self, launched: Launched, read: frozenset[str]) -> None:
        """Raise `CannotDerive` where a launch reads by one argument what it may overwrite by another one."""
        tensors = launched.seen.tensors
        for name in sorted(read):
            for other in sorted(launched.accesses.stored & tensors.keys()):
                one, two = tensors[name], tensors[other]
                if name != other and self.flow.shares(one, two) and not disjoint([one, two]):
                    raise CannotDerive(
                        f"kernel `{launched.seen.name}` reads through `{name}` what it overwrites through `{other}`",
                        remedy="Pass a tensor that is read and overwritten as one argument, or write to another one.",
                        line=launched.seen.site.line,
                    )

    def _refuse_detached(self, launched: Launched, read: frozenset[str]) -> None:
        """Raise `CannotDerive` where a launch reads what was detached: the kernel reads the memory all the same, so its
        gradient is not zero, and torch functions between it and the input have none."""
        for name in sorted(read):
            tensor = launched.seen.tensors[name]
            if any(event.name == "detach" for event in self.flow.chain(tensor)):
                raise CannotDerive(
                    f"the launch of `{launched.seen.name}` is given `{ast.unparse(launched.text.arguments[name])}`, "
                    "which is detached, and its gradient is wanted",
                    remedy="Leave .detach() out: autograd sees no launch, and the backward is derived.",
                    line=launched.seen.site.line or None,
                )

    def _refuse_overwritten(self, launched: Launched, plan: BackwardPlan) -> None:
        """Raise `CannotDerive` where the plan reads what a later launch or torch function changes."""
        tensors = launched.seen.tensors
        used = {argument.name for step in plan.steps for argument in step.kernel.arguments}
        for name in (*launched.accesses.read, *plan.saved):
            if name not in tensors or name not in used or not self.flow.written_after(launched.place, tensors[name]):
                continue
            if self.trips is None or not self.trips.chains.has(tensors[name]):
                raise CannotDerive(
                    f"`{self.references.hint(tensors[name])}`, which kernel `{launched.seen.name}` reads, is "
                    "overwritten later",
                    remedy="Write to another tensor.",
                    line=launched.seen.site.line,
                )

    def refuse_varying(self, launched: Launched, parameter: str) -> None:
        """Raise `CannotDerive` where the backward needs a launch that trips of a loop have compiled each in its way."""
        if launched.place in {one.place for one in self.launched} | self.replayed:
            raise CannotDerive(
                f"`{parameter}` of `{launched.seen.name}` (line {launched.seen.site.line}) may differ between trips "
                "of a loop",
                remedy=f"Compute `{parameter}` ahead of the loop.",
                line=launched.seen.site.line,
            )

    def _is_of_trips(self, launched: Launched) -> bool:
        return self.source.loop_at(launched.seen.site.line) is not None

    # --- results

    def _result(self, name: str) -> str:
        """The gradient of an input, in its dtype."""
        tensor = self.trace.inputs.get(name)
        if tensor is None:
            return "None"
        grad = self.cotangents.settled(tensor)
        if grad is None:
            return f"torch.zeros_like({self.references.named(tensor, 'an input without gradient')})"
        text = whole(grad.text, self.body)
        if grad.element or self._casts(tensor):
            return f"{text}.to({self.references.asked(tensor, 'dtype')})"
        return text

    def _casts(self, tensor: Tensor) -> bool:
        """Whether the stub converts what comes of an input."""
        return any(
            isinstance(event, TorchSeen)
            and event.name in ("to", "type", "float", "double", "half", "bfloat16")
            and any(self.flow.shares(part, tensor) or part is tensor for part in tensors_in(event.args))
            for event in self.trace.events
        )
