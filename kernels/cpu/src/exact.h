// Attention over exact tokens (this step's own, the window's, the first ones) in float32, in the frame that they come in.
#pragma once

#include "packed.h"

namespace tq {
namespace {

struct ExactTile {
    int count = 0;
    bool any_bad = false, masked = false;
    int64_t at[TILE_N];
    bool bad[TILE_N];
};

// K and V of position `at`, as floats; returns whether they are finite.
inline bool load_exact(const State& s, int64_t at, float* key, float* value) {
    const AttendArgs& a = s.a;
    bool good;
    if (at >= s.span.past) {
        int64_t row = a.starts[s.task.seq] + at - s.span.past;
        const Vectors &k = a.fresh_key, &v = a.fresh_value;
        good = load_row(k.data, k.dtype, row * k.token_stride + s.task.kv_head * k.head_stride, s.dim, key);
        good &= load_row(v.data, v.dtype, row * v.token_stride + s.task.kv_head * v.head_stride, s.dim, value);
    } else {
        int64_t block = integer_at(a.window_table, s.task.seq, at / a.window_block_size);
        int64_t from = block * a.window.token_stride + s.task.kv_head * a.window.head_stride +
                       at % a.window_block_size * a.window_token_stride;
        good = load_row(a.window.data, a.window.dtype, from, s.dim, key);
        good &= load_row(a.window.data, a.window.dtype, from + s.dim, s.dim, value);
    }
    if (!good)
        for (int64_t i = 0; i < s.dim; i++) key[i] = value[i] = 0;
    return good;
}

// logits[row .. row + RB, column .. column + VB W] = q·k, K transposed: lanes are tokens, and no lanes need be summed.
template <int RB, int VB>
inline void score_exact(State& s, int64_t row, int column) {
    vf acc[RB][VB];
    clear(acc);
    const float *q = s.queries + row * s.dim, *k = s.exact_k + column;
    for (int64_t d = 0; d < s.dim; d++)
        UNROLL for (int c = 0; c < VB; c++) {
            vf y = loadf(k + d * TILE + c * W);
            UNROLL for (int r = 0; r < RB; r++) acc[r][c] += q[r * s.dim + d] * y;
        }
    UNROLL for (int r = 0; r < RB; r++) {
        UNROLL for (int c = 0; c < VB; c++)
            store_as(s.logits + (row + r) * TILE + column + c * W, acc[r][c] * s.scale);
    }
}

// sums_exact[row .. row + RB, column .. column + VB W] += weights · V
template <int RB, int VB>
inline void accumulate_exact(State& s, const ExactTile& tile, int64_t row, int64_t column) {
    vf acc[RB][VB];
    UNROLL for (int r = 0; r < RB; r++)
        UNROLL for (int c = 0; c < VB; c++) acc[r][c] = loadf(s.sums_exact + (row + r) * s.dim + column + c * W);
    for (int t = 0; t < tile.count; t++)
        UNROLL for (int c = 0; c < VB; c++) {
            vf y = loadf(s.exact_v + t * s.dim + column + c * W);
            UNROLL for (int r = 0; r < RB; r++) acc[r][c] += s.logits[(row + r) * TILE + t] * y;
        }
    UNROLL for (int r = 0; r < RB; r++)
        UNROLL for (int c = 0; c < VB; c++) store_as(s.sums_exact + (row + r) * s.dim + column + c * W, acc[r][c]);
}

template <int RB, int VB>
inline void accumulate_exact_row(State& s, const ExactTile& tile, int64_t row) {
    int64_t column = 0;
    for (; column + VB * W <= s.dim; column += VB * W) accumulate_exact<RB, VB>(s, tile, row, column);
    for (; column + W <= s.dim; column += W) accumulate_exact<RB, 1>(s, tile, row, column);
    for (; column < s.dim; column++)
        UNROLL for (int r = 0; r < RB; r++)
            for (int t = 0; t < tile.count; t++)
                s.sums_exact[(row + r) * s.dim + column] +=
                    s.logits[(row + r) * TILE + t] * s.exact_v[t * s.dim + column];
}

inline void mask_exact(State& s, const ExactTile& tile, int64_t row) {
    float* x = s.logits + row * TILE;
    for (int j = 0; j < tile.count; j++) {
        bool reads = s.visible(row, tile.at[j]) && s.wants_exact(row, tile.at[j]);
        if (reads && tile.bad[j]) s.broken[row] = 1;
        if (!reads || tile.bad[j]) x[j] = MASKED;
    }
}

inline void attend_exact_tile(State& s, const ExactTile& tile) {
    int64_t block = 0;
    for (; block + 4 <= s.rows; block += 4)
        for (int t = 0; t < tile.count; t += 2 * W) score_exact<4, 2>(s, block, t);
    for (; block < s.rows; block++)
        for (int t = 0; t < tile.count; t += 4 * W) score_exact<1, 4>(s, block, t);
    for (int64_t row = 0; row < s.rows; row++) {
        float* logits = s.logits + row * TILE;
        for (int j = tile.count; j < TILE; j++) logits[j] = MASKED;
        vf x[TILE_N / W];
        if (s.a.softcap != 0)
            for (int i = 0; i < TILE_N; i += W) store_as(logits + i, soft_capped(loadf(logits + i), float(s.a.softcap)));
        if (s.a.softcap != 0)
            for (int j = tile.count; j < TILE; j++) logits[j] = MASKED;
        if (tile.masked) mask_exact(s, tile, row);
        for (int i = 0; i < TILE_N / W; i++) x[i] = loadf(logits + i * W);
        if (!weigh(s, row, x))
            for (auto& part : x) part = vf{};
        for (int i = 0; i < TILE_N / W; i++) store_as(logits + i * W, x[i]);
    }
    int64_t row = 0;
    for (; row + 4 <= s.rows; row += 4) accumulate_exact_row<4, 2>(s, tile, row);
    for (; row < s.rows; row++) accumulate_exact_row<1, 4>(s, tile, row);
}

// Does some row not read this token exactly?
inline bool needs_mask(const State& s, int64_t at) {
    return !(s.visible(0, at) && s.visible(s.rows - 1, at) && s.wants_exact(0, at) && s.wants_exact(s.rows - 1, at));
}

inline void attend_exact(State& s) {
    const AttendArgs& a = s.a;
    if (!s.span.has_own && !s.span.has_window) return;
    int64_t newest = s.position(s.rows - 1), oldest = s.position(0);
    int64_t stop = a.causal ? newest + 1 : s.span.length;
    int64_t at = a.sliding_window ? most(0, oldest - a.sliding_window + 1) : 0;
    if (!s.span.has_window) at = most(at, s.span.past);
    ExactTile tile;
    for (; at < stop; at++) {
        // Between the first tokens and those near the queries lies nothing exact.
        int64_t near = most(a.strict ? oldest - a.window_size + 1 : least(s.span.past, oldest - a.window_size + 1), 0);
        if (s.span.has_window && at >= a.window_first && at < near) at = near;
        if (at >= stop) break;
        if (is_held(s, at)) {
            int j = tile.count++;
            tile.at[j] = at;
            tile.bad[j] = !load_exact(s, at, s.exact_row, s.exact_v + j * s.dim);
            for (int64_t d = 0; d < s.dim; d++) s.exact_k[d * TILE + j] = s.exact_row[d];
            tile.masked |= tile.bad[j] || needs_mask(s, at);
        }
        if (tile.count == TILE) {
            attend_exact_tile(s, tile);
            tile = ExactTile{};
        }
    }
    if (tile.count) attend_exact_tile(s, tile);
}

}  // namespace
}  // namespace tq
