"""Takes the inventory of all modules when it is imported, as the server of all processes does after all others.

NumPy's generator is among them, which a look at what a candidate leaves behind would import in each child. Children do
not draw alike for that: each begins with a seed of its own, as Python sees to for its own generator.
"""

import os

import numpy.random

from kernel_agent.gate.known_modules import take_first

os.register_at_fork(after_in_child=numpy.random.seed)
take_first()
