// Portable C++ for the primitives, four lanes wide. Also the specification of what the other instruction sets do.
#pragma once

#include "bits.h"

namespace tq {
namespace {

struct Isa {
    static constexpr int W = 4;           // float lanes; a vector of int16 has 2 W
    static constexpr int REGISTERS = 16;  // of vectors
    typedef float vf __attribute__((vector_size(4 * W)));
    typedef int32_t vi __attribute__((vector_size(4 * W)));

    // A step of K: PARTS times N vectors of int16 centroids from the codes at p.
    template <int BITS>
    struct Keys {
        static constexpr int PARTS = 1, N = 1;
        const int16_t* lut;
        explicit Keys(const int16_t* table) : lut(table) {}
        template <int PART>
        void decode(const uint8_t* p, vi (&out)[N]) const {
            int16_t x[2 * W];
            for (int i = 0; i < 2 * W; i++) x[i] = lut[code_at<BITS>(p, i)];
            out[0] = load_as<vi>(x);
        }
    };

    // A step of V: N vectors of pairs, the codes at p and q interleaved.
    template <int BITS>
    struct Values {
        static constexpr int N = 2;
        const int16_t* lut;
        explicit Values(const int16_t* table) : lut(table) {}
        void decode(const uint8_t* p, const uint8_t* q, vi (&out)[N]) const {
            int16_t x[4 * W];
            for (int i = 0; i < 2 * W; i++) {
                x[2 * i] = lut[code_at<BITS>(p, i)];
                x[2 * i + 1] = lut[code_at<BITS>(q, i)];
            }
            out[0] = load_as<vi>(x);
            out[1] = load_as<vi>(x + 2 * W);
        }
    };

    // Which dimension a column of decoded K or V holds, and how far a step's loads go.
    static int32_t key_dimension(int, int32_t column) { return column; }
    static int32_t value_dimension(int, int32_t column) { return column; }
    static int64_t key_load(int bits) { return bits; }
    static int64_t value_load(int bits) { return bits; }

    static vi load(const int16_t* p) { return load_as<vi>(p); }

    // acc + the sums of neighbouring products of int16
    static vi madd(vi acc, vi a, vi b) {
        int16_t x[2 * W], y[2 * W];
        __builtin_memcpy(x, &a, sizeof x);
        __builtin_memcpy(y, &b, sizeof y);
        for (int i = 0; i < W; i++) acc[i] += x[2 * i] * y[2 * i] + x[2 * i + 1] * y[2 * i + 1];
        return acc;
    }

    // Sums of each accumulator, integers or floats: [rows, tokens] to out
    template <int RB, int TB, class V, class T>
    static void reduce(const V (&acc)[RB][TB], T* out, int64_t stride) {
        for (int r = 0; r < RB; r++)
            for (int t = 0; t < TB; t++) out[r * stride + t] = acc[r][t][0] + acc[r][t][1] + acc[r][t][2] + acc[r][t][3];
    }

    static vf larger(vf a, vf b) {
        for (int i = 0; i < W; i++) a[i] = a[i] > b[i] ? a[i] : b[i];
        return a;
    }
    static float largest(vf x) {
        float a = x[0] > x[1] ? x[0] : x[1], b = x[2] > x[3] ? x[2] : x[3];
        return a > b ? a : b;
    }
    static float sum(vf x) { return (x[0] + x[1]) + (x[2] + x[3]); }
    static vi round(vf x) {
        vf shifted = x + 12582912.0f;
        return (vi)shifted - 0x4B400000;
    }

    static void store16(int16_t* out, vi a, vi b) {
        for (int i = 0; i < W; i++) {
            out[i] = int16_t(a[i]);
            out[W + i] = int16_t(b[i]);
        }
    }

    static vf load_f16(const uint16_t* p) {
        vf x;
        for (int i = 0; i < W; i++) x[i] = half_to_float(p[i]);
        return x;
    }
    static uint16_t to_f16(float x) { return float_to_half(x); }
};

}  // namespace
}  // namespace tq
