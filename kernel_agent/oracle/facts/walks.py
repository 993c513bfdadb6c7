"""How one access walks the dims of its tensor: by program, by loop, within a tile. Read off the addresses as they ran.

The addresses are those of one call. What is said holds for it exactly; that it holds at other sizes too is the usual
case, and is not proven here.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from kernel_agent.ir.sanitizer.views import Geometry
from kernel_agent.oracle.facts.watch import Seen, Site, Visit

FAR = 1 << 60
"""Above every index."""


@dataclass(frozen=True)
class DimWalk:
    """How an access walks one dim of its tensor."""

    dim: int
    name: str
    size: int
    axes: tuple[int, ...]
    """Axes of the grid along which programs go to other places."""
    loop: bool
    """A program goes to other places when it comes back to the access."""
    tiles: tuple[int, ...]
    """Axes of the tile along which the index moves."""
    length: int
    """Lanes along those axes; 1 without any."""
    low: Tensor
    """Lowest index of each program, shape (P,); `FAR` where it does not take part."""
    high: Tensor
    """Highest index of each program, shape (P,); -1 where it does not take part."""

    @property
    def everywhere(self) -> bool:
        """Whether each program that takes part goes over the whole dim."""
        some = self.high >= 0
        return bool((self.low[some] == 0).all()) and bool((self.high[some] == self.size - 1).all())

    def words(self, constants: Mapping[str, int], programs: int) -> str:
        """`M: a tile of 64 (BLOCK_M) per program of axis 0`.

        `programs` of that axis walk this dim alone; 0 where they walk another one, too.
        """
        tile = f"a tile of {tile_name(self.length, constants, self.name)}"
        if not self.axes:
            return f"{self.name}: {self._same_for_all(tile)}"
        where = "axis " + " and ".join(str(axis) for axis in self.axes)
        if not self.loop:
            what = tile if self.length > 1 else "one"
            return f"{self.name}: {what} per program of {where}{self._shared(programs)}"
        each = f"{tile} at a time" if self.length > 1 else "one at a time"
        return f"{self.name}: {self._share(where)}, {each} in a loop"

    def _same_for_all(self, tile: str) -> str:
        if self.loop:
            each = f"{tile} at a time" if self.length > 1 else "one at a time"
            return f"{self._range()}, {each} in a loop"
        if self.length > 1:
            whole = self.everywhere
            return f"all of it in {tile}" if whole else f"{self._range()} in {tile}"
        return self._range()

    def _range(self) -> str:
        some = self.high >= 0
        if not bool(some.any()):
            return "none of it at this size"
        low, high = int(self.low[some].min()), int(self.high[some].max())
        if (low, high) == (0, self.size - 1):
            return "all of it"
        if self.size % 2 == 0 and (low, high) in ((0, self.size // 2 - 1), (self.size // 2, self.size - 1)):
            return "the first half" if low == 0 else "the second half"
        return f"only index {low}" if low == high else f"indices {low} to {high} of {self.size}"

    def _share(self, where: str) -> str:
        some = self.high >= 0
        low, high = self.low[some], self.high[some]
        if bool((low == low[0]).all()):
            return f"from {int(low[0])} up to where the program of {where} stands"
        if bool((high == high[0]).all()):
            return f"from where the program of {where} stands to the end"
        return f"a share of it per program of {where}"

    def _shared(self, programs: int) -> str:
        """Several programs of one axis at one place, as query heads that share a head of keys."""
        places = int(self.low[self.high >= 0].unique().numel())
        if places and places < programs and programs % places == 0:
            return f" ({programs // places} programs share each)"
        return ""


@dataclass(frozen=True)
class Walk:
    """How an access walks its tensor."""

    site: Site
    dims: tuple[DimWalk, ...]
    """Dims of more than one index, outermost first as the tensor names them."""
    steps: Mapping[int, int]
    """Axes of the tile along which all neighbouring lanes are equally far apart -> how many elements."""

    @property
    def unit(self) -> tuple[int, ...]:
        """Axes of the tile along which neighbouring lanes are neighbours in memory."""
        return tuple(axis for axis, step in self.steps.items() if step == 1)

    def moved_by(self, axis: int) -> tuple[DimWalk, ...]:
        """Dims whose index moves along an axis of the tile."""
        return tuple(walk for walk in self.dims if axis in walk.tiles)

    def _alone(self, walk: DimWalk, grid: Sequence[int]) -> int:
        """Programs of the only axis that a dim is walked by, when they walk no other dim; else 0."""
        used = [axis for other in self.dims for axis in other.axes]
        return grid[walk.axes[0]] if len(walk.axes) == 1 and used.count(walk.axes[0]) == 1 else 0

    def words(self, constants: Mapping[str, int], grid: Sequence[int]) -> str:
        """All dims in one line."""
        if not self.dims:
            return "one element"
        used = [axis for walk in self.dims for axis in walk.axes]
        alone = [
            grid[walk.axes[0]] if len(walk.axes) == 1 and used.count(walk.axes[0]) == 1 else 0 for walk in self.dims
        ]
        text = "; ".join(walk.words(constants, programs) for walk, programs in zip(self.dims, alone, strict=True))
        if self.unit:
            along = [walk.name for axis in self.unit for walk in self.moved_by(axis)]
            return f"{text}; contiguous" + (f" along {along[0]}" if len(self.dims) > 1 and along else "")
        tiled = [walk.name for walk in self.dims if walk.tiles]
        return f"{text}; strided along {tiled[-1]}" if tiled else text


def walk_of(seen: Seen, site: Site, names: Sequence[str], *, regular: bool = True) -> Walk:
    """Look at all visits of a site; `names` has one name per dim of `site.shown`. `regular`: no data decides.

    Dims that a kernel walks as one, the flat elements of a matrix or rows of a batch, are told as one.
    """
    shown, names = site.shown, list(names)
    while True:
        walk = _walk(seen, site, shown, names)
        pair = _walked_as_one(walk, shown) if regular else None
        if pair is None:
            return walk
        shown, names = _merged(shown, names, *pair)


def _walked_as_one(walk: Walk, shown: Geometry) -> tuple[int, int] | None:
    """Two dims, the outer first, whose elements follow each other in memory and that are walked as one."""
    for outer in walk.dims:
        for inner in walk.dims:
            step = shown.stride[inner.dim] * inner.size
            if inner is outer or shown.stride[outer.dim] != step:
                continue
            flat = any(axis in outer.tiles and axis in inner.tiles for axis in walk.steps)
            rows = (
                bool(outer.axes)
                and outer.axes == inner.axes
                and not (outer.loop or inner.loop or inner.tiles or outer.tiles)
            )
            if flat or rows:
                return outer.dim, inner.dim
    return None


def _merged(shown: Geometry, names: list[str], outer: int, inner: int) -> tuple[Geometry, list[str]]:
    """One dim in place of the outer one; the inner one is left with a single index."""
    size, stride, told = list(shown.size), list(shown.stride), list(names)
    size[outer], stride[outer], told[outer] = size[outer] * size[inner], stride[inner], f"{names[outer]}*{names[inner]}"
    size[inner] = 1
    return Geometry(tuple(size), tuple(stride), shown.offset), told


def _walk(seen: Seen, site: Site, shown: Geometry, names: Sequence[str]) -> Walk:
    dims = [d for d, (n, step) in enumerate(zip(shown.size, shown.stride, strict=True)) if n > 1 and step > 0]
    low = {d: torch.full((seen.programs,), FAR) for d in dims}
    high = {d: torch.full((seen.programs,), -1) for d in dims}
    first: dict[int, Tensor] = {d: torch.full((seen.programs,), FAR) for d in dims}
    loops = dict.fromkeys(dims, False)
    tiles: dict[int, set[int]] = {d: set() for d in dims}
    for visit in site.visits:
        index = indices(shown, visit.offset, dims)
        for d in dims:
            here_low, here_high = _bounds(index[d], visit)
            loops[d] = loops[d] or _moved(first[d], here_low, visit.programs)
            low[d][visit.programs] = torch.minimum(low[d][visit.programs], here_low)
            high[d][visit.programs] = torch.maximum(high[d][visit.programs], here_high)
            tiles[d] |= {k for k in range(visit.offset.dim() - 1) if _varies(index[d], visit, k + 1)}
    shape = site.visits[0].offset.shape[1:] if site.visits else ()
    tile = [max([1, *(visit.offset.shape[k + 1] for visit in site.visits)]) for k in range(len(shape))]
    walks = tuple(
        DimWalk(
            d,
            names[d],
            shown.size[d],
            axes_of(low[d], high[d], seen.launch.grid),
            loops[d],
            tuple(sorted(tiles[d])),
            math.prod(tile[k] for k in tiles[d]),
            low[d],
            high[d],
        )
        for d in dims
    )
    steps = {k: step for k in range(len(tile)) if tile[k] > 1 and (step := _step(site, k)) is not None}
    return Walk(site, walks, steps)


def indices(shown: Geometry, offset: Tensor, dims: Sequence[int]) -> dict[int, Tensor]:
    """Index along each dim of elements of a buffer, by the strides of a tensor in it."""
    rest, found = offset - shown.offset, {}
    for d in sorted(dims, key=lambda d: -shown.stride[d]):
        found[d] = torch.div(rest, shown.stride[d], rounding_mode="floor")
        rest = rest - found[d] * shown.stride[d]
    return found


def _bounds(index: Tensor, visit: Visit) -> tuple[Tensor, Tensor]:
    """Lowest and highest index of each program, shape (P,)."""
    low, high = _ends(index, visit)
    programs = visit.programs.numel()
    return low.reshape(low.size(0), -1).amin(1).expand(programs), high.reshape(high.size(0), -1).amax(1).expand(
        programs
    )


def _ends(index: Tensor, visit: Visit) -> tuple[Tensor, Tensor]:
    """The index of each lane, twice: lanes that take no part are above everything, and below it."""
    if visit.valid is None:
        return index, index
    return torch.where(visit.valid, index, FAR), torch.where(visit.valid, index, -1)


def _moved(first: Tensor, low: Tensor, programs: Tensor) -> bool:
    """Whether a program is elsewhere than when it first came; programs that come for the first time are noted."""
    known = first[programs]
    taking = low < FAR
    first[programs] = torch.where(known == FAR, low, known)
    return bool(((known != FAR) & taking & (known != low)).any())


def _varies(index: Tensor, visit: Visit, axis: int) -> bool:
    """Whether the index moves along an axis of the tile, among lanes that take part."""
    if index.shape[axis] == 1:
        return False
    low, high = _ends(index, visit)
    most = high.amax(axis)
    return bool(((most > low.amin(axis)) & (most >= 0)).any())


def _step(site: Site, axis: int) -> int | None:
    """Elements between neighbouring lanes along an axis of the tile; None where they are not always as many."""
    found = None
    for visit in site.visits:
        if visit.offset.shape[axis + 1] > 1:
            moves = visit.offset.diff(dim=axis + 1)
            least, most = int(moves.min()), int(moves.max())
            if least != most or found not in (None, least):
                return None
            found = least
    return found


def axes_of(low: Tensor, high: Tensor, grid: tuple[int, int, int]) -> tuple[int, ...]:
    """Axes of the grid along which programs differ, among those that take part."""
    shape = (grid[2], grid[1], grid[0])
    low, high = low.view(shape), high.view(shape)
    taking = high >= 0
    found = []
    for axis in range(3):
        dim = 2 - axis
        ends = [
            (torch.where(taking, end, FAR).amin(dim), torch.where(taking, end, -1).amax(dim)) for end in (low, high)
        ]
        if any(bool(((least != most) & taking.any(dim)).any()) for least, most in ends):
            found.append(axis)
    return tuple(found)


def tile_name(length: int, constants: Mapping[str, int], dim: str = "") -> str:
    """A length, with the constexpr that has this value: `64 (BLOCK_M)`. Of several, the one that ends like the dim."""
    names = [name for name, value in constants.items() if value == length]
    blocks = [name for name in names if re.search("BLOCK|TILE|CHUNK", name.upper())] or names
    fitting = [name for name in names if dim and name.upper().endswith(dim.upper())] or blocks
    if length < 2 or not fitting:
        return str(length)
    return f"{length} ({fitting[0]})" if len(fitting) == 1 else f"{length} ({' = '.join(fitting)})"
