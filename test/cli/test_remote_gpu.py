"""The walk of docs/remote-gpu.md works as it is written: asked in one place, answered and delivered in another."""

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from cli_forwards import FORWARD, RIGHT

ROOT = Path(__file__).resolve().parents[2]
PAGE = (ROOT / "docs" / "remote-gpu.md").read_text()
LINES = re.findall(r"^    (here|there)\$ (.*?)(?:\s+# exit code (\d+))?$", PAGE, re.MULTILINE)


@pytest.fixture(scope="module")
def machines(tmp_path_factory):
    """Two folders for two machines: one has the forward, the other the answer."""
    found = {name: tmp_path_factory.mktemp(name) for name in ("here", "there")}
    (found["here"] / "square.py").write_text(FORWARD)
    (found["there"] / "0001.md").write_text(RIGHT)
    return found


@pytest.fixture(scope="module")
def walked(machines):
    """Every command of the page, run by a shell in the order of the page; what they printed."""
    environment = {k: v for k, v in os.environ.items() if not k.endswith("_API_KEY")}
    environment["PYTHONPATH"] = os.pathsep.join([str(ROOT), environment.get("PYTHONPATH", "")])
    outputs = []
    for machine, command, code in LINES:
        copied = re.fullmatch(r"scp (\S+) (here|there):", command)
        if copied:
            shutil.copy(machines[machine] / copied[1], machines[copied[2]])
            continue
        shell = f'kernel-agent() {{ "{sys.executable}" -m kernel_agent "$@"; }}\n{command}'
        done = subprocess.run(
            ["bash", "-c", shell], cwd=machines[machine], env=environment, capture_output=True, text=True, check=False
        )
        assert done.returncode == int(code or 0), f"{machine}$ {command}\n{done.stdout[-2000:]}{done.stderr}"
        outputs.append(done.stdout + done.stderr)
        if command.startswith("kernel-agent pack") and machine == "here":
            (machines["here"] / "square.py").unlink()  # from here on nothing may need it
    return outputs


def test_the_page_walks_the_whole_way():
    said = " ".join(command for _, command, _ in LINES)
    assert [word for word in ("--no-wait", "pack", "unpack", "replies/", "resume") if word not in said] == []


@pytest.mark.timeout(300)
def test_the_run_is_delivered_on_the_other_machine(walked, machines):
    (product,) = (machines["there"] / "generated").glob("square-*")
    assert (product / "certificate.json").is_file()


def test_what_was_delivered_comes_back(walked, machines):
    (product,) = (machines["here"] / "round-2").glob("square-*")
    assert (product / "certificate.json").is_file()
    assert "## Delivered" in walked[-1], "the trace of the run that came back tells its end"


def test_the_first_state_is_still_where_it_was(walked, machines):
    ((run,),) = [list((machines["here"] / "generated").glob("square-*/runs/2*"))]
    assert not (run / "replies" / "0001.md").exists()
