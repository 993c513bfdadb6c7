"""`Planned`: the plan of one launch as statements: its checks, its buffers, its launches, and what becomes of them."""

from __future__ import annotations

import ast
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial

from torch import Tensor

from kernel_agent.compiler.errors import CannotDerive
from kernel_agent.compiler.free_names import words
from kernel_agent.compiler.plan import BackwardPlan, Buffer, Step
from kernel_agent.compiler.schedule.deposit import NAME as DEPOSITS
from kernel_agent.compiler.schedule.deposit import REGISTERS
from kernel_agent.compiler.schedule.describe import FITS
from kernel_agent.compiler.ssa.value import Kernel
from kernel_agent.compiler.stub.accesses import Accesses, takes_as_it_is
from kernel_agent.compiler.stub.asking import Asking
from kernel_agent.compiler.stub.buffers import Buffers, rows_summed
from kernel_agent.compiler.stub.chosen import Chosen
from kernel_agent.compiler.stub.cotangents import Cotangents, Grad
from kernel_agent.compiler.stub.docstrings import kernel_docstring
from kernel_agent.compiler.stub.final_kernels import FinalKernels
from kernel_agent.compiler.stub.handed import HandedOn
from kernel_agent.compiler.stub.keywords import named_after
from kernel_agent.compiler.stub.lines import LENDS, MEMORY, Line, bound_together, helpers_of
from kernel_agent.compiler.stub.needs import variable_of
from kernel_agent.compiler.stub.products import LARGE, WIDTHS, ProductTiles, product_tiles
from kernel_agent.compiler.stub.stages import ROOM, Stage, staged
from kernel_agent.compiler.stub.strides import Told
from kernel_agent.compiler.stub.tiles import is_one, mentions, steps_by
from kernel_agent.compiler.stub.wording import Wording, divisible

Signature = Callable[..., Sequence[str]]
"""Parameters of a kernel as it is printed. `document`, if it is given, makes a docstring of the text without one."""


class Planned:
    """Writes one plan."""

    def __init__(self, wording: Wording, cotangents: Cotangents, signature: Signature) -> None:
        self.wording = wording
        self.launched = wording.launched
        self.plan: BackwardPlan = wording.plan
        self.body = wording.body
        self.references = wording.references
        self.flow = wording.references.flow
        self.cotangents = cotangents
        self.signature = signature
        self.finals = FinalKernels(wording)
        self.kernels: list[Kernel] = []
        """What is launched, in order."""
        self.several = False
        """Whether more than one launch chooses its tiles."""

    def write(self, given: Mapping[str, Grad], anywhere: Sequence[Told] = ()) -> None:
        """Write it all and add the gradients to the cotangents. `given`: cotangents of what the launch wrote, by
        parameter; `anywhere`: those whose own strides it is given. Raises `CannotDerive`."""
        plan, variables = self.plan, self.wording.variables
        variables |= self._held(given)
        for told in anywhere:
            lying = variables[plan.cotangents[told.tensor]]
            variables |= {parameter: f"{lying}.stride({axis})" for axis, parameter in enumerate(told.parameters)}
        chosen, asking = self._choose(), Asking(self.wording)
        first, later = asking.settings(), self._asking_of_buffers()
        self._settle(chosen, first)
        with self.wording.under([one.tiles for one in chosen]):
            asking.facts()
        self._settle(chosen, {name: text for name, text in plan.settings.items() if name not in {*first, *later}})
        for one in chosen:
            with self.wording.under([one.tiles]):
                self._bind(one.step)
        wide = {plan.cotangents[name] for name, one in given.items() if name in plan.cotangents and one.element}
        buffers = Buffers(self.wording, self.cotangents, wide)
        for census in plan.censuses:
            self._fill(census.step, census.counts, buffers)
        for listing in plan.listings:
            if listing.counting is not None:
                self._fill(listing.counting.step, listing.counting.counts, buffers)
                asking.counting(listing, listing.counting)
            self._fill(listing.step, listing.rows, buffers)
            asking.listing(listing)
        for inverse in plan.inverses:
            asking.inverse(inverse)
        for buffer in plan.buffers:
            with self.wording.under([one.tiles for one in chosen if one.takes(buffer.name)]):
                variables[buffer.name] = buffers.allocate(buffer)
        for census in plan.censuses:
            asking.census(census)
        self._settle(chosen, {name: plan.settings[name] for name in later})
        for one in chosen:
            with self.wording.under([one.tiles]):
                self._launch(one)
        for total in plan.totals:
            name = self.wording.gradient(total.name)
            large = total.wide or any(len(step.grid) > 1 for step in plan.steps)
            variables[total.name] = self.body.bind(name, rows_summed(variables[total.partials], large=large))
        HandedOn(self.wording, self.cotangents, buffers, given).contribute()

    def _fill(self, step: Step, buffer: Buffer, buffers: Buffers) -> None:
        """A launch before all others, and the memory that it writes to."""
        first = Chosen(step, {})
        self._bind(first.step)
        self.wording.variables[buffer.name] = buffers.allocate(buffer)
        self._launch(first)

    def _asking_of_buffers(self) -> list[str]:
        """Settings that ask where memory lies which is made here, or follow from such: it must be there first."""
        later, made = [], {buffer.name for buffer in self.plan.buffers}
        for name, text in self.plan.settings.items():
            if made & words(text):
                later.append(name)
                made.add(name)
        return later

    def _settle(self, chosen: Sequence[Chosen], settings: Mapping[str, str]) -> None:
        """Variables for settings: what holds for each launch that takes one."""
        for name, text in settings.items():
            takers = [one for one in chosen if name in one.step.kernel.constants]
            texts: dict[str, None] = {}
            for tiles in [one.tiles for one in takers] or ({},):
                with self.wording.under([tiles]):
                    texts[self.wording.text(text)] = None
            base = name.rstrip("_")
            meets = sum(other.rstrip("_") == base for other in self.plan.settings) > 1
            owner = takers[0].step if len(takers) == 1 else chosen[0].step if len(chosen) == 1 else None
            self.wording.variables[name] = self._set(self._wanted(base, owner, meets), " and ".join(texts))

    def _set(self, name: str, text: str) -> str:
        """A variable for a number that the plan is free to choose."""
        tree = ast.parse(divisible(text), mode="eval").body
        self.body.helpers |= helpers_of(text)
        if not isinstance(tree, ast.Call) or ast.unparse(tree.func) != FITS:
            return self.body.bind(name, ast.unparse(tree))
        found = self.body.fresh(name)
        self.body.write(Line(f"{found} = {FITS}(", tuple(map(ast.unparse, tree.args)), ")"))
        return found

    def _held(self, given: Mapping[str, Grad]) -> dict[str, str]:
        """Cotangents by argument of the kernels; copies of those that a launch overwrites."""
        plan, tensors = self.plan, self.launched.seen.tensors
        held = {plan.cotangents[name]: grad.text for name, grad in given.items() if name in plan.cotangents}
        for name, argument in plan.cotangents.items():
            if argument in held and given[name].element == "f32" and takes_as_it_is(plan, argument):
                narrow = f"{held[argument]}.to({self.references.asked(tensors[name], 'dtype')})"
                held[argument] = self.body.bind(f"d{self.references.hint(tensors[name])}", narrow)
            if argument in plan.consumed and argument in held:
                held[argument] = self._copied(held[argument], tensors[name])
        return held

    def _copied(self, cotangent: str, tensor: Tensor) -> str:
        """A cotangent that a launch may overwrite. Raises `CannotDerive` for one of a slice: its copy is none."""
        if self.flow.is_slice(tensor):
            raise CannotDerive(
                f"stores to `{self.references.hint(self.flow.root(tensor))}`, a slice of a tensor, may meet",
                remedy="Give the kernel an output of its own.",
            )
        name = f"left_of_{cotangent if cotangent.isidentifier() else 'grad'}"
        return self.body.bind(name, f"{cotangent}.clone()")

    def _choose(self) -> list[Chosen]:
        """Variables for the tiles of each launch, with those for warps and stages beside them."""
        names = [self._own(step) for step in self.plan.steps]
        self.several = sum(map(bool, names)) > 1
        found = [
            Chosen(step, {name: self._variable(name, step) for name in own})
            for step, own in zip(self.plan.steps, names, strict=True)
        ]
        if any(one.tiles for one in found) and not self._apart(found):
            found = [Chosen(step, {}) for step in self.plan.steps]
        return [self._written(one) if one.tiles else one for one in found]

    def _own(self, step: Step) -> list[str]:
        """Tiles that a launch chooses."""
        given = {value.name for value in step.kernel.arguments}
        if given & {one.order for one in self.plan.listings} | given & {one.order for one in self.plan.inverses}:
            return []  # additions are numbered by the forward's tiles
        steps = steps_by(step.kernel)
        able = [name for name in step.kernel.constants if name in steps and (name in step.most or self._may_own(name))]
        own = [name for name in able if self._formula(name, step)]
        if not own:  # then it need not be printed to see which are parameters
            return []
        parameters = self.signature(self.finals.of(step).kernel)
        return [name for name in own if name in parameters]

    def _may_own(self, name: str) -> bool:
        """Whether a launch that is given a tile may choose it."""
        node = self.launched.text.arguments.get(name)
        return node is not None and (not isinstance(node, ast.Name) or bool(self._formula(name)))

    def _wanted(self, name: str, step: Step | None, meets: bool = False) -> str:
        """What a number of a launch would best be called: after what the launch computes where it `meets` another."""
        if step is None or not (meets or not self.body.is_free(name)):
            return name
        written = self.plan.results(step.kernel)
        gradients = [name for name in dict.fromkeys(self.plan.gradients.values()) if name in written]
        return named_after(name, gradients)

    def _variable(self, name: str, step: Step) -> str:
        """A variable for a tile or an option of a launch."""
        return self.body.fresh(self._wanted(name, step, self.several))

    def _formula(self, name: str, step: Step | None = None) -> str:
        """What a tile is at first; empty where it keeps the name that it has in the stub.

        The only launch does as well with that name. Several launches each take the number behind it, unless the
        forward's grid depends on the name by way of others.
        """
        source, node = self.references.source, self.launched.text.arguments.get(name)
        if node is None:
            return ""
        if step is not None and name in step.most and self._grid_follows(name):
            return f"min({self.wording.argument(name)}, {step.most[name]})"
        if not isinstance(node, ast.Name):
            return self.wording.argument(name) if self._grid_follows(name) and not is_one(node) else ""
        number = source.definition(node.id)
        if len(self.plan.steps) == 1 or not isinstance(number, ast.Constant) or is_one(number):
            return ""
        if not self._grid_follows(name):
            return ""
        shown = [self.launched.retiled(axis, {name: "tile"}) for axis in range(len(self.launched.text.grid))]
        return "" if any(mentions(extent, node.id, source) for extent in shown) else repr(number.value)

    def _grid_follows(self, name: str) -> bool:
        """Whether the forward's grid, as its text shows, has as many programs as another size of a tile takes."""
        axes = self.launched.axes_of_tiles.get(name)
        if axes is None:
            return False
        grid = self.launched.text.grid
        return all(ast.dump(self.launched.retiled(axis, {name: "tile"})) != ast.dump(grid[axis]) for axis in axes)

    def _apart(self, chosen: Sequence[Chosen]) -> bool:
        """Whether no memory that several launches share has a size that depends on the tiles of one."""
        for buffer in self.plan.buffers:
            shapes = set()
            for one in chosen:
                if one.takes(buffer.name):
                    with self.wording.under([one.tiles]):
                        shapes.add(tuple(self.wording.text(text) for text in buffer.shape))
            if len(shapes) > 1:
                return False
        return True

    def _written(self, one: Chosen) -> Chosen:
        """The statement that binds what a launch chooses."""
        values = {variable: self._formula(name, one.step) for name, variable in one.tiles.items()}
        options = {}
        for option in ("num_warps", "num_stages"):
            text = self._option(one.step, option)
            if text is not None and text.isdecimal():
                options[option] = self._variable(option, one.step)
                values[options[option]] = text
        large = any(text.isdecimal() and int(text) > LARGE for text in values.values())
        tensors = self.launched.seen.tensors
        readable = [name for name, tensor in tensors.items() if self.flow.same_form(tensor) is not None]
        better = product_tiles(one.step.kernel, one.tiles, readable) if large and len(options) == 2 else None
        most = "" if better else values.get(options.get("num_stages", ""), "")
        stage = staged(one.step.kernel, int(most), readable) if most else None
        if stage:
            del values[options["num_stages"]]
        found = self._by_width(better, one, options, values) if better else ", ".join(values.values())
        targets, alternatives = ", ".join(values), tuple(found.split(" else "))
        if len(alternatives) > 1:
            self.body.write(Line(f"{targets} = (", alternatives, ")", joint="else"))
        else:
            self.body.write(*bound_together(list(values), found, len(one.tiles)))
        if stage:
            self.body.write(Line(f"{options['num_stages']} = {self._stages(one, stage, most)}"))
        return replace(one, options=options)

    def _stages(self, one: Chosen, stage: Stage, most: str) -> str:
        """How many stages there is room for."""
        extents = one.step.kernel.extents
        with self.wording.under([one.tiles]):
            names = {extent: self.wording.text(name) for extent, name in extents.items() if stage.has(extent)}
        size = self.references.asked(self.launched.seen.tensors[stage.operand], "element_size()")
        text = f"({stage.elements(names)}) * {size}"
        held = self.body.bind(self._wanted("stage_bytes", one.step, self.several), text)
        return f"max(1, min({most}, {ROOM >> 10} * 1024 // {held}))"

    def _by_width(
        self, better: ProductTiles, one: Chosen, options: Mapping[str, str], values: Mapping[str, str]
    ) -> str:
        """Sizes for a kernel that sums products, in the order of `values`, one of several where its width decides."""
        variables = {**one.tiles, **options}
        tensor = self.launched.seen.tensors.get(better.operand)
        size = "" if tensor is None else self.references.asked(tensor, "element_size()")
        names = {variable: name for name, variable in variables.items()}
        shown = []
        for sizes in better.choices:
            texts = [f"128 // {size}" if names[it] == better.per_row else str(sizes[names[it]]) for it in values]
            shown.append(", ".join(texts))
        if not better.width:
            return shown[0]
        row = self.body.bind(
            self._wanted("row_bytes", one.step, self.several), f"{self.wording.argument(better.width)} * {size}"
        )
        choices = zip(shown, shown[1:], WIDTHS, strict=False)
        tests = [f"({found}) if {row} <= {most} else" for found, wider, most in choices if found != wider]
        return " ".join((*tests, f"({shown[-1]})"))

    def _option(self, step: Step, option: str) -> str | None:
        """`num_warps` or `num_stages` of a launch: what the plan says, else as the forward was launched."""
        stages = "" if step.num_stages is None else str(step.num_stages)
        given = step.num_warps if option == "num_warps" else stages
        return self.wording.text(given) if given else self.wording.option(option)

    def _bind(self, step: Step) -> None:
        """Variables for long expressions that the launches share."""
        for name, text in step.scalars.items():
            self.wording.bind(self._wanted(name, step), text)
        shared = {self.wording.text(text) for buffer in self.plan.buffers for text in buffer.shape}
        for name, text in zip(("programs", "programs_y", "programs_z"), step.grid, strict=False):
            if not text.startswith("grid") and self.wording.text(text) in shared:
                self.wording.bind(self._wanted(name, step), text)

    def _launch(self, one: Chosen) -> None:
        step = one.step
        final = self.finals.of(step)
        kernel, settings = final.kernel, {keyword: name for name, keyword in final.keywords.items()}
        if final.descriptors:
            self.body.helpers[MEMORY] = None
            self.body.once(Line(f"{LENDS}({self.references.device()})"))
        self.kernels.append(kernel)
        grid = [self.wording.short(text) for text in step.grid]
        shown = f"({grid[0]},)" if len(grid) == 1 else f"({', '.join(grid)})"
        items, parameters = [], []
        given = {value.name for value in kernel.arguments}
        document = partial(kernel_docstring, self.launched.kernel, self.plan, replace(step, kernel=kernel))
        for name in self.signature(kernel, document):
            parameters.append(name)
            if settings.get(name, name) in self.wording.variables:
                text = self.wording.variables[settings.get(name, name)]
            elif name in step.scalars:
                items.append(self.wording.short(step.scalars[name]))
                continue
            else:
                text = one.tiles.get(name) or self.wording.argument(name)
            items.append(text if name in given else f"{name}={text}")
        for option in ("num_warps", "num_stages"):
            shown_option = one.options.get(option) or self._option(step, option)
            if shown_option is not None:
                items.append(f"{option}={shown_option}")
                parameters.append(option)
        deposits = [
            self.wording.variables[settings.get(name, name)] for name in parameters if name.startswith(DEPOSITS)
        ]
        if deposits:
            items.append(f"maxnreg={REGISTERS} if {deposits[0]} else None")
            parameters.append("maxnreg")
        written = Accesses.of(step.kernel).written
        buffers = tuple(self.wording.variables[name] for name in sorted(written) if name in self.wording.variables)
        writes = tuple(map(variable_of, buffers))
        opening = f"{kernel.name}[{shown}]("
        self.body.write(Line(opening, tuple(items), ")", writes=writes, parameters=tuple(parameters)))
