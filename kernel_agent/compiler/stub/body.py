"""`Body`: the statements of one way through a backward as they are written, and the variables they bind."""

from __future__ import annotations

from kernel_agent.compiler.stub.lines import Line
from kernel_agent.compiler.stub.names import Names


class Body:
    """Grows from the first statement to the last."""

    def __init__(self, names: Names) -> None:
        self.names = names
        self.lines: list[Line] = []
        self.helpers: dict[str, None] = {}
        """Functions that the statements call, as text, in order."""
        self._own: set[str] = set()
        self._bound: dict[str, str] = {}

    def fresh(self, name: str) -> str:
        """A variable of this way alone; another way may have one of the same name."""
        found = self.names.local(name, self._own)
        self._own.add(found)
        return found

    def is_free(self, name: str) -> bool:
        """Whether a variable can have that name without a number behind it."""
        return self.names.is_free(name, self._own)

    def write(self, *lines: Line) -> None:
        """Add statements."""
        self.lines += lines

    def once(self, line: Line) -> None:
        """Add a statement that is not there yet."""
        if line not in self.lines:
            self.lines.append(line)

    def bind(self, name: str, text: str) -> str:
        """A fresh variable that holds the value of an expression."""
        found = self.fresh(name)
        self.lines.append(Line(f"{found} = {text}"))
        self._bound[found] = text
        return found

    def bound(self, name: str) -> str:
        """The expression whose value a variable was bound to; empty where that is not known."""
        return self._bound.get(name, "")

    def holding(self, text: str) -> str:
        """A variable that was bound to an expression; empty where there is none."""
        return next((name for name, bound in self._bound.items() if bound == text), "")
