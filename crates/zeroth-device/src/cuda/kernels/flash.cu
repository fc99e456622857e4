// Causal attention over packed sequences on the tensor cores, forward and backward: for bf16 and fp16, heads of a multiple
// of 8 elements up to HEAD, a scale above 0, and operands at multiples of 16 bytes.
//
// A block has a tile of rows of one head; a warpgroup has 64 of them. Tiles of the other side come from the beginning of the
// sequence, two stages in shared memory: while one is computed with, the next one is copied. Weights and gradients of scores
// are rounded to the run's type on their way into the second product. Every sum runs in one order, and there are no atomics:
// dq is summed by query, dk and dv by key, heads of a group one after another. The host says how tiles are cut: *_GROUPS
// warpgroups, and *_KEYS or *_QUERIES rows of the other side.

#define INLINE __device__ __forceinline__

// A block's place: its head, its tile's rows, and what lies between two rows of a tensor.
struct Place {
    i64 head, kv_head, tile, tile_end;
    int head_dim, q_pitch, kv_pitch;
};

// Tiles that meet the most of the other side come first: of queries the last, of keys the first.
INLINE Place place_of_queries(const Shape &shape, int rows) {
    i64 head = blockIdx.x, tile = (i64)(gridDim.y - 1 - blockIdx.y) * rows;
    int head_dim = (int)shape.head_dim;
    return {head, head / (shape.heads / shape.kv_heads), tile, smaller(tile + rows, shape.rows), head_dim,
            (int)shape.heads * head_dim, (int)shape.kv_heads * head_dim};
}

INLINE Place place_of_keys(const Shape &shape, int rows) {
    i64 head = blockIdx.x, tile = (i64)blockIdx.y * rows;
    int head_dim = (int)shape.head_dim;
    return {head, head, tile, smaller(tile + rows, shape.rows), head_dim, (int)shape.heads * head_dim,
            (int)shape.kv_heads * head_dim};
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
template <typename T>
INLINE void fill_padding(Starts starts, T *to, int pitch, i64 tile, i64 tile_end, int head_dim) {
    i64 used = starts.count > 0 ? (i64)starts.at[starts.count - 1] : 0, first = larger(tile, used);
    if (first >= tile_end) return;
    int pieces = head_dim / 8;
    for (i64 i = threadIdx.x; i < (tile_end - first) * pieces; i += blockDim.x) {
        u64 *piece = (u64 *)(to + (first + i / pieces) * pitch + i % pieces * 8);
        piece[0] = piece[1] = 0;
    }
}

// Columns of a tile of queries' scores that a query does not see become -inf. `query` and `key`: of the first row and column.
template <int N>
INLINE void hide_keys(float (&scores)[N / 8][4], i64 query, i64 key, i64 window) {
    int newest = (int)(query - key) + my_row() - my_column();
    int width = window ? (int)smaller(window, 1 << 30) : 1 << 30;
#pragma unroll
    for (int i = 0; i < N / 8; i++)
#pragma unroll
        for (int j = 0; j < 4; j++) {
            int age = newest + j / 2 * 8 - 8 * i - j % 2;
            if (age < 0 || age >= width) scores[i][j] = -INFINITE;
        }
}

// The same for scores whose rows are keys.
template <int N>
INLINE void hide_queries(float (&scores)[N / 8][4], i64 key, i64 query, i64 window) {
    int oldest = (int)(query - key) + my_column() - my_row();
    int width = window ? (int)smaller(window, 1 << 30) : 1 << 30;
#pragma unroll
    for (int i = 0; i < N / 8; i++)
#pragma unroll
        for (int j = 0; j < 4; j++) {
            int age = oldest - j / 2 * 8 + 8 * i + j % 2;
            if (age < 0 || age >= width) scores[i][j] = -INFINITE;
        }
}

// Whether a warp's 16 rows of queries from `query` on see all of N keys.
template <int N> INLINE bool all_seen(i64 query, i64 key, i64 window) {
    query += threadIdx.x / WARP * 16;
    return key + N - 1 <= query && (!window || key > query + 15 - window);
}

template <int N> INLINE bool all_see(i64 key, i64 query, i64 window) {
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
            shrink[half] = exp2_of(fmaf(peaks[half], scale, -base));
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

template <typename T>
INLINE void flash(Starts starts, const T *q, const T *k, const T *v, T *y, float *lse, const Shape &shape) {
    constexpr int ROWS = FORWARD_GROUPS * GROUP_ROWS, THREADS = FORWARD_GROUPS * GROUP, KEYS = FORWARD_KEYS;
    Place at = place_of_queries(shape, ROWS);
    u32 q_tile = shared_begin(), k_tiles = q_tile + tile_bytes(ROWS), v_tiles = k_tiles + 2 * tile_bytes(KEYS);
    q += at.head * at.head_dim;
    y += at.head * at.head_dim;
    k += at.kv_head * at.head_dim;
    v += at.kv_head * at.head_dim;
    lse += at.head * shape.rows;
    float scale = shape.scale * LOG2_E;
    fill_padding(starts, y, at.q_pitch, at.tile, at.tile_end, at.head_dim);
    if (starts.count == 0 || at.tile_end > (i64)starts.at[starts.count - 1]) {
        for (i64 row = at.tile + threadIdx.x; row < at.tile_end; row += THREADS) lse[row] = 0.0f;
        __syncthreads();
    }
    for (u64 s = sequence_at(starts, at.tile); s + 1 < starts.count && (i64)starts.at[s] < at.tile_end; s++) {
        i64 sequence = starts.at[s], first = larger(sequence, at.tile), end = smaller(starts.at[s + 1], at.tile_end);
        if (first >= end) continue;
        i64 key = sequence + (first_key(shape, sequence, first) - sequence) / KEYS * KEYS;
        int tiles = (int)((end - key + KEYS - 1) / KEYS);
        float totals[HEAD / 8][4], scores[KEYS / 8][4], shrink[2];
        u32 weights[KEYS / 16][4];
        Softmax softmax = {{-INFINITE, -INFINITE}, {0.0f, 0.0f}};
        clear(totals);
        auto copy_keys = [&](u32 tiles_at, const T *from, int tile) {
            i64 row = key + (i64)tile * KEYS;
            u32 to = tiles_at + tile % 2 * tile_bytes(KEYS);
            copy_tile<KEYS, THREADS>(to, from + row * at.kv_pitch, at.kv_pitch, (int)smaller(end - row, KEYS), at.head_dim);
        };
        auto weigh = [&](int tile) {
            i64 row = key + (i64)tile * KEYS;
            if (!all_seen<KEYS>(first, row, shape.window)) hide_keys<KEYS>(scores, first, row, shape.window);
            softmax.next<KEYS>(scores, scale, shrink);
        };
        // Nobody reads the tiles of the sequence before any more.
        __syncthreads();
        copy_tile<ROWS, THREADS>(q_tile, q + first * at.q_pitch, at.q_pitch, (int)(end - first), at.head_dim);
        copy_keys(k_tiles, k, 0);
        end_of_copies();
        wait_for_copies();
        __syncthreads();
        if (tiles > 1) copy_keys(k_tiles, k, 1);
        copy_keys(v_tiles, v, 0);
        end_of_copies();
        begin_products();
        dots<T, ROWS, KEYS>(scores, q_tile, k_tiles);
        end_products();
        wait_for_products<0>(scores);
        weigh(0);
        as_left<T, KEYS>(weights, scores);
#pragma unroll 1
        for (int tile = 1; tile < tiles; tile++) {
            // Scores of this tile, then the values of the one before: the softmax runs beside the second product.
            wait_for_copies();
            __syncthreads();
            if (tile + 1 < tiles) copy_keys(k_tiles, k, tile + 1);
            copy_keys(v_tiles, v, tile);
            end_of_copies();
            begin_products();
            dots<T, ROWS, KEYS>(scores, q_tile, k_tiles + tile % 2 * tile_bytes(KEYS));
            end_products();
            gather<T, KEYS, HEAD>(totals, weights, v_tiles + (tile + 1) % 2 * tile_bytes(KEYS), 0);
            end_products();
            wait_for_products<1>(scores);
            weigh(tile);
            wait_for_products<0>(totals);
#pragma unroll
            for (int i = 0; i < HEAD / 8; i++)
#pragma unroll
                for (int j = 0; j < 4; j++) totals[i][j] *= shrink[j / 2];
            as_left<T, KEYS>(weights, scores);
        }
        wait_for_copies();
        __syncthreads();
        begin_products();
        gather<T, KEYS, HEAD>(totals, weights, v_tiles + (tiles + 1) % 2 * tile_bytes(KEYS), 0);
        end_products();
        wait_for_products<0>(totals);
        float factors[2];
#pragma unroll
        for (int half = 0; half < 2; half++) {
            float sum = sum_of_row(softmax.sums[half]);
            factors[half] = 1.0f / sum;
            int row = my_row() + 8 * half;
            bool mine = threadIdx.x % 4 == 0 && row < end - first;
            if (mine) lse[first + row] = fmaf(softmax.peaks[half], shape.scale, logf(sum));
        }
        store(y + first * at.q_pitch, at.q_pitch, (int)(end - first), at.head_dim, 0, totals, factors);
    }
}

// Scores become weights, and slopes (gradients of weights) become gradients of scores but for the scale.
template <typename T>
INLINE void flash_dq(Starts starts, const T *q, const T *k, const T *v, const float *lse, const T *dy,
                     const float *delta, T *dq, const Shape &shape) {
    constexpr int ROWS = DQ_GROUPS * GROUP_ROWS, THREADS = DQ_GROUPS * GROUP, KEYS = DQ_KEYS;
    Place at = place_of_queries(shape, ROWS);
    u32 q_tile = shared_begin(), dy_tile = q_tile + tile_bytes(ROWS), k_tiles = dy_tile + tile_bytes(ROWS);
    u32 v_tiles = k_tiles + 2 * tile_bytes(KEYS);
    q += at.head * at.head_dim;
    dy += at.head * at.head_dim;
    dq += at.head * at.head_dim;
    k += at.kv_head * at.head_dim;
    v += at.kv_head * at.head_dim;
    float scale = shape.scale * LOG2_E;
    fill_padding(starts, dq, at.q_pitch, at.tile, at.tile_end, at.head_dim);
    for (u64 s = sequence_at(starts, at.tile); s + 1 < starts.count && (i64)starts.at[s] < at.tile_end; s++) {
        i64 sequence = starts.at[s], first = larger(sequence, at.tile), end = smaller(starts.at[s + 1], at.tile_end);
        if (first >= end) continue;
        i64 key = sequence + (first_key(shape, sequence, first) - sequence) / KEYS * KEYS;
        int tiles = (int)((end - key + KEYS - 1) / KEYS);
        auto copy_keys = [&](int tile) {
            i64 row = key + (i64)tile * KEYS;
            int there = (int)smaller(end - row, KEYS);
            u32 stage = tile % 2 * tile_bytes(KEYS);
            copy_tile<KEYS, THREADS>(k_tiles + stage, k + row * at.kv_pitch, at.kv_pitch, there, at.head_dim);
            copy_tile<KEYS, THREADS>(v_tiles + stage, v + row * at.kv_pitch, at.kv_pitch, there, at.head_dim);
            end_of_copies();
        };
        __syncthreads();
        copy_tile<ROWS, THREADS>(q_tile, q + first * at.q_pitch, at.q_pitch, (int)(end - first), at.head_dim);
        copy_tile<ROWS, THREADS>(dy_tile, dy + first * at.q_pitch, at.q_pitch, (int)(end - first), at.head_dim);
        copy_keys(0);
        float totals[HEAD / 8][4], scores[KEYS / 8][4], slopes[KEYS / 8][4], logs[2], deltas[2];
        u32 left[KEYS / 16][4];
        clear(totals);
#pragma unroll
        for (int half = 0; half < 2; half++) {
            i64 row = first + my_row() + 8 * half, from = at.head * shape.rows + row;
            logs[half] = row < end ? lse[from] * LOG2_E : 0.0f;
            deltas[half] = row < end ? delta[from] : 0.0f;
        }
#pragma unroll 1
        for (int tile = 0; tile < tiles; tile++) {
            u32 stage = tile % 2 * tile_bytes(KEYS);
            i64 row = key + (i64)tile * KEYS;
            wait_for_copies();
            __syncthreads();
            if (tile + 1 < tiles) copy_keys(tile + 1);
            begin_products();
            dots<T, ROWS, KEYS>(scores, q_tile, k_tiles + stage);
            end_products();
            dots<T, ROWS, KEYS>(slopes, dy_tile, v_tiles + stage);
            end_products();
            wait_for_products<1>(scores);
            if (!all_seen<KEYS>(first, row, shape.window)) hide_keys<KEYS>(scores, first, row, shape.window);
#pragma unroll
            for (int i = 0; i < KEYS / 8; i++)
#pragma unroll
                for (int j = 0; j < 4; j++) scores[i][j] = exp2_of(fmaf(scores[i][j], scale, -logs[j / 2]));
            wait_for_products<0>(slopes);
#pragma unroll
            for (int i = 0; i < KEYS / 8; i++)
#pragma unroll
                for (int j = 0; j < 4; j++) slopes[i][j] = scores[i][j] * (slopes[i][j] - deltas[j / 2]);
            as_left<T, KEYS>(left, slopes);
            begin_products();
            gather<T, KEYS, HEAD>(totals, left, k_tiles + stage, 0);
            end_products();
            wait_for_products<0>(totals);
        }
        float factors[2] = {shape.scale, shape.scale};
        store(dq + first * at.q_pitch, at.q_pitch, (int)(end - first), at.head_dim, 0, totals, factors);
    }
}

// A block has a tile of keys; rows of its scores are keys and columns are queries. Of wide heads it has a half of dk and dv.
template <typename T>
INLINE void flash_dkv(Starts starts, const T *q, const T *k, const T *v, const float *lse, const T *dy,
                      const float *delta, T *dk, T *dv, const Shape &shape) {
    constexpr int ROWS = DKV_GROUPS * GROUP_ROWS, THREADS = DKV_GROUPS * GROUP, QUERIES = DKV_QUERIES;
    constexpr int WIDTH = HEAD > 128 ? 128 : HEAD;
    Place at = place_of_keys(shape, ROWS);
    u32 k_tile = shared_begin(), v_tile = k_tile + tile_bytes(ROWS), q_tiles = v_tile + tile_bytes(ROWS);
    u32 dy_tiles = q_tiles + 2 * tile_bytes(QUERIES), statistics = dy_tiles + 2 * tile_bytes(QUERIES);
    int group = (int)(shape.heads / shape.kv_heads), first_column = blockIdx.z * WIDTH;
    k += at.kv_head * at.head_dim;
    v += at.kv_head * at.head_dim;
    dk += at.kv_head * at.head_dim;
    dv += at.kv_head * at.head_dim;
    float scale = shape.scale * LOG2_E;
    if (blockIdx.z == 0) {
        fill_padding(starts, dk, at.kv_pitch, at.tile, at.tile_end, at.head_dim);
        fill_padding(starts, dv, at.kv_pitch, at.tile, at.tile_end, at.head_dim);
    }
    for (u64 s = sequence_at(starts, at.tile); s + 1 < starts.count && (i64)starts.at[s] < at.tile_end; s++) {
        i64 sequence = starts.at[s], sequence_end = smaller(starts.at[s + 1], shape.rows);
        i64 first = larger(sequence, at.tile), end = smaller(sequence_end, at.tile_end);
        if (first >= end) continue;
        i64 last = shape.window ? smaller(sequence_end, end - 1 + shape.window) : sequence_end;
        i64 query = sequence + (first - sequence) / QUERIES * QUERIES;
        int tiles = (int)((last - query + QUERIES - 1) / QUERIES), all = tiles * group;
        auto copy_queries = [&](int tile) {
            i64 head = at.kv_head * group + tile / tiles, row = query + (i64)(tile % tiles) * QUERIES;
            int there = (int)smaller(last - row, QUERIES), i = threadIdx.x;
            i64 from = row * at.q_pitch + head * at.head_dim;
            u32 stage = tile % 2 * tile_bytes(QUERIES), numbers = statistics + tile % 2 * (8 * QUERIES);
            copy_tile<QUERIES, THREADS>(q_tiles + stage, q + from, at.q_pitch, there, at.head_dim);
            copy_tile<QUERIES, THREADS>(dy_tiles + stage, dy + from, at.q_pitch, there, at.head_dim);
            if (i < 2 * QUERIES) {
                const float *numbers_of = (i < QUERIES ? lse : delta) + head * shape.rows + row;
                bool inside = i % QUERIES < there;
                copy_word(numbers + 4 * i, numbers_of + (inside ? i % QUERIES : 0), inside);
            }
            end_of_copies();
        };
        __syncthreads();
        copy_tile<ROWS, THREADS>(k_tile, k + first * at.kv_pitch, at.kv_pitch, (int)(end - first), at.head_dim);
        copy_tile<ROWS, THREADS>(v_tile, v + first * at.kv_pitch, at.kv_pitch, (int)(end - first), at.head_dim);
        copy_queries(0);
        float k_totals[WIDTH / 8][4], v_totals[WIDTH / 8][4], scores[QUERIES / 8][4], slopes[QUERIES / 8][4];
        u32 weights[QUERIES / 16][4], left[QUERIES / 16][4];
        clear(k_totals);
        clear(v_totals);
#pragma unroll 1
        for (int tile = 0; tile < all; tile++) {
            u32 stage = tile % 2 * tile_bytes(QUERIES), numbers = statistics + tile % 2 * (8 * QUERIES);
            i64 row = query + (i64)(tile % tiles) * QUERIES;
            wait_for_copies();
            __syncthreads();
            if (tile + 1 < all) copy_queries(tile + 1);
            begin_products();
            dots<T, ROWS, QUERIES>(scores, k_tile, q_tiles + stage);
            end_products();
            dots<T, ROWS, QUERIES>(slopes, v_tile, dy_tiles + stage);
            end_products();
            wait_for_products<1>(scores);
            if (!all_see<QUERIES>(first, row, shape.window)) hide_queries<QUERIES>(scores, first, row, shape.window);
#pragma unroll
            for (int i = 0; i < QUERIES / 8; i++) {
                float2 logs = two_shared(numbers + 4 * (8 * i + my_column()));
#pragma unroll
                for (int j = 0; j < 4; j++) {
                    float log = j % 2 ? logs.y : logs.x;
                    scores[i][j] = exp2_of(fmaf(scores[i][j], scale, -log * LOG2_E));
                }
            }
            as_left<T, QUERIES>(weights, scores);
            begin_products();
            gather<T, QUERIES, WIDTH>(v_totals, weights, dy_tiles + stage, first_column);
            end_products();
            wait_for_products<1>(slopes);
#pragma unroll
            for (int i = 0; i < QUERIES / 8; i++) {
                float2 deltas = two_shared(numbers + 4 * (QUERIES + 8 * i + my_column()));
#pragma unroll
                for (int j = 0; j < 4; j++) slopes[i][j] = scores[i][j] * (slopes[i][j] - (j % 2 ? deltas.y : deltas.x));
            }
            as_left<T, QUERIES>(left, slopes);
            begin_products();
            gather<T, QUERIES, WIDTH>(k_totals, left, q_tiles + stage, first_column);
            end_products();
            wait_for_products<0>(v_totals);
            wait_for_products<0>(k_totals);
        }
        float ones[2] = {1.0f, 1.0f}, scales[2] = {shape.scale, shape.scale};
        int there = (int)(end - first);
        store(dv + first * at.kv_pitch, at.kv_pitch, there, at.head_dim, first_column, v_totals, ones);
        store(dk + first * at.kv_pitch, at.kv_pitch, there, at.head_dim, first_column, k_totals, scales);
    }
}

#define FLASH(NAME, T)                                                                                            \
    extern "C" __global__ void __launch_bounds__(FORWARD_GROUPS *GROUP)                                           \
        flash_##NAME(const u32 *starts, u64 room, const T *q, const T *k, const T *v, T *y, float *lse, i64 rows, \
                     i64 heads, i64 kv_heads, i64 head_dim, i64 window, float scale) {                            \
        Shape shape = {rows, heads, kv_heads, head_dim, window, scale};                                           \
        flash(starts_of(starts, room), q, k, v, y, lse, shape);                                                   \
    }                                                                                                             \
    extern "C" __global__ void __launch_bounds__(DQ_GROUPS *GROUP)                                                \
        flash_dq_##NAME(const u32 *starts, u64 room, const T *q, const T *k, const T *v, const float *lse,        \
                        const T *dy, const float *delta, T *dq, i64 rows, i64 heads, i64 kv_heads, i64 head_dim,  \
                        i64 window, float scale) {                                                                \
        Shape shape = {rows, heads, kv_heads, head_dim, window, scale};                                           \
        flash_dq(starts_of(starts, room), q, k, v, lse, dy, delta, dq, shape);                                    \
    }                                                                                                             \
    extern "C" __global__ void __launch_bounds__(DKV_GROUPS *GROUP)                                               \
        flash_dkv_##NAME(const u32 *starts, u64 room, const T *q, const T *k, const T *v, const float *lse,       \
                         const T *dy, const float *delta, T *dk, T *dv, i64 rows, i64 heads, i64 kv_heads,        \
                         i64 head_dim, i64 window, float scale) {                                                 \
        Shape shape = {rows, heads, kv_heads, head_dim, window, scale};                                           \
        flash_dkv(starts_of(starts, room), q, k, v, lse, dy, delta, dk, dv, shape);                               \
    }

FLASH(bf16, Bf16)
FLASH(f16, F16)
