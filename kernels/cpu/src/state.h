// The scratch memory of one task, and the online softmax over one row of one tile.
#pragma once

#include "floats.h"
#include "kernel.h"

namespace tq {
namespace {

constexpr int TILE_N = int(TILE);
constexpr float NOTHING = -1e30f;   // the maximum before any logit: finite, so that differences are not NaN
constexpr float MASKED = -__builtin_inff();
constexpr int PAD = 64;             // bytes that every array is rounded up to

struct Arena {
    char* next;
    template <class T>
    T* take(int64_t count) {
        T* p = reinterpret_cast<T*>(next);
        next += round_up(count * int64_t(sizeof(T)), PAD);
        return p;
    }
};

// The scale of K that keeps int32 sums from overflow while both factors use most of their 16 bits.
inline float key_limit(int64_t dim) { return dim <= 128 ? 8191.0f : dim <= 512 ? 4095.0f : 2047.0f; }
constexpr float VALUE_LIMIT = 4095.0f, WEIGHT_LIMIT = 8191.0f;  // times TILE stays below 2**31

inline int key_columns_step(const Layer& layer) {
    return 2 * W * (layer.key_bits == 4 ? Isa::Keys<4>::PARTS * Isa::Keys<4>::N : Isa::Keys<3>::N);
}
inline int value_columns_step(const Layer& layer) {
    return W * (layer.value_bits == 4 ? Isa::Values<4>::N : Isa::Values<3>::N);
}

struct State {
    const AttendArgs& a;
    const Task& task;
    Span span;
    const Shared& shared;
    int64_t dim, group, rows, key_columns, value_columns, num_basis;
    int64_t key_bytes, value_bytes, key_reads, value_reads;  // of a token's codes, and what is loaded of them
    float scale;  // of logits, to powers of two unless capped

    float* queries;       // [rows, D]
    int16_t* packed_q;    // [rows up to a multiple of 4, key_columns], in K's order
    float* query_scale;   // [rows]
    float *cos_part, *sin_part, *mean_constant;  // [rows, pairs], [rows, pairs], [rows]
    float* mean_factors;  // [rows, num_basis]
    float* sums_packed;   // [rows, value_columns]
    float* sums_exact;    // [rows, D]
    float *top, *total;   // [rows]
    uint8_t* broken;      // [rows]: reads something that is not finite

    float* logits;        // [rows, TILE]
    int32_t* products;    // [rows up to a multiple of 4, TILE]
    float* mean_logits;   // [rows, TILE]
    int16_t* weights16;   // [rows, TILE]
    float* weight_step;   // [rows]
    int16_t* decoded;     // [TILE, columns] K or V
    float *exact_k, *exact_v;  // [TILE, D]: tokens that are not float32 where they lie; and work space of [2 D]
    uint8_t* copies;      // [2, 2, TILE, read_bytes]: of two tiles, one of which is looked up while the other is read

    State(const AttendArgs& args, const Shared& common, const Task& t, int64_t num_rows, void* memory)
        : a(args), task(t), shared(common), rows(num_rows) {
        const Layer& layer = a.layer;
        dim = layer.dim;
        group = a.num_heads / a.pages.num_kv_heads;
        key_columns = shared.key_columns;
        value_columns = shared.value_columns;
        scale = float(a.scale) * (a.softcap != 0 ? 1.0f : LOG2_E);
        int key_step = key_columns_step(layer), value_step = value_columns_step(layer);
        key_bytes = a.pages.value_codes / a.pages.block_size;
        value_bytes = (a.pages.key_scales - a.pages.value_codes) / a.pages.block_size;
        key_reads = (key_columns - key_step) * layer.key_bits / 8 + Isa::key_load(int(layer.key_bits));
        value_reads = (value_columns - value_step) * layer.value_bits / 8 + Isa::value_load(int(layer.value_bits));
        num_basis = 2 * layer.num_fast + SMOOTH;
        int64_t padded = round_up(rows, 4);
        Arena m{static_cast<char*>(memory)};
        queries = m.take<float>(rows * dim);
        packed_q = m.take<int16_t>(padded * key_columns);
        query_scale = m.take<float>(rows);
        int64_t pairs = layer.key_mean ? layer.num_pairs : 0;
        cos_part = m.take<float>(rows * pairs);
        sin_part = m.take<float>(rows * pairs);
        mean_constant = m.take<float>(rows);
        mean_factors = m.take<float>(rows * num_basis);
        sums_packed = m.take<float>(rows * value_columns);
        sums_exact = m.take<float>(rows * dim);
        top = m.take<float>(rows);
        total = m.take<float>(rows);
        broken = m.take<uint8_t>(rows);
        logits = m.take<float>(rows * TILE);
        products = m.take<int32_t>(padded * TILE);
        mean_logits = m.take<float>(rows * TILE);
        weights16 = m.take<int16_t>(rows * TILE);
        weight_step = m.take<float>(rows);
        decoded = m.take<int16_t>(TILE * most(key_columns, value_columns));
        exact_k = m.take<float>(TILE * dim);
        exact_v = m.take<float>(TILE * dim);
        copies = m.take<uint8_t>(4 * TILE * read_bytes());
        end = m.next;
    }
    char* end;

    int64_t read_bytes() const {
        return round_up(most(key_reads, value_reads), 64);
    }
    int64_t position(int64_t row) const { return span.past + task.first_query + row / group; }
    int64_t head(int64_t row) const { return task.kv_head * group + row % group; }
    int64_t query_row(int64_t row) const { return a.starts[task.seq] + task.first_query + row / group; }
    bool has_mean() const { return a.layer.key_mean && a.layer.head_has_mean[task.kv_head]; }

    bool visible(int64_t row, int64_t at) const {
        int64_t p = position(row);
        return !(a.causal && at > p) && !(a.sliding_window && at <= p - a.sliding_window);
    }
    // Does the row take this token exactly where an exact value is at hand?
    bool wants_exact(int64_t row, int64_t at) const {
        if (at >= span.past && !a.strict) return true;
        return span.has_window && (at > position(row) - a.window_size || at < a.window_first);
    }
};

inline vf soft_capped(vf x, float cap) {
    vf y = -largest(-largest(x * (2 * LOG2_E / cap), splat(-120.0f)), splat(-120.0f));
    return (splat(1.0f) - splat(2.0f) / (exp2v(y) + 1.0f)) * (cap * LOG2_E);
}

inline void rescale(State& s, int64_t row, float factor) {
    s.total[row] *= factor;
    float* x = s.sums_packed + row * s.value_columns;
    for (int64_t i = 0; i < s.value_columns; i++) x[i] *= factor;
    float* y = s.sums_exact + row * s.dim;
    for (int64_t i = 0; i < s.dim; i++) y[i] *= factor;
}

// Turns one row of logits into weights exp2(logit - top), with top and total kept. Returns false if all are masked.
inline bool weigh(State& s, int64_t row, vf (&x)[TILE_N / W]) {
    vf high = x[0];
    UNROLL for (int i = 1; i < TILE_N / W; i++) high = largest(high, x[i]);
    float top = maximum(high);
    if (top == MASKED) return false;
    if (top > s.top[row]) {
        if (s.top[row] != NOTHING) rescale(s, row, exp2s(s.top[row] - top));
        s.top[row] = top;
    }
    vf base = splat(s.top[row]), all = {};
    UNROLL for (int i = 0; i < TILE_N / W; i++) {
        x[i] = exp2v(x[i] - base);
        all += x[i];
    }
    s.total[row] += sum(all);
    return true;
}

}  // namespace
}  // namespace tq
