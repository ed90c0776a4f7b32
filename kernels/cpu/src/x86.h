// What AVX2 and AVX-512 share: 256-bit vectors. AVX-512 keeps this width: on the CPU measured, 512-bit instructions do no
// more per cycle, and a sum over twice the lanes costs more.
#pragma once

#include <immintrin.h>

#include "bits.h"

namespace tq {
namespace {

struct X86 {
    static constexpr int W = 8;  // float lanes; a vector of int16 has 2 W
    typedef float vf __attribute__((vector_size(4 * W)));
    typedef int32_t vi __attribute__((vector_size(4 * W)));

    static vi load(const int16_t* p) { return load_as<vi>(p); }
    static vf larger(vf a, vf b) { return (vf)_mm256_max_ps((__m256)a, (__m256)b); }
    static float largest(vf x) {
        __m128 y = _mm_max_ps(_mm256_castps256_ps128((__m256)x), _mm256_extractf128_ps((__m256)x, 1));
        y = _mm_max_ps(y, _mm_movehl_ps(y, y));
        return _mm_cvtss_f32(_mm_max_ss(y, _mm_movehdup_ps(y)));
    }
    static float sum(vf x) {
        __m128 y = _mm_add_ps(_mm256_castps256_ps128((__m256)x), _mm256_extractf128_ps((__m256)x, 1));
        y = _mm_add_ps(y, _mm_movehl_ps(y, y));
        return _mm_cvtss_f32(_mm_add_ss(y, _mm_movehdup_ps(y)));
    }
    static vi round(vf x) { return (vi)_mm256_cvtps_epi32((__m256)x); }
    static void store16(int16_t* out, vi a, vi b) {
        store_as(out, _mm256_permute4x64_epi64(_mm256_packs_epi32((__m256i)a, (__m256i)b), 0xD8));
    }
    static vf load_f16(const uint16_t* p) { return (vf)_mm256_cvtph_ps(load_as<__m128i>(p)); }
    static uint16_t to_f16(float x) { return uint16_t(_cvtss_sh(x, 0)); }

    // Sums of each of eight accumulators, integers or floats: [RB, TB] to rows of out
    template <int RB, int TB, class V, class T>
    static void reduce(const V (&acc)[RB][TB], T* out, int64_t stride) {
        static_assert(RB * TB == 8, "eight sums at a time");
        __m256i sums = (__m256i)sum8(&acc[0][0]);
        __m128i first = _mm256_castsi256_si128(sums), last = _mm256_extracti128_si256(sums, 1);
        if constexpr (TB == 8) {
            store_as(out, sums);
        } else if constexpr (TB == 4) {
            store_as(out, first);
            store_as(out + stride, last);
        } else if constexpr (TB == 2) {
            _mm_storel_epi64((__m128i*)out, first);
            _mm_storeh_pd((double*)(out + stride), _mm_castsi128_pd(first));
            _mm_storel_epi64((__m128i*)(out + 2 * stride), last);
            _mm_storeh_pd((double*)(out + 3 * stride), _mm_castsi128_pd(last));
        } else {
            store_column(out, first, stride);
            store_column(out + 4 * stride, last, stride);
        }
    }

   private:
    template <class T>
    static void store_column(T* out, __m128i x, int64_t stride) {
        store_as(out, _mm_cvtsi128_si32(x));
        store_as(out + stride, _mm_extract_epi32(x, 1));
        store_as(out + 2 * stride, _mm_extract_epi32(x, 2));
        store_as(out + 3 * stride, _mm_extract_epi32(x, 3));
    }

    // Not hadd, which takes two shuffles: blends bring together what one shuffle can.
    template <class V>
    static V sum8(const V* a) {
        V b[4], c[2];
        _Pragma("GCC unroll 4") for (int i = 0; i < 4; i++) {
            __m256i x = (__m256i)a[2 * i], y = (__m256i)a[2 * i + 1];
            b[i] = (V)_mm256_blend_epi32(x, y, 0xAA) +
                   (V)_mm256_shuffle_epi32(_mm256_blend_epi32(y, x, 0xAA), 0xB1);
        }
        _Pragma("GCC unroll 2") for (int i = 0; i < 2; i++) {
            __m256i x = (__m256i)b[2 * i], y = (__m256i)b[2 * i + 1];
            c[i] = (V)_mm256_blend_epi32(x, y, 0xCC) +
                   (V)_mm256_shuffle_epi32(_mm256_blend_epi32(y, x, 0xCC), 0x4E);
        }
        __m256i x = (__m256i)c[0], y = (__m256i)c[1];
        return (V)_mm256_permute2x128_si256(x, y, 0x21) + (V)_mm256_blend_epi32(x, y, 0xF0);
    }
};

}  // namespace
}  // namespace tq
