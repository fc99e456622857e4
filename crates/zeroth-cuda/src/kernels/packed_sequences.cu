// Where sequences lie in a pack, and which keys a query sees.

// Where sequences begin: `count` entries, the last one where the last sequence ends.
struct Starts {
    const u32 *at;
    u64 count;
};

struct Shape {
    i64 rows, heads, kv_heads, head_dim;
    // 0: a query sees all keys before it.
    i64 window;
    float scale;
};

__device__ Starts starts_of(const u32 *starts, u64 room) {
    Starts found;
    found.at = starts + 1;
    found.count = starts[0] < room ? starts[0] : room;
    return found;
}

// The first sequence that ends behind `row`.
__device__ u64 sequence_at(Starts starts, i64 row) {
    u64 low = 0, high = starts.count > 0 ? starts.count - 1 : 0;
    while (low < high) {
        u64 middle = (low + high) / 2;
        if ((i64)starts.at[middle + 1] > row) high = middle;
        else low = middle + 1;
    }
    return low;
}

__device__ __forceinline__ i64 smaller(i64 a, i64 b) { return a < b ? a : b; }
__device__ __forceinline__ i64 larger(i64 a, i64 b) { return a > b ? a : b; }

__device__ __forceinline__ i64 first_key(const Shape &shape, i64 sequence, i64 query) {
    return shape.window ? larger(sequence, query + 1 - shape.window) : sequence;
}

__device__ __forceinline__ bool sees(const Shape &shape, i64 sequence, i64 query, i64 key) {
    return key <= query && key >= first_key(shape, sequence, query);
}
