// The C ABI between the Python module and the library: plain pointers, strides and numbers, 8 bytes a field.
// `library.py` mirrors the structs field by field; ABI_VERSION changes with them.
#pragma once

#include <cstdint>

namespace tq {

constexpr int64_t ABI_VERSION = 2;
constexpr int64_t TILE = 64;        // tokens that are decoded at a time; tiles start at multiples of it
constexpr int64_t SMOOTH = 8;       // Chebyshev terms that stand for the slow pairs of RoPE within a tile
constexpr int64_t MESSAGE = 256;    // bytes of an error message

enum DType : int64_t { F32 = 0, BF16 = 1, F16 = 2 };
enum Status : int64_t { OK = 0, INDEX_ERROR = 1, VALUE_ERROR = 2, MEMORY_ERROR = 3 };

struct Vectors {  // [tokens, heads, D], inner stride 1; strides in elements
    void* data;
    int64_t dtype, token_stride, head_stride;
};

struct Integers {  // one- or two-dimensional, 4 or 8 bytes an element; the stride of rows in elements
    const void* data;
    int64_t bytes, row_stride, columns;
};

struct Pages {
    uint8_t* data;
    int64_t num_blocks, num_kv_heads, block_size, block_stride, head_stride;  // strides in bytes
    int64_t value_codes, key_scales, value_scales, end;                       // offsets of the planes in a page
};

struct Layer {  // what the kernels need of KVParams
    int64_t dim, key_bits, value_bits;
    const float* rotation;         // [D, D]
    const float* signs;            // [D] / sqrt(D) where rotation is a butterfly behind signs, else null
    const float* key_centroids;    // [2**key_bits]
    const float* value_centroids;  // [2**value_bits]
    const float* key_mean;         // [Hkv, D] or null
    const uint8_t* head_has_mean;  // [Hkv]
    // RoPE of the mean; num_pairs 0 for none
    int64_t num_pairs, interleaved, num_fast, smooth_stride, table_tiles;
    double attention_scaling;
    const double* inv_freq;     // [num_pairs]
    const double* tile_angles;  // [table_tiles, num_pairs, 2] cos and sin at the middle of each tile
    const double* local;        // [TILE, num_pairs, 2] cos and sin at -TILE/2 .. TILE/2 - 1
    const float* basis;         // [2 * num_fast + SMOOTH, TILE]
    const float* smooth;        // [SMOOTH, smooth_stride]: the slow pairs in the smooth terms, padded with zeros
};

struct StoreArgs {
    Vectors key, value;
    Pages pages;
    Layer layer;
    const int64_t* slots;
    const int64_t* positions;
    int64_t num_tokens, threads;
};

struct StoreExactArgs {  // key and value have the dtype of the pages [num_blocks, Hkv, block_size, 2 D]
    Vectors key, value, pages;  // token_stride of pages is that of a block
    int64_t num_blocks, num_kv_heads, block_size, token_stride, dim;
    const int64_t* slots;
    int64_t num_tokens;
};

struct AttendArgs {
    Vectors query, out, fresh_key, fresh_value;  // fresh data null for none
    Pages pages;
    Layer layer;
    Integers block_table, window_table;
    const int64_t* seq_lens;
    const int64_t* starts;  // [num_seqs + 1]
    int64_t num_seqs, num_rows, num_heads;
    Vectors window;  // pages [num_blocks, Hkv, block_size, 2 D]; token_stride is that of a block; data null for none
    int64_t window_blocks, window_block_size, window_token_stride, window_size, window_first;
    double scale, softcap;
    const float* sinks;  // [num_heads] or null
    int64_t causal, sliding_window, strict;  // sliding_window 0 for none
    int64_t threads;
};

}  // namespace tq

#pragma GCC visibility push(default)
extern "C" {
int64_t tq_abi_version();
// Names of the instruction sets that were built and that this CPU has, best first, separated by spaces.
const char* tq_available();
// Uses this instruction set from now on; non-zero if it is not available.
int64_t tq_select(const char* name);
const char* tq_selected();
// 1 if the library was built with OpenMP.
int64_t tq_has_threads();
int64_t tq_store(const tq::StoreArgs* args, char* message);
int64_t tq_store_exact(const tq::StoreExactArgs* args, char* message);
int64_t tq_attend(const tq::AttendArgs* args, char* message);
}
#pragma GCC visibility pop
