"""Parser of MLIR's generic operation form.

The generic form has one grammar for every operation of every dialect, so one small parser reads all Triton versions:

    %results = "dialect.op"(%operands)[^successors] <{properties}> ({regions}) {attributes} : (types) -> types loc(...)
"""

from __future__ import annotations

import re
from functools import lru_cache

from kernel_agent.ir.attributes import Attribute, parse_attribute
from kernel_agent.ir.errors import ParseError
from kernel_agent.ir.program import Block, Function, Module, Op, Value, mark_last_uses
from kernel_agent.ir.types import Type, parse_type

_BLANK = re.compile(r"(?:\s|//[^\n]*)*")
_RESULT = re.compile(r"(%[\w$.\-]+)(?::(\d+))?")
_NAME = re.compile(r"%[\w$.\-]+(?:#\d+)?")
_STRING = re.compile(r'"([^"]+)"')
_LABEL = re.compile(r"\^\w+")
_KEY = re.compile(r'"[^"]+"|[\w.\-$]+')
_TYPE = re.compile(r"!?[\w.]+")
_MARK = re.compile(r'"(?:[^"\\]|\\.)*"|->|[()\[\]{}<>,]')
"""A string, an arrow, or what nests and separates."""
_PLAIN = re.compile(
    r"\s*(?:(%[\w$.\-]+)(?::(\d+))? = )?"  # results
    r'"([^"]+)"\(([^()]*)\)'  # name and operands
    r'(?: <\{([^{}"]*)\}>)?(?: \{([^{}"]*)\})?'  # properties and attributes
    r" : \([^()]*\) -> (?:\(([^()]*)\)|([^()\n]+)) loc\(([^()\"]*)\)(?=\s)"  # types and location
)
"""An operation as most are written: no regions, no successors, nothing quoted. What it does not match is read piece by
piece, which takes ten times as long."""
_LOCATION_LINE = re.compile(r"^(#loc\d*) = loc\((.*)\)\s*$")


def parse(text: str) -> Module:
    """Read the generic-form text of one module. Raises `ParseError` on a form we have not met."""
    return _Parser(text).module()


@lru_cache(maxsize=4096)
def _types(text: str) -> tuple[Type, ...]:
    """Of `i32, tensor<4x4xf32>`."""
    return tuple(_Parser(f"({text})").types())


@lru_cache(maxsize=4096)
def _entries(text: str) -> dict[str, Attribute]:
    """Of `axis = 0 : i32, flag`; to be copied, not changed."""
    return _Parser(text + "}").dictionary()


class _Parser:
    def __init__(self, text: str) -> None:
        self.locations: dict[str, str] = {}
        body = []
        for line in text.split("\n"):
            if match := _LOCATION_LINE.match(line):
                self.locations[match.group(1)] = match.group(2)
            elif not line.startswith("#"):
                body.append(line)
        self.whole = text
        self.text = "\n".join(body)
        self.at = 0
        self.scopes: list[dict[str, Value]] = [{}]
        self.values = 0

    # --- scanning

    def skip(self) -> None:
        char = self.text[self.at : self.at + 1]
        if char != "/" and not char.isspace():
            return
        match = _BLANK.match(self.text, self.at)
        if match:
            self.at = match.end()

    def sees(self, literal: str) -> bool:
        self.skip()
        return self.text.startswith(literal, self.at)

    def eat(self, literal: str) -> bool:
        if self.sees(literal):
            self.at += len(literal)
            return True
        return False

    def need(self, literal: str) -> None:
        if not self.eat(literal):
            raise self.error(repr(literal))

    def take(self, pattern: re.Pattern[str]) -> re.Match[str]:
        self.skip()
        match = pattern.match(self.text, self.at)
        if match is None:
            raise self.error(pattern.pattern)
        self.at = match.end()
        return match

    def error(self, expected: str) -> ParseError:
        rest = self.text[self.at : self.at + 80].split("\n")[0]
        return ParseError(
            f"Triton's IR could not be read: expected {expected} before {rest!r}",
            remedy="This Triton version prints IR in a form that is not known; use one of Triton 3.6 to 3.9.",
        )

    def until(self, stops: str) -> str:
        """Raw text up to the first top-level character of `stops`; strings, nesting and `->` are stepped over."""
        self.skip()
        start, depth, self.at = self.at, 0, len(self.text)
        for match in _MARK.finditer(self.text, start):
            mark = match.group()
            if depth == 0 and mark in stops:
                self.at = match.start()
                break
            if mark in "([{<":
                depth += 1
            elif mark in ")]}>":
                depth -= 1
        return self.text[start : self.at].strip()

    # --- pieces

    def types(self) -> list[Type]:
        if not self.eat("("):
            return [self.type()]
        found = []
        while not self.eat(")"):
            found.append(parse_type(self.until(",)")))
            self.eat(",")
        return found

    def type(self) -> Type:
        self.skip()
        match = _TYPE.match(self.text, self.at)
        if match is None:
            raise self.error("a type")
        start, end = self.at, match.end()
        if end < len(self.text) and self.text[end] == "<":
            self.at = end + 1
            self.until(">")
            end = self.at + 1
        self.at = end
        return parse_type(self.text[start:end])

    def dictionary(self) -> dict[str, Attribute]:
        found: dict[str, Attribute] = {}
        while not self.eat("}"):
            key = self.take(_KEY).group(0).strip('"')
            found[key] = parse_attribute(self.until(",}")) if self.eat("=") else True
            self.eat(",")
        return found

    def location(self) -> str:
        if not self.eat("loc("):
            return ""
        body = self.until(")")
        self.need(")")
        return body

    def define(self, name: str, type_: Type) -> Value:
        value = Value(self.values, name, type_)
        self.values += 1
        self.scopes[-1][name] = value
        return value

    def lookup(self, name: str) -> Value:
        for scope in reversed(self.scopes):
            if name in scope:
                return scope[name]
        raise self.error(f"a definition of {name}")

    # --- structure

    def op(self) -> Op:
        match = _PLAIN.match(self.text, self.at)
        return self.any_op() if match is None else self.plain_op(match)

    def plain_op(self, match: re.Match[str]) -> Op:
        result, count, name, operands, properties, attributes, several, one, location = match.groups()
        values = [self.lookup(operand) for operand in operands.split(", ")] if operands else []
        types = _types(several) if one is None else (parse_type(one),)
        names = [f"{result}#{k}" for k in range(int(count))] if count else [result] * (result is not None)
        if len(types) != len(names):
            raise self.error(f"{len(names)} result types of {name}")
        self.at = match.end()
        results = [self.define(name, type_) for name, type_ in zip(names, types, strict=True)]
        entries = {**_entries(properties or ""), **_entries(attributes or "")}
        return Op(name, values, results, entries, [], [], location)

    def any_op(self) -> Op:
        names: list[str] = []
        while self.sees("%") or self.eat(","):
            name, count = self.take(_RESULT).groups()
            names += [f"{name}#{k}" for k in range(int(count))] if count else [name]
        if names:
            self.need("=")
        op_name = self.take(_STRING).group(1)
        operands = self.listed("(", ")", _NAME)
        successors = self.listed("[", "]", _LABEL) if self.sees("[") else []
        attributes: dict[str, Attribute] = {}
        if self.eat("<{"):
            attributes.update(self.dictionary())
            self.need(">")
        values = [self.lookup(name) for name in operands]
        regions = []
        if self.sees("({"):
            self.need("(")
            while not self.eat(")"):
                regions.append(self.region())
                self.eat(",")
        if self.eat("{"):
            attributes.update(self.dictionary())
        self.need(":")
        self.need("(")
        self.until(")")  # types of operands, which their definitions have told
        self.need(")")
        self.need("->")
        result_types = self.types()
        location = self.location()
        if len(result_types) != len(names):
            raise self.error(f"{len(names)} result types of {op_name}")
        results = [self.define(name, type_) for name, type_ in zip(names, result_types, strict=True)]
        return Op(op_name, values, results, attributes, regions, successors, location)

    def listed(self, opening: str, closing: str, item: re.Pattern[str]) -> list[str]:
        self.need(opening)
        found = []
        while not self.eat(closing):
            found.append(self.take(item).group(0))
            self.eat(",")
        return found

    def region(self) -> list[Block]:
        self.need("{")
        self.scopes.append({})
        blocks: list[Block] = []
        if not self.sees("^") and not self.sees("}"):
            blocks.append(Block("^entry"))
        while not self.eat("}"):
            if self.sees("^"):
                blocks.append(self.label())
            else:
                blocks[-1].ops.append(self.op())
        self.scopes.pop()
        return blocks

    def label(self) -> Block:
        block = Block(self.take(_LABEL).group(0))
        if self.eat("("):
            while not self.eat(")"):
                name = self.take(_NAME).group(0)
                self.need(":")
                block.arguments.append(self.define(name, self.type()))
                self.location()
                self.eat(",")
        self.need(":")
        return block

    def module(self) -> Module:
        module = self.op()
        functions = {}
        for op in module.regions[0][0].ops:
            if op.name == "tt.func" and op.regions and op.regions[0]:
                name = str(op.attributes["sym_name"])
                functions[name] = Function(name, op.attributes.get("sym_visibility") == "public", op.regions[0])
        mark_last_uses(functions)
        return Module(functions, self.locations, self.whole)
