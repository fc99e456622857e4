// Boundaries of packed sequences, and the causal and sliding-window mask.

// Cumulative sequence lengths: `count` entries, the last of which is the end of the last sequence.
struct Starts {
    const u32 *at;
    u64 count;
};

struct Shape {
    i64 rows, heads, kv_heads, head_dim;
    // Sliding window in keys; 0: none.
    i64 window;
    float scale;
    // Rows of k and v.
    i64 kv_rows;
    // Whether a query sees the keys up to its own only; its sequence is then that of the keys, too.
    bool causal;
};

__device__ Starts read_starts(const u32 *starts, u64 capacity) {
    Starts found;
    found.at = starts + 1;
    found.count = starts[0] < capacity ? starts[0] : capacity;
    return found;
}

// The first sequence that ends after `row`.
__device__ u64 sequence_at(Starts starts, i64 row) {
    u64 low = 0, high = starts.count > 0 ? starts.count - 1 : 0;
    while (low < high) {
        u64 middle = (low + high) / 2;
        if ((i64)starts.at[middle + 1] > row) high = middle;
        else low = middle + 1;
    }
    return low;
}

__device__ __forceinline__ i64 min64(i64 a, i64 b) { return a < b ? a : b; }
__device__ __forceinline__ i64 max64(i64 a, i64 b) { return a > b ? a : b; }

__device__ __forceinline__ i64 first_visible_key(const Shape &shape, i64 sequence, i64 query) {
    return shape.window ? max64(sequence, query + 1 - shape.window) : sequence;
}
