// What each instruction set's translation unit gives to the driver. Those units are compiled with flags of their own, so
// nothing inline with external linkage may be shared between them: all their helpers are static.
#pragma once

#include "abi.h"

namespace tq {

// A piece of attention: queries `first_query` .. + `num_queries` of one sequence and all heads of one KV head, over the
// packed positions begin .. end (and over all exact tokens where `exact`).
struct Task {
    int64_t seq, kv_head, first_query, num_queries, begin, end;
    bool exact;
    int64_t partial;  // index of its first row among the partial results; -1: the result is final
};

// A partial result of one row: D sums, the logits' maximum in powers of two, the sum of weights.
inline static int64_t partial_floats(int64_t dim) { return dim + 2; }

// What all tasks of a call have in common: how decoded K and V lie in vectors, and centroids as integers.
struct Shared {
    int64_t key_columns, value_columns;
    int32_t *key_order, *value_order;  // the dimension in each column, -1 for none
    bool value_ordered;                // column i is dimension i
    int16_t key_lut[16], value_lut[16];
    float key_step, value_step;
};

struct Kernels {
    const char* name;
    int64_t (*shared_bytes)(const AttendArgs&);
    void (*share)(const AttendArgs&, Shared&, void* memory);
    int64_t (*attend_scratch)(const AttendArgs&, const Shared&, int64_t max_rows);  // bytes a thread
    void (*attend)(const AttendArgs&, const Shared&, const Task&, void* scratch, float* partials);
    void (*combine)(const AttendArgs&, const Task&, int64_t num_partials, float* partials);
    int64_t (*store_scratch)(const StoreArgs&);
    void (*store)(const StoreArgs&, int64_t begin, int64_t end, void* scratch);  // tokens begin .. end
};

extern const Kernels scalar_kernels;
#if defined(__x86_64__)
extern const Kernels avx2_kernels, avx512_kernels, avx512vnni_kernels;
#elif defined(__aarch64__)
extern const Kernels neon_kernels;
#endif

inline static int64_t integer_at(const Integers& x, int64_t row, int64_t column) {
    int64_t at = row * x.row_stride + column;
    return x.bytes == 8 ? static_cast<const int64_t*>(x.data)[at] : static_cast<const int32_t*>(x.data)[at];
}

// Which positions matter to a sequence in this step.
struct Span {
    int64_t past, length;        // position of the first query; tokens in the cache
    int64_t first, packed_end;   // positions that may be read; of these, those before packed_end from packed pages
    bool has_own, has_window;    // exact values: of this step's tokens; of the window's
};

inline static Span span_of(const AttendArgs& a, int64_t seq) {
    Span s;
    s.length = a.seq_lens[seq];
    s.past = s.length - (a.starts[seq + 1] - a.starts[seq]);
    s.first = a.sliding_window && s.past > a.sliding_window - 1 ? s.past - a.sliding_window + 1 : 0;
    s.has_window = a.window.data != nullptr;
    s.has_own = a.fresh_key.data != nullptr && !(a.strict && !s.has_window);
    bool only_exact = a.fresh_key.data != nullptr && !a.strict;
    s.packed_end = only_exact ? (s.past > s.first ? s.past : s.first) : s.length;
    return s;
}

// May the window be asked for position `at` < past? Blocks that left it may belong to somebody else by now.
inline static bool in_window_pages(const AttendArgs& a, const Span& s, int64_t at) {
    return at < a.window_first || at > s.past - a.window_size;
}

}  // namespace tq
