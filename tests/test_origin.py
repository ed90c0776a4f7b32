"""Other distributions that install a `turboquant`, too, are named; ours, and innocent ones, are not."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from importlib import metadata
from pathlib import Path

import pytest

from turboquant._origin import DISTRIBUTION, MixedInstallationError, check_origin, other_owners

OURS = ["turboquant/__init__.py", "turboquant/cache.py", "turboquant_toolkit-0.1.0.dist-info/METADATA"]


def install(
    site: Path, name: str, files: list[str] | None, top_level: str | None = None, info: str = "dist-info"
) -> None:
    """A distribution as pip leaves it: METADATA, RECORD and, from setuptools only, top_level.txt."""
    folder = site / f"{name.replace('-', '_')}-1.0.{info}"
    folder.mkdir(parents=True)
    (folder / ("METADATA" if info == "dist-info" else "PKG-INFO")).write_text(
        f"Metadata-Version: 2.1\nName: {name}\nVersion: 1.0\n"
    )
    if files is not None:
        (folder / "RECORD").write_text("".join(f"{file},,\n" for file in files))
    if top_level is not None:
        (folder / "top_level.txt").write_text(top_level)


@pytest.fixture
def site(tmp_path, monkeypatch):
    """A site-packages folder that is all that importlib.metadata sees."""
    real = metadata.MetadataPathFinder.find_distributions

    def only_here(context=metadata.DistributionFinder.Context()):  # noqa: B008
        return real(metadata.DistributionFinder.Context(name=context.name, path=[str(tmp_path)]))

    monkeypatch.setattr(metadata.MetadataPathFinder, "find_distributions", staticmethod(only_here))
    return tmp_path


RIVALS = {
    "setuptools": ("tq-serving", ["turboquant/__init__.py", "turboquant/core.py"], "turboquant\n"),
    "same-name": ("turboquant", ["turboquant/__init__.py"], None),
    "hyphen-no-top-level": ("turbo-quant", ["turboquant/__init__.py"], None),
    "underscore-no-top-level": ("turbo_quant", ["turboquant/__init__.py"], None),
    "dot-no-top-level": ("turbo.quant", ["turboquant/__init__.py"], None),
    "case-no-top-level": ("TurboQuant-Torch", ["turboquant/__init__.py"], None),
    "several-packages": ("kv-tools", ["kv/__init__.py", "turboquant/x.py"], "kv\nturboquant\n"),
    "only-a-subpackage": ("turboquant-extras", ["turboquant/extras/__init__.py"], "turboquant\n"),
}


@pytest.mark.parametrize(("name", "files", "top_level"), RIVALS.values(), ids=RIVALS.keys())
def test_a_rival_is_named(site, name, files, top_level):
    install(site, DISTRIBUTION, OURS, "turboquant\n")
    install(site, name, files, top_level)
    assert other_owners() == [name]
    with pytest.raises(
        MixedInstallationError, match=rf"also installed by: {name}\. .*pip uninstall -y {name} "
    ) as error:
        check_origin()
    assert isinstance(error.value, ImportError)
    assert str(error.value).endswith(f"pip install {DISTRIBUTION}")


def test_two_rivals_are_both_named(site):
    install(site, "turboquant-b", ["turboquant/__init__.py"], "turboquant\n")
    install(site, "turboquant-a", ["turboquant/__init__.py"], "turboquant\n")
    with pytest.raises(MixedInstallationError, match=r"installed by: turboquant-a, turboquant-b\. "):
        check_origin()


INNOCENT = {
    "nothing-else": None,
    "another-package": ("numpy", ["numpy/__init__.py"], "numpy\n"),
    "a-name-that-contains-ours": ("turboquant-plus", ["turboquant_plus/__init__.py"], "turboquant_plus\n"),
    "a-longer-package-name": ("turboquant-vllm", ["turboquant_vllm/__init__.py"], None),
    "a-deeper-folder": ("zoo", ["zoo/turboquant/__init__.py"], "zoo\n"),
    "no-record": ("turboquant-demo", None, None),
    "a-script-of-that-name": ("turboquant-cli", ["../../../bin/turboquant", "tqcli/__init__.py"], "tqcli\n"),
}


@pytest.mark.parametrize("other", INNOCENT.values(), ids=INNOCENT.keys())
def test_innocent_others_pass(site, other):
    install(site, DISTRIBUTION, OURS, "turboquant\n")
    if other is not None:
        install(site, *other)
    assert other_owners() == []
    check_origin()


@pytest.mark.parametrize("spelling", [DISTRIBUTION, "TurboQuant-Toolkit", "turboquant_toolkit", "turboquant.toolkit"])
def test_we_are_ourselves_in_every_spelling(site, spelling):
    """Names of distributions are compared without case, and with -, _ and . as the same."""
    install(site, spelling, OURS, "turboquant\n")
    check_origin()


def test_a_checkout_and_its_installation_are_both_ours(site):
    """An editable installation: dist-info in site-packages and egg-info beside the sources."""
    install(site, DISTRIBUTION, ["__editable___turboquant_toolkit_finder.py"], "turboquant\n")
    (site / "turboquant_toolkit.egg-info").mkdir()
    (site / "turboquant_toolkit.egg-info" / "PKG-INFO").write_text(f"Name: {DISTRIBUTION}\nVersion: 0.1.0\n")
    (site / "turboquant_toolkit.egg-info" / "SOURCES.txt").write_text("turboquant/__init__.py\n")
    assert other_owners() == []


def test_an_empty_dist_info_is_no_reason_to_fail(site):
    """What an interrupted pip leaves behind."""
    (site / "broken-1.0.dist-info").mkdir()
    (site / "~urboquant-1.0.dist-info").mkdir()
    install(site, DISTRIBUTION, OURS, "turboquant\n")
    assert other_owners() == []


def python(code: str, *extra_path: Path) -> subprocess.CompletedProcess:
    path = os.pathsep.join(map(str, (*extra_path, Path(__file__).parents[1])))
    return subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, env={**os.environ, "PYTHONPATH": path}, cwd="/"
    )


def test_importing_beside_a_rival_fails_at_once(tmp_path):
    """In a process of its own: before torch is imported, and by an error that says what to do."""
    install(tmp_path, "turboquant-rival", ["turboquant/__init__.py"], "turboquant\n")
    result = python("import turboquant", tmp_path)
    assert result.returncode == 1
    assert "MixedInstallationError" in result.stderr
    assert f"pip uninstall -y turboquant-rival {DISTRIBUTION}" in result.stderr
    code = "import sys\ntry:\n    import turboquant\nexcept ImportError:\n    print('torch' in sys.modules)"
    assert python(code, tmp_path).stdout == "False\n"


def test_the_check_is_cheap():
    check_origin()
    times = []
    for _ in range(5):
        begin = time.perf_counter()
        check_origin()
        times.append(1e3 * (time.perf_counter() - begin))
    count = sum(1 for _ in metadata.distributions())
    print(f"\ncheck_origin: {min(times):.1f} ms for {count} distributions")
    # Twice that for a slow disc would still not be felt beside the import of torch.
    assert min(times) < max(100, 0.5 * count)
