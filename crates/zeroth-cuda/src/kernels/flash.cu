// Causal attention over packed sequences on the tensor cores, forward and backward: for bf16 and fp16, heads of a multiple
// of 8 elements up to HEAD, a scale above 0, and operands at multiples of 16 bytes. For all cards but Hopper.
//
// A block has a tile of rows of one head; a warp has 16 of them. Tiles of the other side come from the beginning of the
// sequence, two stages in shared memory: while one is computed with, the next one is copied. What flash_hopper.cu says
// about rounding, the order of sums and the numbers that the host gives holds here.

template <typename T>
INLINE void flash(Starts starts, const T *q, const T *k, const T *v, T *y, float *lse, const Shape &shape) {
    constexpr int ROWS = FORWARD_GROUPS * GROUP_ROWS, THREADS = FORWARD_GROUPS * GROUP, KEYS = FORWARD_KEYS;
    Place at = place_of_queries(shape, ROWS, blockIdx.x);
    u32 q_tile = shared_begin(), k_tiles = q_tile + tile_bytes(ROWS), v_tiles = k_tiles + 2 * tile_bytes(KEYS);
    q += at.head * at.head_dim;
    y += at.head * at.head_dim;
    k += at.kv_head * at.head_dim;
    v += at.kv_head * at.head_dim;
    lse += at.head * at.rows;
    float scale = shape.scale * LOG2_E;
    int me = threadIdx.x;
    fill_padding<THREADS>(used_rows(starts), at, y, at.q_pitch);
    for (int row = max_of(at.tile, used_rows(starts)) + threadIdx.x; row < at.tile_end; row += THREADS) lse[row] = 0.0f;
    each_sequence(starts, at, [&](int sequence, int, int first, int end) {
        int key = first_keys<KEYS>(at, sequence, first), tiles = (end - key + KEYS - 1) / KEYS;
        float totals[HEAD / 8][4], scores[KEYS / 8][4], shrink[2];
        u32 weights[KEYS / 16][4];
        Softmax softmax = {{-INFINITE, -INFINITE}, {0.0f, 0.0f}};
        clear(totals);
        auto copy_keys = [&](u32 tiles_at, const T *from, int tile) {
            int row = key + tile * KEYS;
            u32 to = tiles_at + tile % 2 * tile_bytes(KEYS);
            int there = min_of(end - row, KEYS);
            copy_tile<KEYS, THREADS>(to, from + (i64)row * at.kv_pitch, at.kv_pitch, there, at.head_dim, me);
        };
        auto weigh = [&](int tile) {
            int row = key + tile * KEYS;
            if (!all_seen<KEYS>(first, row, at.window)) hide_keys<KEYS>(scores, first, row, at.window);
            softmax.next<KEYS>(scores, scale, shrink);
        };
        // Nobody reads the tiles of the sequence before any more.
        __syncthreads();
        copy_tile<ROWS, THREADS>(q_tile, q + (i64)first * at.q_pitch, at.q_pitch, end - first, at.head_dim, me);
        copy_keys(k_tiles, k, 0);
        end_of_copies();
        wait_for_copies();
        __syncthreads();
        if (tiles > 1) copy_keys(k_tiles, k, 1);
        copy_keys(v_tiles, v, 0);
        end_of_copies();
        dots<T, ROWS, KEYS>(scores, q_tile, k_tiles);
        weigh(0);
        as_left<T, KEYS>(weights, scores);
#pragma unroll 1
        for (int tile = 1; tile < tiles; tile++) {
            wait_for_copies();
            __syncthreads();
            if (tile + 1 < tiles) copy_keys(k_tiles, k, tile + 1);
            copy_keys(v_tiles, v, tile);
            end_of_copies();
            dots<T, ROWS, KEYS>(scores, q_tile, k_tiles + tile % 2 * tile_bytes(KEYS));
            gather<T, KEYS, HEAD>(totals, weights, v_tiles + (tile + 1) % 2 * tile_bytes(KEYS), 0);
            weigh(tile);
#pragma unroll
            for (int i = 0; i < HEAD / 8; i++)
#pragma unroll
                for (int j = 0; j < 4; j++) totals[i][j] *= shrink[j / 2];
            as_left<T, KEYS>(weights, scores);
        }
        wait_for_copies();
        __syncthreads();
        gather<T, KEYS, HEAD>(totals, weights, v_tiles + (tiles + 1) % 2 * tile_bytes(KEYS), 0);
        float factors[2];
#pragma unroll
        for (int half = 0; half < 2; half++) {
            float sum = sum_of_row(softmax.sums[half]);
            factors[half] = 1.0f / sum;
            int row = my_row() + 8 * half;
            bool mine = threadIdx.x % 4 == 0 && row < end - first;
            if (mine) lse[first + row] = fmaf(softmax.peaks[half], shape.scale, logf(sum));
        }
        store(y + (i64)first * at.q_pitch, at.q_pitch, end - first, at.head_dim, 0, totals, factors);
    });
}

// Scores become weights, and slopes (gradients of weights) become gradients of scores but for the scale.
template <typename T>
INLINE void flash_dq(Starts starts, const T *q, const T *k, const T *v, const float *lse, const T *dy,
                     const float *delta, T *dq, const Shape &shape) {
    constexpr int ROWS = DQ_GROUPS * GROUP_ROWS, THREADS = DQ_GROUPS * GROUP, KEYS = DQ_KEYS;
    Place at = place_of_queries(shape, ROWS, blockIdx.x);
    u32 q_tile = shared_begin(), dy_tile = q_tile + tile_bytes(ROWS), k_tiles = dy_tile + tile_bytes(ROWS);
    u32 v_tiles = k_tiles + 2 * tile_bytes(KEYS);
    q += at.head * at.head_dim;
    dy += at.head * at.head_dim;
    dq += at.head * at.head_dim;
    k += at.kv_head * at.head_dim;
    v += at.kv_head * at.head_dim;
    float scale = shape.scale * LOG2_E;
    int me = threadIdx.x;
    fill_padding<THREADS>(used_rows(starts), at, dq, at.q_pitch);
    each_sequence(starts, at, [&](int sequence, int, int first, int end) {
        int key = first_keys<KEYS>(at, sequence, first), tiles = (end - key + KEYS - 1) / KEYS;
        auto copy_keys = [&](int tile) {
            int row = key + tile * KEYS, there = min_of(end - row, KEYS);
            u32 stage = tile % 2 * tile_bytes(KEYS);
            i64 from = (i64)row * at.kv_pitch;
            copy_tile<KEYS, THREADS>(k_tiles + stage, k + from, at.kv_pitch, there, at.head_dim, me);
            copy_tile<KEYS, THREADS>(v_tiles + stage, v + from, at.kv_pitch, there, at.head_dim, me);
            end_of_copies();
        };
        __syncthreads();
        copy_tile<ROWS, THREADS>(q_tile, q + (i64)first * at.q_pitch, at.q_pitch, end - first, at.head_dim, me);
        copy_tile<ROWS, THREADS>(dy_tile, dy + (i64)first * at.q_pitch, at.q_pitch, end - first, at.head_dim, me);
        copy_keys(0);
        float totals[HEAD / 8][4], scores[KEYS / 8][4], slopes[KEYS / 8][4], logs[2], deltas[2];
        u32 left[KEYS / 16][4];
        clear(totals);
#pragma unroll
        for (int half = 0; half < 2; half++) {
            int row = first + my_row() + 8 * half;
            i64 from = at.head * at.rows + row;
            logs[half] = row < end ? lse[from] * LOG2_E : 0.0f;
            deltas[half] = row < end ? delta[from] : 0.0f;
        }
#pragma unroll 1
        for (int tile = 0; tile < tiles; tile++) {
            u32 stage = tile % 2 * tile_bytes(KEYS);
            int row = key + tile * KEYS;
            wait_for_copies();
            __syncthreads();
            if (tile + 1 < tiles) copy_keys(tile + 1);
            dots<T, ROWS, KEYS>(scores, q_tile, k_tiles + stage);
            dots<T, ROWS, KEYS>(slopes, dy_tile, v_tiles + stage);
            if (!all_seen<KEYS>(first, row, at.window)) hide_keys<KEYS>(scores, first, row, at.window);
#pragma unroll
            for (int i = 0; i < KEYS / 8; i++)
#pragma unroll
                for (int j = 0; j < 4; j++) scores[i][j] = exp2_of(fmaf(scores[i][j], scale, -logs[j / 2]));
#pragma unroll
            for (int i = 0; i < KEYS / 8; i++)
#pragma unroll
                for (int j = 0; j < 4; j++) slopes[i][j] = scores[i][j] * (slopes[i][j] - deltas[j / 2]);
            as_left<T, KEYS>(left, slopes);
            gather<T, KEYS, HEAD>(totals, left, k_tiles + stage, 0);
        }
        float factors[2] = {shape.scale, shape.scale};
        store(dq + (i64)first * at.q_pitch, at.q_pitch, end - first, at.head_dim, 0, totals, factors);
    });
}

// A block has a tile of keys; rows of its scores are keys and columns are queries. Of wide heads it has a half of dk and dv.
template <typename T>
INLINE void flash_dkv(Starts starts, const T *q, const T *k, const T *v, const float *lse, const T *dy,
                      const float *delta, T *dk, T *dv, const Shape &shape) {
    constexpr int ROWS = DKV_GROUPS * GROUP_ROWS, THREADS = DKV_GROUPS * GROUP, QUERIES = DKV_QUERIES;
    constexpr int WIDTH = HEAD > 128 ? 128 : HEAD;
    Place at = place_of_keys(shape, ROWS, blockIdx.x);
    u32 k_tile = shared_begin(), v_tile = k_tile + tile_bytes(ROWS), q_tiles = v_tile + tile_bytes(ROWS);
    u32 dy_tiles = q_tiles + 2 * tile_bytes(QUERIES), statistics = dy_tiles + 2 * tile_bytes(QUERIES);
    int group = (int)(shape.heads / shape.kv_heads), first_column = blockIdx.z * WIDTH;
    k += at.kv_head * at.head_dim;
    v += at.kv_head * at.head_dim;
    dk += at.kv_head * at.head_dim;
    dv += at.kv_head * at.head_dim;
    float scale = shape.scale * LOG2_E;
    int me = threadIdx.x;
    if (blockIdx.z == 0) {
        fill_padding<THREADS>(used_rows(starts), at, dk, at.kv_pitch);
        fill_padding<THREADS>(used_rows(starts), at, dv, at.kv_pitch);
    }
    each_sequence(starts, at, [&](int sequence, int sequence_end, int first, int end) {
        int last = behind_queries(at, sequence_end, end), query = first_queries<QUERIES>(sequence, first);
        int tiles = (last - query + QUERIES - 1) / QUERIES, all = tiles * group;
        auto copy_queries = [&](int tile) {
            int head = at.kv_head * group + tile / tiles, row = query + tile % tiles * QUERIES;
            int there = min_of(last - row, QUERIES), i = me;
            i64 from = (i64)row * at.q_pitch + head * at.head_dim;
            u32 stage = tile % 2 * tile_bytes(QUERIES), numbers = statistics + tile % 2 * (8 * QUERIES);
            copy_tile<QUERIES, THREADS>(q_tiles + stage, q + from, at.q_pitch, there, at.head_dim, me);
            copy_tile<QUERIES, THREADS>(dy_tiles + stage, dy + from, at.q_pitch, there, at.head_dim, me);
            if (i < 2 * QUERIES) {
                const float *numbers_of = (i < QUERIES ? lse : delta) + head * at.rows + row;
                bool inside = i % QUERIES < there;
                copy_word(numbers + 4 * i, numbers_of + (inside ? i % QUERIES : 0), inside);
            }
            end_of_copies();
        };
        __syncthreads();
        copy_tile<ROWS, THREADS>(k_tile, k + (i64)first * at.kv_pitch, at.kv_pitch, end - first, at.head_dim, me);
        copy_tile<ROWS, THREADS>(v_tile, v + (i64)first * at.kv_pitch, at.kv_pitch, end - first, at.head_dim, me);
        copy_queries(0);
        float k_totals[WIDTH / 8][4], v_totals[WIDTH / 8][4], scores[QUERIES / 8][4], slopes[QUERIES / 8][4];
        u32 weights[QUERIES / 16][4], left[QUERIES / 16][4];
        clear(k_totals);
        clear(v_totals);
#pragma unroll 1
        for (int tile = 0; tile < all; tile++) {
            u32 stage = tile % 2 * tile_bytes(QUERIES), numbers = statistics + tile % 2 * (8 * QUERIES);
            int row = query + tile % tiles * QUERIES;
            wait_for_copies();
            __syncthreads();
            if (tile + 1 < all) copy_queries(tile + 1);
            dots<T, ROWS, QUERIES>(scores, k_tile, q_tiles + stage);
            dots<T, ROWS, QUERIES>(slopes, v_tile, dy_tiles + stage);
            if (!all_see<QUERIES>(first, row, at.window)) hide_queries<QUERIES>(scores, first, row, at.window);
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
            gather<T, QUERIES, WIDTH>(v_totals, weights, dy_tiles + stage, first_column);
#pragma unroll
            for (int i = 0; i < QUERIES / 8; i++) {
                float2 deltas = two_shared(numbers + 4 * (QUERIES + 8 * i + my_column()));
#pragma unroll
                for (int j = 0; j < 4; j++) slopes[i][j] = scores[i][j] * (slopes[i][j] - (j % 2 ? deltas.y : deltas.x));
            }
            as_left<T, QUERIES>(left, slopes);
            gather<T, QUERIES, WIDTH>(k_totals, left, q_tiles + stage, first_column);
        }
        float ones[2] = {1.0f, 1.0f}, scales[2] = {shape.scale, shape.scale};
        int there = end - first;
        store(dv + (i64)first * at.kv_pitch, at.kv_pitch, there, at.head_dim, first_column, v_totals, ones);
        store(dk + (i64)first * at.kv_pitch, at.kv_pitch, there, at.head_dim, first_column, k_totals, scales);
    });
}
