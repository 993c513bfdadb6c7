"""`Code`: the operations of a kernel, and what of them passes may assume."""

from __future__ import annotations

import enum


class Code(str, enum.Enum):
    """What an operation does. Operands are named in order, then attributes by key, where it has any.

    Elementwise operations broadcast: their operands have the result's rank or none, with its extents or 1.
    """

    # --- sources
    CONST = "const"
    """A scalar. `value`: bool, int or float; `symbol`: what the source calls it (`BLOCK`, `BLOCK // 2`), or None;
    `open`: launches may give the symbol another value, so that nobody may rely on this one."""
    PROGRAM_ID = "program_id"
    """`axis`."""
    NUM_PROGRAMS = "num_programs"
    """`axis`."""
    ARANGE = "arange"
    """`start`, `end`, `symbol` of the extent, or None."""
    FULL = "full"
    """A scalar as a tile of the result's shape. Only where the whole tile is needed: else values broadcast."""

    # --- elementwise arithmetic; integers wrap, as in C
    ADD = "add"
    SUB = "sub"
    MUL = "mul"
    DIV = "div"
    """Of floats."""
    FLOORDIV = "floordiv"
    """Of integers, cut towards zero; `unsigned`."""
    REM = "rem"
    """Of either, with the dividend's sign; `unsigned`."""
    NEG = "neg"
    MAX = "max"
    """`nan`: whether NaN wins (else the number does); `unsigned`; `first`: of equal ones the first is chosen, which
    matters to derivatives only (else both are)."""
    MIN = "min"
    """As MAX."""
    FMA = "fma"
    """a * b + c."""
    ABS = "abs"
    EXP = "exp"
    EXP2 = "exp2"
    LOG = "log"
    LOG2 = "log2"
    SQRT = "sqrt"
    RSQRT = "rsqrt"
    SIN = "sin"
    COS = "cos"
    TANH = "tanh"
    ERF = "erf"
    SIGMOID = "sigmoid"
    FLOOR = "floor"
    CEIL = "ceil"
    AND = "and"
    OR = "or"
    XOR = "xor"
    SHL = "shl"
    SHR = "shr"
    """`unsigned`: zeros come in, else the sign does."""
    MULHI = "mulhi"
    """Upper half of an unsigned product."""
    CMP = "cmp"
    """`predicate`: eq ne lt le gt ge; `unsigned`. Of floats all but `ne` are false where one is NaN."""
    SELECT = "select"
    """condition, then, else."""
    CAST = "cast"
    """Value conversion to the result's element; `unsigned` source, `toward` for roundings that are not to nearest,
    `held` for an index that the narrower element is known to hold."""
    BITCAST = "bitcast"
    CALL = "call"
    """A function of the libraries, kept whole and elementwise: `function` (`libdevice.atan2`, `tl.rand`)."""
    KNOWN = "known"
    """value, number: the number, which is what the value is; its cotangent goes to the value. The reverse takes the
    number for the value wherever it needs one of the two, so that nobody computes the value."""

    # --- shape
    EXPAND = "expand"
    """Insert an extent 1 at `axis`."""
    BROADCAST = "broadcast"
    """A tile to the result's shape. Only where the whole tile is needed."""
    TRANS = "trans"
    """`order`: result axis i is operand axis order[i]."""
    RESHAPE = "reshape"
    """To the result's shape, elements in row-major order."""
    JOIN = "join"
    """Two tiles -> a new last axis of extent 2."""
    SPLIT = "split"
    """The two halves of a last axis of extent 2: two results."""
    FLIP = "flip"
    """Reversed along `axis`."""
    GATHER = "gather"
    """tile, indices: picked along `axis`."""

    # --- reductions, scans, products
    SUM = "sum"
    """Over `axis`, which goes."""
    REDUCE_MAX = "reduce_max"
    """Over `axis`, which goes; `nan` and `first` as MAX."""
    REDUCE_MIN = "reduce_min"
    ARG_MAX = "arg_max"
    """Index along `axis` of the first largest."""
    ARG_MIN = "arg_min"
    REDUCE = "reduce"
    """n tiles -> n results over `axis`; the block combines 2n scalars. Passes know nothing of it."""
    CUMSUM = "cumsum"
    """Along `axis`; `reverse`."""
    SCAN = "scan"
    """n tiles -> n results along `axis`; `reverse`; the block combines 2n scalars."""
    LINEAR_SCAN = "linear_scan"
    """a, x -> h with h[i] = a[i] * h[i - 1] + x[i] along `axis`, h[-1] = 0; `reverse`: h[i + 1] instead."""
    LINEAR_SCAN_BEFORE = "linear_scan_before"
    """a, x -> the h before each element of LINEAR_SCAN: h[i - 1]; `reverse`: h[i + 1]."""
    DOT = "dot"
    """(.., M, K), (.., K, N) -> (.., M, N); `precision`: ieee, tf32, tf32x3, bf16x3, or None for 16 bits and less."""

    # --- memory: `base` is a pointer argument of the kernel, offsets count elements
    LOAD = "load"
    """offset [, mask [, other]]; `masked`, `padded` say which of the two are there. `saved`: in a forward that is to be
    differentiated, what will be there after it has run. `again`: it was loaded before and is on purpose once more.
    `form`: BY_POINTER or BY_DESCRIPTOR, where the source has either, and `handle`, what it calls that."""
    STORE = "store"
    """offset, value [, mask]; `masked`."""
    ATOMIC_ADD = "atomic_add"
    """As STORE. The order of additions is open; nobody reads the old value."""
    ATOMIC = "atomic"
    """offset, value [, mask]; `operation` (max, min, xchg, ...) : what cannot be differentiated."""
    DESCRIPTOR = "descriptor"
    """start, rows, columns, stride: the matrix of so many rows and columns at `base` + start, rows `stride` apart, to
    load tiles of the extents `block` from. Or start, extent: numbers without gaps. Its element is `descriptor`."""
    BLOCK_POINTER = "block_pointer"
    """start, extents, strides, corner: the tile of the extents `block` from the corner on of the matrix, or the
    numbers, at `base` + start. Its element is `block_pointer`."""
    LOAD_BLOCK = "load_block"
    """descriptor, row, column: the tile of its matrix from there on, zero outside of it; of numbers in a row,
    descriptor, first. Or block pointer [, spares]: its tile, zero outside of the matrix along the axes `checked`;
    where `spares` is true, nothing is outside along the axes `spared`. `base` as of the descriptor;
    the kernel does not write there."""
    STORE_BLOCK = "store_block"
    """descriptor, value, row, column: the tile of its matrix from there on becomes the value, where there is a matrix.
    Or block pointer, value [, spares], as LOAD_BLOCK. `base` as of the descriptor."""
    TAPE_STORE = "tape_store"
    """value: remembered for this program, `tape` and the trips of all loops around."""
    TAPE_LOAD = "tape_load"
    """What the TAPE_STORE of `tape` remembered in the same trips."""
    BARRIER = "barrier"

    # --- control: results are what the blocks yield
    FOR = "for"
    """start, stop, step, initial carries; block(index, carries) yields carries. `reverse`: last trip first;
    `tape`: name of its trips, or None; other hints of tl.range under their own names."""
    WHILE = "while"
    """initial carries; block 0(carries) yields the condition and what goes on, block 1(those) yields carries.
    `tape` as FOR, or not there."""
    IF = "if"
    """condition; two blocks without arguments yield the results."""
    LEAVE_IF = "leave_if"
    """condition: the program ends here where it holds. Only before any effect."""


BY_POINTER, BY_DESCRIPTOR = "block_pointer", "descriptor"
"""How the source says an access, other than by a pointer for each lane."""
C = Code
ELEMENTWISE = frozenset(
    (C.ADD, C.SUB, C.MUL, C.DIV, C.FLOORDIV, C.REM, C.NEG, C.MAX, C.MIN, C.FMA, C.ABS, C.EXP, C.EXP2, C.LOG, C.LOG2,
     C.SQRT, C.RSQRT, C.SIN, C.COS, C.TANH, C.ERF, C.SIGMOID, C.FLOOR, C.CEIL, C.AND, C.OR, C.XOR, C.SHL, C.SHR,
     C.MULHI, C.CMP, C.SELECT, C.CAST, C.BITCAST, C.CALL, C.KNOWN)
)  # fmt: skip
"""One result element per element of the operands, at the same place."""
CONTROL = frozenset((C.FOR, C.WHILE, C.IF))
REDUCTIONS = frozenset((C.SUM, C.REDUCE_MAX, C.REDUCE_MIN))
EFFECTS = frozenset((C.STORE, C.STORE_BLOCK, C.ATOMIC_ADD, C.ATOMIC, C.TAPE_STORE, C.BARRIER, C.LEAVE_IF))
"""What stays where it is, in its order, and is never dropped for want of a reader (a tape nobody loads is)."""
MEMORY = frozenset((C.LOAD, C.STORE, C.ATOMIC_ADD, C.ATOMIC))
"""What has a `base`."""
PURE = frozenset(C) - CONTROL - EFFECTS - frozenset((C.LOAD, C.TAPE_LOAD, C.REDUCE, C.SCAN))
"""What gives the same for the same operands, anywhere, without blocks: may be shared and moved."""
