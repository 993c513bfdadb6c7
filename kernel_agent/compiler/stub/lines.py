"""The statements of a backward as text."""

from __future__ import annotations

import ast
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from kernel_agent.compiler.plan import EVERY, IN_ORDER, LEFT, LISTED, LONGEST, NESTED, PICKED, RISING, ROWS
from kernel_agent.compiler.schedule.describe import EVEN, FITS
from kernel_agent.compiler.stub.breaking import broken

WIDTH = 110

ROOM = '''def merged_axes(axes):
    """Axes (stride, size), the innermost first; those that step through memory as one axis would as one."""
    found = []
    for stride, size in sorted(axes):
        if size > 1 and found and stride == found[-1][0] * found[-1][1]:
            found[-1] = (found[-1][0], found[-1][1] * size)
        elif size > 1:
            found.append((stride, size))
    return found


def gradient_room(x, dtype=None, zeros=True, stored=()):
    """Room for the gradient of x, laid out in memory as x is: kernels address both in the same way. `zeros`: whether
    fewer elements are stored to than x has; `stored`: the axes (stride, size) along which they are."""
    room = torch.empty_like(x, dtype=dtype)
    if room.stride() != x.stride():  # x is a part of a larger tensor
        reach = 1
        for stride, size in sorted(zip(x.stride(), x.shape)):
            if size > 1 and stride < reach:
                raise ValueError("elements of an input share memory: pass it with .contiguous()")
            reach += (size - 1) * stride
        room = torch.empty_strided(x.shape, x.stride(), dtype=room.dtype, device=x.device)
        zeros = zeros or merged_axes(stored) != merged_axes(zip(x.stride(), x.shape))
    return room.zero_() if zeros else room
'''

APART = f'''def {NESTED}(*axes):
    """Whether no two indices share an element: each (stride, size) steps over all that smaller strides reach."""
    strides = [stride for stride, size in axes if size > 1]
    return len(set(strides)) == len(strides) and all(
        stride > sum(inner * (size - 1) for inner, size in axes if inner < stride) for stride in strides
    )
'''

RISE = f'''def {RISING}(bounds):
    """Whether no element is less than the one before: what lies between two is between no others."""
    return bounds.is_contiguous() and bool((bounds.flatten().diff() >= 0).all())
'''
SPAN = f'''def {ROWS}(bounds, segments):
    """Rows of the first so many segments together; -1 where the bounds do not lie one behind the other."""
    lengths = bounds.flatten()[: segments + 1].diff()
    return int(lengths.clamp(min=0).sum()) if bounds.is_contiguous() else -1
'''
LENGTH = f'''def {LONGEST}(bounds, segments):
    """Rows of the longest of the first so many segments."""
    lengths = bounds.flatten()[: segments + 1].diff()
    return int(lengths.max()) if lengths.numel() else 0
'''
ONCE = f'''def {LEFT}(stores):
    """A mask of the rows that nothing will be stored to, by how often each will be. Twice raises ValueError."""
    if bool((stores > 1).any()):
        raise ValueError("programs of this call share rows of a gradient: derive it again with such a call in SWEEP")
    return stores == 0
'''
SORTED = f'''def {IN_ORDER}(rows, count):
    """Places in `rows` in the order of the rows there, and where each of the rows 1 to count begins; 0 is no row."""
    rows, order = torch.sort(rows, stable=True)
    wanted = torch.arange(1, count + 2, dtype=rows.dtype, device=rows.device)
    return order, torch.searchsorted(rows, wanted, out_int32=True)
'''
CHOSEN = f'''def {PICKED}(tiles, count):
    """The same of tiles that programs pick. One of a number below 0 raises ValueError: no owner would add to it."""
    if bool((tiles < 0).any()):
        raise ValueError("this call picks a tile of a number below 0, of which no program is the owner")
    return {IN_ORDER}(tiles, count)
'''
PLACED = f'''def {LISTED}(rows, bounds, programs, count):
    """Places that programs have in a list, in the order of the rows there, where each row begins, and whose every 8th
    place is."""
    bounds = bounds.flatten()[: programs + 1]
    first, last = int(bounds[0]), int(bounds[-1])
    rows, order = torch.sort(rows.flatten()[first:last], stable=True)
    wanted = torch.arange(count + 1, dtype=rows.dtype, device=rows.device)
    places = torch.arange(first, last + {EVERY}, {EVERY}, dtype=bounds.dtype, device=rows.device)
    known = torch.searchsorted(bounds[1:], places, right=True, out_int32=True)
    return order, torch.searchsorted(rows, wanted, out_int32=True), known
'''
TILES = f'''def {FITS}(*matrices):
    """Whether descriptors can load tiles of all (tensor, strides along rows, other steps); they get memory then."""
    for x, units, steps in matrices:
        even = x.data_ptr() % 16 == 0 and not any(step % {EVEN} for step in steps)
        if x.element_size() != 2 or not even or any(unit != 1 for unit in units):
            return False
    device = matrices[0][0].device
    if torch.cuda.get_device_capability(device)[0] < 9:
        return False
    triton.set_allocator(lambda size, _align, _stream: torch.empty(size, dtype=torch.int8, device=device))
    return True
'''
LENDS = "lend_memory"
"""Function that gives kernels the memory in which they make descriptors."""
MEMORY = f'''def {LENDS}(device):
    """Memory for tensor descriptors: autograd runs a backward in a thread of its own, which has no allocator yet."""
    triton.set_allocator(lambda size, _align, _stream: torch.empty(size, dtype=torch.int8, device=device))
'''
HELPERS = {
    NESTED: APART,
    RISING: RISE,
    ROWS: SPAN,
    LONGEST: LENGTH,
    LEFT: ONCE,
    IN_ORDER: SORTED,
    LISTED: PLACED,
    PICKED: CHOSEN,
    FITS: TILES,
}
"""Functions that conditions of a plan may call, by name."""


def helpers_of(condition: str) -> dict[str, None]:
    """The texts of those that a condition calls, as keys."""
    return {text: None for name, text in HELPERS.items() if f"{name}(" in condition}


UNFORMATTED = "  # fmt: skip"
"""Behind a statement whose rows have several items each."""


@dataclass(frozen=True)
class Line:
    """One statement, with marks where `Names` fills something in. Items stand in one row, or in as many as needed."""

    opening: str
    items: tuple[str, ...] = ()
    closing: str = ""
    depth: int = 0
    """Blocks around it."""
    bare: bool = False
    """In several rows the items need parentheses."""
    writes: tuple[str, ...] = ()
    """Of a launch: the variables whose memory it writes to."""
    parameters: tuple[str, ...] = ()
    """Of a launch: what its items are given for, parameters of the kernel and options."""
    joint: str = ""
    """`and` or `or` of conditions, `else` of alternatives; items of anything else have commas between them."""

    def deeper(self) -> Line:
        """The statement in one block more."""
        return replace(self, depth=self.depth + 1)

    def shown(self, filled: Callable[[str], str], depth: int) -> list[str]:
        """Rows of text, `depth` blocks deeper."""
        pad = "    " * (self.depth + depth)
        items = [_as_formatted(filled(item)) for item in self.items]
        opening = pad + _as_formatted(filled(self.opening))
        between = f" {self.joint} " if self.joint else ", "
        if len(opening) + len(between.join(items)) + len(self.closing) <= WIDTH or not items:
            return broken(opening + between.join(items) + self.closing)
        if self.joint:
            rows = [f"{pad}    {self.joint} {item}" for item in items]
            return [opening, f"{pad}    {items[0]}", *rows[1:], pad + self.closing]
        opening, closing = (f"{opening}(", f"){self.closing}") if self.bare else (opening, self.closing)
        inner = f"{pad}    " + ", ".join(items)
        if len(inner) <= WIDTH:
            return [opening, inner, pad + closing]
        rows, row = [], f"{pad}    "
        for item in items:
            if row.strip() and len(row) + len(item) + 1 > WIDTH:
                rows.append(row.rstrip())
                row = f"{pad}    "
            row += f"{item}, "
        rows = [part for one in (*rows, row.rstrip()) for part in broken(one)]
        return [opening, *rows, f"{pad}{closing}{UNFORMATTED}"]


def bound_together(names: Sequence[str], texts: str, first: int) -> list[Line]:
    """`a, b = 1, 2`; where that is longer than a row, the `first` ones in a statement of their own."""
    line = f"{', '.join(names)} = {texts}"
    node = ast.parse(texts, mode="eval").body
    if len(line) <= WIDTH - 8 or not isinstance(node, ast.Tuple) or not 0 < first < len(names):
        return [Line(line)]
    parts = list(map(ast.unparse, node.elts))
    return [Line(f"{', '.join(names[some])} = {', '.join(parts[some])}") for some in (slice(first), slice(first, None))]


def asked_unless(condition: str) -> Line:
    """`if not condition:`, which may take several rows."""
    node = ast.parse(condition, mode="eval").body
    if (
        isinstance(node, ast.Compare) and len(node.ops) == 1 and isinstance(node.ops[0], ast.Eq)
    ):  # true of no NaN either
        return Line(f"if {ast.unparse(node.left)} != {ast.unparse(node.comparators[0])}:")
    if isinstance(node, ast.Call):
        return Line(f"if not {ast.unparse(node.func)}(", tuple(map(ast.unparse, node.args)), "):")
    if not isinstance(node, ast.BoolOp):
        return Line(f"if not ({condition}):")
    return Line("if not (", _conditions(node), "):", joint=_joint(node))


def _conditions(node: ast.BoolOp) -> tuple[str, ...]:
    return tuple(
        f"({ast.unparse(part)})" if isinstance(part, ast.BoolOp) else ast.unparse(part) for part in node.values
    )


def _joint(node: ast.BoolOp) -> str:
    return "and" if isinstance(node.op, ast.And) else "or"


def backward_name(name: str) -> str:
    """`softmax_bwd_kernel` of `softmax_fwd_kernel_backward`."""
    for forward, backward in (("_fwd", "_bwd"), ("_forward", "_backward")):
        if forward in name:
            return name.replace("_backward", "").replace(forward, backward)
    return name


def quoted(text: str) -> str:
    """A literal in double quotes."""
    return '"' + text.replace("\\", "\\\\").replace('"', "'") + '"'


def _as_formatted(text: str) -> str:
    """As formatters leave it; what has strings in double quotes already is written by us, and may quote in them."""
    return _SLICE.sub(_roomy, text if '"' in text else double_quoted(text))


_SLICE = re.compile(r"(?<=[\[ ])([\w.()]*(?: [-+*/]+ [\w.()]+)*):([\w.()]*(?: [-+*/]+ [\w.()]+)*)(?=[\],])")


def _roomy(match: re.Match[str]) -> str:
    begin, end = match.groups()
    if " " not in begin + end:
        return match[0]
    return f"{begin} : {end}".strip() if begin else f": {end}"


def double_quoted(text: str) -> str:
    """An expression as formatters leave it: its plain strings in double quotes."""
    return re.sub(r"""(?<![\w"'])'([^'"\\]*)'""", r'"\1"', text)
