"""The facts of a forward in lines: what every launch loads and stores along which axis, and which gradients cross."""

from __future__ import annotations

from kernel_agent.pairs.forward_facts import AccessFacts, AccessMode, LaunchFacts

MOST_LINES = 60
"""Lines of a derivative beyond which it is left out: it would no longer be read."""

_VERBS = {AccessMode.LOAD: "loads", AccessMode.STORE: "stores", AccessMode.ATOMIC: "adds atomically into"}


def launch_lines(launch: LaunchFacts, source_lines: tuple[str, ...]) -> tuple[str, ...]:
    """One line per group of accesses with the same addresses, then loops, then reductions with their source text."""
    groups: dict[tuple[AccessMode, str, bool], list[AccessFacts]] = {}
    for access in launch.accesses:
        groups.setdefault((access.mode, access.axes, access.masked), []).append(access)
    lines = []
    for (mode, axes, masked), accesses in groups.items():
        names = ", ".join(dict.fromkeys(access.argument for access in accesses))
        lines.append(f"{_VERBS[mode]} {names}: {axes}" + ("; masked" if masked else ""))
    lines += [f"loop: {loop}" for loop in launch.loops]
    for reduction in launch.reductions:
        text = source_text(source_lines, reduction.line)
        lines.append(f"{reduction.operation} over {reduction.axis}" + (f": `{text}`" if text else ""))
    return tuple(dict.fromkeys(lines))


def source_text(source_lines: tuple[str, ...], line: int | None) -> str:
    """A line of the user's file without its indentation: the text shown to a model has other line numbers."""
    return source_lines[line - 1].strip() if line is not None and 1 <= line <= len(source_lines) else ""
