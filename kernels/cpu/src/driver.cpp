// Checks indices, cuts the work into tasks and runs them on OpenMP's threads.
//
// How a sequence is cut depends on that sequence alone, so its result depends neither on the batch around it nor on the
// number of threads. OpenMP, because torch's threads are then ours, too: whoever binds them to cores has bound both.

#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <vector>

#include "kernel.h"

namespace tq {
namespace {

constexpr int64_t ROWS = 128;       // about so many rows (queries times heads of a KV head) share a decoded tile
constexpr int64_t CHUNK = 2048;    // positions of a task where few rows share one long sequence
constexpr int64_t FEW_BLOCKS = 1;  // blocks of rows up to which a sequence is cut into chunks, too
constexpr int64_t STORE_TOKENS = 16;

// Memory that a thread keeps for the next call: fresh pages would cost more than a short decode step.
struct Scratch {
    void* data = nullptr;
    int64_t size = 0;
    ~Scratch() { std::free(data); }
    void* at_least(int64_t bytes) {
        if (bytes > size) {
            std::free(data);
            size = (bytes + 4095) / 4096 * 4096;
            data = std::aligned_alloc(64, size);
            if (!data) size = 0;
        }
        return data;
    }
};

thread_local Scratch scratch_of_thread, partials_of_caller, shared_of_caller;

template <class Body>
bool parallel(int64_t count, int64_t threads, int64_t scratch_bytes, Body body) {
    bool failed = false;
    if (threads <= 1 || count <= 1) {
        void* scratch = scratch_of_thread.at_least(scratch_bytes);
        for (int64_t i = 0; scratch && i < count; i++) body(i, scratch);
        return scratch != nullptr;
    }
#pragma omp parallel num_threads(threads < count ? threads : count)
    {
        void* scratch = scratch_of_thread.at_least(scratch_bytes);
        if (!scratch) {
#pragma omp atomic write
            failed = true;
        }
#pragma omp for schedule(dynamic, 1)
        for (int64_t i = 0; i < count; i++)
            if (scratch) body(i, scratch);
    }
    return !failed;
}

template <class... Args>
Status fail(Status status, char* message, const char* format, Args... args) {
    std::snprintf(message, MESSAGE, format, args...);
    return status;
}

using Long = long long;

Status check_blocks(const AttendArgs& a, int64_t seq, const Span& s, char* message) {
    int64_t size = a.pages.block_size, last = (s.packed_end + size - 1) / size;
    if (s.packed_end > s.first && last > a.block_table.columns)
        return fail(INDEX_ERROR, message, "sequence %lld needs %lld blocks, block_table has %lld columns.", Long(seq),
                    Long(last), Long(a.block_table.columns));
    for (int64_t i = s.first / size; s.packed_end > s.first && i < last; i++) {
        int64_t block = integer_at(a.block_table, seq, i);
        if (block < 0 || block >= a.pages.num_blocks)
            return fail(INDEX_ERROR, message, "block %lld of sequence %lld lies outside the pages: %lld blocks.",
                        Long(block), Long(seq), Long(a.pages.num_blocks));
    }
    return OK;
}

Status check_window_blocks(const AttendArgs& a, int64_t seq, const Span& s, char* message) {
    int64_t size = a.window_block_size;
    int64_t stop = s.past < s.length ? s.past : s.length;
    for (int64_t at = s.first; at < stop; at++) {
        if (!in_window_pages(a, s, at)) {
            at = s.past - a.window_size;  // the next one that is
            continue;
        }
        int64_t column = at / size;
        int64_t block = column < a.window_table.columns ? integer_at(a.window_table, seq, column) : -1;
        if (block < 0 || block >= a.window_blocks)
            return fail(INDEX_ERROR, message, "window block %lld of sequence %lld lies outside the pages: %lld blocks.",
                        Long(block), Long(seq), Long(a.window_blocks));
    }
    return OK;
}

Status check(const AttendArgs& a, char* message) {
    if (a.num_seqs && a.starts[0] < 0)
        return fail(INDEX_ERROR, message, "query_start_loc begins with %lld: expected 0 or more.", Long(a.starts[0]));
    for (int64_t i = 0; i < a.num_seqs; i++) {
        int64_t begin = a.starts[i], end = a.starts[i + 1];
        if (end < begin || end > a.num_rows)
            return fail(INDEX_ERROR, message, "query_start_loc %lld .. %lld of sequence %lld: not rows of a query of %lld.",
                        Long(begin), Long(end), Long(i), Long(a.num_rows));
        if (begin == end) continue;
        if (a.seq_lens[i] < end - begin)
            return fail(VALUE_ERROR, message, "sequence %lld has %lld queries and only %lld tokens.", Long(i),
                        Long(end - begin), Long(a.seq_lens[i]));
        Span s = span_of(a, i);
        if (Status status = check_blocks(a, i, s, message)) return status;
        if (s.has_window)
            if (Status status = check_window_blocks(a, i, s, message)) return status;
    }
    return OK;
}

struct Plan {
    std::vector<Task> tasks;
    std::vector<std::pair<int64_t, int64_t>> splits;  // first task and number of tasks that share their rows
    int64_t max_rows = 0, partial_rows = 0;
};

struct Range {
    int64_t begin, end;
};

// The packed positions that some query of a block reads. The newest tokens that all of them read exactly are not among
// them: with a window, that saves a tile or two of every decode step.
Range packed_range(const AttendArgs& a, const Span& s, const Task& task) {
    int64_t newest = s.past + task.first_query + task.num_queries;  // nothing at or after it is seen
    int64_t oldest = s.past + task.first_query - a.sliding_window + 1;
    int64_t begin = a.sliding_window && oldest > s.first ? oldest : s.first;
    int64_t end = a.causal && newest < s.packed_end ? newest : s.packed_end;
    if (s.has_window)
        for (int64_t exact = newest - a.window_size; end > begin && end > exact; end--) {
            int64_t at = end - 1;
            if (at >= s.past ? !s.has_own : !in_window_pages(a, s, at)) break;
            if (at < s.past && !integer_at(a.window_table, task.seq, at / a.window_block_size)) break;
        }
    return {begin < end ? begin / TILE * TILE : end, end};  // from the first tile that holds something to read
}

void add_block(const AttendArgs& a, Range range, Task task, bool few, Plan& plan) {
    int64_t rows = task.num_queries * (a.num_heads / a.pages.num_kv_heads);
    if (rows > plan.max_rows) plan.max_rows = rows;
    auto [begin, end] = range;
    int64_t chunk = few ? CHUNK : INT64_MAX / 2;
    int64_t count = end > begin ? (end - begin - 1) / chunk + 1 : 1;
    if (count > 1) plan.splits.emplace_back(plan.tasks.size(), count);
    for (int64_t i = 0; i < count; i++) {
        task.begin = begin + i * chunk;
        task.end = i + 1 == count ? (end > task.begin ? end : task.begin) : task.begin + chunk;
        task.exact = i + 1 == count;
        task.partial = count > 1 ? plan.partial_rows : -1;
        plan.partial_rows += count > 1 ? rows : 0;
        plan.tasks.push_back(task);
    }
}

Plan make_plan(const AttendArgs& a) {
    Plan plan;
    int64_t group = a.num_heads / a.pages.num_kv_heads;
    int64_t queries = ROWS / group > 1 ? ROWS / group : 1;
    for (int64_t seq = 0; seq < a.num_seqs; seq++) {
        int64_t count = a.starts[seq + 1] - a.starts[seq];
        if (!count) continue;
        Span s = span_of(a, seq);
        bool few = count <= FEW_BLOCKS * queries;
        // Blocks with most to read first: threads then end at about the same time.
        for (int64_t first = (count - 1) / queries * queries; first >= 0; first -= queries) {
            int64_t rest = count - first;
            Task task{seq, 0, first, rest < queries ? rest : queries, 0, 0, false, -1};
            Range range = packed_range(a, s, task);
            for (task.kv_head = 0; task.kv_head < a.pages.num_kv_heads; task.kv_head++)
                add_block(a, range, task, few, plan);
        }
    }
    return plan;
}

const Kernels* detect(int i) {
#if defined(__x86_64__)
    __builtin_cpu_init();
    bool avx2 = __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") && __builtin_cpu_supports("f16c");
    bool avx512 = avx2 && __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
                  __builtin_cpu_supports("avx512vl") && __builtin_cpu_supports("avx512dq");
    bool vnni = avx512 && __builtin_cpu_supports("avx512vnni");
    const Kernels* all[] = {vnni ? &avx512vnni_kernels : nullptr, avx512 ? &avx512_kernels : nullptr,
                            avx2 ? &avx2_kernels : nullptr, &scalar_kernels};
#elif defined(__aarch64__)
    const Kernels* all[] = {&neon_kernels, &scalar_kernels, nullptr, nullptr};
#else
    const Kernels* all[] = {&scalar_kernels, nullptr, nullptr, nullptr};
#endif
    return i < 4 ? all[i] : nullptr;
}

const Kernels* best() {
    for (int i = 0; i < 4; i++)
        if (detect(i)) return detect(i);
    return &scalar_kernels;
}

const Kernels* selected = best();

}  // namespace
}  // namespace tq

using namespace tq;

extern "C" {

int64_t tq_abi_version() { return ABI_VERSION; }

const char* tq_available() {
    static char names[128];
    names[0] = 0;
    for (int i = 0; i < 4; i++)
        if (const Kernels* k = detect(i)) {
            if (names[0]) std::strcat(names, " ");
            std::strcat(names, k->name);
        }
    return names;
}

int64_t tq_select(const char* name) {
    for (int i = 0; i < 4; i++)
        if (const Kernels* k = detect(i); k && !std::strcmp(k->name, name)) {
            selected = k;
            return 0;
        }
    return 1;
}

const char* tq_selected() { return selected->name; }

int64_t tq_has_threads() {
#if defined(_OPENMP)
    return 1;
#else
    return 0;
#endif
}

int64_t tq_store(const StoreArgs* args, char* message) {
    const StoreArgs& a = *args;
    int64_t num_slots = a.pages.num_blocks * a.pages.block_size;
    for (int64_t i = 0; i < a.num_tokens; i++)
        if (a.slots[i] >= num_slots)
            return fail(INDEX_ERROR, message, "slot %lld lies outside the pages: %lld blocks of %lld tokens.",
                        Long(a.slots[i]), Long(a.pages.num_blocks), Long(a.pages.block_size));
    const Kernels& kernels = *selected;
    int64_t count = (a.num_tokens + STORE_TOKENS - 1) / STORE_TOKENS;
    bool done = parallel(count, a.threads, kernels.store_scratch(a), [&](int64_t i, void* scratch) {
        int64_t begin = i * STORE_TOKENS, end = begin + STORE_TOKENS;
        kernels.store(a, begin, end < a.num_tokens ? end : a.num_tokens, scratch);
    });
    return done ? OK : fail(MEMORY_ERROR, message, "out of memory");
}

int64_t tq_store_exact(const StoreExactArgs* args, char* message) {
    const StoreExactArgs& a = *args;
    for (int64_t i = 0; i < a.num_tokens; i++)
        if (a.slots[i] >= a.num_blocks * a.block_size)
            return fail(INDEX_ERROR, message, "slot %lld lies outside the window pages: %lld blocks of %lld tokens.",
                        Long(a.slots[i]), Long(a.num_blocks), Long(a.block_size));
    const int64_t width = a.pages.dtype == F32 ? 4 : 2, bytes = a.dim * width;
    for (int64_t i = 0; i < a.num_tokens; i++) {
        int64_t block = a.slots[i] / a.block_size, offset = a.slots[i] % a.block_size;
        for (int64_t head = 0; block > 0 && head < a.num_kv_heads; head++) {  // block 0 holds nothing
            auto row = [&](const Vectors& x, int64_t token, int64_t at) {
                return static_cast<char*>(x.data) + (token * x.token_stride + head * x.head_stride + at) * width;
            };
            char* out = row(a.pages, block, offset * a.token_stride);
            std::memcpy(out, row(a.key, i, 0), bytes);
            std::memcpy(out + bytes, row(a.value, i, 0), bytes);
        }
    }
    return OK;
}

int64_t tq_attend(const AttendArgs* args, char* message) {
    const AttendArgs& a = *args;
    if (Status status = check(a, message)) return status;
    const Kernels& kernels = *selected;
    Plan plan = make_plan(a);
    if (plan.tasks.empty()) return OK;
    Shared shared;
    void* tables = shared_of_caller.at_least(kernels.shared_bytes(a));
    if (!tables) return fail(MEMORY_ERROR, message, "out of memory");
    kernels.share(a, shared, tables);
    int64_t partial_bytes = plan.partial_rows * partial_floats(a.layer.dim) * int64_t(sizeof(float));
    float* rows = static_cast<float*>(partials_of_caller.at_least(partial_bytes + 64));
    bool done = rows && parallel(plan.tasks.size(), a.threads, kernels.attend_scratch(a, shared, plan.max_rows),
                                 [&](int64_t i, void* scratch) { kernels.attend(a, shared, plan.tasks[i], scratch, rows); });
    done = done && parallel(plan.splits.size(), a.threads, 64, [&](int64_t i, void*) {
        auto [first, count] = plan.splits[i];
        kernels.combine(a, plan.tasks[first], count, rows);
    });
    return done ? OK : fail(MEMORY_ERROR, message, "out of memory");
}

}  // extern "C"
