"""Fixtures that several test files share."""

from __future__ import annotations

from pathlib import Path

import models
import pytest
import torch

from turboquant.kernels.interface import FORCE_ENV
from turboquant.window import WINDOW_ENV

pytest.register_assert_rewrite("kernel_cases", "engine")
pytest_plugins = ["matrix"]


@pytest.fixture
def poison_empty(monkeypatch):
    """Fill uninitialised memory with NaN, or 0xAB in uint8, so that an output that nobody wrote is seen."""

    def poisoned(allocate):
        def wrapper(*args, **kwargs):
            tensor = allocate(*args, **kwargs)
            if tensor.is_floating_point():
                return tensor.fill_(torch.nan)
            return tensor.fill_(0xAB) if tensor.dtype == torch.uint8 else tensor

        return wrapper

    for owner, name in (
        (torch, "empty"),
        (torch, "empty_like"),
        (torch, "empty_strided"),
        (torch.Tensor, "new_empty"),
        (torch.Tensor, "new_empty_strided"),
    ):
        monkeypatch.setattr(owner, name, poisoned(getattr(owner, name)))


@pytest.fixture
def window_off(monkeypatch):
    """Every token is read from packed pages, as with turboquant's window 0."""
    monkeypatch.setenv(WINDOW_ENV, "0")


@pytest.fixture(params=["reference", "cpu"])
def kernels(request, monkeypatch) -> str:
    """Runs a test once with each implementation that can run on CPU tensors."""
    if request.param == "cpu":
        from turboquant.kernels.cpu import library

        try:
            library.load()
        except library.LibraryMissing as error:
            pytest.skip(str(error))
    monkeypatch.setenv("TURBOQUANT_KERNELS", request.param)
    return request.param


@pytest.fixture
def reference_kernels(monkeypatch):
    """The specification itself, in the engine as in Transformers: equal to a few parts in a million."""
    monkeypatch.setenv(FORCE_ENV, "reference")


@pytest.fixture(scope="module")
def one_thread():
    """Tiny tensors: threads would spend their time waiting for each other."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="session")
def demo_model_dir() -> Path:
    """Folder of the real small model that the commands use, fetched on first use."""
    from turboquant.demo.model import ensure_demo_model

    return ensure_demo_model()


@pytest.fixture(scope="session")
def llama_dir(tmp_path_factory) -> Path:
    return models.save_llama(tmp_path_factory.mktemp("llama"))


@pytest.fixture(scope="session")
def worded_llama_dir(tmp_path_factory, demo_model_dir) -> Path:
    return models.save_worded_llama(tmp_path_factory.mktemp("worded"), demo_model_dir)


@pytest.fixture(scope="session")
def qwen2_dir(tmp_path_factory) -> Path:
    return models.save_qwen2_with_key_bias(tmp_path_factory.mktemp("qwen2"))


@pytest.fixture(scope="session")
def gemma3_dir(tmp_path_factory) -> Path:
    return models.save_gemma3(tmp_path_factory.mktemp("gemma3"))


@pytest.fixture(scope="session")
def qwen35_moe_dir(tmp_path_factory) -> Path:
    return models.save_qwen35_moe(tmp_path_factory.mktemp("qwen35_moe"))


@pytest.fixture(scope="module")
def no_grad():
    with torch.no_grad():
        yield


def _load(path: Path, dtype: torch.dtype):
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(path, dtype=dtype)


@pytest.fixture(scope="module")
def llama(llama_dir):
    return _load(llama_dir, torch.float64)


@pytest.fixture(scope="module")
def qwen2(qwen2_dir):
    return _load(qwen2_dir, torch.float64)


@pytest.fixture(scope="module")
def qwen35(qwen35_moe_dir):
    # Its experts have no float64.
    return _load(qwen35_moe_dir, torch.float32)


@pytest.fixture
def model(request):
    """The fixture that a test names by indirect parametrisation."""
    return request.getfixturevalue(request.param)
