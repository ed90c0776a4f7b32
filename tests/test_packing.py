"""Packing to the bit: the documented order, its inverse, and views that hide nothing and share nothing."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from turboquant.formats import PRESETS, code_bytes
from turboquant.packing import look_up, pack_codes, split_page, unpack_codes

SETTINGS = settings(max_examples=60, deadline=None, derandomize=True)
BITS = st.integers(1, 8)
LEADING = st.lists(st.integers(0, 3), max_size=3).map(tuple)
ALL = pytest.mark.parametrize("fmt", PRESETS.values(), ids=lambda fmt: fmt.name)


def random_codes(shape: tuple[int, ...], bits: int, seed: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(0, 2**bits, shape, generator=generator, dtype=torch.uint8)


def pack_by_hand(codes: list[int], bits: int) -> list[int]:
    """The docstring taken literally: one long number with code i at bit i · bits, cut into bytes, lowest first."""
    stream = sum(code << (i * bits) for i, code in enumerate(codes))
    return list(stream.to_bytes(code_bytes(len(codes), bits), "little"))


@given(bits=BITS, dim=st.integers(1, 70), leading=LEADING, seed=st.integers(0, 2**31))
@SETTINGS
def test_round_trip_is_exact(bits, dim, leading, seed):
    codes = random_codes((*leading, dim), bits, seed)
    packed = pack_codes(codes, bits)
    assert packed.dtype == torch.uint8
    assert packed.shape == (*leading, code_bytes(dim, bits))
    assert torch.equal(unpack_codes(packed, bits, dim), codes)


@given(bits=BITS, dim=st.integers(1, 70), seed=st.integers(0, 2**31))
@SETTINGS
def test_the_order_is_a_little_endian_bit_stream(bits, dim, seed):
    codes = random_codes((dim,), bits, seed)
    assert pack_codes(codes, bits).tolist() == pack_by_hand(codes.tolist(), bits)


@given(bits=BITS, dim=st.integers(1, 70), leading=LEADING, seed=st.integers(0, 2**31))
@SETTINGS
def test_look_up_is_the_table_at_the_codes(bits, dim, leading, seed):
    packed = pack_codes(random_codes((*leading, dim), bits, seed), bits)
    table = torch.randn(2**bits, generator=torch.Generator().manual_seed(seed))
    assert torch.equal(look_up(packed, bits, dim, table), table[unpack_codes(packed, bits, dim).long()])


@given(bits=BITS, dim=st.integers(1, 40), data=st.data())
@SETTINGS
def test_any_bytes_unpack_to_codes_in_range(bits, dim, data):
    """A page that nobody wrote holds anything."""
    size = code_bytes(dim, bits)
    packed = torch.tensor(data.draw(st.lists(st.integers(0, 255), min_size=size, max_size=size)), dtype=torch.uint8)
    codes = unpack_codes(packed, bits, dim)
    assert int(codes.max()) < 2**bits
    repacked = pack_codes(codes, bits)
    assert torch.equal(repacked[:-1], packed[:-1])
    used = dim * bits - 8 * (size - 1)
    assert int(repacked[-1]) == int(packed[-1]) & (2**used - 1)


@pytest.mark.parametrize(
    ("bits", "codes", "golden"),
    [
        (1, [1, 0, 1, 1, 0, 0, 0, 1], [0b10001101]),
        (1, [1, 1, 1], [0b00000111]),
        (2, [3, 0, 1, 2], [0b10_01_00_11]),
        (3, [1, 2, 3, 4, 5, 6, 7, 0], [0b11_010_001, 0b0_101_100_0, 0b000_111_11]),
        (3, [7], [0b00000_111]),
        (4, [0x1, 0xA, 0xF, 0x0], [0xA1, 0x0F]),
        (5, [31, 0, 31], [0b000_11111, 0b0_11111_00]),
        (6, [1, 2, 3, 63], [0b10_000001, 0b0011_0000, 0b111111_00]),
        (7, [127, 1], [0xFF, 0x00]),
        (8, [0, 255, 7], [0, 255, 7]),
    ],
    ids=lambda x: f"b{x}" if isinstance(x, int) else "",
)
def test_golden_bytes(bits, codes, golden):
    assert pack_codes(torch.tensor(codes, dtype=torch.uint8), bits).tolist() == golden
    assert unpack_codes(torch.tensor(golden, dtype=torch.uint8), bits, len(codes)).tolist() == codes


@pytest.mark.parametrize("bits", range(1, 9), ids="b{}".format)
def test_strided_codes_pack_like_contiguous_ones(bits):
    codes = random_codes((5, 24, 3), bits, seed=1).transpose(1, 2)
    packed = pack_codes(codes, bits)
    assert torch.equal(packed, pack_codes(codes.contiguous(), bits))
    strided = torch.empty(5, packed.shape[-1], 3, dtype=torch.uint8).transpose(1, 2).copy_(packed)
    assert torch.equal(unpack_codes(strided, bits, 24), codes)
    table = torch.arange(2**bits, dtype=torch.float64)
    assert torch.equal(look_up(strided, bits, 24, table), codes.double())


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16, torch.float16], ids=str)
def test_look_up_keeps_the_table_s_dtype(dtype):
    packed = pack_codes(random_codes((3, 16), 3, seed=2), 3)
    assert look_up(packed, 3, 16, torch.linspace(-1, 1, 8, dtype=dtype)).dtype == dtype


@pytest.mark.parametrize("dtype", [torch.int8, torch.int64, torch.float32, torch.bool], ids=str)
def test_codes_are_uint8(dtype):
    codes = torch.zeros(2, 16).to(dtype)
    for refused in (
        lambda: pack_codes(codes, 4),
        lambda: unpack_codes(codes, 4, 32),
        lambda: look_up(codes, 5, 25, torch.zeros(32)),
    ):
        with pytest.raises(TypeError, match=rf"uint8, got {dtype}"):
            refused()


@pytest.mark.parametrize("bits", [-1, 0, 9, 16], ids="b{}".format)
def test_bits_out_of_range(bits):
    codes = torch.zeros(16, dtype=torch.uint8)
    with pytest.raises(ValueError, match=f"bits {bits} is not supported: allowed are 1 to 8"):
        pack_codes(codes, bits)
    with pytest.raises(ValueError, match=f"bits {bits} is not supported"):
        unpack_codes(codes, bits, 16)


@pytest.mark.parametrize(("size", "bits", "dim", "expected"), [(5, 4, 16, 8), (7, 3, 16, 6), (0, 2, 8, 2)])
def test_unpacking_the_wrong_number_of_bytes(size, bits, dim, expected):
    with pytest.raises(ValueError, match=f"{size} bytes cannot hold {dim} codes of {bits} bits: expected {expected}"):
        unpack_codes(torch.zeros(3, size, dtype=torch.uint8), bits, dim)


def test_looking_up_the_wrong_number_of_bytes():
    """As with unpack_codes: a shorter or longer answer than `dim` would go unnoticed."""
    with pytest.raises(ValueError, match="10 bytes cannot hold 16 codes of 4 bits"):
        look_up(torch.zeros(3, 10, dtype=torch.uint8), 4, 16, torch.zeros(16))


def contiguous(blocks: int, heads: int, block_size: int, slot: int) -> torch.Tensor:
    return torch.zeros(blocks, heads, block_size, slot, dtype=torch.uint8)


def heads_outermost(blocks: int, heads: int, block_size: int, slot: int) -> torch.Tensor:
    return contiguous(heads, blocks, block_size, slot).transpose(0, 1)


def every_second_block(blocks: int, heads: int, block_size: int, slot: int) -> torch.Tensor:
    return contiguous(2 * blocks, heads, block_size, slot)[1::2]


def padded_pitch(blocks: int, heads: int, block_size: int, slot: int) -> torch.Tensor:
    pitch = heads * block_size * slot + 64
    flat = torch.zeros(32 + blocks * pitch, dtype=torch.uint8)
    strides = (pitch, block_size * slot, slot, 1)
    return flat.as_strided((blocks, heads, block_size, slot), strides, storage_offset=32)


LAYOUTS = pytest.mark.parametrize(
    "layout", [contiguous, heads_outermost, every_second_block, padded_pitch], ids=lambda f: f.__name__
)


@ALL
@LAYOUTS
@pytest.mark.parametrize(("block_size", "dim"), [(16, 64), (3, 80), (17, 128), (160, 96)], ids=str)
def test_planes_cover_each_page_once_and_nothing_else(fmt, layout, block_size, dim):
    """Write a different mark through every plane: each byte of the pages has one, bytes around them have none."""
    pages = layout(3, 2, block_size, fmt.slot_bytes(dim))
    views = split_page(pages, fmt, dim)
    assert views.key_codes.shape == (3, 2, block_size, fmt.key_code_bytes(dim))
    assert views.value_codes.shape == (3, 2, block_size, fmt.value_code_bytes(dim))
    assert views.key_scales.shape == views.value_scales.shape == (3, 2, block_size)
    assert views.key_scales.dtype == views.value_scales.dtype == torch.float16
    plane_bytes = [plane.numel() * plane.element_size() for plane in views]
    assert sum(plane_bytes) == pages.numel()
    for mark, plane in enumerate(views, start=1):
        if plane.dtype == torch.float16:
            plane.fill_(torch.tensor([mark, mark], dtype=torch.uint8).view(torch.float16).item())
        else:
            plane.fill_(mark)
    assert torch.bincount(pages.flatten().int(), minlength=5).tolist() == [0, *plane_bytes]
    storage = torch.empty(0, dtype=torch.uint8).set_(pages.untyped_storage())
    assert int((storage != 0).sum()) == pages.numel()


@ALL
@LAYOUTS
def test_a_token_s_planes_lie_where_the_format_says(fmt, layout):
    block_size, dim = 5, 64
    pages = layout(4, 3, block_size, fmt.slot_bytes(dim))
    pages.copy_(random_codes(pages.shape, 8, seed=3))
    views, at = split_page(pages, fmt, dim), fmt.planes(block_size, dim)
    for block, head, token in [(0, 0, 0), (3, 2, 4), (1, 2, 3)]:
        page = pages[block, head].flatten()
        size = fmt.key_code_bytes(dim)
        assert torch.equal(views.key_codes[block, head, token], page[token * size :][:size])
        size = fmt.value_code_bytes(dim)
        assert torch.equal(views.value_codes[block, head, token], page[at.value_codes + token * size :][:size])
        for plane, begin in ((views.key_scales, at.key_scales), (views.value_scales, at.value_scales)):
            raw = plane[block, head, token].view(torch.int16).item() & 0xFFFF
            low, high = page[begin + 2 * token :][:2].tolist()
            assert raw == low + 256 * high


@pytest.mark.parametrize("name", ["turboquant2.5", "turboquant3.5"])
@pytest.mark.parametrize("dim", [24, 72], ids="d{}".format)
@pytest.mark.parametrize("block_size", [16, 17], ids="block{}".format)
def test_a_page_with_an_odd_number_of_code_bytes_works_or_is_refused_by_name(name, block_size, dim):
    """Codes of 9 or 27 bytes a token times an odd block size put fp16 scales at an odd address."""
    fmt = PRESETS[name]
    pages = contiguous(2, 2, block_size, fmt.slot_bytes(dim))
    try:
        views = split_page(pages, fmt, dim)
    except ValueError as error:
        assert str(block_size) in str(error)
    else:
        views.value_scales.fill_(1.0)
        assert int((pages != 0).sum()) == 4 * block_size


@ALL
def test_an_empty_pool(fmt):
    views = split_page(contiguous(0, 2, 16, fmt.slot_bytes(64)), fmt, 64)
    assert views.key_codes.shape[:3] == views.key_scales.shape == (0, 2, 16)


@ALL
@pytest.mark.parametrize("off_by", [-4, -1, 1, 28])
def test_pages_with_another_slot(fmt, off_by):
    slot = fmt.slot_bytes(64) + off_by
    with pytest.raises(ValueError, match=rf"slots of {slot} bytes; {fmt.name} at head_dim 64 needs {slot - off_by}"):
        split_page(contiguous(2, 2, 16, slot), fmt, 64)


@pytest.mark.parametrize(
    "spoil",
    [
        lambda blocks, heads, tokens, slot: contiguous(blocks, tokens, heads, slot).transpose(1, 2),
        lambda blocks, heads, tokens, slot: contiguous(blocks, heads, tokens, slot + 4)[..., :slot],
        lambda blocks, heads, tokens, slot: contiguous(blocks, heads, 2 * tokens, slot)[:, :, ::2],
        lambda blocks, heads, tokens, slot: contiguous(blocks, heads, slot, tokens).transpose(2, 3),
    ],
    ids=["token-major", "padded-slots", "every-second-token", "transposed"],
)
def test_pages_that_are_not_contiguous_inside(spoil):
    fmt = PRESETS["turboquant3.5"]
    with pytest.raises(ValueError, match=r"a page must be contiguous .*inner strides \(60, 1\).*got \("):
        split_page(spoil(3, 2, 16, 60), fmt, 64)
