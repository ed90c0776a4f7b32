// Attention over packed tokens, a tile at a time, in 16-bit integers:
//
//     logit = (q16 · centroids16) · step_q · |scale_k| + [scale_k >= +0] q·RoPE(μ)
//     sums += (w16 · centroids16) · step_w,   w = exp2(logit - top) · scale_v
//
// K and V are decoded once for all rows. A query's step, and that of a row's weights in one tile, fit the largest entry.
#pragma once

#include "mean.h"
#include "products.h"

namespace tq {
namespace {

struct Tile {
    int64_t begin;
    int count;  // tokens; what stands beyond in the arrays is masked
    const uint8_t *keys[TILE_N], *values[TILE_N];
    alignas(64) float key_scale[TILE_N], value_scale[TILE_N], takes_mean[TILE_N];
    alignas(64) float mask[TILE_N];  // of the queries at one position: zero, or minus infinity where they do not read
    bool bad[TILE_N], any_bad, held[TILE_N], masked, broken;
    uint8_t* copies;  // [2, TILE, read_bytes], of rows at the end of a page
};

inline bool is_held(const State& s, int64_t at) {
    if (at >= s.span.past) return s.span.has_own;
    if (!s.span.has_window || !in_window_pages(s.a, s.span, at)) return false;
    return integer_at(s.a.window_table, s.task.seq, at / s.a.window_block_size) != 0;
}

// Where some row of the task may not read some token of the tile from packed pages.
inline void find_masks(const State& s, Tile& tile) {
    int64_t oldest = s.position(0), newest = s.position(s.rows - 1), end = tile.begin + tile.count;
    bool exact = (s.span.has_own && end > s.span.past) ||
                 (s.span.has_window && (tile.begin < s.a.window_first || end > s.span.past - s.a.window_size + 1));
    tile.masked = tile.count < TILE || exact || (s.a.causal && end - 1 > oldest) ||
                  (s.a.sliding_window && tile.begin <= newest - s.a.sliding_window) || tile.any_bad;
    if (tile.masked)
        for (int j = 0; j < tile.count; j++) tile.held[j] = is_held(s, tile.begin + j);
}

// The pages of the tile's tokens first .. count: calls run(first token, their number, page, offset in the page) for each.
template <class Run>
inline void for_runs(const State& s, int64_t begin, int64_t first, int64_t count, Run run) {
    const Pages& pages = s.a.pages;
    for (int64_t j = first; j < count;) {
        int64_t column = (begin + j) / pages.block_size, offset = (begin + j) % pages.block_size;
        int64_t length = least(pages.block_size - offset, count - j);
        int64_t block = integer_at(s.a.block_table, s.task.seq, column);
        run(j, length, pages.data + block * pages.block_stride + s.task.kv_head * pages.head_stride, offset);
        j += length;
    }
}

// The rows of a run. One whose loads would pass the end of its page is copied first.
inline void find_run(const uint8_t* row, const uint8_t* end, int64_t count, int64_t bytes, int64_t reads,
                     const uint8_t** out, uint8_t* copies, int64_t copy_bytes) {
    for (int64_t j = 0; j < count; j++) out[j] = row + j * bytes;
    if (row + (count - 1) * bytes + reads <= end) return;
    for (int64_t j = 0; j < count; j++) {
        if (out[j] + reads <= end) continue;
        uint8_t* copy = copies + j * copy_bytes;
        __builtin_memset(copy, 0, copy_bytes);
        __builtin_memcpy(copy, out[j], bytes);
        out[j] = copy;
    }
}

inline void find_scales(Tile& tile, const uint16_t* keys, const uint16_t* values) {
    uint16_t largest_exponent = 0;
    for (int j = 0; j < TILE; j++) {
        uint16_t k = keys[j] & 0x7C00, v = values[j] & 0x7C00;
        largest_exponent = k > largest_exponent ? k : largest_exponent;
        largest_exponent = v > largest_exponent ? v : largest_exponent;
        tile.takes_mean[j] = keys[j] & 0x8000 ? 0.0f : 1.0f;
    }
    for (int j = 0; j < TILE; j += W) {
        store_as(tile.key_scale + j, absolute(Isa::load_f16(keys + j)));
        store_as(tile.value_scale + j, Isa::load_f16(values + j));
    }
    tile.any_bad = largest_exponent == 0x7C00;
    if (!tile.any_bad) return;
    for (int j = 0; j < TILE; j++) {
        tile.bad[j] = (keys[j] & 0x7C00) == 0x7C00 || (values[j] & 0x7C00) == 0x7C00;
        if (tile.bad[j]) tile.key_scale[j] = tile.value_scale[j] = 0;
    }
}

// The first token of the tile that some query may see: those before it may have no page any more.
inline int64_t first_seen(const State& s, const Tile& tile) { return most(0, s.span.first - tile.begin); }

// Where the tile's rows lie. Nothing is read yet; the scales, which are first to be read, are on their way.
inline void find_rows(const State& s, Tile& tile) {
    const Pages& pages = s.a.pages;
    const int64_t key_bytes = s.key_bytes, value_bytes = s.value_bytes, copy_bytes = s.read_bytes();
    const int64_t from = first_seen(s, tile);
    for_runs(s, tile.begin, from, tile.count, [&](int64_t first, int64_t length, const uint8_t* page, int64_t offset) {
        const uint8_t *end = page + pages.end, *value = page + pages.value_codes + offset * value_bytes;
        find_run(page + offset * key_bytes, end, length, key_bytes, s.key_reads, tile.keys + first,
                 tile.copies + first * copy_bytes, copy_bytes);
        find_run(value, end, length, value_bytes, s.value_reads, tile.values + first,
                 tile.copies + (TILE + first) * copy_bytes, copy_bytes);
        prefetch(page + pages.key_scales + 2 * offset, 2 * length);
        prefetch(page + pages.value_scales + 2 * offset, 2 * length);
    });
    for (int j = 0; j < TILE; j++) {
        if (j >= from && j < tile.count) continue;
        tile.keys[j] = tile.keys[from];
        tile.values[j] = tile.values[from];
    }
}

inline void load_scales(const State& s, Tile& tile) {
    const Pages& pages = s.a.pages;
    alignas(64) uint16_t key_scales[TILE_N] = {}, value_scales[TILE_N] = {};
    for_runs(s, tile.begin, first_seen(s, tile), tile.count,
             [&](int64_t first, int64_t length, const uint8_t* page, int64_t offset) {
                 __builtin_memcpy(key_scales + first, page + pages.key_scales + 2 * offset, 2 * length);
                 __builtin_memcpy(value_scales + first, page + pages.value_scales + 2 * offset, 2 * length);
             });
    find_scales(tile, key_scales, value_scales);
}

// For the queries of this row's position: all heads of a KV head read the same tokens.
inline void make_mask(const State& s, Tile& tile, int64_t row) {
    tile.broken = false;
    for (int j = 0; j < TILE; j++) {
        int64_t at = tile.begin + j;
        bool reads = j < tile.count && s.visible(row, at) && !(tile.held[j] && s.wants_exact(row, at));
        bool bad = tile.any_bad && tile.bad[j];
        tile.broken |= reads && bad;
        tile.mask[j] = reads && !bad ? 0.0f : MASKED;
    }
}

// Products to logits to 16-bit weights times V's scales.
inline void soften(State& s, Tile& tile, int64_t row) {
    vf x[TILE_N / W];
    const int32_t* products = s.products + row * TILE;
    vf step = splat(s.query_scale[row]);
    UNROLL for (int i = 0; i < TILE_N / W; i++)
        x[i] = __builtin_convertvector(load_as<vi>(products + i * W), vf) * (loadf(tile.key_scale + i * W) * step);
    if (s.has_mean())
        UNROLL for (int i = 0; i < TILE_N / W; i++)
            x[i] += loadf(s.mean_logits + row * TILE + i * W) * loadf(tile.takes_mean + i * W);
    if (s.a.softcap != 0)
        for (auto& part : x) part = soft_capped(part, float(s.a.softcap));
    if (tile.masked) {
        if (row % s.group == 0) make_mask(s, tile, row);
        s.broken[row] |= tile.broken;
        UNROLL for (int i = 0; i < TILE_N / W; i++) x[i] += loadf(tile.mask + i * W);
    }
    int16_t* out = s.weights16 + row * TILE;
    float high = 0;
    if (weigh(s, row, x)) {
        vf highest = {};
        UNROLL for (int i = 0; i < TILE_N / W; i++) {
            x[i] *= loadf(tile.value_scale + i * W);
            highest = largest(highest, absolute(x[i]));
        }
        high = maximum(highest);
    }
    if (high < 1e-30f) {
        __builtin_memset(out, 0, TILE * sizeof(int16_t));
        s.weight_step[row] = 0;
        return;
    }
    float factor = WEIGHT_LIMIT / high;
    s.weight_step[row] = high * (s.shared.value_step / WEIGHT_LIMIT);
    UNROLL for (int i = 0; i < TILE_N / W; i += 2)
        Isa::store16(out + i * W, Isa::round(x[i] * factor), Isa::round(x[i + 1] * factor));
}

template <int KB, int VB>
inline void attend_packed(State& s) {
    Tile tiles[2];
    for (int i = 0; i < 2; i++) tiles[i].copies = s.copies + i * 2 * TILE * s.read_bytes();
    auto look_up = [&](Tile& tile, int64_t begin) {
        tile.begin = begin;
        tile.count = int(least(TILE, s.task.end - begin));
        find_rows(s, tile);
    };
    look_up(tiles[0], s.task.begin);
    int current = 0;
    for (int64_t begin = s.task.begin; begin < s.task.end; begin += TILE, current ^= 1) {
        Tile &tile = tiles[current], &next = tiles[current ^ 1];
        bool last = begin + TILE >= s.task.end;
        // While a tile is decoded, the lines of the next one are fetched, row by row: pages are scattered, which ends
        // what the hardware fetches ahead, and all lines at once would leave none for the loads of this tile.
        if (!last) look_up(next, begin + TILE);
        const Tile& ahead = last ? tile : next;
        load_scales(s, tile);
        find_masks(s, tile);
        bool fused = s.rows <= MOST_FUSED;
        fused ? score_codes<KB>(s, tile.keys, ahead.keys) : score_decoded<KB>(s, tile.keys, ahead.keys);
        if (s.has_mean()) mean_logits(s, begin / TILE);
        for (int64_t row = 0; row < s.rows; row++) soften(s, tile, row);
        fused ? accumulate_codes<VB>(s, tile.values, ahead.values) : accumulate_decoded<VB>(s, tile.values, ahead.values);
    }
}

}  // namespace
}  // namespace tq
