"""`formulas`: what a kernel computes as mathematics: `dA = sum over cols of dC @ B'`.

Read off the operations behind each gradient that is stored: loads are the tensors, sums that a loop carries are sums
over what it walks, masks and conversions are left out. Names are those of the text; each is defined, or the formula of
its gradient is left out.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence

from kernel_agent.compiler.ssa.code import Code
from kernel_agent.compiler.ssa.value import Kernel, Op, Value, beneath, constant, is_setting

_WIDTH = 104
"""Characters of a formula that is read at a glance."""
_MOST = 6
"""Definitions of a kernel."""
_DEEP, _LONG = 60, 2000
"""Operations one within the other, and all of them, behind one gradient."""
_SHORT = 16
"""Characters up to which something needs no name."""
_AS_IT_IS = frozenset((Code.CAST, Code.BROADCAST, Code.EXPAND, Code.FULL, Code.RESHAPE))
_ROUNDING = 1e-5
"""Of numbers that undo each other."""
_SIGNS = {Code.ADD: "+", Code.SUB: "-", Code.MUL: "*", Code.DIV: "/", Code.DOT: "@"}
_LEVELS = {"+": 1, "-": 1, "*": 2, "/": 2, "@": 2}
_ATOM = 9
_FUNCTIONS = frozenset(
    (Code.EXP, Code.EXP2, Code.LOG, Code.LOG2, Code.SQRT, Code.RSQRT, Code.SIN, Code.COS, Code.TANH, Code.ERF,
     Code.SIGMOID, Code.ABS, Code.FLOOR, Code.CEIL, Code.CUMSUM, Code.MAX, Code.MIN)
)  # fmt: skip
_OVER = {Code.SUM: "sum", Code.REDUCE_MAX: "max", Code.REDUCE_MIN: "min"}

_PREDICATES = {"eq": "==", "ne": "!=", "lt": "<", "le": "<=", "gt": ">", "ge": ">="}

Written = tuple[str, int]
"""A formula and how tightly it holds together."""


class _Unsaid(Exception):
    """There is no formula, or none that is read at a glance."""


def formulas(
    kernel: Kernel, gradients: Mapping[str, str], assigned: Collection[str], over: Mapping[Op, str]
) -> list[str]:
    """Lines of gradients, then of the names in them.

    `gradients`: pointer argument -> what is said of what it gets; `assigned`: names of the text; `over`: what loops
    walk.
    """
    said = _Formulas(kernel, assigned, over)
    lines = []
    for base, name in gradients.items():
        found = said.of(base, name)
        lines += [found] if found else []
    return [*lines, *said.definitions()] if lines else []


class _Formulas:
    def __init__(self, kernel: Kernel, assigned: Collection[str], over: Mapping[Op, str]) -> None:
        self.kernel = kernel
        self.assigned = assigned
        self.over = over
        self.wanted: dict[str, Value] = {}
        """Names that are to be defined, and what they stand for."""
        self.defined: dict[str, str] = {}
        self.texts: dict[str, str] = {}
        """What each name stood for where it was met first."""
        self.open: set[str] = set()
        """Names whose values are being written."""
        self.depth = self.steps = 0

    def of(self, base: str, name: str) -> str:
        """What is stored for a gradient; empty where that has no formula."""
        mine = [op for op in self.kernel.ops if "base" in op.attributes and op.base.name == base]
        blocks = [op for op in mine if op.code is Code.STORE_BLOCK]
        ops = [op for op in mine if op.code in (Code.STORE, Code.ATOMIC_ADD)] or blocks
        before = dict(self.wanted), dict(self.defined)
        self.open, self.steps = set(), 0
        try:
            texts = list(dict.fromkeys(self._top(op.stored) for op in ops))
            if len(texts) == 1 and len(texts[0]) <= _WIDTH and self._define():
                sign = "+=" if any(op.code is Code.ATOMIC_ADD for op in ops) else "="
                return f"{name} {sign} {texts[0]}"
        except _Unsaid:
            pass
        self.wanted, self.defined = before
        return ""

    def definitions(self) -> list[str]:
        """Of the names that formulas have."""
        return [f"{name} = {self.defined[name]}" for name in self.wanted]

    def _define(self) -> bool:
        """Whether all names can be defined, in few lines."""
        while len(self.wanted) <= _MOST:
            name = next((one for one in self.wanted if one not in self.defined), None)
            if name is None:
                return True
            self.open = {name}
            self.defined[name] = self._top(self.wanted[name])
            self.open = set()
            if len(self.defined[name]) > _WIDTH:
                return False
        return False

    def _top(self, value: Value) -> str:
        return self._written(value, inside=False)[0]

    # --- expressions

    def _said(self, value: Value, level: int, *, right: bool = False) -> str:
        """An operand of something that holds together by a level."""
        text, own = self._written(value, inside=True)
        return f"({text})" if own < level or (right and own == level) else text

    def _written(self, value: Value, inside: bool) -> Written:
        """A value, within something else perhaps. Raises `_Unsaid` for what takes more than a few lines anyway."""
        self.depth, self.steps = self.depth + 1, self.steps + 1
        try:
            if self.depth > _DEEP or self.steps > _LONG:
                raise _Unsaid
            return self._shown(value, inside)
        finally:
            self.depth -= 1

    def _shown(self, value: Value, inside: bool) -> Written:
        op = value.producer
        if op is None:
            if value.depth or not value.name:
                raise _Unsaid
            return value.name, _ATOM
        number = constant(value)
        if number is not None:
            if symbol := _symbol(value):
                return symbol, _ATOM
            return (f"{number:.6g}" if isinstance(number, float) else str(number)), _ATOM if number >= 0 else 0
        if op.code in _AS_IT_IS:
            if op.operands[0].is_float and not value.is_float:
                raise _Unsaid  # what is rounded is no conversion
            return self._written(op.operands[0], inside)
        if op.code in (Code.LOAD, Code.LOAD_BLOCK):
            return op.base.name, _ATOM
        if op.code is Code.SELECT and _is_of_places(op.operands[0]):
            return self._written(_kept(op), inside)
        if op.code is Code.IF:
            return self._branches(op, op.results.index(value), inside)
        if not value.is_float:
            raise _Unsaid
        if inside and value.name in self.assigned:
            return self._name(value)
        return self._computed(op, value)

    def _name(self, value: Value) -> Written:
        """The name of a value; what is short needs none."""
        assert value.producer is not None
        if self.wanted.get(value.name) is value:
            return value.name, _ATOM
        if value.name in self.open:
            return self._computed(value.producer, value)  # an earlier value of the name that is being defined
        before = dict(self.wanted)
        self.open.add(value.name)
        try:
            text, level = self._computed(value.producer, value)
        finally:
            self.open.remove(value.name)
        known = self.wanted.get(value.name)
        if known is None and len(text) <= _SHORT and self.wanted == before:
            return text, level
        if known is not None and known is not value and self.texts[value.name] != text:
            return text, level  # another value of the same name
        self.wanted = before | {value.name: known or value}
        self.texts.setdefault(value.name, text)
        return value.name, _ATOM

    def _computed(self, op: Op, value: Value) -> Written:
        if op.code is Code.FOR:
            return self._sum(op, op.results.index(value))
        if op.code in (Code.MUL, Code.DIV):
            return self._product(value)
        if op.code in _SIGNS:
            sign = _SIGNS[op.code]
            level = _LEVELS[sign]
            left, right = (self._said(op.operands[0], level), self._said(op.operands[1], level, right=sign not in "+*"))
            return f"{left} {sign} {right}", level
        if op.code is Code.NEG:
            return f"-{self._said(op.operands[0], _ATOM)}", 1
        if op.code is Code.TRANS:
            return f"{self._said(op.operands[0], _ATOM)}'", _ATOM
        if op.code in _OVER:
            axis = f", axis={op.attributes['axis']}" if len(op.operands[0].shape) > 1 else ""
            return f"{_OVER[op.code]}({self._written(op.operands[0], inside=True)[0]}{axis})", _ATOM
        if op.code is Code.SELECT:
            return self._chosen(op.operands[0], op.operands[1:]), _ATOM
        if op.code in _FUNCTIONS:
            arguments = ", ".join(self._written(one, inside=True)[0] for one in op.operands)
            return f"{op.code.value}({arguments})", _ATOM
        if op.code is Code.CALL:
            arguments = ", ".join(self._written(one, inside=True)[0] for one in op.operands)
            return f"{str(op.attributes['function']).rsplit('.', 1)[-1]}({arguments})", _ATOM
        raise _Unsaid

    def _product(self, value: Value) -> Written:
        """Factors and what divides them, with one number of all the numbers among them."""
        factors: list[tuple[str, Value]] = []
        number, pending = 1.0, [("*", value)]
        while pending:
            sign, part = pending.pop()
            inner = _plain(part)
            op, known = inner.producer, constant(inner)
            if known is not None and known != 0 and not _symbol(inner):
                number = number * known if sign == "*" else number / known
            elif op is None or (part is not value and self._written(part, inside=True)[0] == inner.name):
                factors.append((sign, part))
            elif op.code is Code.MUL:
                pending += [(sign, op.operands[1]), (sign, op.operands[0])]
            elif op.code is Code.DIV:
                pending += [("/" if sign == "*" else "*", op.operands[1]), (sign, op.operands[0])]
            else:
                factors.append((sign, part))
        factors.sort(key=lambda factor: factor[0] == "/")
        text = "" if abs(number - 1.0) < _ROUNDING and factors and factors[0][0] == "*" else f"{number:.6g}"
        for sign, part in factors:
            said = self._said(part, _LEVELS[sign], right=sign == "/" or bool(text))
            text = f"{text} {sign} {said}" if text else said
        return text, _LEVELS["*"]

    def _chosen(self, condition: Value, sides: Sequence[Value]) -> str:
        """A choice by what is loaded or computed."""
        test = _plain(condition).producer
        if test is None or test.code is not Code.CMP:
            raise _Unsaid
        asked = f" {_PREDICATES[test.attributes['predicate']]} ".join(map(self._compared, test.operands))
        return f"where({asked}, {', '.join(self._written(one, inside=True)[0] for one in sides)})"

    def _compared(self, value: Value) -> str:
        """A side of a comparison; of whole numbers only those that have names."""
        inner = _plain(value)
        if inner.is_float or inner.producer is None or constant(inner) is not None:
            return self._said(inner, 1)
        if inner.name not in self.assigned:
            raise _Unsaid
        return inner.name

    def _branches(self, op: Op, place: int, inside: bool) -> Written:
        """What both branches compute, or the one that computes something; of those that a launch is free to choose the
        last."""
        found = [block.yields[place] for block in op.blocks]
        if is_setting(op.operands[0]):
            return self._written(found[-1], inside)
        if not _is_of_places(op.operands[0]):
            return self._chosen(op.operands[0], found), _ATOM
        some = [value for value in found if not _is_zero(value)]
        texts = list(dict.fromkeys(self._written(value, inside) for value in some))
        if len(texts) != 1:
            raise _Unsaid
        return texts[0]

    def _sum(self, loop: Op, place: int) -> Written:
        """What a loop adds up, with what loops before it did."""
        (block,) = loop.blocks
        terms = list(_terms(block.yields[place], block.arguments[1 + place]))
        over = self.over.get(loop, "")
        if not over or len(terms) != 1:
            raise _Unsaid
        ((sign, term),) = terms
        text = f"{sign}sum over {over} of {self._said(term, 2)}"
        start = loop.operands[3 + place]
        if _is_zero(start):
            return text, 1
        earlier, _ = self._written(start, inside=False)
        if earlier != text:
            raise _Unsaid
        return text, 1


def _terms(value: Value, carry: Value) -> Iterator[tuple[str, Value]]:
    """What is added to a carry, or with a `-` subtracted. Raises `_Unsaid` where something else is done."""
    op = value.producer
    if value is carry:
        return
    if op is None:
        raise _Unsaid
    if op.code in _AS_IT_IS:
        yield from _terms(op.operands[0], carry)
    elif op.code is Code.ADD and _reaches(op.operands[0], carry):
        yield from _terms(op.operands[0], carry)
        yield "", op.operands[1]
    elif op.code is Code.SUB and _reaches(op.operands[0], carry):
        yield from _terms(op.operands[0], carry)
        yield "-", op.operands[1]
    elif op.code is Code.ADD and _reaches(op.operands[1], carry):
        yield from _terms(op.operands[1], carry)
        yield "", op.operands[0]
    else:
        raise _Unsaid


def _reaches(value: Value, carry: Value) -> bool:
    """Whether a value is a carry to which something was added."""
    pending, seen = [value], {value}
    while pending:
        op = (here := pending.pop()).producer
        if here is carry:
            return True
        if op is not None and op.code in (Code.ADD, Code.SUB, *_AS_IT_IS):
            pending += [one for one in op.operands if one not in seen]
            seen |= set(op.operands)
    return False


def _kept(op: Op) -> Value:
    """What a choice by a mask leaves where lanes are there."""
    _, then, other = op.operands
    if constant(_plain(other)) is not None:
        return then
    if constant(_plain(then)) is not None:
        return other
    raise _Unsaid


def _is_of_places(condition: Value) -> bool:
    """Whether a condition only asks where lanes and programs are."""
    pending, seen = [condition], {condition}
    while pending:
        value = pending.pop()
        op = value.producer
        if value.is_float or (op is not None and op.code in (Code.LOAD, Code.IF, Code.FOR, Code.WHILE)):
            return False
        more = [one for one in op.operands if one not in seen] if op is not None else []
        pending += more
        seen |= set(more)
    return True


def _symbol(value: Value) -> str:
    """What the source calls a constant, if it is more than a number of this launch."""
    op = value.producer
    return str(op.attributes["symbol"] or "") if op is not None and op.code is Code.CONST else ""


def _plain(value: Value) -> Value:
    return beneath(value, _AS_IT_IS)


def _is_zero(value: Value) -> bool:
    return constant(_plain(value)) == 0
