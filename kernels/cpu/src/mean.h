// The logit's part from K's mean, q·RoPE_p(μ), for a tile of positions at once.
//
// With the tile's middle c and x = p - c, pair i of RoPE gives A_i cos(x ω_i) + B_i sin(x ω_i); A and B turn with c. Pairs
// that turn by less than a radian within half a tile are smooth: eight Chebyshev terms stand for all of them together.
// What is left is a product of a few factors a row with a fixed basis, and its lanes are tokens.
#pragma once

#include "state.h"

// libm's; <cmath> would bring inline functions that the linker might take from a unit with other flags.
extern "C" double cos(double);
extern "C" double sin(double);

namespace tq {
namespace {

// The factors of a row before any turn: what μ and the query are to each other in each pair.
inline void prepare_mean(State& s, int64_t row) {
    const Layer& layer = s.a.layer;
    const float *q = s.queries + row * s.dim, *mean = layer.key_mean + s.task.kv_head * s.dim;
    float factor = float(layer.attention_scaling) * s.scale, passed = 0;
    int64_t pairs = layer.num_pairs;
    for (int64_t i = 0; i < pairs; i++) {
        int64_t first = layer.interleaved ? 2 * i : i, second = layer.interleaved ? 2 * i + 1 : i + pairs;
        s.cos_part[row * pairs + i] = (q[first] * mean[first] + q[second] * mean[second]) * factor;
        s.sin_part[row * pairs + i] = (q[second] * mean[first] - q[first] * mean[second]) * factor;
    }
    for (int64_t d = 2 * pairs; d < s.dim; d++) passed += q[d] * mean[d];
    s.mean_constant[row] = passed * s.scale;
}

// cos and sin at the middle of a tile
inline void tile_angle(const Layer& layer, int64_t tile, int64_t pair, double& cosine, double& sine) {
    if (tile < layer.table_tiles) {
        const double* at = layer.tile_angles + (tile * layer.num_pairs + pair) * 2;
        cosine = at[0];
        sine = at[1];
    } else {
        double angle = double(tile * TILE + TILE / 2) * layer.inv_freq[pair];
        cosine = cos(angle);
        sine = sin(angle);
    }
}

inline void turn_factors(State& s, int64_t tile) {
    const Layer& layer = s.a.layer;
    const int64_t pairs = layer.num_pairs, fast = layer.num_fast, slow = round_up(pairs - fast, W);
    constexpr int MOST = 512 + 16;
    float cosine[MOST], sine[MOST], x[MOST], y[MOST];
    for (int64_t i = 0; i < pairs; i++) {
        double c, n;
        tile_angle(layer, tile, i, c, n);
        cosine[i] = float(c);
        sine[i] = float(n);
    }
    for (int64_t i = pairs; i < fast + slow; i++) x[i] = y[i] = 0;
    for (int64_t row = 0; row < s.rows; row++) {
        const float *a = s.cos_part + row * pairs, *b = s.sin_part + row * pairs;
        float* out = s.mean_factors + row * s.num_basis;
        for (int64_t i = 0; i < pairs; i++) {
            x[i] = a[i] * cosine[i] + b[i] * sine[i];
            y[i] = b[i] * cosine[i] - a[i] * sine[i];
        }
        for (int64_t i = 0; i < fast; i++) {
            out[i] = x[i];
            out[fast + i] = y[i];
        }
        for (int64_t k = 0; k < SMOOTH; k++) {  // even terms are cosines', odd ones sines'
            const float *part = (k % 2 ? y : x) + fast, *terms = layer.smooth + k * layer.smooth_stride;
            vf acc = {};
            for (int64_t i = 0; i < slow; i += W) acc += loadf(part + i) * loadf(terms + i);
            out[2 * fast + k] = sum(acc) + (k ? 0 : s.mean_constant[row]);
        }
    }
}

template <int RB, int VB>
inline void spread_factors(State& s, int64_t row, int column) {
    vf acc[RB][VB];
    clear(acc);
    const float *factors = s.mean_factors + row * s.num_basis, *basis = s.a.layer.basis + column;
    for (int64_t i = 0; i < s.num_basis; i++)
        UNROLL for (int c = 0; c < VB; c++) {
            vf y = loadf(basis + i * TILE + c * W);
            UNROLL for (int r = 0; r < RB; r++) acc[r][c] += factors[r * s.num_basis + i] * y;
        }
    UNROLL for (int r = 0; r < RB; r++)
        UNROLL for (int c = 0; c < VB; c++) store_as(s.mean_logits + (row + r) * TILE + column + c * W, acc[r][c]);
}

// To mean_logits: the part of every row and token of the tile, scaled as logits are.
inline void mean_logits(State& s, int64_t tile) {
    turn_factors(s, tile);
    int64_t row = 0;
    for (; row + 4 <= s.rows; row += 4)
        for (int t = 0; t < TILE_N; t += 2 * W) spread_factors<4, 2>(s, row, t);
    for (; row < s.rows; row++)
        for (int t = 0; t < TILE_N; t += 4 * W) spread_factors<1, 4>(s, row, t);
}

}  // namespace
}  // namespace tq
