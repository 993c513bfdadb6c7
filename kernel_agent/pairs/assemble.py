"""`assemble`: a spec and a candidate's sections as one pair file, the format of datasets and deliveries."""

from __future__ import annotations

import ast
import json
from collections.abc import Iterable
from dataclasses import dataclass, replace

from kernel_agent.errors import InputError
from kernel_agent.pairs.adjoints import declarable
from kernel_agent.pairs.generated import generated_forward, saved_layout
from kernel_agent.pairs.mark import find_mark
from kernel_agent.pairs.meta import SCHEMA, declaring
from kernel_agent.pairs.sections import (
    SECTION_MARKERS,
    has_marker,
    split_sections,
    truth_source,
    without_backward,
)
from kernel_agent.pairs.spec import ArgumentFacts, ArgumentKind, Candidate, KernelSpec
from kernel_agent.pairs.statements import Statement, statements
from kernel_agent.pairs.syntax import ImportedNames, parse

__all__ = [
    "assemble",
    "candidate_from_pair",
    "generated_forward",
    "handwritten",
    "saved_layout",
    "truth_source",
    "without_backward",
]

_CHECK_NAMES = frozenset({"SWEEP", "make_args", "reference", "surrogate", "flops"})
_STANDARD = {"torch": "import torch", "triton": "import triton", "tl": "import triton.language as tl"}


def assemble(spec: KernelSpec, candidate: Candidate) -> str:
    """Write the pair file: docstring, imports, META, and the forward, backward and check sections.

    For a user's file the forward section holds what the stub needs, the stub without its mark, and `forward`: the
    candidate's own if it has one, else the generated one. The user's own `backward`, `__main__` block and functions
    that nothing here needs are left out. Of a pair file, the candidate's sections replace the file's.

    Raises `InputError` when a section of the candidate holds a section marker. Whether the sections are valid Python is
    not looked at: the gate says so.
    """
    if has_marker(candidate.backward) or has_marker(candidate.forward or ""):
        raise InputError(
            "the reply's code holds a section marker",
            remedy="Give the text of a section without lines such as `# --- check ---`.",
        )
    if spec.facts.is_pair:
        sections = split_sections(spec.facts.source)
        forward = sections.forward if candidate.forward is None else _spaced(candidate.forward)
        head = declaring(sections.head, candidate.torch_ops)
        return replace(sections, head=head, forward=forward, backward=_spaced(candidate.backward)).join()
    arranged = _arrange(spec)
    own = generated_forward(spec) if candidate.forward is None else candidate.forward
    forward = "\n\n\n".join([arranged.forward, own.strip("\n")]) if arranged.forward else own
    sections_text = zip(SECTION_MARKERS, (forward, candidate.backward, arranged.check), strict=True)
    return _head(spec, candidate, arranged) + "".join(
        f"\n\n{marker}\n{text.strip()}\n" for marker, text in sections_text
    )


def candidate_from_pair(source: str) -> Candidate:
    """Take the forward and backward sections out of a pair file. Raises `InputError` where a marker is missing."""
    sections = split_sections(source)
    return Candidate(forward=sections.forward.strip("\n") + "\n", backward=sections.backward.strip("\n") + "\n")


def handwritten(spec: KernelSpec) -> Candidate:
    """The user's own `backward` as a candidate: it takes (saved, *grad_outputs), with `saved` as `saved_layout` says.

    What it needs and nothing else needs comes along. Raises `InputError` for a file that has none.
    """
    if spec.facts.is_pair or not spec.facts.has_backward:
        raise InputError(
            "the file has no hand-written `backward`",
            path=spec.facts.path,
            remedy="Add backward(saved, *grad_outputs), or let one be written: "
            f"kernel-agent --file-path {spec.facts.path}",
        )
    tree = parse(spec.facts.source, spec.facts.path)
    mark = find_mark(tree, ImportedNames(tree), spec.facts.path)
    items = statements(spec.facts.source, drop_decorator=mark.decorator)
    leading = _leading_imports(items)
    rest = [item for item in items if item not in leading]
    needed, own = _reached(rest, {spec.facts.stub}), _reached(rest, {"backward"})
    functions = frozenset(name for item in rest if item.is_definition for name in item.binds - needed.names)
    mine = [item for item in own.items if item not in needed.items and (item.is_definition or item.uses & functions)]
    return Candidate(backward=_text(mine) + "\n")


@dataclass(frozen=True)
class _Arranged:
    """A user's file, divided."""

    imports: list[Statement]
    """The imports at the top of the file."""
    forward: str
    """What the stub needs, and the stub."""
    check: str
    """SWEEP, make_args, the references, and what only they need."""


def _arrange(spec: KernelSpec) -> _Arranged:
    source = spec.facts.source
    tree = parse(source, spec.facts.path)
    mark = find_mark(tree, ImportedNames(tree), spec.facts.path)
    items = [
        item
        for item in statements(source, drop_decorator=mark.decorator)
        if not (item.is_definition and item.binds <= {"backward", "setup"} and spec.facts.stub not in item.binds)
    ]
    imports = _leading_imports(items)
    rest = [item for item in items if item not in imports]
    needed = _reached(rest, {spec.facts.stub})
    checking = _reached(rest, set(_CHECK_NAMES) - needed.names)
    forward, check = [], []
    check_names = set(_CHECK_NAMES) - needed.names
    dropped = _unneeded(rest, needed, checking) | {"backward", "setup"}
    for item in rest:
        if item in needed.items:
            forward.append(item)
        elif item.is_definition:
            if item in checking.items:
                check.append(item)
                check_names |= item.binds
        elif (item.uses | item.binds) & check_names:
            check.append(item)
            check_names |= item.binds
        elif not item.uses & dropped:
            forward.append(item)
    return _Arranged(imports, _text(forward), _text(check))


@dataclass(frozen=True)
class _Reached:
    """Statements that some names need, and the names they bind."""

    items: tuple[Statement, ...]
    names: frozenset[str]


def _reached(items: list[Statement], wanted: set[str]) -> _Reached:
    """The statements that bind the wanted names, or names that those statements use, and so on."""
    names, found = set(wanted), [False] * len(items)
    while True:
        fresh = [i for i, item in enumerate(items) if not found[i] and item.binds & names]
        if not fresh:
            kept = tuple(item for item, yes in zip(items, found, strict=True) if yes)
            return _Reached(kept, frozenset(name for item in kept for name in item.binds))
        for i in fresh:
            found[i] = True
            names |= items[i].uses


def _unneeded(items: list[Statement], needed: _Reached, checking: _Reached) -> frozenset[str]:
    """Functions that nothing needs; statements that mention them go too."""
    live = needed.names | checking.names
    return frozenset(name for item in items if item.is_definition for name in item.binds - live)


def _leading_imports(items: list[Statement]) -> list[Statement]:
    leading = []
    for item in items:
        if not item.is_import:
            break
        leading.append(item)
    return leading


def _text(items: list[Statement]) -> str:
    """Definitions set apart by two blank lines, other statements close together."""
    parts: list[str] = []
    for previous, item in zip([None, *items], items, strict=False):
        if previous is not None:
            apart = item.is_definition or previous.is_definition
            parts.append("\n\n\n" if apart else "\n")
        parts.append(item.text)
    return "".join(parts)


def _head(spec: KernelSpec, candidate: Candidate, arranged: _Arranged) -> str:
    bound = {name for item in arranged.imports for name in item.binds}
    standard = [text for name, text in _STANDARD.items() if name not in bound]
    future = [item.text for item in arranged.imports if item.is_future]
    imports = [*future, *standard, *(item.text for item in arranged.imports if not item.is_future)]
    return f'"""{_docstring(spec)}"""\n\n' + "\n".join(imports) + f"\n\n{_meta(spec, candidate)}"


def _docstring(spec: KernelSpec) -> str:
    """The first sentence of the user's docstring, else one of our own."""
    text = ast.get_docstring(parse(spec.facts.source)) or ""
    paragraph = " ".join(text.split("\n\n")[0].split())
    sentence = paragraph.partition(". ")[0].rstrip(".")
    if not sentence or "\\" in sentence or '"' in sentence:
        sentence = f"The forward `{spec.facts.stub}` of {spec.facts.path.name} and its backward"
    return sentence + "."


def _meta(spec: KernelSpec, candidate: Candidate) -> str:
    values: dict[str, object] = {
        "slug": spec.facts.stem,
        "family": "user",
        "op": spec.facts.stub,
        "schema": SCHEMA,
        "techniques": (),
        "saves": _saves(spec, candidate),
        "grads": spec.grads,
        "dtypes": _dtypes(spec),
    }
    if spec.facts.nondiff_outputs:
        values["nondiff_outputs"] = spec.facts.nondiff_outputs
    # The stub may call others at other entries than the smallest, which `spec` shows; what of them is allowed, the gate
    # says.
    if torch_ops := {*spec.torch_ops, *declarable(spec.torch_ops), *candidate.torch_ops}:
        values["torch_ops"] = tuple(sorted(torch_ops))
    if spec.custom_gradient:
        values["gradient"] = "custom"
    values["origin"] = "kernel-agent"
    return "META = dict(\n" + "".join(f"    {name}={_literal(value)},\n" for name, value in values.items()) + ")\n"


def _literal(value: object) -> str:
    if isinstance(value, tuple):
        inner = ", ".join(_literal(item) for item in value)
        return f"({inner},)" if len(value) == 1 else f"({inner})"
    return json.dumps(value) if isinstance(value, str) else repr(value)


def _saves(spec: KernelSpec, candidate: Candidate) -> tuple[str, ...]:
    if candidate.forward is None:
        sizes = _size_names(spec)
        return tuple(_save(item, sizes) for item in spec.outputs if item.kind is ArgumentKind.TENSOR)
    return tuple(_own_saves(candidate.forward))


def _save(item: ArgumentFacts, sizes: dict[int, str]) -> str:
    dims = ", ".join(sizes.get(size, "?") for size in item.shape)
    return f"{item.name}: {item.dtype} ({dims}{',' if len(item.shape) == 1 else ''})"


def _size_names(spec: KernelSpec) -> dict[int, str]:
    """Sizes of the observed arguments that exactly one dim of the smallest entry has, by that dim's name."""
    from kernel_agent.pairs.sweep import smallest

    dims = [(value, name) for name, value in smallest(spec.sweep).dims.items() if type(value) is int]
    values = [value for value, _ in dims]
    return {value: name for value, name in dims if values.count(value) == 1}


def _own_saves(forward: str) -> Iterable[str]:
    """Names in the saved tuple of a candidate's own forward that are no parameters; nothing if it cannot be read."""
    try:
        tree = ast.parse(forward)
    except (SyntaxError, ValueError, RecursionError, MemoryError):  # the gate says what is wrong with it
        return
    for function in tree.body:
        if not isinstance(function, ast.FunctionDef) or function.name != "forward":
            continue
        parameters = {argument.arg for argument in (*function.args.args, *function.args.kwonlyargs)}
        returned = [node.value for node in ast.walk(function) if isinstance(node, ast.Return)]
        for value in returned[-1:]:
            if isinstance(value, ast.Tuple) and len(value.elts) == 2 and isinstance(value.elts[1], ast.Tuple):
                for item in value.elts[1].elts:
                    if isinstance(item, ast.Name) and item.id not in parameters:
                        yield item.id


def _dtypes(spec: KernelSpec) -> tuple[str, ...]:
    """Floating dtypes of the observed arguments and of the entries that name one."""
    observed = [item.dtype for item in spec.inputs if item.needs_grad]
    named = [str(entry.dims["dtype"]).removeprefix("torch.") for entry in spec.sweep if entry.dims.get("dtype")]
    return tuple(dict.fromkeys([*observed, *named]))


def _spaced(text: str) -> str:
    return text.strip("\n") + "\n\n\n"
