"""`Lying`: where in memory the cotangents of one launch lie: as what it wrote does, or anywhere."""

from __future__ import annotations

from collections.abc import Mapping

from torch import Tensor

from kernel_agent.compiler.plan import BackwardPlan
from kernel_agent.compiler.stub.cotangents import Cotangents, Grad
from kernel_agent.compiler.stub.lines import Line
from kernel_agent.compiler.stub.strides import Told, read_anywhere, told_strides
from kernel_agent.compiler.stub.wording import Launched


class Lying:
    """Names the cotangents of a launch, and lays them out where its kernels need that."""

    def __init__(self, launched: Launched, cotangents: Cotangents) -> None:
        self.launched = launched
        self.cotangents = cotangents
        self.body = cotangents.body
        self.references = cotangents.references
        self.flow = cotangents.flow
        self._open: list[tuple[Told, Grad, Tensor]] = []
        """Those that are laid out only if the plan needs it."""

    def held(self, grad: Grad, root: Tensor, homes: Mapping[str, Tensor]) -> Grad:
        """A cotangent that has a name. `homes`: what the cotangent of each argument that is written is laid out as."""
        name = grad.text
        if not name.isidentifier():
            hint = self.references.hint(root)
            name = f"grad_{hint}"  # that of a parameter, if nothing needs it any more
            name = self.body.bind(f"d{hint}" if self.cotangents.waits_for(name) else name, grad.text)
        named = Grad(name, grad.element)
        told = self._told(root, homes)
        if told is None:
            self._lay_out(named, root)
        else:
            self._open.append((told, named, root))
        return named

    def settled(self, plan: BackwardPlan) -> tuple[BackwardPlan, list[Told]]:
        """The plan of the launch with what it then asks for, and the cotangents that lie anywhere; the others are laid
        out."""
        anywhere = []
        for told, grad, root in self._open:
            asking = read_anywhere(plan, self.launched, told)
            if asking is None:
                self._lay_out(grad, root)
            else:
                plan = asking
                anywhere.append(told)
        return plan, anywhere

    def _lay_out(self, grad: Grad, root: Tensor) -> None:
        """Have a cotangent lie in memory as what was written."""
        name = grad.text
        if self.flow.always_contiguous(root):
            self.body.once(Line(f"{name} = {name}.contiguous()"))
        else:
            like = self.references.named(root, "an output in the layout of an input")
            self.body.once(Line(f"if {name}.stride() != {like}.stride():"))
            self.body.once(Line(f"{name} = torch.empty_like({like}).copy_({name})", depth=1))

    def _told(self, root: Tensor, homes: Mapping[str, Tensor]) -> Told | None:
        """The strides that the launch is told of the only argument that it wrote to a memory by, where nothing before
        it needs the cotangent; None where there are none, or the cotangent lies like that anyway."""
        names = [name for name, home in homes.items() if home is root]
        if len(names) != 1 or self.launched.seen.tensors[names[0]] is not root or self.flow.always_contiguous(root):
            return None
        place = self.launched.place
        if self.flow.held_before(place, root) or self.flow.written_before(place, root):
            return None
        return told_strides(self.launched, names[0])
