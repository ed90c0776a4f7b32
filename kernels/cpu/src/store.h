// Tokens to packed codes: see `kernels/coding.py` for the equations. Norms are float64, as there.
#pragma once

#include "floats.h"
#include "kernel.h"
#include "mean.h"

extern "C" double sqrt(double);

namespace tq {
namespace {

constexpr float HALF_MAX = 65504.0f;

inline int64_t store_scratch(const StoreArgs& a) {
    return round_up(a.layer.dim * 8 * int64_t(sizeof(float)), 64) + 64;
}

inline double squares(const float* x, int64_t n) {
    typedef double v4 __attribute__((vector_size(32)));
    typedef float f4 __attribute__((vector_size(16)));
    v4 acc = {};
    int64_t i = 0;
    for (; i + 4 <= n; i += 4) {
        v4 y = __builtin_convertvector(load_as<f4>(x + i), v4);
        acc += y * y;
    }
    double total = acc[0] + acc[1] + (acc[2] + acc[3]);
    for (; i < n; i++) total += double(x[i]) * double(x[i]);
    return total;
}

// cos and sin of every pair at a position, scaled: [pairs] each
inline void turn_at(const Layer& layer, int64_t position, float* cosine, float* sine) {
    int64_t tile = position / TILE;
    const double* local = layer.local + position % TILE * layer.num_pairs * 2;
    for (int64_t i = 0; i < layer.num_pairs; i++) {
        double c, n, u = local[2 * i], v = local[2 * i + 1];
        if (tile < layer.table_tiles) {
            tile_angle(layer, tile, i, c, n);
            cosine[i] = float((c * u - n * v) * layer.attention_scaling);
            sine[i] = float((n * u + c * v) * layer.attention_scaling);
        } else {
            double angle = double(position) * layer.inv_freq[i];
            cosine[i] = float(cos(angle) * layer.attention_scaling);
            sine[i] = float(sin(angle) * layer.attention_scaling);
        }
    }
}

// Subtracts RoPE_p(μ) where that makes the key shorter; returns whether the mean was kept.
inline bool take_out_mean(const Layer& layer, int64_t head, const float* cosine, const float* sine, float* key,
                          float* centred) {
    const float* mean = layer.key_mean + head * layer.dim;
    int64_t pairs = layer.num_pairs;
    for (int64_t i = 0; i < pairs; i++) {
        int64_t a = layer.interleaved ? 2 * i : i, b = layer.interleaved ? 2 * i + 1 : i + pairs;
        centred[a] = key[a] - (rounded_product(mean[a], cosine[i]) - rounded_product(mean[b], sine[i]));
        centred[b] = key[b] - (rounded_product(mean[b], cosine[i]) + rounded_product(mean[a], sine[i]));
    }
    for (int64_t d = 2 * pairs; d < layer.dim; d++) centred[d] = key[d] - mean[d];
    if (float(sqrt(squares(key, layer.dim))) <= float(sqrt(squares(centred, layer.dim)))) return true;
    __builtin_memcpy(key, centred, layer.dim * sizeof(float));
    return false;
}

// Codes of `rotated`, whose length is `norm`, and the squares of their centroids.
inline double choose(const float* rotated, float norm, int64_t dim, const float* centroids, int bits, uint8_t* codes) {
    int count = 1 << bits;
    float bounds[16];
    for (int i = 0; i + 1 < count; i++) bounds[i] = (centroids[i + 1] + centroids[i]) / 2;
    int64_t i = 0;
    for (; i + W <= dim; i += W) {
        vf unit = loadf(rotated + i) / norm;
        vi code = {};
        for (int j = 0; j + 1 < count; j++) code -= unit > splat(bounds[j]);
        for (int j = 0; j < W; j++) codes[i + j] = uint8_t(code[j]);
    }
    for (; i < dim; i++) {
        int code = 0;
        for (int j = 0; j + 1 < count; j++) code += rotated[i] / norm > bounds[j];
        codes[i] = uint8_t(code);
    }
    double parts[4] = {};  // a sum of its own for each, or every addition would wait for the one before
    for (i = 0; i < dim; i++) parts[i % 4] += double(centroids[codes[i]]) * double(centroids[codes[i]]);
    return (parts[0] + parts[1]) + (parts[2] + parts[3]);
}

// Eight codes are `bits` bytes: gaps between neighbours close in pairs, then in fours, then in eights.
inline void pack(const uint8_t* codes, int64_t dim, int bits, uint8_t* out) {
    const uint64_t two = (uint64_t(1) << 2 * bits) - 1, four = (uint64_t(1) << 4 * bits) - 1;
    const uint64_t pairs = two * 0x0001000100010001u, fours = four * 0x0000000100000001u;
    for (int64_t i = 0; i < dim; i += 8, out += bits) {
        uint64_t x = load_as<uint64_t>(codes + i);
        x = (x | x >> (8 - bits)) & pairs;
        x = (x | x >> (16 - 2 * bits)) & fours;
        x |= x >> (32 - 4 * bits);
        for (int j = 0; j < bits; j++) out[j] = uint8_t(x >> 8 * j);
    }
}

// One vector to its codes and fp16 scale (bits).
inline uint16_t encode(const Layer& layer, const float* x, const float* centroids, int bits, float* rotated,
                       uint8_t* codes, uint8_t* out) {
    rotate(layer, x, rotated);
    float norm = float(sqrt(squares(rotated, layer.dim)));
    bool finite = norm <= FLOAT_MAX;
    if (!finite || norm == 0) __builtin_memset(rotated, 0, layer.dim * sizeof(float));
    double length = choose(rotated, finite && norm > 0 ? norm : 1.0f, layer.dim, centroids, bits, codes);
    pack(codes, layer.dim, bits, out);
    if (!finite) return 0x7E00;
    float scale = norm / float(sqrt(length));
    return Isa::to_f16(scale < HALF_MAX ? scale : HALF_MAX);
}

inline void store(const StoreArgs& a, int64_t begin, int64_t end, void* scratch) {
    const Layer& layer = a.layer;
    int64_t dim = layer.dim, size = a.pages.block_size;
    float* memory = static_cast<float*>(scratch);
    float *x = memory, *centred = x + dim, *rotated = centred + dim, *cosine = rotated + dim, *sine = cosine + dim;
    uint8_t* codes = reinterpret_cast<uint8_t*>(sine + dim);
    int64_t key_bytes = a.pages.value_codes / size, value_bytes = (a.pages.key_scales - a.pages.value_codes) / size;
    for (int64_t i = begin; i < end; i++) {
        int64_t slot = a.slots[i];
        if (slot < 0) continue;
        if (layer.key_mean && layer.num_pairs) turn_at(layer, a.positions[i], cosine, sine);
        int64_t offset = slot % size;
        for (int64_t head = 0; head < a.pages.num_kv_heads; head++) {
            uint8_t* page = a.pages.data + slot / size * a.pages.block_stride + head * a.pages.head_stride;
            load_row(a.key.data, a.key.dtype, i * a.key.token_stride + head * a.key.head_stride, dim, x);
            bool kept = layer.key_mean && take_out_mean(layer, head, cosine, sine, x, centred);
            uint16_t scale = encode(layer, x, layer.key_centroids, int(layer.key_bits), rotated, codes,
                                    page + offset * key_bytes);
            store_as(page + a.pages.key_scales + 2 * offset, uint16_t(scale | (kept ? 0x8000 : 0)));
            load_row(a.value.data, a.value.dtype, i * a.value.token_stride + head * a.value.head_stride, dim, x);
            scale = encode(layer, x, layer.value_centroids, int(layer.value_bits), rotated, codes,
                           page + a.pages.value_codes + offset * value_bytes);
            store_as(page + a.pages.value_scales + 2 * offset, scale);
        }
    }
}

}  // namespace
}  // namespace tq
