"""What a dataset entry must look like beyond being right: the rules that let many pairs read as one collection."""

from __future__ import annotations

import ast
import re
from dataclasses import dataclass
from pathlib import Path

from kernel_agent.errors import InputError
from kernel_agent.pairs.benchsizes import read_bench
from kernel_agent.pairs.meta import Gradient, PairMeta, read_meta
from kernel_agent.pairs.spec import ShapeEntry
from kernel_agent.pairs.sweep import read_sweep
from kernel_agent.pairs.syntax import assigned_values, parse
from kernel_agent.pairs.techniques import TECHNIQUES

SLUG = re.compile(r"[a-z][a-z0-9_]*")
MOST_BENCH = 2
"""Entries of BENCH: minutes on a GPU are scarce."""
TILE = 16
"""Sides of tiles are powers of two, rarely below this: a size that is no multiple of it lies off their borders."""
SAVED = re.compile(r"\w+: (fp|bf|i|u|b|int|bool|uint)\w*(?: or \w+)* \(.*\)")


@dataclass(frozen=True)
class Complaint:
    """One broken rule."""

    path: Path
    rule: str

    def __str__(self) -> str:
        return f"{self.path}: {self.rule}"


def lint(path: Path) -> list[Complaint]:
    """All complaints about one dataset entry. Executes nothing. Raises `InputError` when META cannot be read at all."""
    source = path.read_text()
    meta, tree = read_meta(source), parse(source)
    broken = [*_naming(path, meta), *_contents(tree, meta), *_sweep(path, tree), *_bench(path, tree, meta)]
    return [Complaint(path, rule) for rule in broken]


def _naming(path: Path, meta: PairMeta) -> list[str]:
    broken = []
    if meta.slug != path.stem or not SLUG.fullmatch(meta.slug):
        broken.append(f'META["slug"] is {meta.slug!r}; it must be the file name {path.stem!r} in lower case')
    if meta.family != path.parent.name:
        broken.append(f'META["family"] is {meta.family!r}; it must be the folder {path.parent.name!r}')
    unknown = [tag for tag in meta.techniques if tag not in TECHNIQUES]
    if unknown or not meta.techniques:
        broken.append(f"techniques {unknown or '()'} are not of the closed list in kernel_agent/pairs/techniques.py")
    for field in ("op", "dtypes", "license", "origin"):
        if not getattr(meta, field):
            broken.append(f"META[{field!r}] is empty")
    broken += [
        f"META['saves'] entry {text!r} is not 'name: dtype (dims)'" for text in meta.saves if not SAVED.match(text)
    ]
    return broken


def _contents(tree: ast.Module, meta: PairMeta) -> list[str]:
    functions = {node.name: node for node in tree.body if isinstance(node, ast.FunctionDef)}
    broken = []
    docstring = ast.get_docstring(tree) or ""
    if not docstring.strip():
        broken.append("the file has no docstring that says the mathematics and the schedule")
    for name in ("forward", "backward", "make_args", "reference"):
        if name not in functions:
            broken.append(f"there is no function {name}()")
    if (meta.gradient is Gradient.CUSTOM) != ("surrogate" in functions):
        broken.append('surrogate() and META["gradient"] = "custom" belong together')
    parameters = {argument.arg for argument in functions["forward"].args.args} if "forward" in functions else set()
    broken += [
        f'META["grads"] names {name!r}, which forward() does not take' for name in meta.grads if name not in parameters
    ]
    return broken


def _sweep(path: Path, tree: ast.Module) -> list[str]:
    """Masks that are wrong only show where a size is no multiple of its block."""
    values = assigned_values(tree, "SWEEP")
    if not values:
        return ["there is no SWEEP"]
    try:
        entries = read_sweep(ast.literal_eval(values[-1]), path, values[-1])
    except (ValueError, TypeError):
        return ["SWEEP is not literal"]
    except InputError as error:
        return [f"line {error.line}: {error.message}"]
    sizes = [size for entry in entries for size in entry.dims.values() if type(size) is int and size > TILE // 2]
    if not any(size % TILE for size in sizes):
        return [f"no entry of SWEEP has a size above {TILE // 2} that is no multiple of {TILE}: masks go unseen"]
    return []


def _bench(path: Path, tree: ast.Module, meta: PairMeta) -> list[str]:
    try:
        entries = read_bench(tree, path)
    except InputError as error:
        return [f"line {error.line}: {error.message}"]
    if not 1 <= len(entries) <= MOST_BENCH:
        return [f"BENCH has {len(entries)} entries; it names one or two sizes of real workloads"]
    made = next((n for n in tree.body if isinstance(n, ast.FunctionDef) and n.name == "make_args"), None)
    return [rule for entry in entries for rule in _bench_entry(entry, made, meta)]


def _bench_entry(entry: ShapeEntry, made: ast.FunctionDef | None, meta: PairMeta) -> list[str]:
    broken = []
    if made is not None and made.args.kwarg is None:
        taken = [argument.arg for argument in (*made.args.args, *made.args.kwonlyargs)]
        broken += [f"BENCH names {name!r}, which make_args() does not take" for name in entry.dims if name not in taken]
        wanted = taken[: len(made.args.args) - len(made.args.defaults)]
        lacking = [name for name in wanted if name not in (*entry.dims, "device", "seed")]
        broken += [f"the BENCH entry {entry.label} does not say {name!r}" for name in lacking]
        if "dtype" in taken and "dtype" not in entry.dims:
            broken.append(f"the BENCH entry {entry.label} does not say its dtype")
    if entry.dims.get("dtype", meta.dtypes[:1] and meta.dtypes[0]) not in meta.dtypes:
        broken.append(f"the dtype of the BENCH entry {entry.label} is none of META['dtypes']")
    return broken
