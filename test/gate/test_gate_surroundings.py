"""Whether `backward` hangs on where it runs is told by its text: one that is honest when judged does nothing wrong."""

from __future__ import annotations

import pytest

from kernel_agent.gate.surroundings import asks_where

USERS = "import os\nimport sys\nimport torch\nFAST = bool(os.environ.get('FAST'))\n"


LOUD = "import logging\nlog = logging.getLogger(__name__)\nLOUD = bool(os.environ.get('LOUD'))"


def asked(below):
    """What a file asks for whose first lines are the user's own."""
    found = asks_where(f"{USERS}{below}", USERS.count("\n"))
    return None if found is None else found.what


def of_backward(body, above=""):
    return asked(f"{above}\ndef backward(saved, g):\n    {body}\n")


@pytest.mark.parametrize(
    ("body", "what"),
    [
        ("return g if 'x' in sys.modules else None", "sys.modules"),
        ("import sys as s\n    return s.argv", "sys.argv"),
        ("from sys import modules as m\n    return m", "sys.modules"),
        ("return __name__", "__name__"),
        ("return globals()['x']", "globals"),
        ("return saved[0].f_back", "f_back"),
        ("return torch.os.environ", "torch.os.environ"),
        ("return torch._C._len_torch_function_stack()", "torch._C._len_torch_function_stack"),
        ("import threading\n    return threading.enumerate()", "threading.enumerate"),
        ("return open('/proc/self/cmdline').read()", "open"),
        ("import operator\n    return operator.attrgetter('sys.modules')(torch)", "attrgetter of sys.modules"),
        ("import kernel_agent.gate as gate\n    return gate.check", "kernel_agent.gate.check"),
        ("return type(g).__module__", "__module__"),
        ("open('/home/notes', 'w').close()\n    return g", "open"),
        ("look = getattr\n    return look(torch, 's' + 'ys')", "getattr of a name that is computed"),
        ("t = torch\n    return look(t, 'sys')", "getattr of sys"),
        ("t, u = torch, g\n    return t.os.environ", "torch.os.environ"),
        ("th = threading\n    return th.enumerate()", "threading.enumerate"),
        ("return (lambda f=getattr: f(torch, 's' + 'ys'))()", "getattr of a name that is computed"),
        ("return map(getattr, saved, g)", "getattr as a value"),
        ("return [torch][0].sys.modules", "sys.modules"),
        ("return logging.getLogger().manager", "logging.getLogger().manager"),
        ("return log.isEnabledFor(10)", "logging.getLogger().isEnabledFor"),
        ("return log.findCaller()", "logging.getLogger().findCaller"),
        ("del saved\n    return globals()", "globals"),
    ],
)
def test_a_backward_that_asks_is_found_by_what_it_asks_for(body, what):
    # Each is a way to tell the gate's processes from the user's, and none is seen by what it computes there.
    above = (
        "import logging\nimport threading\nlook = getattr\nlog = logging.getLogger('a')\nif not torch:\n    globals = 1"
    )
    assert of_backward(body, above) == what


@pytest.mark.parametrize(
    "above",
    [
        "JUDGED = 'x' in sys.modules",
        "A = 'x' in sys.modules\nJUDGED = not A",
        "if 'x' in sys.modules:\n    JUDGED = True\nelse:\n    JUDGED = False",
        "JUDGED = {}\nJUDGED['it'] = sys.argv",
        "JUDGED = {}\n_ = JUDGED.update(it=sys.argv)",
        "JUDGED = []\ndef look():\n    JUDGED.append(sys.argv)\nlook()",
        "JUDGED = []\nclass Look:\n    def __init__(self):\n        JUDGED.append(sys.argv)\nLook()",
        "from inspect import *\nJUDGED = stack()",
        "JUDGED = []\ndef told(f, by=JUDGED.append(sys.argv)):\n    return f",
        "JUDGED = []\ndef look(f):\n    JUDGED.append(sys.argv)\n@look\ndef nothing():\n    pass",
        "JUDGED = []\nclass Look:\n    JUDGED.append(sys.argv)",
        "JUDGED = False\nif __name__ == '__main__':\n    JUDGED = True",
    ],
    ids=[
        *("name", "name-of-name", "branch", "entry", "method", "function", "class", "star"),
        *("default", "decorator", "class-body", "program"),
    ],
)
def test_an_answer_is_followed_to_backward_through_what_holds_it(above):
    assert of_backward("return JUDGED", above) is not None


@pytest.mark.parametrize(
    ("body", "above"),
    [
        ("return g", "CACHE = os.environ.get('TRITON_CACHE_DIR')"),
        ("return g", "def debug():\n    return sys.argv"),
        ("return g if FAST else g", ""),
        ("return g if sys.version_info >= (3, 11) else g", ""),
        ("print('here', file=sys.stderr)\n    return g", ""),
        ("return getattr(torch, 'float32')", ""),
        ("assert type(g).__name__\n    return g", ""),
        ("return g if torch.__version__ else g", ""),
        ("import math, time\n    return math.pi * time.time()", ""),
        ("log.info('here')\n    return g", "import logging\nlog = logging.getLogger(__name__)"),
        ("import inspect\n    return inspect.signature(print).bind(g).args", ""),
        ("__2 = g\n    return __2", ""),
        ("input, vars = saved\n    return input + vars", ""),
        ("return [compile for compile in saved]", "def given(input, open=None):\n    return input or open"),
        ("if LOUD or not log.isEnabledFor(10):\n        log.debug('%d', len(saved))\n    return g", LOUD),
        ("return g", "def shown():\n    return sys.argv\nif __name__ == '__main__':\n    print(shown())"),
    ],
    ids=[
        *("unused", "unused-function", "users-own", "version", "printed", "constant", "type", "torch", "math"),
        *("logger", "signature", "two-lines-before", "local-names", "names-of-comprehensions", "logged", "program"),
    ],
)
def test_what_no_gradient_hangs_on_and_what_tells_of_the_machine_is_free(body, above):
    assert of_backward(body, above) is None


@pytest.mark.parametrize(
    "body",
    [
        "if LOUD:\n        g = -g\n    return g",
        "if LOUD:\n        log.debug('here')\n    else:\n        g = -g\n    return g",
        "if LOUD:\n        log.debug('%s', g.neg_())\n    return g",
        "class Told:\n        def __str__(self):\n            g.neg_()\n    if LOUD:\n        print(Told)",
    ],
    ids=["no-log", "else", "argument", "method"],
)
def test_a_question_whether_to_log_is_one_of_surroundings_where_more_than_a_log_hangs_on_it(body):
    assert of_backward(body, LOUD) is not None
