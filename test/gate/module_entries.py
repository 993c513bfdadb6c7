"""What children of these tests run."""

import resource
import sys

from kernel_agent.gate.foreign_attributes import Watched


def looked(call):
    """Look at all modules; the message tells how many pages that took."""
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    watched = Watched()
    assert watched.replaced() == watched.reset() == ()
    call.send({"pages": resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before})


def drawn(call):
    """Tell a number that nobody has set a seed for."""
    assert "numpy.random" in sys.modules, "imported once, by the server"
    call.send({"number": sys.modules["numpy.random"].random()})
