// Flash attention over packed sequences on Hopper's tensor cores, forward and backward: bf16 and fp16, head_dim a
// multiple of 8 up to HEAD_DIM, scale above 0, 16-byte aligned operands.
//
// Warp-specialized: a block computes a tile of rows of one head, each consumer warpgroup 64 of them, while a producer
// warpgroup copies double-buffered tiles of the other operand, from the beginning of the sequence. Softmax weights and
// score gradients are rounded to DTYPE as operands of the second matmul. Sums run in a fixed order without atomics: dq
// is summed per query, dk and dv per key, over the heads of a group in sequence. The host sets the tile sizes:
// *_WARPGROUPS consumers, *_KEYS or *_QUERIES rows per stage.

template <typename T>
INLINE void flash(Starts starts, const T *q, const T *k, const T *v, T *y, float *lse, const Shape &shape,
                  const Context &context) {
    constexpr int ROWS = FORWARD_WARPGROUPS * WARPGROUP_ROWS, THREADS = FORWARD_WARPGROUPS * WARPGROUP,
                  KEYS = FORWARD_KEYS;
    constexpr u32 STAGE = tile_bytes(KEYS);
    BlockTile block = query_tile(shape, ROWS, blockIdx.x);
    u32 q_tile = shared_begin(), k_tiles = q_tile + tile_bytes(ROWS), v_tiles = k_tiles + 2 * STAGE;
    u32 barriers = v_tiles + 2 * STAGE;
    PipelineSlot q_slot = slot_at(barriers, 0);
    auto k_slot = [&](int iteration) { return slot_at(barriers, 1 + iteration % 2); };
    auto v_slot = [&](int iteration) { return slot_at(barriers, 3 + iteration % 2); };
    auto biases = BiasTable<KEYS>::template copy<THREADS + PRODUCERS>(context, block.head, 1, barriers + BARRIERS);
    init_barriers<THREADS>(barriers, 5);
    // Tiles and sequences processed so far.
    int iteration = 0, sequences = 0;
    if (threadIdx.x >= THREADS) {
        release_registers();
        int thread = threadIdx.x - THREADS;
        q += block.head * block.head_dim;
        k += block.kv_head * block.head_dim;
        v += block.kv_head * block.head_dim;
        auto copy_keys = [&](u32 to, const T *from, int valid) {
            copy_tile<KEYS, PRODUCERS>(to, from, block.kv_stride, valid, block.head_dim, thread);
        };
        for_each_sequence_of_queries(starts, context, block, [&](const Overlap &at) {
            int first = at.first, end = at.end, key = first_key<KEYS>(block, at), last = keys_end(block, at);
            if (GENERAL && last <= key) return;
            q_slot.empty.wait(sequences++ - 1);
            copy_tile<ROWS, PRODUCERS>(q_tile, q + (i64)first * block.q_stride, block.q_stride, end - first,
                                       block.head_dim, thread);
            q_slot.full.arrive_with_copies();
            for (; key < last; key += KEYS, iteration++) {
                int valid = imin(last - key, KEYS);
                i64 from = (i64)key * block.kv_stride;
                u32 stage = iteration % 2 * STAGE;
                k_slot(iteration).empty.wait(iteration / 2 - 1);
                copy_keys(k_tiles + stage, k + from, valid);
                k_slot(iteration).full.arrive_with_copies();
                v_slot(iteration).empty.wait(iteration / 2 - 1);
                copy_keys(v_tiles + stage, v + from, valid);
                v_slot(iteration).full.arrive_with_copies();
            }
        });
    } else {
        acquire_registers<FORWARD_WARPGROUPS>();
        float scale = shape.scale * LOG2_E;
        y += block.head * block.head_dim;
        lse += block.head * block.rows;
        zero_padding<THREADS>(starts, block, y, block.q_stride);
        zero_padding<THREADS>(starts, block, lse);
        for_each_sequence_of_queries(starts, context, block, [&](const Overlap &at) {
            int first = at.first, end = at.end, key = first_key<KEYS>(block, at), last = keys_end(block, at);
            int query = first - at.sequence + at.other;
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
            auto start_scores = [&] {
                k_slot(iteration).full.wait_for_tile(iteration / 2);
                wgmma_fence();
                mma_abt<T, ROWS, KEYS>(scores, q_tile, k_tiles + iteration % 2 * STAGE);
                wgmma_commit();
            };
            // Multiplies with the values of the previous tile.
            auto start_values = [&] {
                v_slot(iteration - 1).full.wait_for_tile((iteration - 1) / 2);
                wgmma_fence();
                mma_ab<T, KEYS, HEAD_DIM>(acc, probs, v_tiles + (iteration - 1) % 2 * STAGE, 0);
                wgmma_commit();
            };
            auto apply_softmax = [&] {
                if constexpr (BIAS) add_biases<KEYS, false>(scores, scale, biases, key - query);
                mask_scores<KEYS>(scores, block, query, key, last);
                softmax.update<KEYS>(scores, BIAS ? 1.0f : scale, rescale);
                if constexpr (DROPOUT) dropout.drop<KEYS>(scores, context.threshold, key - at.other);
            };
            q_slot.full.wait_for_tile(sequences++);
            start_scores();
            wgmma_wait<0>(scores);
            k_slot(iteration++).empty.release_tile();
            apply_softmax();
            to_a_fragment<T, KEYS>(probs, scores);
#pragma unroll 1
            for (key += KEYS; key < last; key += KEYS) {
                // The softmax of this tile overlaps the second matmul of the previous one.
                start_scores();
                start_values();
                wgmma_wait<1>(scores);
                k_slot(iteration).empty.release_tile();
                apply_softmax();
                wgmma_wait<0>(acc);
                v_slot(iteration++ - 1).empty.release_tile();
#pragma unroll
                for (int i = 0; i < HEAD_DIM / 8; i++)
#pragma unroll
                    for (int j = 0; j < 4; j++) acc[i][j] *= rescale[j / 2];
                to_a_fragment<T, KEYS>(probs, scores);
            }
            q_slot.empty.release_tile();
            start_values();
            wgmma_wait<0>(acc);
            v_slot(iteration - 1).empty.release_tile();
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
}

template <typename T>
INLINE void flash_dq(Starts starts, const T *q, const T *k, const T *v, const float *lse, const T *dy,
                     const float *delta, T *dq, float *partials, const Shape &shape, const Context &context) {
    constexpr int ROWS = DQ_WARPGROUPS * WARPGROUP_ROWS, THREADS = DQ_WARPGROUPS * WARPGROUP, KEYS = DQ_KEYS;
    constexpr u32 STAGE = tile_bytes(KEYS);
    BlockTile block = query_tile(shape, ROWS, blockIdx.x);
    u32 q_tile = shared_begin(), dy_tile = q_tile + tile_bytes(ROWS), k_tiles = dy_tile + tile_bytes(ROWS);
    u32 v_tiles = k_tiles + 2 * STAGE, barriers = v_tiles + 2 * STAGE;
    auto biases = BiasTable<KEYS>::template copy<THREADS + PRODUCERS>(context, block.head, 1, barriers + BARRIERS);
    PipelineSlot own_slot = slot_at(barriers, 0);
    auto slot = [&](int iteration) { return slot_at(barriers, 1 + iteration % 2); };
    init_barriers<THREADS>(barriers, 3);
    int iteration = 0, sequences = 0;
    if (threadIdx.x >= THREADS) {
        release_registers();
        int thread = threadIdx.x - THREADS;
        q += block.head * block.head_dim;
        dy += block.head * block.head_dim;
        k += block.kv_head * block.head_dim;
        v += block.kv_head * block.head_dim;
        auto copy_keys = [&](u32 to, const T *from, int valid) {
            copy_tile<KEYS, PRODUCERS>(to, from, block.kv_stride, valid, block.head_dim, thread);
        };
        for_each_sequence_of_queries(starts, context, block, [&](const Overlap &at) {
            int first = at.first, own_rows = at.end - first, key = first_key<KEYS>(block, at),
                last = keys_end(block, at);
            if (GENERAL && last <= key) return;
            own_slot.empty.wait(sequences++ - 1);
            copy_tile<ROWS, PRODUCERS>(q_tile, q + (i64)first * block.q_stride, block.q_stride, own_rows,
                                       block.head_dim, thread);
            copy_tile<ROWS, PRODUCERS>(dy_tile, dy + (i64)first * block.q_stride, block.q_stride, own_rows,
                                       block.head_dim, thread);
            own_slot.full.arrive_with_copies();
            for (; key < last; key += KEYS, iteration++) {
                int valid = imin(last - key, KEYS);
                i64 from = (i64)key * block.kv_stride;
                u32 stage = iteration % 2 * STAGE;
                slot(iteration).empty.wait(iteration / 2 - 1);
                copy_keys(k_tiles + stage, k + from, valid);
                copy_keys(v_tiles + stage, v + from, valid);
                slot(iteration).full.arrive_with_copies();
            }
        });
    } else {
        acquire_registers<DQ_WARPGROUPS>();
        float scale = shape.scale * LOG2_E;
        dq += block.head * block.head_dim;
        zero_padding<THREADS>(starts, block, dq, block.q_stride);
        DistanceSums<KEYS, THREADS / WARP> bias_grads(context, biases.end(1));
        for_each_sequence_of_queries(starts, context, block, [&](const Overlap &at) {
            int first = at.first, end = at.end, begin = first_key<KEYS>(block, at), last = keys_end(block, at);
            int query = first - at.sequence + at.other;
            if (GENERAL && last <= begin) {
                zero_rows<THREADS>(first, end, block.head_dim, dq, block.q_stride);
                return;
            }
            ThreadDropout dropout(context, block, first);
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
            own_slot.full.wait_for_tile(sequences++);
#pragma unroll 1
            for (int key = begin; key < last; key += KEYS, iteration++) {
                u32 stage = iteration % 2 * STAGE;
                slot(iteration).full.wait_for_tile(iteration / 2);
                wgmma_fence();
                mma_abt<T, ROWS, KEYS>(scores, q_tile, k_tiles + stage);
                wgmma_commit();
                mma_abt<T, ROWS, KEYS>(dscores, dy_tile, v_tiles + stage);
                wgmma_commit();
                wgmma_wait<1>(scores);
                // The previous tile's last matmul is complete as well.
                if (key > begin) slot(iteration - 1).empty.release_tile();
                if constexpr (BIAS) add_biases<KEYS, false>(scores, scale, biases, key - query);
                mask_scores<KEYS>(scores, block, query, key, last);
#pragma unroll
                for (int i = 0; i < KEYS / 8; i++)
#pragma unroll
                    for (int j = 0; j < 4; j++)
                        scores[i][j] = fast_exp2(fmaf(scores[i][j], BIAS ? 1.0f : scale, -logs[j / 2]));
                wgmma_wait<0>(dscores);
                if constexpr (DROPOUT) dropout.drop<KEYS>(dscores, context.threshold, key - at.other);
#pragma unroll
                for (int i = 0; i < KEYS / 8; i++)
#pragma unroll
                    for (int j = 0; j < 4; j++) {
                        float grad = DROPOUT ? dscores[i][j] * context.dropout_scale : dscores[i][j];
                        dscores[i][j] = scores[i][j] * (grad - deltas[j / 2]);
                    }
                if (BIAS && partials) bias_grads.add(dscores, key - query);
                to_a_fragment<T, KEYS>(fragment, dscores);
                wgmma_fence();
                mma_ab<T, KEYS, HEAD_DIM>(acc, fragment, k_tiles + stage, 0);
                wgmma_commit();
            }
            wgmma_wait<0>(acc);
            slot(iteration - 1).empty.release_tile();
            own_slot.empty.release_tile();
            float factors[2] = {shape.scale, shape.scale};
            store_tile(dq + (i64)first * block.q_stride, block.q_stride, end - first, block.head_dim, 0, acc, factors);
        });
        if (BIAS && partials) {
            bias_grads.finish();
            sync_consumers<THREADS>();
            bias_grads.store(partials_of(partials, context, block, shape.heads, ROWS));
        }
    }
}

// One block per tile of keys: rows of its scores are keys, columns are queries. For wide heads a block computes half of
// dk and dv.
template <typename T>
INLINE void flash_dkv(Starts starts, const T *q, const T *k, const T *v, const float *lse, const T *dy,
                      const float *delta, T *dk, T *dv, const Shape &shape, const Context &context) {
    constexpr int ROWS = DKV_WARPGROUPS * WARPGROUP_ROWS, THREADS = DKV_WARPGROUPS * WARPGROUP, QUERIES = DKV_QUERIES;
    constexpr int WIDTH = HEAD_DIM > 128 ? 128 : HEAD_DIM;
    constexpr u32 STAGE = tile_bytes(QUERIES), STATS = 8 * QUERIES;
    BlockTile block = key_tile(shape, ROWS, blockIdx.x);
    u32 k_tile = shared_begin(), v_tile = k_tile + tile_bytes(ROWS), q_tiles = v_tile + tile_bytes(ROWS);
    u32 dy_tiles = q_tiles + 2 * STAGE, statistics = dy_tiles + 2 * STAGE, barriers = statistics + 2 * STATS;
    using Kept = KeptBits<ROWS, QUERIES>;
    u32 kept_bits = barriers + BARRIERS;
    int group = (int)(shape.heads / shape.kv_heads), iteration = 0, sequences = 0;
    auto biases = BiasTable<QUERIES>::template copy<THREADS + PRODUCERS>(context, block.kv_head * group, group,
                                                                         kept_bits + 2 * Kept::BYTES);
    PipelineSlot own_slot = slot_at(barriers, 0);
    auto slot = [&](int iteration) { return slot_at(barriers, 1 + iteration % 2); };
    // Producers arrive twice with dropout: with their copies, and with the bits that they compute.
    init_barriers<THREADS>(barriers, 3, DROPOUT ? 2 * PRODUCERS : PRODUCERS);
    if (threadIdx.x >= THREADS) {
        release_registers();
        int thread = threadIdx.x - THREADS;
        k += block.kv_head * block.head_dim;
        v += block.kv_head * block.head_dim;
        for_each_sequence_of_keys(starts, context, block, [&](const Overlap &at) {
            int first = at.first, own_rows = at.end - first;
            int begin = first_query<QUERIES>(block, at), last = queries_end(block, at);
            if (GENERAL && last <= begin) return;
            own_slot.empty.wait(sequences++ - 1);
            copy_tile<ROWS, PRODUCERS>(k_tile, k + (i64)first * block.kv_stride, block.kv_stride, own_rows,
                                       block.head_dim, thread);
            copy_tile<ROWS, PRODUCERS>(v_tile, v + (i64)first * block.kv_stride, block.kv_stride, own_rows,
                                       block.head_dim, thread);
            own_slot.full.arrive_with_copies();
            if constexpr (DROPOUT) own_slot.full.arrive();
            for (int head = block.kv_head * group; head < (block.kv_head + 1) * group; head++)
                for (int query = begin; query < last; query += QUERIES, iteration++) {
                    int valid = imin(last - query, QUERIES);
                    i64 from = (i64)query * block.q_stride + head * block.head_dim,
                        stat_offset = head * block.rows + query;
                    u32 stage = iteration % 2 * STAGE, stats = statistics + iteration % 2 * STATS;
                    slot(iteration).empty.wait(iteration / 2 - 1);
                    copy_tile<QUERIES, PRODUCERS>(q_tiles + stage, q + from, block.q_stride, valid, block.head_dim,
                                                  thread);
                    copy_tile<QUERIES, PRODUCERS>(dy_tiles + stage, dy + from, block.q_stride, valid, block.head_dim,
                                                  thread);
                    for (int i = thread; i < 2 * QUERIES; i += PRODUCERS) {
                        bool in_range = i % QUERIES < valid;
                        const float *source = (i < QUERIES ? lse : delta) + stat_offset;
                        cp_async_4(stats + 4 * i, source + (in_range ? i % QUERIES : 0), in_range);
                    }
                    slot(iteration).full.arrive_with_copies();
                    if constexpr (DROPOUT) {
                        Kept::template store<PRODUCERS>(kept_bits + iteration % 2 * Kept::BYTES, context, head,
                                                        first - at.sequence, query, valid, thread);
                        slot(iteration).full.arrive();
                    }
                }
        });
    } else {
        acquire_registers<DKV_WARPGROUPS>();
        float scale = shape.scale * LOG2_E;
        int first_column = blockIdx.z * WIDTH;
        dk += block.kv_head * block.head_dim;
        dv += block.kv_head * block.head_dim;
        if (blockIdx.z == 0) {
            zero_padding<THREADS>(context.kv_starts, block, dk, block.kv_stride);
            zero_padding<THREADS>(context.kv_starts, block, dv, block.kv_stride);
        }
        for_each_sequence_of_keys(starts, context, block, [&](const Overlap &at) {
            int first = at.first, end = at.end, key = first - at.sequence;
            int last = queries_end(block, at), begin = first_query<QUERIES>(block, at), query = begin;
            if (GENERAL && last <= begin) {
                if (blockIdx.z > 0) return;
                zero_rows<THREADS>(first, end, block.head_dim, dk, block.kv_stride);
                zero_rows<THREADS>(first, end, block.head_dim, dv, block.kv_stride);
                return;
            }
            int tiles_of_head = (last - begin + QUERIES - 1) / QUERIES, tiles = tiles_of_head * group;
            float dk_acc[WIDTH / 8][4], dv_acc[WIDTH / 8][4], scores[QUERIES / 8][4], dscores[QUERIES / 8][4];
            u32 probs[QUERIES / 16][4], fragment[QUERIES / 16][4];
            clear(dk_acc);
            clear(dv_acc);
            own_slot.full.wait_for_tile(sequences++);
#pragma unroll 1
            for (int tile = 0; tile < tiles; tile++, iteration++) {
                u32 stage = iteration % 2 * STAGE, stats = statistics + iteration % 2 * STATS;
                slot(iteration).full.wait_for_tile(iteration / 2);
                wgmma_fence();
                mma_abt<T, ROWS, QUERIES>(scores, k_tile, q_tiles + stage);
                wgmma_commit();
                mma_abt<T, ROWS, QUERIES>(dscores, v_tile, dy_tiles + stage);
                wgmma_commit();
                wgmma_wait<1>(scores);
                if constexpr (BIAS)
                    add_biases<QUERIES, true>(scores, scale, biases.after(tile / tiles_of_head),
                                              key - (query - at.other));
                mask_transposed<QUERIES>(scores, block, first, query, last);
#pragma unroll
                for (int i = 0; i < QUERIES / 8; i++) {
                    float2 logs = load_shared_f32x2(stats + 4 * (8 * i + thread_column()));
#pragma unroll
                    for (int j = 0; j < 4; j++) {
                        float log = j % 2 ? logs.y : logs.x;
                        scores[i][j] = fast_exp2(fmaf(scores[i][j], BIAS ? 1.0f : scale, -log * LOG2_E));
                    }
                }
                wgmma_wait<0>(dscores);
                if constexpr (DROPOUT)
                    Kept::apply(scores, dscores, kept_bits + iteration % 2 * Kept::BYTES, stats + 4 * QUERIES,
                                context.dropout_scale);
#pragma unroll
                for (int i = 0; i < (DROPOUT ? 0 : QUERIES / 8); i++) {
                    float2 deltas = load_shared_f32x2(stats + 4 * (QUERIES + 8 * i + thread_column()));
#pragma unroll
                    for (int j = 0; j < 4; j++) {
                        dscores[i][j] = scores[i][j] * (dscores[i][j] - (j % 2 ? deltas.y : deltas.x));
                    }
                }
                to_a_fragment<T, QUERIES>(probs, scores);
                to_a_fragment<T, QUERIES>(fragment, dscores);
                wgmma_fence();
                mma_ab<T, QUERIES, WIDTH>(dv_acc, probs, dy_tiles + stage, first_column);
                mma_ab<T, QUERIES, WIDTH>(dk_acc, fragment, q_tiles + stage, first_column);
                wgmma_commit();
                // The next head of the group starts at its first query tile.
                query = query + QUERIES < last ? query + QUERIES : begin;
                // No registers are left to overlap these matmuls within a warpgroup; the other warpgroup overlaps them.
                wgmma_wait<0>(dv_acc);
                wgmma_wait<0>(dk_acc);
                slot(iteration).empty.release_tile();
            }
            own_slot.empty.release_tile();
            float weight = DROPOUT ? context.dropout_scale : 1.0f;
            float weights[2] = {weight, weight}, scales[2] = {shape.scale, shape.scale};
            int valid = end - first;
            store_tile(dv + (i64)first * block.kv_stride, block.kv_stride, valid, block.head_dim, first_column, dv_acc,
                       weights);
            store_tile(dk + (i64)first * block.kv_stride, block.kv_stride, valid, block.head_dim, first_column, dk_acc,
                       scales);
        });
    }
}
