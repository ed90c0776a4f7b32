// The two products of a tile: queries by K, weights by V. With few rows, codes are decoded in registers and used at once;
// with many, into memory and used by blocks of rows.
#pragma once

#include "state.h"

namespace tq {
namespace {

constexpr int MOST_FUSED = 8;
constexpr int LANES16 = 2 * W;  // int16 in a vector

// Fetches a row for later.
inline void prefetch(const uint8_t* row, int64_t bytes) {
    for (int64_t i = 0; i < bytes; i += 64) __builtin_prefetch(row + i, 0, 3);
}

template <int BITS, int PART, int RB, int M, int TB>
inline void score_part(const Isa::Keys<BITS>& decoder, const uint8_t* codes, const int16_t* q, int64_t columns, int t,
                       vi (&acc)[M][TB]) {
    using Keys = Isa::Keys<BITS>;
    vi y[Keys::N];
    decoder.template decode<PART>(codes, y);
    UNROLL for (int r = 0; r < RB; r++) {
        UNROLL for (int i = 0; i < Keys::N; i++)
            acc[r][t] = Isa::madd(acc[r][t], y[i], Isa::load(q + r * columns + (PART * Keys::N + i) * LANES16));
    }
}

// products[row .. row + RB, all tokens] = q16 · K, K decoded on the way. Sums of SETS times eight accumulators are made at
// a time: with three rows, those of a fourth are zero.
template <int BITS, int RB, int TB, int SETS = 1>
inline void score_rows(const State& s, int64_t row, const uint8_t* const* keys, const uint8_t* const* ahead) {
    using Keys = Isa::Keys<BITS>;
    constexpr int STEP = Keys::PARTS * Keys::N * LANES16;
    const Keys decoder(s.shared.key_lut);
    const int16_t* q = s.packed_q + row * s.key_columns;
    const int64_t columns = s.key_columns;
    for (int token = 0; token < TILE_N; token += SETS * TB) {
        vi acc[SETS][8 / TB][TB];
        UNROLL for (int i = 0; i < SETS; i++) clear(acc[i]);
        if (row == 0)
            for (int t = 0; t < SETS * TB; t++) prefetch(ahead[token + t], s.key_bytes);
        for (int64_t d = 0; d < columns; d += STEP) {
            UNROLL for (int t = 0; t < SETS * TB; t++) {
                const uint8_t* codes = keys[token + t] + d * BITS / 8;
                score_part<BITS, 0, RB>(decoder, codes, q + d, columns, t % TB, acc[t / TB]);
                if constexpr (Keys::PARTS == 2)
                    score_part<BITS, 1, RB>(decoder, codes, q + d, columns, t % TB, acc[t / TB]);
            }
        }
        int32_t* out = s.products + row * TILE + token;
        UNROLL for (int i = 0; i < SETS; i++) Isa::reduce<8 / TB, TB>(acc[i], out + i * TB, TILE);
    }
}

template <int BITS>
inline void score_codes(const State& s, const uint8_t* const* keys, const uint8_t* const* ahead) {
    int64_t row = 0;
    if (s.rows == 8) return score_rows<BITS, 8, 1, Isa::REGISTERS / 16>(s, 0, keys, ahead);
    for (; row + 4 <= s.rows; row += 4) score_rows<BITS, 4, 2>(s, row, keys, ahead);
    if (row + 3 == s.rows) return score_rows<BITS, 3, 2>(s, row, keys, ahead);
    for (; row + 2 <= s.rows; row += 2) score_rows<BITS, 2, 4>(s, row, keys, ahead);
    for (; row < s.rows; row++) score_rows<BITS, 1, 8>(s, row, keys, ahead);
}

template <int RB, int VB>
inline void add_sums(State& s, int64_t row, int64_t column, const vi (&acc)[RB][VB]) {
    UNROLL for (int r = 0; r < RB; r++) {
        float* sums = s.sums_packed + (row + r) * s.value_columns + column;
        vf step = splat(s.weight_step[row + r]);
        UNROLL for (int c = 0; c < VB; c++)
            store_as(sums + c * W, loadf(sums + c * W) + __builtin_convertvector(acc[r][c], vf) * step);
    }
}

// sums[row .. row + RB, from column on] += weights16 · V, V decoded on the way, VB steps at a time. Returns the first
// column that is left.
template <int BITS, int RB, int VB>
inline int64_t accumulate_rows(State& s, int64_t row, int64_t column, const uint8_t* const* values,
                               const uint8_t* const* ahead) {
    using Values = Isa::Values<BITS>;
    constexpr int N = Values::N, STEP = N * W;
    const Values decoder(s.shared.value_lut);
    const int16_t* w = s.weights16 + row * TILE;
    for (; column + VB * STEP <= s.value_columns; column += VB * STEP) {
        vi acc[RB][VB * N];
        clear(acc);
        const int64_t offset = column * BITS / 8, bytes = row == 0 && column == 0 ? s.value_bytes : 0;
        for (int p = 0; p < TILE / 2; p++) {
            const uint8_t *first = values[2 * p] + offset, *second = values[2 * p + 1] + offset;
            if (bytes) {
                prefetch(ahead[2 * p], bytes);
                prefetch(ahead[2 * p + 1], bytes);
            }
            vi x[RB];
            UNROLL for (int r = 0; r < RB; r++) x[r] = load_as<int32_t>(w + r * TILE + 2 * p) - vi{};
            UNROLL for (int c = 0; c < VB; c++) {
                vi y[N];
                decoder.decode(first + c * STEP * BITS / 8, second + c * STEP * BITS / 8, y);
                UNROLL for (int r = 0; r < RB; r++) {
                    UNROLL for (int i = 0; i < N; i++) acc[r][c * N + i] = Isa::madd(acc[r][c * N + i], x[r], y[i]);
                }
            }
        }
        add_sums(s, row, column, acc);
    }
    return column;
}

// As many accumulators as registers allow, and one step at a time for what is left.
template <int BITS, int RB>
inline void accumulate_block(State& s, int64_t row, const uint8_t* const* values, const uint8_t* const* ahead) {
    constexpr int FIT = Isa::REGISTERS / 2 / RB / Isa::Values<BITS>::N;
    constexpr int VB = FIT >= 8 ? 8 : FIT >= 4 ? 4 : FIT >= 2 ? 2 : 1;  // divides what head sizes there are
    int64_t column = accumulate_rows<BITS, RB, VB>(s, row, 0, values, ahead);
    accumulate_rows<BITS, RB, 1>(s, row, column, values, ahead);
}

template <int BITS>
inline void accumulate_codes(State& s, const uint8_t* const* values, const uint8_t* const* ahead) {
    int64_t row = 0;
    if (s.rows == 8) return accumulate_block<BITS, 8>(s, 0, values, ahead);
    for (; row + 4 <= s.rows; row += 4) accumulate_block<BITS, 4>(s, row, values, ahead);
    if (row + 3 == s.rows) return accumulate_block<BITS, 3>(s, row, values, ahead);
    if (row + 2 == s.rows) return accumulate_block<BITS, 2>(s, row, values, ahead);
    if (row + 1 == s.rows) accumulate_block<BITS, 1>(s, row, values, ahead);
}

// The same products over decoded K and V, for any number of rows.

template <int RB, int TB>
inline void score_block(const State& s, int64_t row, int64_t token) {
    vi acc[RB][TB];
    clear(acc);
    const int64_t columns = s.key_columns;
    const int16_t *q = s.packed_q + row * columns, *k = s.decoded + token * columns;
    for (int64_t d = 0; d < columns; d += LANES16) {
        vi x[RB];
        UNROLL for (int r = 0; r < RB; r++) x[r] = in_register(Isa::load(q + r * columns + d));
        UNROLL for (int t = 0; t < TB; t++) {
            vi y = Isa::load(k + t * columns + d);
            UNROLL for (int r = 0; r < RB; r++) acc[r][t] = Isa::madd(acc[r][t], x[r], y);
        }
    }
    Isa::reduce<RB, TB>(acc, s.products + row * TILE + token, TILE);
}

template <int BITS>
inline void score_decoded(const State& s, const uint8_t* const* keys, const uint8_t* const* ahead) {
    using Keys = Isa::Keys<BITS>;
    constexpr int PART = Keys::N * LANES16, STEP = Keys::PARTS * PART;
    const Keys decoder(s.shared.key_lut);
    int16_t* out = s.decoded;
    for (int t = 0; t < TILE_N; t++) {
        prefetch(ahead[t], s.key_bytes);
        for (int64_t d = 0; d < s.key_columns; d += STEP, out += STEP) {
            vi y[Keys::N];
            decoder.template decode<0>(keys[t] + d * BITS / 8, y);
            UNROLL for (int i = 0; i < Keys::N; i++) store_as(out + i * LANES16, y[i]);
            if constexpr (Keys::PARTS == 2) {
                decoder.template decode<1>(keys[t] + d * BITS / 8, y);
                UNROLL for (int i = 0; i < Keys::N; i++) store_as(out + PART + i * LANES16, y[i]);
            }
        }
    }
    int64_t row = 0;
    for (; row + 4 <= s.rows; row += 4)
        for (int t = 0; t < TILE; t += 2) score_block<4, 2>(s, row, t);
    for (; row + 2 <= s.rows; row += 2)
        for (int t = 0; t < TILE; t += 4) score_block<2, 4>(s, row, t);
    for (; row < s.rows; row++)
        for (int t = 0; t < TILE; t += 8) score_block<1, 8>(s, row, t);
}

template <int RB, int VB>
inline int64_t accumulate_decoded_rows(State& s, int64_t row, int64_t column) {
    for (; column + VB * W <= s.value_columns; column += VB * W) {
        vi acc[RB][VB];
        clear(acc);
        const int16_t *w = s.weights16 + row * TILE, *v = s.decoded + 2 * column;
        for (int p = 0; p < TILE / 2; p++, v += 2 * s.value_columns) {
            vi x[RB];
            UNROLL for (int r = 0; r < RB; r++) x[r] = in_register(load_as<int32_t>(w + r * TILE + 2 * p) - vi{});
            UNROLL for (int c = 0; c < VB; c++) {
                vi y = Isa::load(v + c * LANES16);
                UNROLL for (int r = 0; r < RB; r++) acc[r][c] = Isa::madd(acc[r][c], x[r], y);
            }
        }
        add_sums(s, row, column, acc);
    }
    return column;
}

template <int BITS>
inline void accumulate_decoded(State& s, const uint8_t* const* values, const uint8_t* const* ahead) {
    using Values = Isa::Values<BITS>;
    constexpr int STEP = Values::N * W;
    const Values decoder(s.shared.value_lut);
    int16_t* out = s.decoded;
    for (int p = 0; p < TILE_N / 2; p++) {
        prefetch(ahead[2 * p], s.value_bytes);
        prefetch(ahead[2 * p + 1], s.value_bytes);
        for (int64_t d = 0; d < s.value_columns; d += STEP, out += 2 * STEP) {
            vi y[Values::N];
            decoder.decode(values[2 * p] + d * BITS / 8, values[2 * p + 1] + d * BITS / 8, y);
            UNROLL for (int i = 0; i < Values::N; i++) store_as(out + i * LANES16, y[i]);
        }
    }
    int64_t row = 0;
    for (; row + 4 <= s.rows; row += 4) {
        int64_t column = accumulate_decoded_rows<4, 2>(s, row, 0);
        accumulate_decoded_rows<4, 1>(s, row, column);
    }
    for (; row < s.rows; row++) {
        int64_t column = accumulate_decoded_rows<1, 4>(s, row, 0);
        accumulate_decoded_rows<1, 1>(s, row, column);
    }
}

}  // namespace
}  // namespace tq
