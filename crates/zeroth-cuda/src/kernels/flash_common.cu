// What the kernels of attention on the tensor cores share: where a block and a thread are, what a query sees, the softmax
// so far, and how results are stored.

#define INLINE __device__ __forceinline__

// Where a block works: the head, the tile's rows, and what lies between two rows of a tensor.
struct Place {
    int head, kv_head, tile, tile_end, head_dim, q_pitch, kv_pitch, window;
    i64 rows;
};

INLINE int min_of(int a, int b) { return a < b ? a : b; }
INLINE int max_of(int a, int b) { return a > b ? a : b; }

INLINE Place place_at(const Shape &shape, int rows, int head, int kv_head, int tile) {
    int head_dim = (int)shape.head_dim, first = tile * rows;
    return {head, kv_head, first, (int)smaller((i64)first + rows, shape.rows), head_dim, (int)shape.heads * head_dim,
            (int)shape.kv_heads * head_dim, (int)smaller(shape.window, 1 << 30), shape.rows};
}

// A launch's items are all tiles of all heads, a tile's heads next to each other, and a block has one. Tiles that meet the
// most of the other side come first: of queries the last, of keys the first.
INLINE Place place_of_queries(const Shape &shape, int rows, int item) {
    int heads = (int)shape.heads, head = item % heads, tiles = (int)((shape.rows + rows - 1) / rows);
    return place_at(shape, rows, head, head / (heads / (int)shape.kv_heads), tiles - 1 - item / heads);
}

INLINE Place place_of_keys(const Shape &shape, int rows, int item) {
    int heads = (int)shape.kv_heads, head = item % heads;
    return place_at(shape, rows, head, head, item / heads);
}

// Where the tile of keys begins that has the first one that `query` sees; tiles count from the beginning of the sequence.
template <int KEYS> INLINE int first_keys(const Place &at, int sequence, int query) {
    int oldest = at.window ? max_of(sequence, query + 1 - at.window) : sequence;
    return sequence + (oldest - sequence) / KEYS * KEYS;
}

// Where the tile of queries begins that has the first one that sees `key`, and behind the last that sees one before `end`.
template <int QUERIES> INLINE int first_queries(int sequence, int key) {
    return sequence + (key - sequence) / QUERIES * QUERIES;
}

INLINE int behind_queries(const Place &at, int sequence_end, int end) {
    return at.window ? min_of(sequence_end, end - 1 + at.window) : sequence_end;
}

// Calls `body` with where each sequence that meets the tile begins and ends, and with its rows of the tile.
template <typename Body> INLINE void each_sequence(Starts starts, const Place &at, Body body) {
    for (u64 s = sequence_at(starts, at.tile); s + 1 < starts.count && (int)starts.at[s] < at.tile_end; s++) {
        int sequence = (int)starts.at[s], sequence_end = (int)smaller(starts.at[s + 1], at.rows);
        int first = max_of(sequence, at.tile), end = min_of(sequence_end, at.tile_end);
        if (first < end) body(sequence, sequence_end, first, end);
    }
}

// Where a thread's elements of a result are: rows `row` and `row` + 8 of the tile, columns `column`, + 1, + 8, + 9, ...
INLINE int my_row() { return threadIdx.x / WARP * 16 + threadIdx.x % WARP / 4; }
INLINE int my_column() { return threadIdx.x % 4 * 2; }

template <int N> INLINE void clear(float (&totals)[N][4]) {
#pragma unroll
    for (int i = 0; i < N; i++) totals[i][0] = totals[i][1] = totals[i][2] = totals[i][3] = 0.0f;
}

// Writes those of the rows that are `there`, each times its factor.
template <typename T, int N>
INLINE void store(T *to, int pitch, int there, int head_dim, int first, const float (&totals)[N][4],
                  const float (&factors)[2]) {
#pragma unroll
    for (int half = 0; half < 2; half++) {
        int row = my_row() + 8 * half;
        if (row >= there) continue;
#pragma unroll
        for (int i = 0; i < N; i++) {
            int column = first + 8 * i + my_column();
            if (column >= head_dim) continue;
            float low = totals[i][2 * half] * factors[half], high = totals[i][2 * half + 1] * factors[half];
            *(u32 *)(to + (i64)row * pitch + column) = Pair<T>::of(low, high);
        }
    }
}

// Rows of padding, which lie behind all sequences, give zeros.
template <int THREADS, typename T>
INLINE void fill_padding(int used, const Place &at, T *to, int pitch) {
    int first = max_of(at.tile, used), pieces = at.head_dim / 8;
    for (int i = threadIdx.x; i < (at.tile_end - first) * pieces; i += THREADS) {
        *(uint4 *)(to + (i64)(first + i / pieces) * pitch + i % pieces * 8) = make_uint4(0, 0, 0, 0);
    }
}

INLINE int used_rows(Starts starts) { return starts.count > 0 ? (int)starts.at[starts.count - 1] : 0; }

// Columns of a tile of queries' scores that a query does not see become -inf. `query` and `key`: of the first row and column.
template <int N>
INLINE void hide_keys(float (&scores)[N / 8][4], int query, int key, int window) {
    int newest = query - key + my_row() - my_column();
    u32 width = window ? (u32)window : 1u << 31;
#pragma unroll
    for (int i = 0; i < N / 8; i++)
#pragma unroll
        for (int j = 0; j < 4; j++) {
            int age = newest + j / 2 * 8 - 8 * i - j % 2;
            if ((u32)age >= width) scores[i][j] = -INFINITE;
        }
}

// The same for scores whose rows are keys.
template <int N>
INLINE void hide_queries(float (&scores)[N / 8][4], int key, int query, int window) {
    int oldest = query - key + my_column() - my_row();
    u32 width = window ? (u32)window : 1u << 31;
#pragma unroll
    for (int i = 0; i < N / 8; i++)
#pragma unroll
        for (int j = 0; j < 4; j++) {
            int age = oldest - j / 2 * 8 + 8 * i + j % 2;
            if ((u32)age >= width) scores[i][j] = -INFINITE;
        }
}

// Whether a warp's 16 rows of queries from `query` on see all of N keys.
template <int N> INLINE bool all_seen(int query, int key, int window) {
    query += threadIdx.x / WARP * 16;
    return key + N - 1 <= query && (!window || key > query + 15 - window);
}

template <int N> INLINE bool all_see(int key, int query, int window) {
    key += threadIdx.x / WARP * 16;
    return key + 15 <= query && (!window || key > query + N - 1 - window);
}

INLINE float largest_of_row(float value) {
    value = fmaxf(value, __shfl_xor_sync(ALL_LANES, value, 1));
    return fmaxf(value, __shfl_xor_sync(ALL_LANES, value, 2));
}

INLINE float sum_of_row(float value) {
    value += __shfl_xor_sync(ALL_LANES, value, 1);
    return value + __shfl_xor_sync(ALL_LANES, value, 2);
}

// The softmax so far of a thread's two rows: largest score, this thread's part of the sum of weights.
struct Softmax {
    float peaks[2], sums[2];

    // Scores become weights; `shrink` is what earlier weights are multiplied with. `scale` is to the base 2.
    template <int N> INLINE void next(float (&scores)[N / 8][4], float scale, float (&shrink)[2]) {
#pragma unroll
        for (int half = 0; half < 2; half++) {
            float peak = peaks[half];
#pragma unroll
            for (int i = 0; i < N / 8; i++) peak = fmaxf(peak, fmaxf(scores[i][2 * half], scores[i][2 * half + 1]));
            peak = largest_of_row(peak);
            // A row that has seen nothing yet stays at 0.
            float base = peak == -INFINITE ? 0.0f : peak * scale, sum = 0.0f;
            // Rounded as `base` is: where the largest score stays, earlier weights stay as they are, bit by bit.
            shrink[half] = exp2_of(peaks[half] * scale - base);
            peaks[half] = peak;
#pragma unroll
            for (int i = 0; i < N / 8; i++)
#pragma unroll
                for (int j = 2 * half; j < 2 * half + 2; j++) {
                    scores[i][j] = exp2_of(fmaf(scores[i][j], scale, -base));
                    sum += scores[i][j];
                }
            sums[half] = fmaf(sums[half], shrink[half], sum);
        }
    }
};

