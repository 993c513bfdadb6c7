"""`shared_kernels`: kernels that several ways through a backward launch, printed once.

Where two ways have the same text, it serves both. Where a constexpr of the forward tells two ways apart, one kernel
with that constexpr can: see `united`.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace

from kernel_agent.compiler.emit.source import KernelSource
from kernel_agent.compiler.stub.backward import Written
from kernel_agent.compiler.stub.lines import Line
from kernel_agent.compiler.stub.names import Names
from kernel_agent.compiler.stub.united import united
from kernel_agent.compiler.stub.ways import THERE, Tests


@dataclass(eq=False)
class _Version:
    """A kernel as it is printed."""

    source: KernelSource
    ways: set[int] = field(default_factory=set)
    """Those that launch it."""
    flags: dict[str, str] = field(default_factory=dict)
    """Constexprs that tell ways apart, and what launches give for them."""


@dataclass(frozen=True)
class Shared:
    """What is printed."""

    written: list[Written]
    """The ways, launching what is below."""
    kernels: list[KernelSource]
    """Each once, in the order in which they are launched."""
    names: Mapping[str, str]
    """Of every kernel that a way wants: what is printed for it."""


def shared_kernels(
    written: Sequence[Written], sources: Sequence[Sequence[KernelSource]], tests: Sequence[Tests], names: Names
) -> Shared:
    """`sources`: of each way the text of its kernels; `tests`: what tells it from the others."""
    versions = _distinct(sources)
    for text in dict.fromkeys(text for one in tests for text in one):
        for one, other in itertools.permutations(range(len(written)), 2):
            if tests[one].get(text) is True and tests[other].get(text) is False and _alike(tests, one, other, text):
                _unite(versions, one, other, text, written, tests, names)
    found = {
        kernel.name: version
        for way, mine in zip(written, versions, strict=True)
        for kernel, version in zip(way.kernels, mine, strict=True)
    }
    ways = [replace(way, body=list(_launching(way.body, found))) for way in written]
    kernels = dict.fromkeys(version.source.name for version in found.values())
    printed = {version.source.name: version.source for version in found.values()}
    return Shared(ways, [printed[name] for name in kernels], {name: one.source.name for name, one in found.items()})


def _distinct(sources: Sequence[Sequence[KernelSource]]) -> list[list[_Version]]:
    """The versions of each way; texts that differ in the name of the kernel alone are one."""
    known: dict[tuple[object, ...], _Version] = {}
    found = []
    for way, mine in enumerate(sources):
        row = []
        for source in mine:
            text = re.sub(rf"\b{source.name}\b", "", source.text)
            version = known.setdefault((text, source.helpers, source.imports), _Version(source))
            version.ways.add(way)
            row.append(version)
        found.append(row)
    return found


def _alike(tests: Sequence[Tests], one: int, other: int, text: str) -> bool:
    """Whether two ways differ in one expression."""
    both = [{name: repr(value) for name, value in tests[way].items() if name != text} for way in (one, other)]
    return both[0] == both[1]


def _unite(
    versions: list[list[_Version]],
    one: int,
    other: int,
    text: str,
    written: Sequence[Written],
    tests: Sequence[Tests],
    names: Names,
) -> None:
    """Put one kernel for those of two ways, which an expression tells apart."""
    if len(versions[one]) != len(versions[other]):
        return
    for place, (mine, its) in enumerate(zip(versions[one], versions[other], strict=True)):
        if mine is its or _base(mine) != _base(its):
            continue
        flag = _flag(written[one], place, text, names)
        if not flag or not all(
            tests[way].get(text) is value for version, value in ((mine, True), (its, False)) for way in version.ways
        ):
            continue
        both = united(mine.source, its.source, flag)
        if both is None:
            continue
        name = min(mine.source.name, its.source.name, key=len)
        both = replace(both, name=name, text=re.sub(rf"\b{both.name}\b", name, both.text))
        version = _Version(both, mine.ways | its.ways, {**mine.flags, **its.flags, flag: text})
        for row in versions:
            row[:] = [version if known in (mine, its) else known for known in row]


def _base(version: _Version) -> str:
    return re.sub(r"_\d+$", "", version.source.name)


def _flag(way: Written, place: int, text: str, names: Names) -> str:
    """The constexpr of the forward's kernel that an expression is given for, or one that says that an argument of the
    kernel is there; empty where there is none."""
    launched = way.launched[place]
    told = ""
    for parameter, node in launched.text.arguments.items():
        if names.is_of_trips(node):
            continue
        shown = names.expression(node, launched.text.line, parameter)
        if isinstance(launched.kernel.constants.get(parameter), bool) and shown == text:
            return parameter
        if f"{shown}{THERE}" == text:
            told = told or f"HAS_{re.sub(r'_?(ptr|pointer)$', '', parameter, flags=re.IGNORECASE).upper()}"
    return told


def _launching(body: Sequence[Line], versions: Mapping[str, _Version]) -> Iterator[Line]:
    """Statements with what is printed for the kernels they launch."""
    for line in body:
        name = line.opening.partition("[")[0]
        version = versions.get(name) if line.parameters else None
        if version is None:
            yield line
            continue
        given = dict(zip(line.parameters, line.items, strict=True))
        kernel = version.source
        items = []
        for parameter in kernel.parameters:
            missing = version.flags.get(parameter, "None")
            keyword = f"{parameter}=" if parameter in kernel.constexprs else ""
            items.append(given.pop(parameter, f"{keyword}{missing}"))
        yield replace(
            line,
            opening=line.opening.replace(name, kernel.name, 1),
            items=(*items, *given.values()),
            parameters=(*kernel.parameters, *given),
        )
