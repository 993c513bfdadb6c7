"""What runs in the child of `kernel-agent grad`: the user's file is imported here, its function derived and compared.

The parent imports this module for nothing but its entry's name.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from triton import JITFunction

from kernel_agent.compiler.errors import CannotDerive
from kernel_agent.compiler.tile.check import check_tile
from kernel_agent.compiler.tile.gradient import grad
from kernel_agent.errors import InputError
from kernel_agent.ir import import_module, standin
from kernel_agent.oracle.child import answered
from kernel_agent.pairs.blame import blame_file

if TYPE_CHECKING:
    from kernel_agent.sandbox import Call


def proven(call: Call) -> None:
    """Payload: `source` of a file, its `stem`, `function`, `shapes`, and `wrt`, a list of names or None. Sends `text`,
    the adjoint's module, with `green` and `verdict` of its comparison with the executor's derivative.
    """
    with answered(call), standin():
        function = _function(call)
        shapes, wrt = call.payload["shapes"], call.payload["wrt"]
        try:
            found = grad(function, wrt, shapes)
        except CannotDerive as error:
            raise InputError(error.message, remedy=error.remedy, line=error.line) from error
        verdict = check_tile(function, found, shapes=shapes, wrt=wrt)
        call.send({"text": found.source, "green": verdict.green, "verdict": str(verdict)})


def _function(call: Call) -> Any:
    """The function of the user's file. Raises InputError."""
    name = call.payload["function"]
    path = call.scratch / f"{call.payload['stem']}.py"
    path.write_text(call.payload["source"], encoding="utf-8")
    try:
        module = import_module(path, "kernel_agent_tile_file")
    except (Exception, SystemExit) as error:
        remedy = 'Importing the file must only define things; put the rest under `if __name__ == "__main__":`.'
        raise blame_file(error, path, "the file fails while it is imported", remedy) from error
    found = getattr(module, name, None)
    if not isinstance(found, JITFunction):
        known = [key for key, value in vars(module).items() if isinstance(value, JITFunction)]
        raise InputError(
            f"the file has no @triton.jit function `{name}`",
            remedy=f"It has {', '.join(known) or 'none'}.",
        )
    return found
