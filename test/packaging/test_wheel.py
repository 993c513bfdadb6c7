"""A built wheel works outside the checkout: it carries pairs, index, prompts and recorded runs."""

import os
import shutil
import subprocess
import sys
import venv
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(scope="module")
def wheel(tmp_path_factory):
    pytest.importorskip("build", reason="building a wheel needs the dev dependencies")
    target = tmp_path_factory.mktemp("dist")
    command = [sys.executable, "-m", "build", "--wheel", "--no-isolation", "--outdir", str(target), str(ROOT)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    (built,) = target.glob("*.whl")
    return built


@pytest.fixture(scope="module")
def installed(wheel, tmp_path_factory):
    """A python of an empty venv with the wheel in it; dependencies are borrowed from this environment by path."""
    home = tmp_path_factory.mktemp("away")
    venv.create(home / "venv", with_pip=False)
    python = home / "venv" / "bin" / "python"
    site = subprocess.run(
        [python, "-c", "import sysconfig; print(sysconfig.get_path('purelib'))"],
        capture_output=True,
        text=True,
        check=True,
    ).stdout.strip()
    zipfile.ZipFile(wheel).extractall(site)
    shutil.copy(ROOT / "examples" / "layernorm.py", home / "layernorm.py")

    def run(*arguments):
        # PYTHONPATH does not process .pth files, so an editable install of the checkout stays out of reach.
        places = [site, *(place for place in sys.path if place and not Path(place).is_relative_to(ROOT / "test"))]
        path = os.pathsep.join(place for place in places if Path(place) != ROOT)
        borrowed = {**os.environ, "PYTHONPATH": path, "OMP_NUM_THREADS": "1"}
        return subprocess.run([python, *arguments], capture_output=True, text=True, check=False, cwd=home, env=borrowed)

    return run


def test_wheel_installs_no_package_called_datasets(wheel):
    # A regular package of that name would shadow the well-known library.
    tops = {name.split("/")[0] for name in zipfile.ZipFile(wheel).namelist()}
    assert {name for name in tops if not name.endswith(".dist-info")} == {"kernel_agent", "rag"}


def test_wheel_is_imported_from_its_own_place(installed):
    # Guards the other tests of this file: they would pass vacuously if the checkout were imported.
    done = installed("-c", "import kernel_agent; print(kernel_agent.__file__)")
    assert str(ROOT) not in done.stdout


def test_wheel_carries_pairs_index_and_recorded_runs(installed):
    code = (
        "from kernel_agent.data import index_path, logs_root, pairs_root; "
        "print(len(list(pairs_root().glob('*/*.py'))), index_path().exists(), len(list(logs_root().iterdir())))"
    )
    done = installed("-c", code)
    pairs, index, logs = done.stdout.split()
    assert int(pairs) >= 30, done.stderr
    assert index == "True"
    assert int(logs) >= 2


@pytest.mark.slow
def test_wheel_runs_the_demo(installed, tmp_path):
    done = installed(
        "-m", "kernel_agent", "--file-path", "layernorm.py", "--topk", "4", "--out", str(tmp_path), "--json"
    )
    assert done.returncode == 0, done.stderr
    assert '"GREEN"' in done.stdout
    assert len(list(tmp_path.glob("layernorm-*/layernorm_backward.py"))) == 1
