// Float helpers over the instruction set's vectors: loads of any dtype, exp2, the rotation. Included after `Isa`.
#pragma once

#include "abi.h"

namespace tq {
namespace {

using vf = Isa::vf;
using vi = Isa::vi;
constexpr int W = Isa::W;
constexpr float FLOAT_MAX = 3.402823466e38f;
constexpr float LOG2_E = 1.44269504088896f;

// Loops of a fixed, small count must vanish before registers are given out, or arrays of vectors end up in memory.
#define UNROLL _Pragma("GCC unroll 16")

template <class T, int M, int N>
inline void clear(T (&x)[M][N]) {
    UNROLL for (int i = 0; i < M; i++) {
        UNROLL for (int j = 0; j < N; j++) x[i][j] = T{};
    }
}

#if defined(__clang__)
inline vf shuffled(vf x, vi from) {  // folds to one shuffle where `from` is constant
    vf y;
    for (int i = 0; i < W; i++) y[i] = x[from[i]];
    return y;
}
#else
inline vf shuffled(vf x, vi from) { return __builtin_shuffle(x, from); }
#endif

inline vf splat(float x) { return x - vf{}; }
inline float larger(float a, float b) { return a > b ? a : b; }
inline int32_t nearest(float x) {  // |x| below 2**22
    float shifted = x + 12582912.0f;
    return load_as<int32_t>(&shifted) - 0x4B400000;
}
inline vf loadf(const float* p) { return load_as<vf>(p); }
inline vf largest(vf a, vf b) { return Isa::larger(a, b); }
inline vf absolute(vf x) { return (vf)((vi)x & 0x7FFFFFFF); }

inline float sum(vf x) { return Isa::sum(x); }
inline float maximum(vf x) { return Isa::largest(x); }

// 2**x for x <= 126; zero below -126, and for -infinity.
inline vf exp2v(vf x) {
    vf clamped = largest(x, splat(-126.0f));
    vf shifted = clamped + 12582912.0f;  // the nearest integer in the lowest bits
    vf f = clamped - (shifted - 12582912.0f);
    vf y = splat(1.3333558e-3f) * f + 9.6181291e-3f;
    y = y * f + 5.5504109e-2f;
    y = y * f + 2.4022651e-1f;
    y = y * f + 6.9314718e-1f;
    y = y * f + 1.0f;
    vf scaled = (vf)((vi)y + ((vi)shifted << 23));
    return (vf)((vi)scaled & (x >= splat(-126.0f)));
}
inline float exp2s(float x) { return exp2v(splat(x))[0]; }

// All of x [n], n a multiple of W? Only then is every product with zero a zero.
inline bool is_finite(const float* x, int64_t n) {
    vf zeros = {};
    for (int64_t i = 0; i < n; i += W) zeros += loadf(x + i) * 0.0f;
    return sum(zeros) == 0.0f;
}

// One row [n] of any dtype to float; returns whether all of it is finite.
inline bool load_row(const void* data, int64_t dtype, int64_t at, int64_t n, float* out) {
    vf zeros = {};
    int64_t i = 0;
    float rest = 0;
    if (dtype == F32) {
        const float* p = static_cast<const float*>(data) + at;
        for (; i + W <= n; i += W) {
            vf x = loadf(p + i);
            zeros += x * 0.0f;
            store_as(out + i, x);
        }
        for (; i < n; i++) rest += (out[i] = p[i]) * 0.0f;
    } else {
        const uint16_t* p = static_cast<const uint16_t*>(data) + at;
        typedef uint16_t vh __attribute__((vector_size(2 * W)));
        for (; i + W <= n; i += W) {
            vf x = dtype == BF16 ? (vf)(__builtin_convertvector(load_as<vh>(p + i), vi) << 16) : Isa::load_f16(p + i);
            zeros += x * 0.0f;
            store_as(out + i, x);
        }
        for (; i < n; i++) rest += (out[i] = dtype == BF16 ? bf16_to_float(p[i]) : half_to_float(p[i])) * 0.0f;
    }
    return sum(zeros) + rest == 0.0f;
}

inline void store_row(const Vectors& x, int64_t at, int64_t n, const float* row) {
    if (x.dtype == F32) {
        float* p = static_cast<float*>(x.data) + at;
        for (int64_t i = 0; i < n; i++) p[i] = row[i];
    } else {
        uint16_t* p = static_cast<uint16_t*>(x.data) + at;
        for (int64_t i = 0; i < n; i++) p[i] = x.dtype == BF16 ? float_to_bf16(row[i]) : Isa::to_f16(row[i]);
    }
}

// Within a vector: lanes i and i + HALF to their sum and difference.
template <int HALF>
inline vf butterfly_lanes(vf x) {
    vi other, sign;
    for (int i = 0; i < W; i++) {
        other[i] = i ^ HALF;
        sign[i] = i & HALF ? INT32_MIN : 0;
    }
    return shuffled(x, other) + (vf)((vi)x ^ sign);
}

inline void butterfly(float* x, int64_t n) {
    for (int64_t i = 0; i < n; i += W) {
        vf y = butterfly_lanes<2>(butterfly_lanes<1>(loadf(x + i)));
        if constexpr (W == 8) y = butterfly_lanes<4>(y);
        store_as(x + i, y);
    }
    for (int64_t half = W; half < n; half *= 2)
        for (int64_t i = 0; i < n; i += 2 * half)
            for (int64_t j = i; j < i + half; j += W) {
                vf a = loadf(x + j), b = loadf(x + j + half);
                store_as(x + j, a + b);
                store_as(x + j + half, a - b);
            }
}

// out = R·x
inline void rotate(const Layer& layer, const float* x, float* out) {
    int64_t dim = layer.dim;
    if (layer.signs) {
        for (int64_t i = 0; i < dim; i++) out[i] = x[i] * layer.signs[i];
        return butterfly(out, dim);
    }
    for (int64_t i = 0; i < dim; i++) {
        vf acc = {};
        float rest = 0;
        int64_t j = 0;
        for (; j + W <= dim; j += W) acc += loadf(layer.rotation + i * dim + j) * loadf(x + j);
        for (; j < dim; j++) rest += layer.rotation[i * dim + j] * x[j];
        out[i] = sum(acc) + rest;
    }
}

// out = Rᵀ·x; x is destroyed
inline void rotate_back(const Layer& layer, float* x, float* out) {
    int64_t dim = layer.dim;
    if (layer.signs) {
        butterfly(x, dim);
        for (int64_t i = 0; i < dim; i++) out[i] = x[i] * layer.signs[i];
        return;
    }
    for (int64_t i = 0; i < dim; i++) out[i] = 0;
    for (int64_t i = 0; i < dim; i++)
        for (int64_t j = 0; j < dim; j++) out[j] += layer.rotation[i * dim + j] * x[i];
}

}  // namespace
}  // namespace tq
