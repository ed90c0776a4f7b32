// AVX2, FMA and F16C. Look-ups are shuffles of a register: 16 entries a byte (pshufb) or 8 entries an int32 (vpermd).
#pragma once

#include "x86.h"

namespace tq {
namespace {

struct Isa : X86 {
    static constexpr int REGISTERS = 16;

    static vi madd(vi acc, vi a, vi b) { return acc + (vi)_mm256_madd_epi16((__m256i)a, (__m256i)b); }

    template <int BITS>
    struct Keys;  // 3 bits; 4 bits below
    template <int BITS>
    struct Values;  // 2 and 3 bits; 4 bits below

    static int32_t key_dimension(int bits, int32_t column) {
        if (bits == 4) {
            // Even codes lie in the low nibbles. Unpacking goes by 128-bit halves: bytes 0-7 and 16-23 come first.
            int32_t i = column % 64, half = i % 32 / 16, lane = i % 16 / 8;
            return column / 64 * 64 + 2 * (16 * lane + 8 * half + i % 8) + i / 32;
        }
        return column / 16 * 16 + column % 2 * 8 + column % 16 / 2;
    }
    static int32_t value_dimension(int bits, int32_t column) {
        if (bits != 4) return column;
        int32_t i = column % 16;
        return column / 16 * 16 + 8 * (i / 8) + 2 * (i % 4) + i % 8 / 4;
    }
    // Bytes from a step's first byte on that its loads touch.
    static int64_t key_load(int bits) { return bits == 4 ? 32 : bits + 4; }
    static int64_t value_load(int bits) { return bits == 4 ? 8 : 4; }

   private:
    struct Bytes {  // int16 centroids as two tables of bytes
        __m256i low, high;
        explicit Bytes(const int16_t* lut) {
            alignas(16) uint8_t bytes[2][16];
            for (int i = 0; i < 16; i++) {
                bytes[0][i] = uint8_t(lut[i] & 0xFF);
                bytes[1][i] = uint8_t((lut[i] >> 8) & 0xFF);
            }
            low = in_register(_mm256_broadcastsi128_si256(load_as<__m128i>(bytes[0])));
            high = in_register(_mm256_broadcastsi128_si256(load_as<__m128i>(bytes[1])));
        }
        void look_up(__m256i codes, vi& first, vi& second) const {
            __m256i l = _mm256_shuffle_epi8(low, codes), h = _mm256_shuffle_epi8(high, codes);
            first = (vi)_mm256_unpacklo_epi8(l, h);
            second = (vi)_mm256_unpackhi_epi8(l, h);
        }
    };

    // vpermd looks at three bits of an index: a table of four stands there twice, and no mask is needed.
    template <int BITS>
    struct Words {
        __m256i low, high, shifts;
        explicit Words(const int16_t* lut) {
            int32_t x[3][8];
            for (int i = 0; i < 8; i++) {
                x[0][i] = uint16_t(lut[i % (1 << BITS)]);
                x[1][i] = int32_t(uint32_t(x[0][i]) << 16);
                x[2][i] = i * BITS;
            }
            low = in_register(load_as<__m256i>(x[0]));
            high = in_register(load_as<__m256i>(x[1]));
            shifts = in_register(load_as<__m256i>(x[2]));
        }
        // Eight codes each at p and q, interleaved
        vi look_up(const uint8_t* p, const uint8_t* q) const {
            __m256i x = _mm256_srlv_epi32(_mm256_set1_epi32(load_as<int32_t>(p)), shifts);
            __m256i y = _mm256_srlv_epi32(_mm256_set1_epi32(load_as<int32_t>(q)), shifts);
            return (vi)_mm256_or_si256(_mm256_permutevar8x32_epi32(low, x), _mm256_permutevar8x32_epi32(high, y));
        }
    };
};

template <int BITS>
struct Isa::Keys {
    static constexpr int PARTS = 1, N = 1;
    Words<BITS> words;
    explicit Keys(const int16_t* lut) : words(lut) {}
    template <int PART>
    void decode(const uint8_t* p, vi (&out)[N]) const {
        out[0] = words.look_up(p, p + BITS);
    }
};

template <>
struct Isa::Keys<4> {
    static constexpr int PARTS = 2, N = 2;
    Bytes bytes;
    __m256i mask = in_register(_mm256_set1_epi8(15));
    explicit Keys(const int16_t* lut) : bytes(lut) {}
    template <int PART>
    void decode(const uint8_t* p, vi (&out)[N]) const {
        __m256i x = load_as<__m256i>(p);
        bytes.look_up(_mm256_and_si256(PART ? _mm256_srli_epi16(x, 4) : x, mask), out[0], out[1]);
    }
};

template <int BITS>
struct Isa::Values {
    static constexpr int N = 1;
    Words<BITS> words;
    explicit Values(const int16_t* lut) : words(lut) {}
    void decode(const uint8_t* p, const uint8_t* q, vi (&out)[N]) const { out[0] = words.look_up(p, q); }
};

template <>
struct Isa::Values<4> {
    static constexpr int N = 2;
    Bytes bytes;
    __m256i mask = in_register(_mm256_set1_epi8(15)), shifts = in_register(_mm256_set_epi64x(4, 4, 0, 0));
    explicit Values(const int16_t* lut) : bytes(lut) {}
    void decode(const uint8_t* p, const uint8_t* q, vi (&out)[N]) const {
        __m128i x = _mm_unpacklo_epi8(_mm_loadl_epi64((const __m128i*)p), _mm_loadl_epi64((const __m128i*)q));
        __m256i both = _mm256_srlv_epi64(_mm256_broadcastsi128_si256(x), shifts);
        bytes.look_up(_mm256_and_si256(both, mask), out[0], out[1]);
    }
};

}  // namespace
}  // namespace tq
