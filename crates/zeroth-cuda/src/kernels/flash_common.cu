// Shared by the flash attention kernels of all GPUs: tile coordinates, masking, the online softmax, and stores.
//
// The host compiles variants. GENERAL is 0 for causal attention within sequences, and 1 for a context: whole sequences,
// those of other rows, and, where BIAS and DROPOUT are 1, biases and dropout.

#define INLINE __device__ __forceinline__

// The work of one block: head, rows of its tile, and row strides of the tensors. `rows` are those of q.
struct BlockTile {
    int head, kv_head, tile, tile_end, head_dim, q_stride, kv_stride, window;
    i64 rows, kv_rows;
    bool causal;
};

// A sequence that overlaps a block's tile: its rows, those of the tile, and its rows in the other operand.
struct Overlap {
    int sequence, sequence_end, first, end, other, other_end;
};

INLINE int imin(int a, int b) { return a < b ? a : b; }
INLINE int imax(int a, int b) { return a > b ? a : b; }

INLINE BlockTile block_tile(const Shape &shape, int rows, int head, int kv_head, int tile, i64 all_rows) {
    int head_dim = (int)shape.head_dim, first = tile * rows;
    return {head,
            kv_head,
            first,
            (int)min64((i64)first + rows, all_rows),
            head_dim,
            (int)shape.heads * head_dim,
            (int)shape.kv_heads * head_dim,
            (int)min64(shape.window, 1 << 30),
            shape.rows,
            shape.kv_rows,
            shape.causal};
}

// A grid covers all tiles of all heads, one per block; the heads of a tile are consecutive. Tiles with the most work
// start first: the last query tiles, the first key tiles.
INLINE BlockTile query_tile(const Shape &shape, int rows, int item) {
    int heads = (int)shape.heads, head = item % heads, tiles = (int)((shape.rows + rows - 1) / rows);
    return block_tile(shape, rows, head, head / (heads / (int)shape.kv_heads), tiles - 1 - item / heads, shape.rows);
}

INLINE BlockTile key_tile(const Shape &shape, int rows, int item) {
    int heads = (int)shape.kv_heads, head = item % heads;
    return block_tile(shape, rows, head, head, item / heads, shape.kv_rows);
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

// The first key of the tiles of keys that a tile of queries needs, and the end of the last. Without a mask or another
// sequence, those of its own.
template <int KEYS> INLINE int first_key(const BlockTile &block, const Overlap &at) {
    if (GENERAL && !block.causal) return at.other;
    return first_key_tile<KEYS>(block, at.sequence, at.first);
}

INLINE int keys_end(const BlockTile &block, const Overlap &at) {
    return GENERAL && !block.causal ? at.other_end : at.end;
}

// Likewise of queries that a tile of keys needs.
template <int QUERIES> INLINE int first_query(const BlockTile &block, const Overlap &at) {
    if (GENERAL && !block.causal) return at.other;
    return first_query_tile<QUERIES>(at.sequence, at.first);
}

INLINE int queries_end(const BlockTile &block, const Overlap &at) {
    return GENERAL && !block.causal ? at.other_end : query_end(block, at.sequence_end, at.end);
}

// Calls `body` for every sequence that overlaps the tile. `starts` and `rows` are those of its own operand.
template <typename Body>
INLINE void for_each_sequence(Starts starts, i64 rows, Starts others, i64 other_rows, const BlockTile &block,
                              Body body) {
    for (u64 s = sequence_at(starts, block.tile); s + 1 < starts.count && (int)starts.at[s] < block.tile_end; s++) {
        Overlap at;
        at.sequence = (int)starts.at[s];
        at.sequence_end = (int)min64(starts.at[s + 1], rows);
        at.first = imax(at.sequence, block.tile);
        at.end = imin(at.sequence_end, block.tile_end);
        at.other = at.sequence;
        at.other_end = at.sequence_end;
        if constexpr (GENERAL) {
            bool exists = s + 1 < others.count;
            at.other = exists ? (int)others.at[s] : 0;
            at.other_end = exists ? (int)min64(others.at[s + 1], other_rows) : 0;
        }
        if (at.first < at.end) body(at);
    }
}

template <typename Body>
INLINE void for_each_sequence_of_queries(Starts starts, const Context &context, const BlockTile &block, Body body) {
    for_each_sequence(starts, block.rows, context.kv_starts, block.kv_rows, block, body);
}

template <typename Body>
INLINE void for_each_sequence_of_keys(Starts starts, const Context &context, const BlockTile &block, Body body) {
    for_each_sequence(context.kv_starts, block.kv_rows, starts, block.rows, block, body);
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

INLINE int used_rows(Starts starts) { return starts.count > 0 ? (int)starts.at[starts.count - 1] : 0; }
INLINE int first_row(Starts starts) { return starts.count > 0 ? (int)starts.at[0] : 0; }

template <int THREADS, typename T>
INLINE void zero_rows(int first, int end, int head_dim, T *to, int row_stride) {
    int chunks = head_dim / 8;
    for (int i = threadIdx.x; i < (end - first) * chunks; i += THREADS) {
        *(uint4 *)(to + (i64)(first + i / chunks) * row_stride + i % chunks * 8) = make_uint4(0, 0, 0, 0);
    }
}

// Zeroes the padding rows, which follow all sequences or, with a context, precede them.
template <int THREADS, typename T>
INLINE void zero_padding(Starts starts, const BlockTile &block, T *to, int row_stride) {
    zero_rows<THREADS>(imax(block.tile, used_rows(starts)), block.tile_end, block.head_dim, to, row_stride);
    if constexpr (GENERAL)
        zero_rows<THREADS>(block.tile, imin(block.tile_end, first_row(starts)), block.head_dim, to, row_stride);
}

template <int THREADS> INLINE void zero_statistics(int first, int end, float *to) {
    for (int row = first + threadIdx.x; row < end; row += THREADS) to[row] = 0.0f;
}

template <int THREADS> INLINE void zero_padding(Starts starts, const BlockTile &block, float *to) {
    zero_statistics<THREADS>(imax(block.tile, used_rows(starts)), block.tile_end, to);
    if constexpr (GENERAL) zero_statistics<THREADS>(block.tile, imin(block.tile_end, first_row(starts)), to);
}

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

// Sets the scores of columns from `valid` on to -inf.
template <int N> INLINE void mask_columns(float (&scores)[N / 8][4], int valid) {
#pragma unroll
    for (int i = 0; i < N / 8; i++)
#pragma unroll
        for (int j = 0; j < 4; j++)
            if (8 * i + thread_column() + j % 2 >= valid) scores[i][j] = -INF;
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

// Masks the scores of queries from `query` on, as keys count their rows, and N keys from `key` on, of which the last is
// before `end`.
template <int N>
INLINE void mask_scores(float (&scores)[N / 8][4], const BlockTile &block, int query, int key, int end) {
    if (GENERAL && !block.causal) {
        if (key + N > end) mask_columns<N>(scores, end - key);
    } else if (!all_keys_visible<N>(query, key, block.window)) {
        mask_keys<N>(scores, query, key, block.window);
    }
}

// `mask_scores` for transposed scores: `key` is counted as the rows of queries.
template <int N>
INLINE void mask_transposed(float (&scores)[N / 8][4], const BlockTile &block, int key, int query, int end) {
    if ((!GENERAL || block.causal) && !all_queries_see<N>(key, query, block.window))
        mask_queries<N>(scores, key, query, block.window);
    // Without biases, the zeros in rows beyond the last query are enough.
    if (GENERAL && query + N > end) mask_columns<N>(scores, end - query);
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
