"""Random kernels, operation by operation as they come: nothing folded, shared or moved, which is what copies are held
against. Floats stay small and finite, integers may wrap, addresses are in bounds wherever they are reached."""

from collections.abc import Callable

import torch
from random_blocks import SIZE, RandomBlocks, goes_with

from kernel_agent.compiler.ssa.code import Code
from kernel_agent.compiler.ssa.value import Kernel, Op, Value, broadcast_shape

GRID = (2, 2)


def tensors() -> dict[str, torch.Tensor | int | float]:
    """Arguments for the kernels below, the same for every call."""
    torch.manual_seed(0)
    floats = {name: torch.randn(SIZE, dtype=torch.float64) for name in ("X", "F", "W")}
    written = {name: torch.zeros(SIZE, dtype=torch.float64) for name in ("Y", "A")}
    return {**floats, **written, "I": torch.randint(-20, 20, (SIZE,), dtype=torch.int32), "N": 3, "s": 0.7}


class RandomKernel(RandomBlocks):
    """The kernel of a seed: it reads X, F and I, stores to Y, adds to A, and reads and stores W."""

    def __init__(self, seed: int, *, statements: int = 30) -> None:
        pointers = [Value(f"*{element}", name=name) for name, element in
                    (("X", "f64"), ("F", "f32"), ("I", "i32"), ("Y", "f64"), ("A", "f64"), ("W", "f64"))]  # fmt: skip
        kernel = Kernel(f"random_{seed}", [*pointers, Value("i32", name="N"), Value("f64", name="s")])
        super().__init__(seed, kernel, kernel.arguments[6:])
        self.tapes = 0
        for axis in range(2):
            self.op(Code.PROGRAM_ID, (), "i32", axis=axis)
        for element in ("f64", "f32", "i32", "i64", "i1"):
            self.const(element)
        lanes = self.op(Code.ARANGE, (), "i32", start=0, end=4, symbol=None)
        rows, columns = (self.op(Code.EXPAND, (lanes,), "i32", axis=axis) for axis in (1, 0))
        self.access(Code.LOAD, self.kernel.argument("X"), self.op(Code.MUL, (rows, columns), "i32"), None)
        for _ in range(3):
            self.load()
        for _ in range(statements):
            self.statement()
        for _ in range(4):
            self.store()

    # --- statements

    def statement(self) -> None:
        depth = len(self.blocks)
        choices: list[tuple[Callable[[], object], float]] = [
            (self.integers, 4), (self.floats, 5), (self.conditions, 2), (self.conversions, 2), (self.shapes, 3),
            (self.reductions, 3), (self.load, 3), (self.store, 1), (self.guarded_load, 0.5),
            (self.load_again, 0.5),
            (self.sequence, 1.2 if depth < 3 else 0), (self.branch, 1.2 if depth < 3 else 0),
            (self.repetition, 0.4 if depth < 3 else 0), (self.tape, 0.4 if depth == 1 else 0),
        ]  # fmt: skip
        made, weights = zip(*choices, strict=True)
        self.random.choices(made, weights)[0]()

    def integers(self) -> None:
        a = self.pick(self.random.choice(("i32", "i64")))
        b = self.pick(a.element, like=a)
        if self.random.random() < 0.15:
            self.op(self.random.choice((Code.NEG, Code.ABS)), (a,), a.element)
            return
        plain = (Code.ADD, Code.ADD, Code.SUB, Code.MUL, Code.AND, Code.OR, Code.XOR)
        signed = (Code.FLOORDIV, Code.REM, Code.MAX, Code.MIN, Code.SHR)
        if self.random.random() < 0.6:
            self.op(self.random.choice(plain), (a, b), a.element)
        else:
            unsigned = {"unsigned": True} if self.random.random() < 0.3 else {}
            self.op(self.random.choice(signed), (a, b), a.element, **unsigned)

    def floats(self) -> None:
        a = self.pick(self.random.choice(("f64", "f64", "f32")))
        b = self.pick(a.element, like=a)
        code = self.random.choice((Code.ADD, Code.SUB, Code.MUL, Code.MAX, Code.MIN, Code.SELECT, Code.NEG, Code.NEG,
                                   Code.SIN, Code.TANH, Code.ABS, Code.DIV))  # fmt: skip
        if code is Code.NEG and self.random.random() < 0.5:
            inner = self.op(Code.SUB, (a, b), a.element)
            self.op(Code.ADD, (self.op(code, (inner,), a.element), a), a.element)
        elif code in (Code.NEG, Code.SIN, Code.TANH, Code.ABS):
            self.op(code, (a,), a.element)
        elif code is Code.SELECT:
            wide = Value("f64", broadcast_shape([a.shape, b.shape]))
            self.op(code, (self.pick("i1", like=wide), a, b), a.element)
        elif code is Code.DIV:
            square = self.op(Code.MUL, (b, b), b.element)
            self.op(code, (a, self.op(Code.ADD, (square, self.const(b.element, 1.0)), b.element)), a.element)
        elif code in (Code.MAX, Code.MIN):
            self.op(code, (a, b), a.element, nan=self.random.random() < 0.5)
        else:
            found = self.op(code, (a, b), a.element)
            if code is Code.MUL:
                self.op(Code.TANH, (found,), a.element)
                self.seen[-1].remove(found)  # products of products would overflow

    def conditions(self) -> None:
        if self.random.random() < 0.3:
            a = self.pick("i1")
            self.op(self.random.choice((Code.AND, Code.OR, Code.XOR)), (a, self.pick("i1", like=a)), "i1")
            return
        a = self.pick(self.random.choice(("i32", "i64", "f64", "f32")))
        unsigned = {"unsigned": True} if a.element[0] == "i" and self.random.random() < 0.2 else {}
        predicate = self.random.choice(("eq", "ne", "lt", "le", "gt", "ge"))
        self.op(Code.CMP, (a, self.pick(a.element, like=a)), "i1", predicate=predicate, **unsigned)

    def conversions(self) -> None:
        a = self.pick(self.random.choice(("i32", "i64", "i1", "f64", "f32")))
        if a.element[0] == "f" and self.random.random() < 0.5:
            a = self.op(Code.MUL, (self.op(Code.SIN, (a,), a.element), self.const(a.element, 9.0)), a.element)
            self.op(Code.CAST, (a,), self.random.choice(("i32", "i64")))
        elif a.element[0] == "f":
            self.op(Code.CAST, (a,), "f32" if a.element == "f64" else "f64")
        elif self.random.random() < 0.3:
            self.op(Code.SIN, (self.op(Code.CAST, (a,), "f64"),), "f64")
        else:
            target = self.random.choice([e for e in ("i8", "i32", "i64") if e != a.element])
            found = self.op(Code.CAST, (a,), target)
            if target == "i8":
                self.op(Code.CAST, (found,), "i32")

    def shapes(self) -> None:
        kind = self.random.choice(("expand", "trans", "reshape", "whole", "join", "split", "flip"))
        a = self.pick(self.random.choice(("f64", "f32", "i32")), rank=self.random.choice((1, 2)))
        rank, size = len(a.shape), 1
        for extent in a.shape:
            size *= extent
        if kind == "expand" and rank == 1:
            self.op(Code.EXPAND, (a,), a.element, axis=self.random.randrange(2))
        elif kind == "trans" and rank == 2:
            self.op(Code.TRANS, (a,), a.element, order=(1, 0))
        elif kind == "reshape":
            forms = [
                form
                for form in ((4,), (2, 2), (1, 4), (4, 1), (2, 4), (4, 4), (16,))
                if torch.Size(form).numel() == size
            ]
            if forms:
                self.op(Code.RESHAPE, (a,), a.element, self.random.choice(forms))
        elif kind == "whole":
            shape = broadcast_shape([a.shape, (4,) if rank == 1 else (4, 4)]) if set(a.shape) <= {1, 4} else a.shape
            self.whole(a, shape)
        elif kind == "flip":
            self.op(Code.FLIP, (a,), a.element, axis=self.random.randrange(rank))
        elif kind == "join" and size <= 8 and rank == 1:
            self.op(Code.JOIN, (a, self.op(Code.ADD, (a, a), a.element)), a.element)
        elif kind == "split" and a.shape[-1] == 2 and rank == 2:
            self.add(Op(Code.SPLIT, (a,), [Value(a.element, a.shape[:-1]) for _ in range(2)]))

    def reductions(self) -> None:
        a = self.pick(self.random.choice(("f64", "f64", "i32")), rank=self.random.choice((1, 2)))
        axis = self.random.randrange(len(a.shape))
        kind = self.random.choice(("sum", "sum", "max", "arg", "cumsum", "dot", "scan", "linear", "reduce"))
        if kind == "sum":
            self.op(Code.SUM, (a,), a.element, axis=axis)
        elif kind == "max":
            self.op(self.random.choice((Code.REDUCE_MAX, Code.REDUCE_MIN)), (a,), a.element, axis=axis)
        elif kind == "arg":
            self.op(self.random.choice((Code.ARG_MAX, Code.ARG_MIN)), (a,), "i32", axis=axis)
        elif kind == "cumsum":
            self.op(Code.CUMSUM, (a,), a.element, axis=axis, reverse=self.random.random() < 0.5)
        elif kind == "dot" and len(a.shape) == 2 and a.element == "f64":
            b = self.op(Code.TRANS, (a,), a.element, order=(1, 0))
            self.op(Code.TANH, (self.op(Code.DOT, (a, b), "f64", precision="ieee"),), "f64")
        elif a.element == "f64" and kind in ("linear", "scan", "reduce"):
            factors = self.op(Code.SIN, (a,), "f64")
            reverse = self.random.random() < 0.5
            if kind == "linear":
                code = self.random.choice((Code.LINEAR_SCAN, Code.LINEAR_SCAN_BEFORE))
                self.op(code, (factors, a), "f64", axis=axis, reverse=reverse)
                return
            block = self.inside([Value("f64") for _ in range(2)], lambda: self.combine())
            code = Code.SCAN if kind == "scan" else Code.REDUCE
            attributes = {"axis": axis, "reverse": reverse} if kind == "scan" else {"axis": axis}
            self.op(code, (a,), "f64", blocks=[block], **attributes)

    def combine(self) -> list[Value]:
        """Of two scalars, and one from outside."""
        a, b = self.blocks[-1].arguments
        half = self.op(Code.MUL, (a, self.const("f64", 0.5)), "f64")
        return [self.op(Code.ADD, (half, self.op(Code.MUL, (b, self.kernel.arguments[7]), "f64")), "f64")]

    # --- memory

    def load(self) -> None:
        base = self.kernel.argument(self.random.choice(("X", "F", "I", "W")))
        offset = self.places(self.pick(self.random.choice(("i32", "i64"))))
        self.access(Code.LOAD, base, offset, None)

    def store(self) -> None:
        base = self.kernel.argument(self.random.choice(("Y", "A", "W")))
        code = Code.ATOMIC_ADD if base.name == "A" else Code.STORE
        value = self.pick("f64")
        index = self.pick("i32", like=value)
        shape = broadcast_shape([value.shape, index.shape])
        self.access(code, base, self.places(self.whole(index, shape)), value)

    def access(self, code: Code, base: Value, offset: Value, value: Value | None) -> None:
        operands = [offset, *([] if value is None else [value])]
        masked = self.random.random() < 0.5
        if masked:
            mask = self.pick("i1")
            fits = goes_with(mask, offset) and broadcast_shape([mask.shape, offset.shape]) == offset.shape
            operands.append(mask if fits else self.const("i1"))
        attributes = {"base": base, "masked": masked}
        if value is not None:
            self.add(Op(code, operands, (), attributes))
            return
        attributes["padded"] = masked and self.random.random() < 0.5
        if attributes["padded"]:
            operands.append(self.const(base.pointee))
        self.add(Op(code, operands, [Value(base.pointee, offset.shape)], attributes))

    def load_again(self) -> None:
        """What is in memory, once before and once after it changes."""
        offset, base = self.places(self.pick("i32")), self.kernel.argument("W")
        attributes = {"base": base, "masked": False}
        loads = [
            Op(Code.LOAD, (offset,), [Value("f64", offset.shape)], {**attributes, "padded": False}) for _ in range(2)
        ]
        (before,) = self.add(loads[0])
        changed = self.op(Code.SIN, (self.op(Code.ADD, (before, self.kernel.argument("s")), "f64"),), "f64")
        self.add(Op(Code.STORE, (offset, changed), (), attributes))
        self.add(loads[1])

    def guarded_load(self) -> None:
        """Of an address that is in bounds only where it is reached: in a branch, or in a loop that makes a trip."""
        index = self.op(
            Code.ADD, (self.pick("i32", rank=0), self.const("i32", self.random.choice((0, 13, -40)))), "i32"
        )
        low = self.op(Code.CMP, (index, self.const("i32", 0)), "i1", predicate="ge")
        high = self.op(Code.CMP, (index, self.const("i32", SIZE)), "i1", predicate="lt")
        holds = self.op(Code.AND, (low, high), "i1")
        base = self.kernel.argument(self.random.choice(("X", "W")))

        def loaded() -> list[Value]:
            op = Op(Code.LOAD, (index,), [Value("f64")], {"base": base, "masked": False, "padded": False})
            return list(self.add(op))

        zero = self.const("f64", 0.0)
        if self.random.random() < 0.5:
            blocks = [self.inside([], loaded), self.inside([], lambda: [zero])]
            self.add(Op(Code.IF, (holds,), [Value("f64")], {}, blocks))
            return
        trips = self.op(Code.SELECT, (holds, self.const("i32", 1), self.const("i32", 0)), "i32")
        block = self.inside([Value("i32"), Value("f64")], loaded)
        bounds = (self.const("i32", 0), trips, self.const("i32", 1), zero)
        self.add(Op(Code.FOR, bounds, [Value("f64")], {"reverse": False, "tape": None}, [block]))

    # --- control

    def statements(self, most: int) -> None:
        for _ in range(self.random.randrange(1, most)):
            self.statement()

    def next_of(self, value: Value) -> Value:
        """A value for the next trip, of the same element and shape."""
        chance = self.random.random()
        if chance < 0.15 or value.element == "i1":
            return value
        other = self.pick(value.element, like=value)
        fits = broadcast_shape([other.shape, value.shape]) == value.shape
        other = other if fits else self.const(value.element)
        if chance < 0.6:
            return self.op(self.random.choice((Code.ADD, Code.SUB)), (value, other), value.element)
        if value.element[0] == "f":
            return self.whole(self.op(Code.SIN, (other,), value.element), value.shape)
        return self.whole(other, value.shape)

    def sequence(self) -> None:
        """A FOR of zero to three trips, either way, with a few carries."""
        start, stop = self.const("i32", 0), self.random.choice((self.kernel.argument("N"), self.const("i32")))
        if stop.producer is not None and abs(stop.producer.attributes["value"]) > 3:
            stop = self.const("i32", 2)
        carries = [
            self.pick(*self.random.choice((("f64",), ("f64",), ("i32",), ("f32",))))
            for _ in range(self.random.randrange(4))
        ]
        inside = [Value("i32"), *(Value(value.element, value.shape) for value in carries)]

        def body() -> list[Value]:
            self.statements(7)
            return [self.next_of(value) for value in inside[1:]]

        block = self.inside(inside, body)
        attributes = {"reverse": self.random.random() < 0.4, "tape": None}
        operands = (start, stop, self.const("i32", 1), *carries)
        self.add(Op(Code.FOR, operands, [Value(v.element, v.shape) for v in carries], attributes, [block]))

    def repetition(self) -> None:
        """A WHILE of at most three trips."""
        carries = [self.const("i32", 0), self.pick("f64")]
        first = [Value(value.element, value.shape) for value in carries]
        second = [Value(value.element, value.shape) for value in carries]

        def test() -> list[Value]:
            self.statements(3)
            goes_on = self.op(Code.CMP, (first[0], self.kernel.argument("N")), "i1", predicate="lt")
            return [goes_on, *first]

        def body() -> list[Value]:
            self.statements(5)
            return [self.op(Code.ADD, (second[0], self.const("i32", 1)), "i32"), self.next_of(second[1])]

        blocks = [self.inside(first, test), self.inside(second, body)]
        self.add(Op(Code.WHILE, carries, [Value(value.element, value.shape) for value in carries], {}, blocks))

    def branch(self) -> None:
        likes = [self.pick("f64"), self.pick("i32")][: self.random.randrange(3)]

        def side() -> list[Value]:
            self.statements(5)
            return [self.next_of(value) for value in likes]

        condition = self.pick("i1", rank=0)
        blocks = [self.inside([], side), self.inside([], side)]
        self.add(Op(Code.IF, (condition,), [Value(v.element, v.shape) for v in likes], {}, blocks))

    def tape(self) -> None:
        """A loop that stores a tape, and one that loads it, or one that could."""
        name = f"t{self.tapes}"
        self.tapes += 1
        value = self.pick("f64")
        bounds = (self.const("i32", 0), self.kernel.argument("N"), self.const("i32", 1))
        shape, inside = value.shape, [Value("i32"), Value("f64", value.shape)]

        def stored() -> list[Value]:
            self.add(Op(Code.TAPE_STORE, (inside[1],), (), {"tape": name}))
            self.statements(4)
            return [self.op(Code.SIN, (self.op(Code.ADD, (inside[1], self.kernel.argument("s")), "f64"),), "f64")]

        forth = self.inside(inside, stored)
        attributes = {"reverse": False, "tape": name}
        self.add(Op(Code.FOR, (*bounds, value), [Value("f64", shape)], attributes, [forth]))
        back = [Value("i32"), Value("f64", shape)]

        def loaded() -> list[Value]:
            (found,) = self.add(Op(Code.TAPE_LOAD, (), [Value("f64", shape)], {"tape": name}))
            self.statements(4)
            return [self.op(Code.SIN, (self.op(Code.SUB, (found, back[1]), "f64"),), "f64")]

        block = self.inside(back, loaded)
        self.add(Op(Code.FOR, (*bounds, value), [Value("f64", shape)], {"reverse": True, "tape": name}, [block]))
