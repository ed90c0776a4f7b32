// One task of attention, and the combination of partial results.
#pragma once

#include "exact.h"

namespace tq {
namespace {

inline int64_t attend_scratch(const AttendArgs& a, const Shared& shared, int64_t max_rows) {
    State s(a, shared, Task{}, max_rows, nullptr);
    return s.end - static_cast<char*>(nullptr) + PAD;
}

inline int64_t shared_bytes(const AttendArgs& a) {
    const Layer& layer = a.layer;
    int64_t columns = round_up(layer.dim, key_columns_step(layer)) + round_up(layer.dim, value_columns_step(layer));
    return columns * int64_t(sizeof(int32_t)) + 2 * PAD;
}

// Centroids as integers that fill the given range.
inline float quantise_centroids(const float* centroids, int64_t bits, float limit, int16_t* lut) {
    float high = 0;
    for (int i = 0; i < 1 << bits; i++) high = larger(high, __builtin_fabsf(centroids[i]));
    for (int i = 0; i < 1 << bits; i++) lut[i] = int16_t(nearest(centroids[i] * (limit / high)));
    return high / limit;
}

inline void share(const AttendArgs& a, Shared& s, void* memory) {
    const Layer& layer = a.layer;
    s.key_columns = round_up(layer.dim, key_columns_step(layer));
    s.value_columns = round_up(layer.dim, value_columns_step(layer));
    Arena m{static_cast<char*>(memory)};
    s.key_order = m.take<int32_t>(s.key_columns);
    s.value_order = m.take<int32_t>(s.value_columns);
    s.key_step = quantise_centroids(layer.key_centroids, layer.key_bits, key_limit(layer.dim), s.key_lut);
    s.value_step = quantise_centroids(layer.value_centroids, layer.value_bits, VALUE_LIMIT, s.value_lut);
    for (int32_t i = 0; i < s.key_columns; i++) {
        int32_t d = Isa::key_dimension(int(layer.key_bits), i);
        s.key_order[i] = d < layer.dim ? d : -1;
    }
    s.value_ordered = true;
    for (int32_t i = 0; i < s.value_columns; i++) {
        int32_t d = Isa::value_dimension(int(layer.value_bits), i);
        s.value_order[i] = d < layer.dim ? d : -1;
        s.value_ordered &= d == i;
    }
}

inline void pack_query(State& s, int64_t row, const float* rotated) {
    vf highs = {}, sums = {};
    for (int64_t i = 0; i < s.dim; i += W) {
        vf size = absolute(loadf(rotated + i));
        highs = largest(highs, size);
        sums += size;
    }
    float high = maximum(highs), all = sum(sums);
    int16_t* out = s.packed_q + row * s.key_columns;
    // No entry beyond 16 bits, no sum of products beyond 32.
    float factor = 2.0e9f / (key_limit(s.dim) * all);
    if (factor > 32000.0f / high) factor = 32000.0f / high;
    if (!(factor < FLOAT_MAX)) factor = 0;  // a query of zeros or denormals
    s.query_scale[row] = factor > 0 ? s.shared.key_step / factor * s.scale : 0;
    int32_t* whole = reinterpret_cast<int32_t*>(s.exact_v);
    for (int64_t i = 0; i < s.dim; i += W) store_as(whole + i, Isa::round(loadf(rotated + i) * factor));
    for (int64_t i = 0; i < s.key_columns; i++) {
        int32_t d = s.shared.key_order[i];
        out[i] = d < 0 ? int16_t(0) : int16_t(whole[d]);
    }
}

inline void begin_rows(State& s) {
    const Layer& layer = s.a.layer;
    const Vectors& query = s.a.query;
    for (int64_t row = 0; row < s.rows; row++) {
        float* q = s.queries + row * s.dim;
        int64_t at = s.query_row(row) * query.token_stride + s.head(row) * query.head_stride;
        s.broken[row] = !load_row(query.data, query.dtype, at, s.dim, q);
        if (s.broken[row])
            for (int64_t i = 0; i < s.dim; i++) q[i] = 0;
        rotate(layer, q, s.exact_k);
        pack_query(s, row, s.exact_k);
        if (s.has_mean()) prepare_mean(s, row);
        s.top[row] = NOTHING;
        s.total[row] = 0;
    }
    __builtin_memset(s.sums_packed, 0, s.rows * s.value_columns * sizeof(float));
    __builtin_memset(s.sums_exact, 0, s.rows * s.dim * sizeof(float));
    int64_t padding = round_up(s.rows, 4) - s.rows;
    __builtin_memset(s.packed_q + s.rows * s.key_columns, 0, padding * s.key_columns * sizeof(int16_t));
}

// The last step of a row: sinks, the division, the result's dtype.
inline void finish(const AttendArgs& a, int64_t query_row, int64_t head, float* sums, float top, float total) {
    float factor = 1;
    if (a.sinks) {
        float sink = a.sinks[head] * LOG2_E, high = sink > top ? sink : top;
        factor = exp2s(top - high);
        total = total * factor + exp2s(sink - high);
    }
    for (int64_t i = 0; i < a.layer.dim; i++) sums[i] *= factor / total;
    store_row(a.out, query_row * a.out.token_stride + head * a.out.head_stride, a.layer.dim, sums);
}

inline void end_rows(State& s, float* partials) {
    const int32_t* order = s.shared.value_order;
    float *ordered = s.exact_k, *turned = s.exact_v;
    for (int64_t row = 0; row < s.rows; row++) {
        float* packed = s.sums_packed + row * s.value_columns;
        for (int64_t i = 0; !s.shared.value_ordered && i < s.value_columns; i++)
            if (order[i] >= 0) ordered[order[i]] = packed[i];
        rotate_back(s.a.layer, s.shared.value_ordered ? packed : ordered, turned);
        for (int64_t i = 0; i < s.dim; i++) turned[i] += s.sums_exact[row * s.dim + i];
        if (s.broken[row]) s.total[row] = __builtin_nanf("");
        if (s.task.partial < 0) {
            finish(s.a, s.query_row(row), s.head(row), turned, s.top[row], s.total[row]);
            continue;
        }
        float* out = partials + (s.task.partial + row) * partial_floats(s.dim);
        __builtin_memcpy(out, turned, s.dim * sizeof(float));
        out[s.dim] = s.top[row];
        out[s.dim + 1] = s.total[row];
    }
}

template <int KB>
inline void attend_keys(State& s) {
    switch (s.a.layer.value_bits) {
        case 2: return attend_packed<KB, 2>(s);
        case 3: return attend_packed<KB, 3>(s);
        default: return attend_packed<KB, 4>(s);
    }
}

inline void attend(const AttendArgs& a, const Shared& shared, const Task& task, void* scratch, float* partials) {
    State s(a, shared, task, task.num_queries * (a.num_heads / a.pages.num_kv_heads), scratch);
    s.span = span_of(a, task.seq);
    begin_rows(s);
    if (task.begin < task.end) a.layer.key_bits == 4 ? attend_keys<4>(s) : attend_keys<3>(s);
    if (task.exact) attend_exact(s);
    end_rows(s, partials);
}

// `first` and the `count - 1` tasks behind it have the same rows: into the first one's place, then out.
inline void combine(const AttendArgs& a, const Task& first, int64_t count, float* partials) {
    int64_t dim = a.layer.dim, width = partial_floats(dim), group = a.num_heads / a.pages.num_kv_heads;
    int64_t rows = first.num_queries * group;
    for (int64_t row = 0; row < rows; row++) {
        float* into = partials + (first.partial + row) * width;
        for (int64_t i = 1; i < count; i++) {
            const float* from = partials + (first.partial + i * rows + row) * width;
            float top = larger(into[dim], from[dim]);
            float keep = exp2s(into[dim] - top), add = exp2s(from[dim] - top);
            for (int64_t d = 0; d < dim; d++) into[d] = into[d] * keep + from[d] * add;
            into[dim] = top;
            into[dim + 1] = into[dim + 1] * keep + from[dim + 1] * add;
        }
        int64_t query_row = a.starts[first.seq] + first.first_query + row / group;
        finish(a, query_row, first.kv_head * group + row % group, into, into[dim], into[dim + 1]);
    }
}

}  // namespace
}  // namespace tq
