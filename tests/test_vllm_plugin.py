"""The plugin without an engine: versions, registration, options, and what is refused before anything loads."""

from __future__ import annotations

import subprocess
import sys
from types import SimpleNamespace

import pytest
import torch
from packaging.version import Version

vllm = pytest.importorskip("vllm")

from turboquant.formats import ALIASES, PRESETS  # noqa: E402
from turboquant.vllm import owner, plugin, routing  # noqa: E402
from turboquant.vllm.metadata import token_positions  # noqa: E402
from turboquant.vllm.options import Options  # noqa: E402


@pytest.mark.matrix(feature="vLLM {version}", shape="any", verdict="refused")
@pytest.mark.parametrize("version", ["0.31.2", "0.34.0", "1.0"])
def test_other_versions_are_named(version):
    with pytest.raises(plugin.UnsupportedVllmError, match=rf"vLLM {version} .*0\.32\.x, 0\.33\.x"):
        plugin.hooks_module(Version(version))


def test_an_unsupported_version_is_logged_and_registers_nothing(monkeypatch, caplog):
    monkeypatch.setattr(plugin, "_registered", False)
    monkeypatch.setattr(plugin, "vllm_version", lambda: Version("0.99.0"))
    monkeypatch.setattr(plugin.logger, "propagate", True)
    monkeypatch.setattr(plugin, "import_module", lambda name: pytest.fail(f"{name} was imported"))
    with caplog.at_level("ERROR", logger=plugin.logger.name):
        plugin.register()
    assert "vLLM 0.99.0 is not supported" in caplog.text


def test_every_name_is_a_cache_dtype_after_registering_twice():
    from vllm.config import CacheConfig
    from vllm.utils.torch_utils import STR_DTYPE_TO_TORCH_DTYPE

    plugin.register()
    plugin.register()
    for name in [*PRESETS, *ALIASES]:
        assert CacheConfig(cache_dtype=name).cache_dtype == name
        assert STR_DTYPE_TO_TORCH_DTYPE[name] is torch.uint8
    with pytest.raises(ValueError, match=r"turboquant3\.5"):
        CacheConfig(cache_dtype="turboquant3.6")


@pytest.mark.matrix(feature="command line of {module}", shape="any")
@pytest.mark.parametrize("module", ["vllm.benchmarks.latency", "vllm.benchmarks.startup"])
def test_parsers_built_before_general_plugins_accept_the_names(module):
    code = f"""
from importlib import import_module
from vllm.utils.argparse_utils import FlexibleArgumentParser
parser = FlexibleArgumentParser()
import_module({module!r}).add_cli_args(parser)
print("accepted", parser.parse_args(["--kv-cache-dtype", "turboquant3.5"]).kv_cache_dtype)
"""
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=300, check=False)
    assert "accepted turboquant3.5" in run.stdout, run.stderr[-2000:]


def selector_config(**asked) -> SimpleNamespace:
    return SimpleNamespace(kv_cache_dtype="turboquant3.5", head_size=64, attn_type="decoder", **asked)


@pytest.mark.matrix(feature="attention with {field}", shape="any", verdict="refused")
@pytest.mark.parametrize("field", routing.UNSUPPORTED)
def test_unsupported_attention_is_refused_by_name(field):
    with pytest.raises(NotImplementedError) as error:
        routing.check_supported("turboquant3.5", selector_config(**{field: True}))
    assert routing.UNSUPPORTED[field] in str(error.value)


def test_a_layer_under_construction_is_named():
    class Asking:
        def __init__(self, prefix: str) -> None:
            routing.check_supported("turboquant3.5", selector_config(use_mla=True))

    with pytest.raises(NotImplementedError, match=r"layer model\.layers\.3\.self_attn: .*MLA"):
        Asking(prefix="model.layers.3.self_attn")


@pytest.mark.matrix(feature="{attn_type} attention", shape="any", verdict="refused")
@pytest.mark.parametrize("attn_type", ["encoder", "encoder_only", "encoder_decoder"])
def test_encoders_are_refused(attn_type):
    config = selector_config()
    config.attn_type = attn_type
    with pytest.raises(NotImplementedError, match=attn_type):
        routing.check_supported("turboquant3.5", config)


def test_layers_of_other_dtypes_keep_the_platforms_choice():
    from vllm.v1.attention import selector

    plugin.register()
    config = selector_config()
    assert selector._cached_get_attn_backend(None, config).get_name() == "TURBOQUANT3_5"
    config.kv_cache_dtype = "turboquant25"
    assert selector._cached_get_attn_backend(None, config).get_name() == "TURBOQUANT2_5"


class Impl:
    kv_cache_dtype = "turboquant3.5"

    def __init__(self, *unsupported: str) -> None:
        self.unsupported = list(unsupported)


class Layer(torch.nn.Module):
    def __init__(self, impl: Impl, name: str) -> None:
        super().__init__()
        self.impl, self.layer_name = impl, name


def test_a_layer_is_refused_by_name_as_it_joins_its_model():
    impl = Impl("ALiBi")
    owner.expect(impl, {})
    parent = torch.nn.Module()
    with pytest.raises(NotImplementedError, match=r"layer model\.layers\.7\.attn: .*ALiBi"):
        parent.attn = Layer(impl, "model.layers.7.attn")


def test_the_owner_of_an_impl_is_found():
    impl, parent = Impl(), torch.nn.Module()
    context = {}
    owner.expect(impl, context)
    with pytest.raises(RuntimeError, match="no attention layer"):
        owner.find(impl)
    layer = context["attn"] = Layer(impl, "attn")
    assert owner.find(impl) == owner.OwnedLayer("attn", layer, None)
    parent.attn = layer
    assert owner.find(impl).parent is parent


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"windw": 3}, "windw"),
        ({"prefill_reads": "exactly"}, "prefill_reads.*'exact' or 'packed'"),
        ({"key_mean": 1}, "key_mean"),
    ],
)
def test_wrong_options_are_named(given, message):
    with pytest.raises(ValueError, match=message):
        Options.load({"turboquant": given})


def test_options_from_the_environment_give_way_to_the_config(monkeypatch):
    monkeypatch.setenv("TURBOQUANT_PREFILL_READS", "packed")
    assert Options.load({}).prefill_reads == "packed"
    assert Options.load({"turboquant": {"prefill_reads": "exact"}}).prefill_reads == "exact"
    assert Options.load(None) == Options(prefill_reads="packed")


def test_token_positions_of_a_mixed_batch():
    query_start_loc = torch.tensor([0, 1, 4, 4, 6], dtype=torch.int32)
    seq_lens = torch.tensor([10, 3, 5, 7], dtype=torch.int32)
    assert token_positions(query_start_loc, seq_lens, 6).tolist() == [9, 0, 1, 2, 5, 6]
