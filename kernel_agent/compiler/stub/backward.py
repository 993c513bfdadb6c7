"""Writes `backward(saved, *grad_outputs)`: the launches of a stub taken back from the last to the first."""

from __future__ import annotations

import ast
import copy
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace

from torch import Tensor

from kernel_agent.compiler.errors import CannotDerive
from kernel_agent.compiler.plan import BackwardPlan, Buffer, Fill, Step
from kernel_agent.compiler.ssa.value import NARROW, Kernel
from kernel_agent.compiler.stub.accesses import Accesses
from kernel_agent.compiler.stub.flow import (
    RESHAPED,
    SAME,
    Flow,
    disjoint,
    is_float,
    launch_places,
    replaced,
    storage_of,
    tensors_in,
)
from kernel_agent.compiler.stub.lines import ROOM, Line, backward_name, quoted
from kernel_agent.compiler.stub.names import Names
from kernel_agent.compiler.stub.source import LaunchText, StubSource
from kernel_agent.compiler.stub.torchops import Undo, undone
from kernel_agent.compiler.stub.trace import LaunchSeen, TorchSeen, Trace

_LONG = 24
"""Characters from which an expression of a plan gets a name."""
DTYPES = {
    "f64": "torch.float64", "f32": "torch.float32", "f16": "torch.float16", "bf16": "torch.bfloat16",
    "i1": "torch.bool", "i8": "torch.int8", "i16": "torch.int16", "i32": "torch.int32", "i64": "torch.int64",
}  # fmt: skip
"""Elements of buffers as torch names them."""

Planner = Callable[[LaunchSeen, frozenset[str], frozenset[str]], BackwardPlan]
"""The plan of a launch, given which tensors want gradients and which have cotangents."""


@dataclass(frozen=True)
class Launched:
    """A launch as the writer sees it."""

    place: int
    seen: LaunchSeen
    text: LaunchText
    accesses: Accesses


@dataclass(frozen=True)
class Grad:
    """A gradient or cotangent that the backward holds in a variable."""

    text: str
    """An expression of the form of the tensor it belongs to."""
    element: str = ""
    """What it is made of, where that is not what the tensor is made of."""


@dataclass
class Written:
    """A backward."""

    body: list[Line]
    kernels: list[Kernel]
    """In the order in which they are launched."""
    results: list[str]
    """One expression per gradient, in order."""
    helpers: tuple[str, ...] = ()
    """Functions that the statements call, as text."""
    plans: list[BackwardPlan] = field(default_factory=list)


class BackwardWriter:
    """Takes one traced call of a stub back."""

    def __init__(
        self,
        trace: Trace,
        source: StubSource,
        names: Names,
        kernels: Mapping[int, Kernel],
        planner: Planner,
        signature: Callable[[Kernel], Sequence[str]],
    ) -> None:
        """`kernels`: programs of the launches, by position. `signature`: parameters of a kernel as it is printed."""
        self.trace = trace
        self.source = source
        self.names = names
        self.planner = planner
        self.signature = signature
        self.launches = {
            place: Launched(place, seen, source.launch(seen), Accesses.of(kernels[place]))
            for place, seen in launch_places(trace)
        }
        self.lines: list[Line] = []
        self.own: set[str] = set()
        self.bound: dict[str, str] = {}
        """Long expressions of the plan at hand, with their names."""
        self.before: dict[int, frozenset[int]] = {}
        """Memory that depends on differentiable inputs before each launch."""
        self.helpers: dict[str, None] = {}
        self.kernels: list[Kernel] = []
        self.plans: list[BackwardPlan] = []
        self.adjoints: dict[int, tuple[Tensor, list[Grad]]] = {}
        self.variables: dict[str, str] = {}

    # --- the way back

    def write(self, grads: Sequence[str], outputs: Sequence[tuple[str, Tensor | None]]) -> Written:
        """The backward for gradients of some parameters. `outputs`: name of the cotangent, and the output where it has
        one. Raises `CannotDerive`."""
        self.flow = Flow(self.trace, self.source, grads)
        self.grads = grads
        self._propagate()
        several = sum(tensor is not None for _, tensor in outputs) > 1
        for name, output in outputs:
            if output is not None and storage_of(output) in self.flow.active:
                if several:
                    self._instead_of_none(name, output)
                self._add(output, Grad(name))
        for place, event in reversed(list(enumerate(self.trace.events))):
            if isinstance(event, LaunchSeen):
                self._launch(self.launches[place])
            else:
                self._torch(place, event)
        results = [self._result(name) for name in grads]
        return Written(self.lines, self.kernels, results, tuple(self.helpers), self.plans)

    def _propagate(self) -> None:
        """Which memory depends on differentiable inputs."""
        active = self.flow.active
        for place, event in enumerate(self.trace.events):
            if isinstance(event, LaunchSeen):
                launched = self.launches[place]
                tensors = event.tensors
                self.before[place] = frozenset(active)
                if any(storage_of(tensors[name]) in active for name in launched.accesses.read if name in tensors):
                    active |= {
                        storage_of(tensors[name])
                        for name in launched.accesses.written
                        if name in tensors and is_float(tensors[name])
                    }
            elif event.name != "detach" and any(
                storage_of(part) in active and is_float(part) for part in tensors_in(event.args)
            ):
                active |= {storage_of(part) for part in tensors_in((event.result,)) if is_float(part)}

    def _instead_of_none(self, name: str, output: Tensor) -> None:
        """Zeros for a cotangent that is None. Their shape may be another one where what follows reshapes them."""
        while self.flow.local(output) is None:
            event = self.flow.maker_of(output)
            if event is None or event.name not in RESHAPED | SAME:
                raise CannotDerive(
                    "an output whose cotangent may be None has no name in the stub",
                    remedy="Assign it to a name of its own before the return.",
                    line=event.site.line or None if event is not None else None,
                )
            output = tensors_in(event.args)[0]
        like = self.flow.like(output)
        if like is None:
            known = self.flow.local(output) or ""
            shape, dtype, device = (self.names.ask(known, what) for what in ("shape", "dtype", "device"))
            zeros = f"torch.zeros({shape}, dtype={dtype}, device={device})"
        else:
            zeros = f"torch.zeros_like({self.names.tensor(like)})"
        self.lines += [Line(f"if {name} is None:"), Line(f"{name} = {zeros}", depth=1)]

    def _fresh(self, name: str) -> str:
        """A variable of this way alone; another way may have one of the same name."""
        found = self.names.local(name, self.own)
        self.own.add(found)
        return found

    # --- contributions

    def _add(self, tensor: Tensor, grad: Grad) -> None:
        self.adjoints.setdefault(id(tensor), (tensor, []))[1].append(grad)

    def _taken(self, tensor: Tensor) -> Grad | None:
        """The sum of a tensor's contributions, which it then no longer has."""
        _, found = self.adjoints.pop(id(tensor), (tensor, []))
        if not found:
            return None
        if len(found) == 1:
            return found[0]
        parts = ", ".join(grad.text for grad in found)
        element = "f32" if any(grad.element == "f32" for grad in found) else found[0].element
        if len({grad.element for grad in found}) > 1:
            parts = ", ".join(f"{grad.text}.float()" if grad.element != "f32" else grad.text for grad in found)
        name = self._fresh(f"d{self._hint(tensor)}")
        self.lines.append(Line(f"{name} = torch.stack(({parts})).sum(0)"))
        return Grad(name, element)

    def _settled(self, root: Tensor) -> Grad | None:
        """The cotangent of a memory's root: what was found of its views is brought there."""
        for tensor, _ in list(self.adjoints.values()):
            if tensor is not root and self.flow.shares(tensor, root):
                chain = self.flow.chain(tensor)
                for event in reversed(chain[len(self.flow.chain(root)) :]):
                    self._undo(event)
        return self._taken(root)

    def _hint(self, tensor: Tensor) -> str:
        return self.flow.local(tensor) or self.flow.inputs.get(id(tensor)) or "part"

    # --- torch

    def _torch(self, place: int, event: TorchSeen) -> None:
        for at, changed in self.flow.changes:
            if at == place and any(self.flow.shares(changed, tensor) for tensor, _ in self.adjoints.values()):
                if event.name in ("zero_", "fill_"):
                    self._settled(self.flow.root(changed))
                    continue
                raise self._refused(event, "changes a tensor in place that gradients go through")
        if any(id(part) in self.adjoints for part in tensors_in((event.result,))):
            self._undo(event)

    def _undo(self, event: TorchSeen) -> None:
        """Bring the cotangents of a torch function's results to its arguments."""
        results = [part for part in tensors_in((event.result,)) if id(part) in self.adjoints]
        active = [part for part in tensors_in(event.args) if storage_of(part) in self.flow.active and is_float(part)]
        for result in results:
            if result in [part for part in active if part is result]:
                continue
            if not active or event.name in ("detach",):
                self.adjoints.pop(id(result))
                continue
            grad = self._taken(result)
            assert grad is not None
            for undo in self._undone(event, result, active, grad):
                self._add(undo.tensor, Grad(undo.text, grad.element))

    def _undone(self, event: TorchSeen, result: Tensor, active: Sequence[Tensor], grad: Grad) -> list[Undo]:
        found = undone(event, result, active, grad.text, self._shape)
        if found is None:
            raise self._refused(event, "has no derivative that is written here")
        for undo in found:
            self.lines += [Line(text) for text in undo.before]
        return found

    def _refused(self, event: TorchSeen, why: str) -> CannotDerive:
        line = event.site.line or None
        return CannotDerive(
            f"torch's `{event.name.strip('_')}`" + (f" (line {line})" if line else "") + f" {why}",
            remedy="Move it into a kernel, or out of the stub.",
            line=line,
        )

    # --- launches

    def _launch(self, launched: Launched) -> None:
        seen, tensors = launched.seen, launched.seen.tensors
        written = [
            name
            for name in tensors
            if name in launched.accesses.written and storage_of(tensors[name]) in self.flow.active
        ]
        homes = {name: self._home(tensors[name]) for name in written}
        roots = {id(root): root for root in homes.values()}
        cotangents: dict[str, Grad] = {}
        held: dict[int, Grad] = {}
        for key, root in roots.items():
            grad = self._settled(root)
            if grad is not None:
                held[key] = grad
        if not held:
            return
        for name in written:
            root = homes[name]
            if id(root) in held:
                cotangents[name] = self._laid_out(held[id(root)], root, tensors[name], launched.text.arguments[name])
        for key, root in roots.items():
            if key in held and self._writers(root) > 1:
                self._add(root, held[key])
        read = frozenset(
            name
            for name in launched.accesses.read
            if name in tensors and storage_of(tensors[name]) in self.before[launched.place]
        )
        if not read:
            return
        plan = self.planner(seen, read, frozenset(cotangents))
        self.plans.append(plan)
        self._emit(launched, plan, cotangents)

    def _home(self, tensor: Tensor) -> Tensor:
        """The tensor that a cotangent is laid out as: what was written, if all that depends on its memory is a view of
        it, else the root of the memory."""
        others = [other for other, _ in self.adjoints.values() if self.flow.shares(other, tensor)]
        known = self.flow.local(tensor) is not None and not self.flow.is_slice(tensor)
        if known and all(other is tensor or self.flow.is_view_of(other, tensor) for other in others):
            return tensor
        return self.flow.root(tensor)

    def _writers(self, root: Tensor) -> int:
        """How many launches write to a memory. Raises `CannotDerive` where they write to the same elements."""
        found = []
        for launched in self.launches.values():
            tensors = launched.seen.tensors
            parts = {
                id(t): t for n, t in tensors.items() if n in launched.accesses.written and self.flow.shares(t, root)
            }
            found += list(parts.values())
        if len(found) > 1 and not disjoint(found):
            raise CannotDerive(
                f"several launches write to the memory of `{self._hint(root)}`",
                remedy="Give every launch an output of its own.",
            )
        return len(found)

    def _laid_out(self, grad: Grad, root: Tensor, tensor: Tensor, node: ast.expr) -> Grad:
        """A cotangent that lies in memory as what the launch wrote."""
        name = grad.text
        if not name.isidentifier():
            name = self._fresh(f"grad_{self._hint(root)}")
            self.lines.append(Line(f"{name} = {grad.text}"))
        if self.flow.always_contiguous(root):
            self._once(Line(f"{name} = {name}.contiguous()"))
        else:
            like = self._named(root, "an output in the layout of an input")
            self._once(Line(f"if {name}.stride() != {like}.stride():"))
            self._once(Line(f"{name} = torch.empty_like({like}).copy_({name})", depth=1))
        if root is tensor or not self.flow.is_slice(tensor):
            return Grad(name, grad.element)
        found = self.flow.view_text(tensor, node)
        if found is None or self.names.final.get(found[1]) is not root:
            raise CannotDerive(
                f"what the launch writes through `{ast.unparse(node)}` cannot be told from the stub's text",
                remedy="Write views as plain assignments.",
                line=node.lineno if hasattr(node, "lineno") else None,
            )
        return Grad(replaced(found[0], found[1], name), grad.element)

    def _once(self, line: Line) -> None:
        if line not in self.lines:
            self.lines.append(line)

    # --- one plan as text

    def _emit(self, launched: Launched, plan: BackwardPlan, cotangents: Mapping[str, Grad]) -> None:
        seen, tensors = launched.seen, launched.seen.tensors
        held = {plan.cotangents[name]: grad.text for name, grad in cotangents.items() if name in plan.cotangents}
        for name, argument in plan.cotangents.items():
            if argument in plan.consumed and argument in held:
                held[argument] = self._copied(held[argument], tensors[name])
        for name in (*launched.accesses.read, *plan.saved):
            if name in tensors and self._uses(plan, name):
                writes = {
                    place: [t for n, t in other.seen.tensors.items() if n in other.accesses.written]
                    for place, other in self.launches.items()
                }
                if self.flow.written_after(launched.place, tensors[name], writes):
                    raise CannotDerive(
                        f"`{self._hint(tensors[name])}`, which kernel `{seen.name}` reads, is overwritten later",
                        remedy="Write to another tensor.",
                        line=seen.site.line,
                    )
        variables: dict[str, str] = dict(held)
        for fact in plan.facts:
            shown = self._plan_text(fact.expression, launched, variables)
            reason = f"{fact.reason} only if {shown}"
            self.lines += [Line(f"if not ({shown}):"), Line(f"raise ValueError({quoted(reason)})", depth=1)]
        slices: dict[int, tuple[str, list[Tensor]]] = {}
        self.bound = {}
        for step in plan.steps:
            for name, text in step.scalars.items():
                self._bind(name, self._plan_text(text, launched, variables))
            for axis, text in enumerate(step.grid):
                if not text.startswith("grid"):
                    self._bind(
                        "programs" if axis == 0 else f"programs_{axis}", self._plan_text(text, launched, variables)
                    )
        for buffer in plan.buffers:
            variables[buffer.name] = self._allocate(buffer, launched, plan, slices, variables)
        for step in plan.steps:
            self._step(step, launched, variables)
        for total in plan.totals:
            name = self._fresh(self._gradient_name(total.name, launched, plan))
            self.lines.append(Line(f"{name} = {variables[total.partials]}.sum(0)"))
            variables[total.name] = name
        buffers = {buffer.name: buffer for buffer in plan.buffers}
        partials = {total.name: total.partials for total in plan.totals}
        for name, result in plan.gradients.items():
            tensor = tensors[name]
            buffer = buffers[partials.get(result, result)]
            if result in buffers and self.flow.is_slice(tensor) and buffer.like == name:
                continue
            text = variables[result]
            if self.flow.is_expanded(tensor) and buffer.like == name:
                self._add(tensors_in(self.flow.maker[id(tensor)].args)[0], Grad(text, buffer.element))
                continue
            if result not in buffers or buffer.like != name:
                text += f".reshape({self._shape(tensor)})"
            self._add(tensor, Grad(text, "" if self._as_like(buffer, launched) else buffer.element))
        for variable, parts in slices.values():
            self._add(self.flow.root(parts[0]), Grad(variable, "f32"))

    def _copied(self, cotangent: str, tensor: Tensor) -> str:
        """A cotangent that a launch may overwrite. Raises `CannotDerive` for one of a slice: its copy is none."""
        if self.flow.is_slice(tensor):
            raise CannotDerive(
                f"stores to `{self._hint(self.flow.root(tensor))}`, a slice of a tensor, may meet",
                remedy="Give the kernel an output of its own.",
            )
        name = self._fresh(f"left_of_{cotangent if cotangent.isidentifier() else 'grad'}")
        self.lines.append(Line(f"{name} = {cotangent}.clone()"))
        return name

    def _bind(self, name: str, text: str) -> None:
        """Give an expression that is long a name, under which `_short` knows it."""
        if len(text) > _LONG and text not in self.bound:
            self.bound[text] = self._fresh(name)
            self.lines.append(Line(f"{self.bound[text]} = {text}"))

    def _short(self, text: str) -> str:
        return self.bound.get(text, text)

    def _uses(self, plan: BackwardPlan, name: str) -> bool:
        return any(argument.name == name for step in plan.steps for argument in step.kernel.arguments)

    def _gradient_name(self, name: str, launched: Launched, plan: BackwardPlan) -> str:
        """`dx` for the gradient of the stub's `x`, whatever the kernel calls it."""
        for argument, result in plan.gradients.items():
            if result == name:
                return f"d{self._hint(launched.seen.tensors[argument])}"
        return name

    def _as_like(self, buffer: Buffer, launched: Launched) -> bool:
        """Whether a buffer has the dtype of the tensor it is like, in every call: what is added to stays float32."""
        kinds = {"f32": "fp32", "f64": "fp64", "f16": "fp16", "bf16": "bf16"}
        if (
            not buffer.like
            or launched.seen.build.types.get(buffer.like) != f"*{kinds.get(buffer.element, buffer.element)}"
        ):
            return False
        return buffer.fill is Fill.EMPTY or bool(buffer.empty_if) or buffer.element in NARROW

    def _allocate(
        self,
        buffer: Buffer,
        launched: Launched,
        plan: BackwardPlan,
        slices: dict[int, tuple[str, list[Tensor]]],
        variables: dict[str, str],
    ) -> str:
        make = "torch.zeros" if buffer.fill is Fill.ZEROS else "torch.empty"
        end = "_like" if buffer.like else ""
        if buffer.fill is Fill.ZEROS and buffer.empty_if:
            condition = self._plan_text(buffer.empty_if, launched, variables)
            make, end = f"(torch.empty{end} if {condition} else torch.zeros{end})", ""
        dtype = "" if self._as_like(buffer, launched) else f", dtype={DTYPES[buffer.element]}"
        base = self._gradient_name(buffer.name, launched, plan)
        if not buffer.like:
            shape = ", ".join(self._short(self._plan_text(text, launched, variables)) for text in buffer.shape)
            name = self._fresh(base if base != buffer.name else buffer.name.lower())
            shape = f"({shape},)" if len(buffer.shape) == 1 else f"({shape})"
            options = [text for text in (dtype.removeprefix(", "), f"device={self._device()}") if text]
            self.lines.append(Line(f"{name} = {make}(", (shape, *options), ")"))
            return name
        tensor = launched.seen.tensors[buffer.like]
        node = launched.text.arguments[buffer.like]
        if self.flow.is_slice(tensor):
            return self._slice(tensor, node, slices)
        name = self._fresh(base)
        like = self._argument(buffer.like, launched)
        if self.flow.is_expanded(tensor):
            # Kernels add to the elements that the indices share, so that the sum over them is there already.
            tensor = tensors_in(self.flow.maker[id(tensor)].args)[0]
            like = self._named(tensor, "a tensor that is expanded for a launch")
            make, end, dtype = "torch.zeros", "_like", f", dtype={DTYPES[buffer.element]}"
        if self.flow.always_dense(tensor):
            self.lines.append(Line(f"{name} = {make}{end}({like}{dtype})"))
        else:
            self.helpers[ROOM] = None
            zeros = "" if buffer.fill is Fill.ZEROS and not buffer.empty_if else ", zeros=False"
            if buffer.empty_if:
                zeros = f", zeros=not ({self._plan_text(buffer.empty_if, launched, variables)})"
            self.lines.append(Line(f"{name} = gradient_room({like}{dtype}{zeros})"))
        return name

    def _slice(self, tensor: Tensor, node: ast.expr, slices: dict[int, tuple[str, list[Tensor]]]) -> str:
        """Part of a gradient of the whole tensor that the launch was given a part of."""
        root = self.flow.root(tensor)
        found = self.flow.view_text(tensor, node)
        if found is None or self.names.final.get(found[1]) is not root:
            raise CannotDerive(
                f"the part that `{ast.unparse(node)}` is of a tensor cannot be told from the stub's text",
                remedy="Take parts in plain assignments, in one step.",
            )
        key = id(root)
        if key in slices and not disjoint([*slices[key][1], tensor]):
            raise CannotDerive(
                f"a launch is given parts of `{found[1]}` that overlap", remedy="Pass the whole tensor once."
            )
        if key not in slices:
            name = self._fresh(f"d{self._hint(root)}")
            self.lines.append(Line(f"{name} = torch.zeros_like({self.names.tensor(found[1])}, dtype=torch.float32)"))
            slices[key] = (name, [])
        slices[key][1].append(tensor)
        return replaced(found[0], found[1], slices[key][0])

    def _device(self) -> str:
        for name, value in self.names.final.items():
            if isinstance(value, Tensor):
                return self.names.ask(name, "device")
        return '"cuda"'

    def _step(self, step: Step, launched: Launched, variables: Mapping[str, str]) -> None:
        kernel = replace(step.kernel, name=self.names.fresh(backward_name(step.kernel.name)))
        self.kernels.append(kernel)
        grid = [self._short(self._plan_text(text, launched, variables)) for text in step.grid]
        shown = f"({grid[0]},)" if len(grid) == 1 else f"({', '.join(grid)})"
        items = []
        given = {value.name for value in kernel.arguments}
        for name in self.signature(kernel):
            if name in variables:
                items.append(variables[name] if name in given else f"{name}={variables[name]}")
            elif name in step.scalars:
                items.append(self._short(self._plan_text(step.scalars[name], launched, variables)))
            else:
                text = self._argument(name, launched)
                items.append(text if name in given else f"{name}={text}")
        for option, value in (("num_warps", step.num_warps), ("num_stages", step.num_stages)):
            if value is not None:
                items.append(f"{option}={value}")
            elif option in launched.text.options:
                node = launched.text.options[option]
                items.append(f"{option}={self.names.expression(node, launched.text.line, option)}")
        self.lines.append(Line(f"{kernel.name}[{shown}](", tuple(items), ")"))

    def _argument(self, name: str, launched: Launched) -> str:
        """A parameter of the forward's launch as the backward writes it."""
        if name not in launched.text.arguments:
            raise CannotDerive(
                f"a backward kernel of `{launched.seen.name}` wants `{name}`, which nothing gives",
                remedy="Please report this forward: the plan is not complete.",
            )
        return self.names.expression(launched.text.arguments[name], launched.text.line, name)

    def _plan_text(self, text: str, launched: Launched, variables: Mapping[str, str]) -> str:
        """An expression of a plan over the launch's parameters, in the backward's names."""
        tree = ast.parse(text, mode="eval").body
        writer = self

        class Fill_(ast.NodeTransformer):
            def visit_Name(self, node: ast.Name) -> ast.AST:
                if node.id in ("grid0", "grid1", "grid2"):
                    axis = int(node.id[-1])
                    grid = launched.text.grid
                    if axis >= len(grid):
                        return ast.Constant(1)
                    shown = writer.names.expression(grid[axis], launched.text.line, node.id)
                elif node.id in variables:
                    shown = variables[node.id]
                elif node.id in launched.text.arguments:
                    shown = writer._argument(node.id, launched)
                else:
                    return node
                return ast.parse(shown, mode="eval").body

        return ast.unparse(Fill_().visit(copy.deepcopy(tree)))

    # --- forms

    def _named(self, tensor: Tensor, what: str) -> str:
        name = self.flow.local(tensor)
        if name is None:
            raise CannotDerive(
                f"{what} has no name in the stub", remedy="Assign it to a name of its own before the return."
            )
        return self.names.tensor(name)

    def _shape(self, tensor: Tensor) -> str:
        return self._asked(tensor, "shape")

    def _asked(self, tensor: Tensor, attribute: str) -> str:
        name = self.flow.same_form(tensor)
        if name is not None:
            return self.names.ask(name, attribute)
        given = self.flow.inputs.get(id(tensor))
        if given is not None and given in self.source.parameters:
            return self.names.ask_first(given, attribute)
        raise CannotDerive(
            "a tensor between torch functions has no name in the stub, so that its shape is not known in the backward",
            remedy="Assign the results of torch functions to names of their own.",
        )

    def _result(self, name: str) -> str:
        """The gradient of an input, in its dtype."""
        tensor = self.trace.inputs.get(name)
        if tensor is None:
            return "None"
        grad = self._settled(tensor)
        if grad is None:
            return f"torch.zeros_like({self._named(tensor, 'an input without gradient')})"
        if grad.element or self._casts(tensor):
            return f"{grad.text}.to({self._asked(tensor, 'dtype')})"
        return grad.text

    def _casts(self, tensor: Tensor) -> bool:
        """Whether the stub converts what comes of an input."""
        return any(
            isinstance(event, TorchSeen)
            and event.name in ("to", "type", "float", "double", "half", "bfloat16")
            and any(self.flow.shares(part, tensor) or part is tensor for part in tensors_in(event.args))
            for event in self.trace.events
        )
