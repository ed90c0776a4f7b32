// AVX-512 F, BW, VL on 256-bit vectors; with VNNI a product is added in the same instruction. Look-ups are `vpermw`: 16
// int16 entries in a register. It looks at four bits of an index, so a smaller table stands there repeatedly and no code
// needs a mask.
#pragma once

#include "x86.h"

namespace tq {
namespace {

struct Isa : X86 {
    static constexpr int REGISTERS = 32;

    static vi madd(vi acc, vi a, vi b) {
#if defined(__AVX512VNNI__)
        return (vi)_mm256_dpwssd_epi32((__m256i)acc, (__m256i)a, (__m256i)b);
#else
        return acc + (vi)_mm256_madd_epi16((__m256i)a, (__m256i)b);
#endif
    }

    template <int BITS>
    struct Keys;
    template <int BITS>
    struct Values;

    static int32_t key_dimension(int bits, int32_t column) {
        return bits == 4 ? column / 32 * 32 + 2 * (column % 16) + column % 32 / 16 : column;
    }
    static int32_t value_dimension(int, int32_t column) { return column; }
    // Bytes from a step's first byte on that its loads touch.
    static int64_t key_load(int) { return 16; }
    static int64_t value_load(int) { return 8; }

   private:
    template <int BITS>
    static __m256i repeated(const int16_t* lut) {
        int16_t x[16];
        for (int i = 0; i < 16; i++) x[i] = lut[i % (1 << BITS)];
        return in_register(load_as<__m256i>(x));
    }

    // Which bytes of every 128-bit half go into each 16-bit lane, and how far that lane is shifted then. In pairs, the
    // half's bytes 0-7 are one token's and 8-15 the next one's.
    template <int BITS>
    struct Lanes {
        __m256i place, shifts;
        explicit Lanes(bool pairs) {
            uint8_t bytes[32];
            int16_t bits[16];
            for (int lane = 0; lane < 16; lane++) {
                int bit = BITS * (pairs ? lane / 2 : lane), byte = bit / 8 + (pairs && lane % 2 ? 8 : 0);
                bytes[2 * lane] = uint8_t(byte & 15);
                bytes[2 * lane + 1] = uint8_t((byte + 1) & 15);
                bits[lane] = int16_t(bit % 8);
            }
            place = in_register(load_as<__m256i>(bytes));
            shifts = in_register(load_as<__m256i>(bits));
        }
        __m256i codes(__m256i x) const { return _mm256_srlv_epi16(_mm256_shuffle_epi8(x, place), shifts); }
    };
};

template <int BITS>
struct Isa::Keys {
    static constexpr int PARTS = 1, N = 1;
    __m256i table;
    Lanes<BITS> lanes{false};
    explicit Keys(const int16_t* lut) : table(repeated<BITS>(lut)) {}
    template <int PART>
    void decode(const uint8_t* p, vi (&out)[N]) const {
        __m256i x = _mm256_broadcastsi128_si256(load_as<__m128i>(p));
        out[0] = (vi)_mm256_permutexvar_epi16(lanes.codes(x), table);
    }
};

template <>
struct Isa::Keys<4> {
    static constexpr int PARTS = 1, N = 2;
    __m256i table;
    explicit Keys(const int16_t* lut) : table(repeated<4>(lut)) {}
    template <int PART>
    void decode(const uint8_t* p, vi (&out)[N]) const {
        __m256i x = _mm256_cvtepu8_epi16(load_as<__m128i>(p));
        out[0] = (vi)_mm256_permutexvar_epi16(x, table);
        out[1] = (vi)_mm256_permutexvar_epi16(_mm256_srli_epi16(x, 4), table);
    }
};

template <int BITS>
struct Isa::Values {
    static constexpr int N = 1;
    __m256i table;
    Lanes<BITS> lanes{true};
    explicit Values(const int16_t* lut) : table(repeated<BITS>(lut)) {}
    void decode(const uint8_t* p, const uint8_t* q, vi (&out)[N]) const {
        __m256i x = _mm256_set1_epi64x(load_as<int64_t>(p));
        x = _mm256_mask_set1_epi64(x, 0xA, load_as<int64_t>(q));
        out[0] = (vi)_mm256_permutexvar_epi16(lanes.codes(x), table);
    }
};

}  // namespace
}  // namespace tq
