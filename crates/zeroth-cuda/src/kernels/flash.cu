// Flash attention over packed sequences on tensor cores, forward and backward: bf16 and fp16, head_dim a multiple of 8
// up to HEAD_DIM, scale above 0, 16-byte aligned operands. For all GPUs except Hopper.
//
// A block computes a tile of rows of one head, a warp 16 of them. Tiles of the other operand are double-buffered in
// shared memory: the next one is copied while the current one is used. Rounding, the order of sums and the macros set
// by the host are those of flash_hopper.cu.

template <typename T>
INLINE void flash(Starts starts, const T *q, const T *k, const T *v, T *y, float *lse, const Shape &shape,
                  const Context &context) {
    constexpr int ROWS = FORWARD_WARPGROUPS * WARPGROUP_ROWS, THREADS = FORWARD_WARPGROUPS * WARPGROUP,
                  KEYS = FORWARD_KEYS;
    BlockTile block = query_tile(shape, ROWS, blockIdx.x);
    u32 q_tile = shared_begin(), k_tiles = q_tile + tile_bytes(ROWS), v_tiles = k_tiles + 2 * tile_bytes(KEYS);
    q += block.head * block.head_dim;
    y += block.head * block.head_dim;
    k += block.kv_head * block.head_dim;
    v += block.kv_head * block.head_dim;
    lse += block.head * block.rows;
    auto biases = BiasTable<KEYS>::template copy<THREADS>(context, block.head, 1, v_tiles + 2 * tile_bytes(KEYS));
    float scale = shape.scale * LOG2_E;
    int thread = threadIdx.x;
    zero_padding<THREADS>(starts, block, y, block.q_stride);
    zero_padding<THREADS>(starts, block, lse);
    for_each_sequence_of_queries(starts, context, block, [&](const Overlap &at) {
        int first = at.first, end = at.end, key = first_key<KEYS>(block, at), last = keys_end(block, at);
        int tiles = (last - key + KEYS - 1) / KEYS, query = first - at.sequence + at.other;
        if (GENERAL && last <= key) {
            zero_rows<THREADS>(first, end, block.head_dim, y, block.q_stride);
            zero_statistics<THREADS>(first, end, lse);
            return;
        }
        ThreadDropout dropout(context, block, first);
        float acc[HEAD_DIM / 8][4], scores[KEYS / 8][4], rescale[2];
        u32 probs[KEYS / 16][4];
        OnlineSoftmax softmax = {{-INF, -INF}, {0.0f, 0.0f}};
        clear(acc);
        auto copy_keys = [&](u32 tiles_at, const T *from, int tile) {
            int row = key + tile * KEYS;
            u32 to = tiles_at + tile % 2 * tile_bytes(KEYS);
            int valid = imin(last - row, KEYS);
            copy_tile<KEYS, THREADS>(to, from + (i64)row * block.kv_stride, block.kv_stride, valid, block.head_dim,
                                     thread);
        };
        auto apply_softmax = [&](int tile) {
            int row = key + tile * KEYS;
            if constexpr (BIAS) add_biases<KEYS, false>(scores, scale, biases, row - query);
            mask_scores<KEYS>(scores, block, query, row, last);
            softmax.update<KEYS>(scores, BIAS ? 1.0f : scale, rescale);
            if constexpr (DROPOUT) dropout.drop<KEYS>(scores, context.threshold, row - at.other);
        };
        // The previous sequence's tiles are no longer in use.
        __syncthreads();
        copy_tile<ROWS, THREADS>(q_tile, q + (i64)first * block.q_stride, block.q_stride, end - first, block.head_dim,
                                 thread);
        copy_keys(k_tiles, k, 0);
        commit_copies();
        wait_for_copies();
        __syncthreads();
        if (tiles > 1) copy_keys(k_tiles, k, 1);
        copy_keys(v_tiles, v, 0);
        commit_copies();
        mma_abt<T, ROWS, KEYS>(scores, q_tile, k_tiles);
        apply_softmax(0);
        to_a_fragment<T, KEYS>(probs, scores);
#pragma unroll 1
        for (int tile = 1; tile < tiles; tile++) {
            wait_for_copies();
            __syncthreads();
            if (tile + 1 < tiles) copy_keys(k_tiles, k, tile + 1);
            copy_keys(v_tiles, v, tile);
            commit_copies();
            mma_abt<T, ROWS, KEYS>(scores, q_tile, k_tiles + tile % 2 * tile_bytes(KEYS));
            mma_ab<T, KEYS, HEAD_DIM>(acc, probs, v_tiles + (tile + 1) % 2 * tile_bytes(KEYS), 0);
            apply_softmax(tile);
#pragma unroll
            for (int i = 0; i < HEAD_DIM / 8; i++)
#pragma unroll
                for (int j = 0; j < 4; j++) acc[i][j] *= rescale[j / 2];
            to_a_fragment<T, KEYS>(probs, scores);
        }
        wait_for_copies();
        __syncthreads();
        mma_ab<T, KEYS, HEAD_DIM>(acc, probs, v_tiles + (tiles + 1) % 2 * tile_bytes(KEYS), 0);
        float factors[2];
#pragma unroll
        for (int half = 0; half < 2; half++) {
            float sum = row_sum(softmax.sums[half]);
            factors[half] = (DROPOUT ? context.dropout_scale : 1.0f) / sum;
            int row = thread_row() + 8 * half;
            bool owns_row = threadIdx.x % 4 == 0 && row < end - first;
            if (owns_row) lse[first + row] = fmaf(softmax.maxima[half], BIAS ? LN2 : shape.scale, logf(sum));
        }
        store_tile(y + (i64)first * block.q_stride, block.q_stride, end - first, block.head_dim, 0, acc, factors);
    });
}

// dscores holds the gradients of the softmax weights, then those of the scores without the scale.
template <typename T>
INLINE void flash_dq(Starts starts, const T *q, const T *k, const T *v, const float *lse, const T *dy,
                     const float *delta, T *dq, float *partials, const Shape &shape, const Context &context) {
    constexpr int ROWS = DQ_WARPGROUPS * WARPGROUP_ROWS, THREADS = DQ_WARPGROUPS * WARPGROUP, KEYS = DQ_KEYS;
    BlockTile block = query_tile(shape, ROWS, blockIdx.x);
    u32 q_tile = shared_begin(), dy_tile = q_tile + tile_bytes(ROWS), k_tiles = dy_tile + tile_bytes(ROWS);
    u32 v_tiles = k_tiles + 2 * tile_bytes(KEYS);
    q += block.head * block.head_dim;
    dy += block.head * block.head_dim;
    dq += block.head * block.head_dim;
    k += block.kv_head * block.head_dim;
    v += block.kv_head * block.head_dim;
    auto biases = BiasTable<KEYS>::template copy<THREADS>(context, block.head, 1, v_tiles + 2 * tile_bytes(KEYS));
    DistanceSums<KEYS, THREADS / WARP> bias_grads(context, biases.end(1));
    float scale = shape.scale * LOG2_E;
    int thread = threadIdx.x;
    zero_padding<THREADS>(starts, block, dq, block.q_stride);
    for_each_sequence_of_queries(starts, context, block, [&](const Overlap &at) {
        int first = at.first, end = at.end, key = first_key<KEYS>(block, at), last = keys_end(block, at);
        int tiles = (last - key + KEYS - 1) / KEYS, query = first - at.sequence + at.other;
        if (GENERAL && last <= key) {
            zero_rows<THREADS>(first, end, block.head_dim, dq, block.q_stride);
            return;
        }
        ThreadDropout dropout(context, block, first);
        auto copy_keys = [&](int tile) {
            int row = key + tile * KEYS, valid = imin(last - row, KEYS);
            u32 stage = tile % 2 * tile_bytes(KEYS);
            i64 from = (i64)row * block.kv_stride;
            copy_tile<KEYS, THREADS>(k_tiles + stage, k + from, block.kv_stride, valid, block.head_dim, thread);
            copy_tile<KEYS, THREADS>(v_tiles + stage, v + from, block.kv_stride, valid, block.head_dim, thread);
            commit_copies();
        };
        __syncthreads();
        copy_tile<ROWS, THREADS>(q_tile, q + (i64)first * block.q_stride, block.q_stride, end - first, block.head_dim,
                                 thread);
        copy_tile<ROWS, THREADS>(dy_tile, dy + (i64)first * block.q_stride, block.q_stride, end - first, block.head_dim,
                                 thread);
        copy_keys(0);
        float acc[HEAD_DIM / 8][4], scores[KEYS / 8][4], dscores[KEYS / 8][4], logs[2], deltas[2];
        u32 fragment[KEYS / 16][4];
        clear(acc);
#pragma unroll
        for (int half = 0; half < 2; half++) {
            int row = first + thread_row() + 8 * half;
            i64 from = block.head * block.rows + row;
            // Rows beyond the tile have weights of 0 for the gradients of biases.
            logs[half] = row < end ? lse[from] * LOG2_E : BIAS ? INF : 0.0f;
            deltas[half] = row < end ? delta[from] : 0.0f;
        }
#pragma unroll 1
        for (int tile = 0; tile < tiles; tile++) {
            u32 stage = tile % 2 * tile_bytes(KEYS);
            int row = key + tile * KEYS;
            wait_for_copies();
            __syncthreads();
            if (tile + 1 < tiles) copy_keys(tile + 1);
            mma_abt<T, ROWS, KEYS>(scores, q_tile, k_tiles + stage);
            mma_abt<T, ROWS, KEYS>(dscores, dy_tile, v_tiles + stage);
            if constexpr (BIAS) add_biases<KEYS, false>(scores, scale, biases, row - query);
            mask_scores<KEYS>(scores, block, query, row, last);
#pragma unroll
            for (int i = 0; i < KEYS / 8; i++)
#pragma unroll
                for (int j = 0; j < 4; j++)
                    scores[i][j] = fast_exp2(fmaf(scores[i][j], BIAS ? 1.0f : scale, -logs[j / 2]));
            if constexpr (DROPOUT) dropout.drop<KEYS>(dscores, context.threshold, row - at.other);
#pragma unroll
            for (int i = 0; i < KEYS / 8; i++)
#pragma unroll
                for (int j = 0; j < 4; j++) {
                    float grad = DROPOUT ? dscores[i][j] * context.dropout_scale : dscores[i][j];
                    dscores[i][j] = scores[i][j] * (grad - deltas[j / 2]);
                }
            if (BIAS && partials) bias_grads.add(dscores, row - query);
            to_a_fragment<T, KEYS>(fragment, dscores);
            mma_ab<T, KEYS, HEAD_DIM>(acc, fragment, k_tiles + stage, 0);
        }
        float factors[2] = {shape.scale, shape.scale};
        store_tile(dq + (i64)first * block.q_stride, block.q_stride, end - first, block.head_dim, 0, acc, factors);
    });
    if (BIAS && partials) {
        bias_grads.finish();
        __syncthreads();
        bias_grads.store(partials_of(partials, context, block, shape.heads, ROWS));
    }
}

// One block per tile of keys: rows of its scores are keys, columns are queries. For wide heads a block computes half of
// dk and dv.
template <typename T>
INLINE void flash_dkv(Starts starts, const T *q, const T *k, const T *v, const float *lse, const T *dy,
                      const float *delta, T *dk, T *dv, const Shape &shape, const Context &context) {
    constexpr int ROWS = DKV_WARPGROUPS * WARPGROUP_ROWS, THREADS = DKV_WARPGROUPS * WARPGROUP, QUERIES = DKV_QUERIES;
    constexpr int WIDTH = HEAD_DIM > 128 ? 128 : HEAD_DIM;
    BlockTile block = key_tile(shape, ROWS, blockIdx.x);
    u32 k_tile = shared_begin(), v_tile = k_tile + tile_bytes(ROWS), q_tiles = v_tile + tile_bytes(ROWS);
    u32 dy_tiles = q_tiles + 2 * tile_bytes(QUERIES), statistics = dy_tiles + 2 * tile_bytes(QUERIES);
    using Kept = KeptBits<ROWS, QUERIES>;
    u32 kept = statistics + 16 * QUERIES;
    int group = (int)(shape.heads / shape.kv_heads), first_column = blockIdx.z * WIDTH;
    k += block.kv_head * block.head_dim;
    v += block.kv_head * block.head_dim;
    dk += block.kv_head * block.head_dim;
    dv += block.kv_head * block.head_dim;
    auto biases =
        BiasTable<QUERIES>::template copy<THREADS>(context, block.kv_head * group, group, kept + 2 * Kept::BYTES);
    float scale = shape.scale * LOG2_E;
    int thread = threadIdx.x;
    if (blockIdx.z == 0) {
        zero_padding<THREADS>(context.kv_starts, block, dk, block.kv_stride);
        zero_padding<THREADS>(context.kv_starts, block, dv, block.kv_stride);
    }
    for_each_sequence_of_keys(starts, context, block, [&](const Overlap &at) {
        int first = at.first, end = at.end, query = first_query<QUERIES>(block, at), last = queries_end(block, at);
        int tiles = (last - query + QUERIES - 1) / QUERIES, all = tiles * group, key = first - at.sequence;
        if (GENERAL && last <= query) {
            if (blockIdx.z > 0) return;
            zero_rows<THREADS>(first, end, block.head_dim, dk, block.kv_stride);
            zero_rows<THREADS>(first, end, block.head_dim, dv, block.kv_stride);
            return;
        }
        auto copy_queries = [&](int tile) {
            int head = block.kv_head * group + tile / tiles, row = query + tile % tiles * QUERIES;
            int valid = imin(last - row, QUERIES), i = thread;
            i64 from = (i64)row * block.q_stride + head * block.head_dim;
            u32 stage = tile % 2 * tile_bytes(QUERIES), stats = statistics + tile % 2 * (8 * QUERIES);
            copy_tile<QUERIES, THREADS>(q_tiles + stage, q + from, block.q_stride, valid, block.head_dim, thread);
            copy_tile<QUERIES, THREADS>(dy_tiles + stage, dy + from, block.q_stride, valid, block.head_dim, thread);
            if (i < 2 * QUERIES) {
                const float *stats_source = (i < QUERIES ? lse : delta) + head * block.rows + row;
                bool in_range = i % QUERIES < valid;
                cp_async_4(stats + 4 * i, stats_source + (in_range ? i % QUERIES : 0), in_range);
            }
            commit_copies();
        };
        auto store_kept = [&](int tile) {
            int head = block.kv_head * group + tile / tiles, row = query + tile % tiles * QUERIES;
            Kept::template store<THREADS>(kept + tile % 2 * Kept::BYTES, context, head, key, row,
                                          imin(last - row, QUERIES), thread);
        };
        __syncthreads();
        copy_tile<ROWS, THREADS>(k_tile, k + (i64)first * block.kv_stride, block.kv_stride, end - first, block.head_dim,
                                 thread);
        copy_tile<ROWS, THREADS>(v_tile, v + (i64)first * block.kv_stride, block.kv_stride, end - first, block.head_dim,
                                 thread);
        copy_queries(0);
        if constexpr (DROPOUT) store_kept(0);
        float dk_acc[WIDTH / 8][4], dv_acc[WIDTH / 8][4], scores[QUERIES / 8][4], dscores[QUERIES / 8][4];
        u32 probs[QUERIES / 16][4], fragment[QUERIES / 16][4];
        clear(dk_acc);
        clear(dv_acc);
#pragma unroll 1
        for (int tile = 0; tile < all; tile++) {
            u32 stage = tile % 2 * tile_bytes(QUERIES), stats = statistics + tile % 2 * (8 * QUERIES);
            int row = query + tile % tiles * QUERIES;
            wait_for_copies();
            __syncthreads();
            if (tile + 1 < all) copy_queries(tile + 1);
            mma_abt<T, ROWS, QUERIES>(scores, k_tile, q_tiles + stage);
            mma_abt<T, ROWS, QUERIES>(dscores, v_tile, dy_tiles + stage);
            if (DROPOUT && tile + 1 < all) store_kept(tile + 1);
            if constexpr (BIAS)
                add_biases<QUERIES, true>(scores, scale, biases.after(tile / tiles), key - (row - at.other));
            mask_transposed<QUERIES>(scores, block, first, row, last);
#pragma unroll
            for (int i = 0; i < QUERIES / 8; i++) {
                float2 logs = load_shared_f32x2(stats + 4 * (8 * i + thread_column()));
#pragma unroll
                for (int j = 0; j < 4; j++) {
                    float log = j % 2 ? logs.y : logs.x;
                    scores[i][j] = fast_exp2(fmaf(scores[i][j], BIAS ? 1.0f : scale, -log * LOG2_E));
                }
            }
            if constexpr (DROPOUT)
                Kept::apply(scores, dscores, kept + tile % 2 * Kept::BYTES, stats + 4 * QUERIES, context.dropout_scale);
            to_a_fragment<T, QUERIES>(probs, scores);
            mma_ab<T, QUERIES, WIDTH>(dv_acc, probs, dy_tiles + stage, first_column);
#pragma unroll
            for (int i = 0; i < (DROPOUT ? 0 : QUERIES / 8); i++) {
                float2 deltas = load_shared_f32x2(stats + 4 * (QUERIES + 8 * i + thread_column()));
#pragma unroll
                for (int j = 0; j < 4; j++)
                    dscores[i][j] = scores[i][j] * (dscores[i][j] - (j % 2 ? deltas.y : deltas.x));
            }
            to_a_fragment<T, QUERIES>(fragment, dscores);
            mma_ab<T, QUERIES, WIDTH>(dk_acc, fragment, q_tiles + stage, first_column);
        }
        float weight = DROPOUT ? context.dropout_scale : 1.0f;
        float weights[2] = {weight, weight}, scales[2] = {shape.scale, shape.scale};
        int valid = end - first;
        store_tile(dv + (i64)first * block.kv_stride, block.kv_stride, valid, block.head_dim, first_column, dv_acc,
                   weights);
        store_tile(dk + (i64)first * block.kv_stride, block.kv_stride, valid, block.head_dim, first_column, dk_acc,
                   scales);
    });
}
