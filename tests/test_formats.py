"""Every byte of every preset, and the messages for names and shapes that do not exist."""

from __future__ import annotations

import dataclasses
from itertools import pairwise

import pytest

from turboquant.formats import ALIASES, MAX_HEAD_DIM, MIN_HEAD_DIM, PRESETS, KVFormat, check_head_dim, code_bytes

# name, K bits, V bits, {D: slot bytes}, {D: bits per element}, ratio against bf16 at D = 128.
TABLE = [
    ("turboquant2.5", 3, 2, {64: 44, 128: 84, 256: 164}, {64: 2.75, 128: 2.625, 256: 2.5625}, 6.10),
    ("turboquant3", 3, 3, {64: 52, 128: 100, 256: 196}, {64: 3.25, 128: 3.125, 256: 3.0625}, 5.12),
    ("turboquant3.5", 4, 3, {64: 60, 128: 116, 256: 228}, {64: 3.75, 128: 3.625, 256: 3.5625}, 4.41),
    ("turboquant4", 4, 4, {64: 68, 128: 132, 256: 260}, {64: 4.25, 128: 4.125, 256: 4.0625}, 3.88),
]
ALL = pytest.mark.parametrize("fmt", PRESETS.values(), ids=lambda fmt: fmt.name)


def test_presets_are_those_of_the_table():
    assert list(PRESETS) == [row[0] for row in TABLE]
    assert all(name == fmt.name for name, fmt in PRESETS.items())


@pytest.mark.parametrize("row", TABLE, ids=lambda row: row[0])
def test_bytes_of_the_table(row):
    name, key_bits, value_bits, slots, bits, ratio = row
    fmt = KVFormat.from_name(name)
    assert (fmt.key_bits, fmt.value_bits) == (key_bits, value_bits)
    assert float(name.removeprefix("turboquant")) == (key_bits + value_bits) / 2
    assert {dim: fmt.slot_bytes(dim) for dim in slots} == slots
    assert {dim: fmt.bits_per_element(dim) for dim in bits} == bits
    assert fmt.ratio_vs_bf16(128) == pytest.approx(ratio, abs=0.005)


@ALL
@pytest.mark.parametrize("dim", [16, 24, 72, 80, 96, 120, 192, 1024], ids="d{}".format)
def test_a_slot_is_codes_and_two_scales(fmt, dim):
    assert fmt.slot_bytes(dim) * 8 == dim * (fmt.key_bits + fmt.value_bits) + 2 * 16
    assert fmt.slot_bytes(dim) == fmt.key_code_bytes(dim) + fmt.value_code_bytes(dim) + 4


@pytest.mark.parametrize(
    ("dim", "bits", "expected"), [(8, 1, 1), (7, 1, 1), (9, 1, 2), (3, 3, 2), (8, 3, 3), (5, 8, 5), (0, 4, 0)]
)
def test_code_bytes_round_up(dim, bits, expected):
    assert code_bytes(dim, bits) == expected


@ALL
@pytest.mark.parametrize("dim", [64, 72, 80, 128, 256], ids="d{}".format)
@pytest.mark.parametrize("block_size", [1, 3, 16, 17, 48, 160, 1023], ids="block{}".format)
def test_planes_tile_the_page(fmt, dim, block_size):
    at = fmt.planes(block_size, dim)
    borders = [0, at.value_codes, at.key_scales, at.value_scales, at.end]
    per_token = [dim * fmt.key_bits // 8, dim * fmt.value_bits // 8, 2, 2]
    assert [after - before for before, after in pairwise(borders)] == [block_size * size for size in per_token]
    assert at.end == block_size * fmt.slot_bytes(dim)


@pytest.mark.parametrize(
    ("alias", "name"), [("turboquant25", "turboquant2.5"), ("turboquant35", "turboquant3.5")], ids=lambda x: x
)
def test_aliases(alias, name):
    assert KVFormat.from_name(alias) is PRESETS[name]
    assert ALIASES[alias] == name


def test_aliases_never_shadow_a_preset():
    assert not ALIASES.keys() & PRESETS.keys()
    assert set(ALIASES.values()) <= PRESETS.keys()


@pytest.mark.parametrize(
    ("wrong", "meant"),
    [
        ("turboqant3.5", "turboquant3.5"),
        ("turboquant_3.5", "turboquant3.5"),
        ("turboquant-4", "turboquant4"),
        ("turbquant25", "turboquant2.5"),
        ("TurboQuant3.5", "turboquant3.5"),
        ("TURBOQUANT4", "turboquant4"),
    ],
    ids=lambda x: x,
)
def test_an_unknown_name_is_guessed(wrong, meant):
    with pytest.raises(ValueError, match="unknown KV cache format") as error:
        KVFormat.from_name(wrong)
    message = str(error.value)
    assert repr(wrong) in message
    assert f"Did you mean {meant!r}?" in message
    assert all(name in message for name in PRESETS)


@pytest.mark.parametrize("wrong", ["fp8", "", "int4"], ids=repr)
def test_a_far_name_is_not_guessed(wrong):
    with pytest.raises(ValueError, match=r"Allowed: turboquant2\.5, turboquant3, turboquant3\.5, turboquant4") as error:
        KVFormat.from_name(wrong)
    assert "Did you mean" not in str(error.value)


@pytest.mark.parametrize("dim", [MIN_HEAD_DIM, 24, 64, 72, 80, MAX_HEAD_DIM], ids="d{}".format)
def test_a_head_dim_that_fits(dim):
    check_head_dim(dim)


@pytest.mark.parametrize("dim", [-64, 0, 8, 20, 63, 65, 100, 1028, 1032, 4096], ids="d{}".format)
def test_a_head_dim_that_does_not_fit(dim):
    for refused in (check_head_dim, PRESETS["turboquant3.5"].slot_bytes, PRESETS["turboquant3.5"].ratio_vs_bf16):
        with pytest.raises(ValueError, match=rf"head_dim {dim} cannot be stored: .*{MIN_HEAD_DIM} to {MAX_HEAD_DIM}"):
            refused(dim)


def test_formats_are_frozen_and_comparable():
    fmt = PRESETS["turboquant3.5"]
    with pytest.raises(dataclasses.FrozenInstanceError):
        fmt.key_bits = 3
    assert fmt == KVFormat("turboquant3.5", 4, 3)
    assert len({*PRESETS.values(), fmt}) == len(PRESETS)
