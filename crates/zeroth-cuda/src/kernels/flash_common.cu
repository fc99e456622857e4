// Shared by the flash attention kernels of all GPUs: tile coordinates, masking, the online softmax, and stores.

#define INLINE __device__ __forceinline__

// The work of one block: head, rows of its tile, and row strides of the tensors.
struct BlockTile {
    int head, kv_head, tile, tile_end, head_dim, q_stride, kv_stride, window;
    i64 rows;
};

INLINE int imin(int a, int b) { return a < b ? a : b; }
INLINE int imax(int a, int b) { return a > b ? a : b; }

INLINE BlockTile block_tile(const Shape &shape, int rows, int head, int kv_head, int tile) {
    int head_dim = (int)shape.head_dim, first = tile * rows;
    return {head,
            kv_head,
            first,
            (int)min64((i64)first + rows, shape.rows),
            head_dim,
            (int)shape.heads * head_dim,
            (int)shape.kv_heads * head_dim,
            (int)min64(shape.window, 1 << 30),
            shape.rows};
}

// A grid covers all tiles of all heads, one per block; the heads of a tile are consecutive. Tiles with the most work
// start first: the last query tiles, the first key tiles.
INLINE BlockTile query_tile(const Shape &shape, int rows, int item) {
    int heads = (int)shape.heads, head = item % heads, tiles = (int)((shape.rows + rows - 1) / rows);
    return block_tile(shape, rows, head, head / (heads / (int)shape.kv_heads), tiles - 1 - item / heads);
}

INLINE BlockTile key_tile(const Shape &shape, int rows, int item) {
    int heads = (int)shape.kv_heads, head = item % heads;
    return block_tile(shape, rows, head, head, item / heads);
}

// First row of the key tile that holds the first key visible to `query`; tiles start at the beginning of the sequence.
template <int KEYS> INLINE int first_key_tile(const BlockTile &block, int sequence, int query) {
    int oldest = block.window ? imax(sequence, query + 1 - block.window) : sequence;
    return sequence + (oldest - sequence) / KEYS * KEYS;
}

// First row of the query tile that holds the first query that sees `key`, and the end of the queries that see a key
// before `end`.
template <int QUERIES> INLINE int first_query_tile(int sequence, int key) {
    return sequence + (key - sequence) / QUERIES * QUERIES;
}

INLINE int query_end(const BlockTile &block, int sequence_end, int end) {
    return block.window ? imin(sequence_end, end - 1 + block.window) : sequence_end;
}

// Calls `body` with the bounds of every sequence that overlaps the tile, and with its rows in the tile.
template <typename Body> INLINE void for_each_sequence(Starts starts, const BlockTile &block, Body body) {
    for (u64 s = sequence_at(starts, block.tile); s + 1 < starts.count && (int)starts.at[s] < block.tile_end; s++) {
        int sequence = (int)starts.at[s], sequence_end = (int)min64(starts.at[s + 1], block.rows);
        int first = imax(sequence, block.tile), end = imin(sequence_end, block.tile_end);
        if (first < end) body(sequence, sequence_end, first, end);
    }
}

// A thread's fragment of a result: rows `row` and `row` + 8 of the tile, columns `column`, + 1, + 8, + 9, ...
INLINE int thread_row() { return threadIdx.x / WARP * 16 + threadIdx.x % WARP / 4; }
INLINE int thread_column() { return threadIdx.x % 4 * 2; }

template <int N> INLINE void clear(float (&acc)[N][4]) {
#pragma unroll
    for (int i = 0; i < N; i++) acc[i][0] = acc[i][1] = acc[i][2] = acc[i][3] = 0.0f;
}

// Stores the first `valid` rows, each scaled by its factor.
template <typename T, int N>
INLINE void store_tile(T *to, int row_stride, int valid, int head_dim, int first, const float (&acc)[N][4],
                       const float (&factors)[2]) {
#pragma unroll
    for (int half = 0; half < 2; half++) {
        int row = thread_row() + 8 * half;
        if (row >= valid) continue;
#pragma unroll
        for (int i = 0; i < N; i++) {
            int column = first + 8 * i + thread_column();
            if (column >= head_dim) continue;
            float low = acc[i][2 * half] * factors[half], high = acc[i][2 * half + 1] * factors[half];
            *(u32 *)(to + (i64)row * row_stride + column) = Pair<T>::pack(low, high);
        }
    }
}

// Zeroes the padding rows, which follow all sequences.
template <int THREADS, typename T>
INLINE void zero_padding(int used, const BlockTile &block, T *to, int row_stride) {
    int first = imax(block.tile, used), chunks = block.head_dim / 8;
    for (int i = threadIdx.x; i < (block.tile_end - first) * chunks; i += THREADS) {
        *(uint4 *)(to + (i64)(first + i / chunks) * row_stride + i % chunks * 8) = make_uint4(0, 0, 0, 0);
    }
}

INLINE int used_rows(Starts starts) { return starts.count > 0 ? (int)starts.at[starts.count - 1] : 0; }

// Sets masked scores to -inf. Rows are queries from `query` on, columns are keys from `key` on.
template <int N>
INLINE void mask_keys(float (&scores)[N / 8][4], int query, int key, int window) {
    int newest = query - key + thread_row() - thread_column();
    u32 width = window ? (u32)window : 1u << 31;
#pragma unroll
    for (int i = 0; i < N / 8; i++)
#pragma unroll
        for (int j = 0; j < 4; j++) {
            int age = newest + j / 2 * 8 - 8 * i - j % 2;
            if ((u32)age >= width) scores[i][j] = -INF;
        }
}

// `mask_keys` for transposed scores: rows are keys, columns are queries.
template <int N>
INLINE void mask_queries(float (&scores)[N / 8][4], int key, int query, int window) {
    int oldest = query - key + thread_column() - thread_row();
    u32 width = window ? (u32)window : 1u << 31;
#pragma unroll
    for (int i = 0; i < N / 8; i++)
#pragma unroll
        for (int j = 0; j < 4; j++) {
            int age = oldest - j / 2 * 8 + 8 * i + j % 2;
            if ((u32)age >= width) scores[i][j] = -INF;
        }
}

// Whether a warp's 16 queries see all of the N keys, so that no masking is needed.
template <int N> INLINE bool all_keys_visible(int query, int key, int window) {
    query += threadIdx.x / WARP * 16;
    return key + N - 1 <= query && (!window || key > query + 15 - window);
}

template <int N> INLINE bool all_queries_see(int key, int query, int window) {
    key += threadIdx.x / WARP * 16;
    return key + 15 <= query && (!window || key > query + N - 1 - window);
}

INLINE float row_max(float value) {
    value = fmaxf(value, __shfl_xor_sync(FULL_MASK, value, 1));
    return fmaxf(value, __shfl_xor_sync(FULL_MASK, value, 2));
}

INLINE float row_sum(float value) {
    value += __shfl_xor_sync(FULL_MASK, value, 1);
    return value + __shfl_xor_sync(FULL_MASK, value, 2);
}

// Online softmax of a thread's two rows: running maximum, and this thread's part of the denominator.
struct OnlineSoftmax {
    float maxima[2], sums[2];

    // Replaces scores by exp2(scores * scale - max); `rescale` is the factor for earlier results. `scale` includes
    // log2(e).
    template <int N> INLINE void update(float (&scores)[N / 8][4], float scale, float (&rescale)[2]) {
#pragma unroll
        for (int half = 0; half < 2; half++) {
            float maximum = maxima[half];
#pragma unroll
            for (int i = 0; i < N / 8; i++)
                maximum = fmaxf(maximum, fmaxf(scores[i][2 * half], scores[i][2 * half + 1]));
            maximum = row_max(maximum);
            // A row whose keys are all masked so far stays at 0.
            float base = maximum == -INF ? 0.0f : maximum * scale, sum = 0.0f;
            // Rounded like `base`: if the maximum does not change, `rescale` is exactly 1.
            rescale[half] = fast_exp2(maxima[half] * scale - base);
            maxima[half] = maximum;
#pragma unroll
            for (int i = 0; i < N / 8; i++)
#pragma unroll
                for (int j = 2 * half; j < 2 * half + 2; j++) {
                    scores[i][j] = fast_exp2(fmaf(scores[i][j], scale, -base));
                    sum += scores[i][j];
                }
            sums[half] = fmaf(sums[half], rescale[half], sum);
        }
    }
};
