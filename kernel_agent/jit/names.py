"""Which names of its surroundings a piece of Python source refers to."""

from __future__ import annotations

import symtable


def free_names(source: str) -> tuple[str, ...]:
    """Names that the source reads and does not bind itself, in order: those of bodies, decorators and defaults."""
    top = symtable.symtable(source, "<slice>", "exec")
    bound = {symbol.get_name() for symbol in top.get_symbols() if symbol.is_assigned() or symbol.is_imported()}
    found: dict[str, None] = {}
    tables = [top]
    while tables:
        table = tables.pop(0)
        for symbol in table.get_symbols():
            outer = symbol.is_referenced() if table is top else symbol.is_global() and symbol.is_referenced()
            if outer and symbol.get_name() not in bound:
                found[symbol.get_name()] = None
        tables += table.get_children()
    return tuple(found)
