"""Backwards that misbehave, for Hypothesis: one to three deeds, at import, in the call or in a thread, and an answer.

Each is a backward section of `rmsnorm`, whose honest kernels stand above. Some deeds are harmless, so that a candidate
may well be green: what is asked is that every one has a verdict and leaves nothing.
"""

from __future__ import annotations

from hypothesis import strategies as st

_BYTES = "b'\\x00KAF1\\xff' * 999"
DEEDS = {
    "print 100 MB": "for _ in range(100): print('x' * (1 << 20))",
    "print 100 MB to stderr": "for _ in range(100): sys.stderr.write('y' * (1 << 20))",
    "print bytes": f"os.write(1, {_BYTES}); os.write(2, {_BYTES})",
    "print without end": "while True: print('again')",
    "loop": "while True: pass",
    "loop deaf to signals": "\n".join(
        (
            "for number in range(1, 32):",
            "    try: signal.signal(number, signal.SIG_IGN)",
            "    except OSError: pass",
            "while True: time.sleep(1)",
        )
    ),
    "sleep": "time.sleep(600)",
    "sleep for a moment": "time.sleep(0.2)",
    "wait for input": "sys.stdin.read()",
    "stop itself": "os.kill(os.getpid(), signal.SIGSTOP)",
    "stop its group": "os.kill(0, signal.SIGSTOP)",
    "stop its parent": "os.kill(os.getppid(), signal.SIGSTOP)",
    "kill its parent": "os.kill(os.getppid(), signal.SIGKILL)",
    "kill all": "os.kill(-1, signal.SIGKILL)",
    "alarm": "signal.alarm(1); time.sleep(600)",
    "abort": "os.abort()",
    "segfault": "ctypes.string_at(0)",
    "illegal instruction": "os.kill(os.getpid(), signal.SIGILL)",
    "leave with 0": "os._exit(0)",
    "leave with 137": "os._exit(137)",
    "exit with a text": "sys.exit('all cases agree')",
    "KeyboardInterrupt": "raise KeyboardInterrupt",
    "GeneratorExit": "raise GeneratorExit('done')",
    "own BaseException": "raise type('Rude', (BaseException,), {'__str__': lambda self: 1 / 0})",
    "name of an error too long": "raise type('E' * 100000, (Exception,), {})('m' * (1 << 22))",
    "error with halves of characters": "raise ValueError('\\ud800' * 9)",
    "errors in groups": "raise ValueError from RecursionError('again')",
    "MemoryError": "raise MemoryError",
    "recursion": "(lambda f: f(f))(lambda f: f(f))",
    "recursion without limit": "sys.setrecursionlimit(1 << 30); (lambda f: f(f))(lambda f: f(f))",
    "allocate": "hoard = [bytearray(b'1') * (64 << 20) for _ in range(9999)]",
    "allocate by torch": "hoard = [torch.ones(1 << 24) for _ in range(9999)]",
    "allocate a terabyte": "torch.ones(1 << 38)",
    "allocate in memory files": "hoard = [os.write(os.memfd_create('m'), b'1' * (64 << 20)) for _ in range(40)]",
    "fork": "os.fork()",
    "fork bomb": "while True: os.fork()",
    "fork and leave a sleeper": "if os.fork() == 0: time.sleep(600); os._exit(0)",
    "fork twice into a session": "\n".join(
        ("if os.fork() == 0:", "    os.setsid()", "    if os.fork() == 0: time.sleep(600)", "    os._exit(0)")
    ),
    "start a program": "subprocess.Popen(['sleep', '600'])",
    "start a program without a terminal": "subprocess.Popen(['nohup', 'sleep', '600'], start_new_session=True)",
    "threads": "for _ in range(200): threading.Thread(target=time.sleep, args=(600,)).start()",
    "a thread": "threading.Thread(target=time.sleep, args=(600,)).start()",
    "close everything": "os.closerange(0, 4096)",
    "close its output": "os.close(1); os.close(2)",
    "write to every descriptor": f"for fd in range(3, 64):\n    try: os.write(fd, {_BYTES})\n    except OSError: pass",
    "open many files": "files = [open(os.devnull) for _ in range(5000)]",
    "leave files": "for n in range(50): open(f'left{n}', 'w').write('x' * 1000)",
    "leave a large file": "open('large', 'wb').truncate(1 << 40)",
    "leave a full file": "open('full', 'wb').write(b'1' * (128 << 20))",
    "leave deep folders": "for _ in range(500): os.mkdir('d'); os.chdir('d')",
    "leave a locked folder": "os.makedirs('a/b'); os.chmod('a', 0)",
    "leave a pipe and a link": "os.mkfifo('p'); os.symlink('/', 'root')",
    "remove its folder": "shutil.rmtree(os.environ['HOME'])",
    "change folder": "os.chdir('/')",
    "write elsewhere": "open('/tmp/kernel-agent-was-here', 'w').write('x')",
    "empty the environment": "os.environ.clear()",
    "forget modules": "sys.modules.clear()",
    "no builtins": "__builtins__.clear() if isinstance(__builtins__, dict) else __builtins__.__dict__.clear()",
    "no output": "sys.stdout = sys.stderr = None",
    "trace": "sys.settrace(lambda *a: 1 / 0); sys.setprofile(lambda *a: 1 / 0)",
    "no more memory": "resource.setrlimit(resource.RLIMIT_AS, (1 << 20, 1 << 20))",
    "no more files": "resource.setrlimit(resource.RLIMIT_NOFILE, (0, 0))",
    "at exit": "import atexit; atexit.register(time.sleep, 600)",
    "finaliser": "keep = type('F', (), {'__del__': lambda self: time.sleep(600)})()",
    "collector off": "import gc; gc.disable(); gc.set_threshold(1)",
    "no JSON": "import json; json.dumps = json.loads = lambda *a, **k: '{'",
    "torch default": "torch.set_default_dtype(torch.float16); torch.manual_seed(0)",
    "torch threads": "torch.set_num_threads(64)",
    "inference mode": "torch.inference_mode().__enter__()",
    "nothing": "pass",
}
"""What a candidate may do, as Python statements."""

ANSWERS = {
    "honest": "by_kernel(saved, g)",
    "nothing": "None",
    "too few": "by_kernel(saved, g)[:1]",
    "too many": "by_kernel(saved, g) * 300",
    "a generator": "(t for t in by_kernel(saved, g))",
    "a mapping": "dict(enumerate(by_kernel(saved, g)))",
    "endless text": "('x' * (1 << 24), 'y')",
    "itself": "(lambda a: a.append(a) or a)([])",
    "a huge view": "(torch.zeros(1, device=g.device).expand(1 << 40), g)",
    "negative sizes": "(g.as_strided((2, 2), (0, 0)), g)",
    "meta": "(torch.empty(3, 4, device='meta'), g)",
    "sparse": "(g.to_sparse(), g)",
    "complex": "(g + 1j, g)",
    "bool": "(g > 0, g > 0)",
    "numbers": "(1.0, float('nan'))",
    "hostile attributes": "(type('T', (), {'__getattr__': lambda self, name: os._exit(3)})(),) * 2",
    "hostile repr": "(type('T', (), {'__repr__': lambda self: 'r' * (1 << 26)})(),) * 2",
    "hostile subclass": "tuple(t.as_subclass(type('S', (torch.Tensor,), {})) for t in by_kernel(saved, g))",
    "hostile equality": "(type('T', (), {'__eq__': lambda self, other: True, '__hash__': None})(),) * 2",
}
"""What it returns, as an expression."""

_IMPORTS = "import ctypes, os, resource, shutil, signal, subprocess, sys, threading, time"


def _indented(text: str, by: str) -> str:
    return "\n".join(by + line for line in text.split("\n"))


def section(at_import: tuple[str, ...], in_call: tuple[str, ...], aside: tuple[str, ...], answer: str) -> str:
    """A backward section that does these deeds, by name: at import, in `backward`, in a thread beside it."""
    lines = [_IMPORTS, ""]
    for number, name in enumerate(aside):
        lines += [f"def aside_{number}():", _indented(DEEDS[name], "    "), ""]
    lines += [DEEDS[name] for name in at_import]
    lines += ["", "", "def backward(saved, g):"]
    lines += [f"    threading.Thread(target=aside_{number}, daemon=True).start()" for number in range(len(aside))]
    lines += [_indented(DEEDS[name], "    ") for name in in_call]
    return "\n".join([*lines, f"    return {ANSWERS[answer]}", ""])


_names = st.sampled_from(sorted(DEEDS))
_few = st.lists(_names, max_size=2).map(tuple)
CANDIDATES: st.SearchStrategy[str] = st.builds(
    section,
    st.one_of(st.just(()), st.just(()), _few),
    _few,
    st.one_of(st.just(()), st.just(()), st.just(()), _few),
    st.sampled_from(("honest", *sorted(ANSWERS))),
)
"""The text of one backward section."""
