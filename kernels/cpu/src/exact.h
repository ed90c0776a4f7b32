// Attention over exact tokens (this step's own, the window's, the first ones) in float32, in the frame that they come in.
#pragma once

#include "packed.h"

namespace tq {
namespace {

struct ExactTile {
    int count = 0;
    bool masked = false;
    int64_t at[TILE_N];
    const float *key[TILE_N], *value[TILE_N];
    bool bad[TILE_N];
};

// One token's K or V: where it lies if that is float32, else as a copy.
inline const float* as_floats(const Vectors& x, int64_t at, int64_t n, float* copy, bool& good) {
    if (x.dtype != F32) {
        good &= load_row(x.data, x.dtype, at, n, copy);
        return copy;
    }
    const float* p = static_cast<const float*>(x.data) + at;
    good &= is_finite(p, n);
    return p;
}

inline void add_exact(State& s, ExactTile& tile, int64_t at, const Vectors& keys, int64_t key, const Vectors& values,
                      int64_t value, bool masked) {
    int j = tile.count++;
    bool good = true;
    tile.at[j] = at;
    tile.key[j] = as_floats(keys, key, s.dim, s.exact_k + j * s.dim, good);
    tile.value[j] = as_floats(values, value, s.dim, s.exact_v + j * s.dim, good);
    tile.bad[j] = !good;
    tile.masked |= masked || !good;
    if (good) return;
    for (int64_t i = 0; i < s.dim; i++) s.exact_k[j * s.dim + i] = 0;
    tile.key[j] = tile.value[j] = s.exact_k + j * s.dim;
}

// logits[row .. row + RB, token .. token + TB] = q·k
template <int RB, int TB>
inline void score_exact(State& s, const ExactTile& tile, int64_t row, int token) {
    vf acc[RB][TB];
    clear(acc);
    const float* q = s.queries + row * s.dim;
    for (int64_t d = 0; d < s.dim; d += W)
        UNROLL for (int t = 0; t < TB; t++) {
            vf y = loadf(tile.key[token + t] + d);
            UNROLL for (int r = 0; r < RB; r++) acc[r][t] += loadf(q + r * s.dim + d) * y;
        }
    Isa::reduce<RB, TB>(acc, s.logits + row * TILE + token, TILE);
}

// sums_exact[row .. row + RB, column .. column + VB W] += weights · V
template <int RB, int VB>
inline void accumulate_exact(State& s, const ExactTile& tile, int64_t row, int64_t column) {
    vf acc[RB][VB];
    UNROLL for (int r = 0; r < RB; r++)
        UNROLL for (int c = 0; c < VB; c++) acc[r][c] = loadf(s.sums_exact + (row + r) * s.dim + column + c * W);
    const float* weights = s.logits + row * TILE;
    for (int t = 0; t < tile.count; t++)
        UNROLL for (int c = 0; c < VB; c++) {
            vf y = loadf(tile.value[t] + column + c * W);
            UNROLL for (int r = 0; r < RB; r++) acc[r][c] += weights[r * TILE + t] * y;
        }
    UNROLL for (int r = 0; r < RB; r++)
        UNROLL for (int c = 0; c < VB; c++) store_as(s.sums_exact + (row + r) * s.dim + column + c * W, acc[r][c]);
}

template <int RB, int VB>
inline void accumulate_exact_row(State& s, const ExactTile& tile, int64_t row) {
    int64_t column = 0;
    for (; column + VB * W <= s.dim; column += VB * W) accumulate_exact<RB, VB>(s, tile, row, column);
    for (; column < s.dim; column += W) accumulate_exact<RB, 1>(s, tile, row, column);
}

inline void mask_exact(State& s, const ExactTile& tile, int64_t row) {
    float* x = s.logits + row * TILE;
    for (int j = 0; j < tile.count; j++) {
        bool reads = s.visible(row, tile.at[j]) && s.wants_exact(row, tile.at[j]);
        if (reads && tile.bad[j]) s.broken[row] = 1;
        if (!reads || tile.bad[j]) x[j] = MASKED;
    }
}

inline void soften_exact(State& s, const ExactTile& tile, int64_t row) {
    float* logits = s.logits + row * TILE;
    for (int i = 0; i < tile.count; i += W) {
        vf x = loadf(logits + i) * s.scale;
        store_as(logits + i, s.a.softcap != 0 ? soft_capped(x, float(s.a.softcap)) : x);
    }
    for (int j = tile.count; j < TILE; j++) logits[j] = MASKED;
    if (tile.masked) mask_exact(s, tile, row);
    vf x[TILE_N / W];
    for (int i = 0; i < TILE_N / W; i++) x[i] = loadf(logits + i * W);
    if (!weigh(s, row, x))
        for (auto& part : x) part = vf{};
    for (int i = 0; i < TILE_N / W; i++) store_as(logits + i * W, x[i]);
}

inline void attend_exact_tile(State& s, ExactTile& tile) {
    for (int j = tile.count; j < int(round_up(tile.count, 8)); j++) tile.key[j] = tile.key[0];
    int64_t row = 0;
    for (; row + 4 <= s.rows; row += 4)
        for (int t = 0; t < tile.count; t += 2) score_exact<4, 2>(s, tile, row, t);
    for (; row + 2 <= s.rows; row += 2)
        for (int t = 0; t < tile.count; t += 4) score_exact<2, 4>(s, tile, row, t);
    for (; row < s.rows; row++)
        for (int t = 0; t < tile.count; t += 8) score_exact<1, 8>(s, tile, row, t);
    for (row = 0; row < s.rows; row++) soften_exact(s, tile, row);
    for (row = 0; row + 4 <= s.rows; row += 4) accumulate_exact_row<4, 2>(s, tile, row);
    for (; row + 2 <= s.rows; row += 2) accumulate_exact_row<2, 4>(s, tile, row);
    for (; row < s.rows; row++) accumulate_exact_row<1, 8>(s, tile, row);
    tile.count = 0;
    tile.masked = false;
}

// Exact tokens by position: the window's first ones, its newest ones, this step's own.
struct ExactReader {
    State& s;
    int64_t oldest, newest;  // positions of the task's queries
    ExactTile tile;

    explicit ExactReader(State& state) : s(state), oldest(s.position(0)), newest(s.position(s.rows - 1)) {}

    // Does some row not read this token exactly?
    bool needs_mask(int64_t at) const {
        const AttendArgs& a = s.a;
        if ((a.causal && at > oldest) || (a.sliding_window && at <= newest - a.sliding_window)) return true;
        if (at >= s.span.past && !a.strict) return false;
        return at <= newest - a.window_size && at >= a.window_first;
    }

    void full() {
        if (tile.count == TILE) attend_exact_tile(s, tile);
    }

    // Positions from .. stop in window pages, block by block
    void window(int64_t from, int64_t stop) {
        const AttendArgs& a = s.a;
        const int64_t size = a.window_block_size;
        while (from < stop) {
            int64_t column = from / size, end = least(stop, (column + 1) * size);
            int64_t block = integer_at(a.window_table, s.task.seq, column);
            int64_t row = block * a.window.token_stride + s.task.kv_head * a.window.head_stride +
                          (from - column * size) * a.window_token_stride;
            for (; block && from < end; from++, row += a.window_token_stride) {
                add_exact(s, tile, from, a.window, row, a.window, row + s.dim, needs_mask(from));
                full();
            }
            from = end;
        }
    }

    void own(int64_t from, int64_t stop) {
        const Vectors &k = s.a.fresh_key, &v = s.a.fresh_value;
        for (; from < stop; from++) {
            int64_t row = s.a.starts[s.task.seq] + from - s.span.past, head = s.task.kv_head;
            add_exact(s, tile, from, k, row * k.token_stride + head * k.head_stride, v,
                      row * v.token_stride + head * v.head_stride, needs_mask(from));
            full();
        }
    }
};

inline void attend_exact(State& s) {
    const AttendArgs& a = s.a;
    const int64_t past = s.span.past;
    if (!s.span.has_own && !s.span.has_window) return;
    ExactReader reader(s);
    int64_t stop = a.causal ? reader.newest + 1 : s.span.length;
    int64_t seen = a.sliding_window ? most(0, reader.oldest - a.sliding_window + 1) : 0;
    // The oldest position that the window pages still hold, and that some query reads from there.
    int64_t near = most(past, reader.oldest) - a.window_size + 1;
    if (s.span.has_window) {
        int64_t first = least(a.window_first, least(past, stop));
        reader.window(seen, first);
        reader.window(most(most(first, seen), near), least(past, stop));
    }
    if (s.span.has_own) {
        // In strict mode a query reads its own step's tokens exactly only as far as the window goes.
        int64_t from = most(most(past, seen), a.strict ? reader.oldest - a.window_size + 1 : 0);
        if (a.strict) reader.own(most(past, seen), least(least(a.window_first, from), stop));
        reader.own(from, stop);
    }
    if (reader.tile.count) attend_exact_tile(s, reader.tile);
}

}  // namespace
}  // namespace tq
