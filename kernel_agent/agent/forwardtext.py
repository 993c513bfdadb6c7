"""The part of a user's file that a model needs to see: the stub and all it reaches."""

from __future__ import annotations

import ast

from kernel_agent.pairs.mark import find_mark
from kernel_agent.pairs.sections import split_sections
from kernel_agent.pairs.spec import FileFacts
from kernel_agent.pairs.statements import Statement, statements
from kernel_agent.pairs.syntax import ImportedNames, parse


def forward_text(facts: FileFacts) -> str:
    """The stub with every kernel, function, constant and import it reaches by name, in file order with their comments.

    SWEEP, make_args, references, hand-written backwards, benchmarks and the main block are left out, as the stub does
    not use them. Of a pair file only the head and the forward section are looked at.
    """
    if facts.is_pair:
        sections = split_sections(facts.source)
        items = statements(sections.head + sections.forward)
    else:
        tree = parse(facts.source, facts.path)
        items = statements(facts.source, drop_decorator=find_mark(tree, ImportedNames(tree), facts.path).decorator)
    kept = _reached(items, facts.stub)
    text = ""
    for before, item in zip([None, *kept], kept, strict=False):
        if before is not None:
            text += "\n" if item.is_import and before.is_import else "\n\n\n" if item.is_definition else "\n\n"
        text += item.text
    return text + "\n"


def function_text(source: str, name: str) -> str:
    """The source of one module-level function, or empty."""
    for node in parse(source).body:
        if isinstance(node, ast.FunctionDef) and node.name == name:
            return (ast.get_source_segment(source, node) or "") + "\n"
    return ""


def _reached(items: list[Statement], stub: str) -> list[Statement]:
    kept: list[Statement] = []
    names = {stub}
    while fresh := [item for item in items if item not in kept and item.binds & names]:
        kept += fresh
        names |= {name for item in fresh for name in item.uses}
    return [item for item in items if item in kept]
