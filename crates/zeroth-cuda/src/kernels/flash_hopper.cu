// Causal attention over packed sequences on the tensor cores, forward and backward: for bf16 and fp16, heads of a multiple
// of 8 elements up to HEAD, a scale above 0, and operands at multiples of 16 bytes. For Hopper.
//
// A block has a tile of rows of one head; a computing warpgroup has 64 of them. Another warpgroup copies tiles of the other
// side, from the beginning of the sequence, two stages in shared memory: while one is computed with, the next one comes.
// Weights and gradients of scores are rounded to the run's type on their way into the second product. Every sum runs in one
// order, and there are no atomics: dq is summed by query, dk and dv by key, heads of a group one after another. The host
// says how tiles are cut: *_GROUPS warpgroups, and *_KEYS or *_QUERIES rows of the other side.

template <typename T>
INLINE void flash(Starts starts, const T *q, const T *k, const T *v, T *y, float *lse, const Shape &shape) {
    constexpr int ROWS = FORWARD_GROUPS * GROUP_ROWS, THREADS = FORWARD_GROUPS * GROUP, KEYS = FORWARD_KEYS;
    constexpr u32 STAGE = tile_bytes(KEYS);
    Place at = place_of_queries(shape, ROWS, blockIdx.x);
    u32 q_tile = shared_begin(), k_tiles = q_tile + tile_bytes(ROWS), v_tiles = k_tiles + 2 * STAGE;
    u32 meetings = v_tiles + 2 * STAGE;
    Slot q_slot = slot_at(meetings, 0);
    auto k_slot = [&](int turn) { return slot_at(meetings, 1 + turn % 2); };
    auto v_slot = [&](int turn) { return slot_at(meetings, 3 + turn % 2); };
    begin_meetings<THREADS>(meetings, 5);
    // Tiles and sequences so far.
    int turn = 0, pass = 0;
    if (threadIdx.x >= THREADS) {
        few_registers();
        int me = threadIdx.x - THREADS;
        q += at.head * at.head_dim;
        k += at.kv_head * at.head_dim;
        v += at.kv_head * at.head_dim;
        auto copy_keys = [&](u32 to, const T *from, int there) {
            copy_tile<KEYS, COPYING>(to, from, at.kv_pitch, there, at.head_dim, me);
        };
        each_sequence(starts, at, [&](int sequence, int, int first, int end) {
            q_slot.empty.wait(pass++ - 1);
            copy_tile<ROWS, COPYING>(q_tile, q + (i64)first * at.q_pitch, at.q_pitch, end - first, at.head_dim, me);
            q_slot.full.arrive_with_copies();
            for (int key = first_keys<KEYS>(at, sequence, first); key < end; key += KEYS, turn++) {
                int there = min_of(end - key, KEYS);
                i64 from = (i64)key * at.kv_pitch;
                u32 stage = turn % 2 * STAGE;
                k_slot(turn).empty.wait(turn / 2 - 1);
                copy_keys(k_tiles + stage, k + from, there);
                k_slot(turn).full.arrive_with_copies();
                v_slot(turn).empty.wait(turn / 2 - 1);
                copy_keys(v_tiles + stage, v + from, there);
                v_slot(turn).full.arrive_with_copies();
            }
        });
    } else {
        many_registers<FORWARD_GROUPS>();
        float scale = shape.scale * LOG2_E;
        y += at.head * at.head_dim;
        lse += at.head * at.rows;
        int used = used_rows(starts);
        fill_padding<THREADS>(used, at, y, at.q_pitch);
        for (int row = max_of(at.tile, used) + threadIdx.x; row < at.tile_end; row += THREADS) lse[row] = 0.0f;
        each_sequence(starts, at, [&](int sequence, int, int first, int end) {
            int key = first_keys<KEYS>(at, sequence, first);
            float totals[HEAD / 8][4], scores[KEYS / 8][4], shrink[2];
            u32 weights[KEYS / 16][4];
            Softmax softmax = {{-INFINITE, -INFINITE}, {0.0f, 0.0f}};
            clear(totals);
            auto score = [&] {
                k_slot(turn).full.wait_for_tile(turn / 2);
                begin_products();
                dots<T, ROWS, KEYS>(scores, q_tile, k_tiles + turn % 2 * STAGE);
                end_products();
            };
            // The values of the tile before.
            auto collect = [&] {
                v_slot(turn - 1).full.wait_for_tile((turn - 1) / 2);
                begin_products();
                gather<T, KEYS, HEAD>(totals, weights, v_tiles + (turn - 1) % 2 * STAGE, 0);
                end_products();
            };
            auto weigh = [&] {
                if (!all_seen<KEYS>(first, key, at.window)) hide_keys<KEYS>(scores, first, key, at.window);
                softmax.next<KEYS>(scores, scale, shrink);
            };
            q_slot.full.wait_for_tile(pass++);
            score();
            wait_for_products<0>(scores);
            k_slot(turn++).empty.leave_tile();
            weigh();
            as_left<T, KEYS>(weights, scores);
#pragma unroll 1
            for (key += KEYS; key < end; key += KEYS) {
                // The softmax of this tile runs beside the second product of the one before.
                score();
                collect();
                wait_for_products<1>(scores);
                k_slot(turn).empty.leave_tile();
                weigh();
                wait_for_products<0>(totals);
                v_slot(turn++ - 1).empty.leave_tile();
#pragma unroll
                for (int i = 0; i < HEAD / 8; i++)
#pragma unroll
                    for (int j = 0; j < 4; j++) totals[i][j] *= shrink[j / 2];
                as_left<T, KEYS>(weights, scores);
            }
            q_slot.empty.leave_tile();
            collect();
            wait_for_products<0>(totals);
            v_slot(turn - 1).empty.leave_tile();
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
}

template <typename T>
INLINE void flash_dq(Starts starts, const T *q, const T *k, const T *v, const float *lse, const T *dy,
                     const float *delta, T *dq, const Shape &shape) {
    constexpr int ROWS = DQ_GROUPS * GROUP_ROWS, THREADS = DQ_GROUPS * GROUP, KEYS = DQ_KEYS;
    constexpr u32 STAGE = tile_bytes(KEYS);
    Place at = place_of_queries(shape, ROWS, blockIdx.x);
    u32 q_tile = shared_begin(), dy_tile = q_tile + tile_bytes(ROWS), k_tiles = dy_tile + tile_bytes(ROWS);
    u32 v_tiles = k_tiles + 2 * STAGE, meetings = v_tiles + 2 * STAGE;
    Slot own_slot = slot_at(meetings, 0);
    auto slot = [&](int turn) { return slot_at(meetings, 1 + turn % 2); };
    begin_meetings<THREADS>(meetings, 3);
    int turn = 0, pass = 0;
    if (threadIdx.x >= THREADS) {
        few_registers();
        int me = threadIdx.x - THREADS;
        q += at.head * at.head_dim;
        dy += at.head * at.head_dim;
        k += at.kv_head * at.head_dim;
        v += at.kv_head * at.head_dim;
        auto copy_keys = [&](u32 to, const T *from, int there) {
            copy_tile<KEYS, COPYING>(to, from, at.kv_pitch, there, at.head_dim, me);
        };
        each_sequence(starts, at, [&](int sequence, int, int first, int end) {
            int own = end - first;
            own_slot.empty.wait(pass++ - 1);
            copy_tile<ROWS, COPYING>(q_tile, q + (i64)first * at.q_pitch, at.q_pitch, own, at.head_dim, me);
            copy_tile<ROWS, COPYING>(dy_tile, dy + (i64)first * at.q_pitch, at.q_pitch, own, at.head_dim, me);
            own_slot.full.arrive_with_copies();
            for (int key = first_keys<KEYS>(at, sequence, first); key < end; key += KEYS, turn++) {
                int there = min_of(end - key, KEYS);
                i64 from = (i64)key * at.kv_pitch;
                u32 stage = turn % 2 * STAGE;
                slot(turn).empty.wait(turn / 2 - 1);
                copy_keys(k_tiles + stage, k + from, there);
                copy_keys(v_tiles + stage, v + from, there);
                slot(turn).full.arrive_with_copies();
            }
        });
    } else {
        many_registers<DQ_GROUPS>();
        float scale = shape.scale * LOG2_E;
        dq += at.head * at.head_dim;
        fill_padding<THREADS>(used_rows(starts), at, dq, at.q_pitch);
        each_sequence(starts, at, [&](int sequence, int, int first, int end) {
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
            own_slot.full.wait_for_tile(pass++);
            int begin = first_keys<KEYS>(at, sequence, first);
#pragma unroll 1
            for (int key = begin; key < end; key += KEYS, turn++) {
                u32 stage = turn % 2 * STAGE;
                slot(turn).full.wait_for_tile(turn / 2);
                begin_products();
                dots<T, ROWS, KEYS>(scores, q_tile, k_tiles + stage);
                end_products();
                dots<T, ROWS, KEYS>(slopes, dy_tile, v_tiles + stage);
                end_products();
                wait_for_products<1>(scores);
                // The last product of the tile before is done, too.
                if (key > begin) slot(turn - 1).empty.leave_tile();
                if (!all_seen<KEYS>(first, key, at.window)) hide_keys<KEYS>(scores, first, key, at.window);
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
            }
            wait_for_products<0>(totals);
            slot(turn - 1).empty.leave_tile();
            own_slot.empty.leave_tile();
            float factors[2] = {shape.scale, shape.scale};
            store(dq + (i64)first * at.q_pitch, at.q_pitch, end - first, at.head_dim, 0, totals, factors);
        });
    }
}

// A block has a tile of keys; rows of its scores are keys and columns are queries. Of wide heads it has a half of dk and dv.
template <typename T>
INLINE void flash_dkv(Starts starts, const T *q, const T *k, const T *v, const float *lse, const T *dy,
                      const float *delta, T *dk, T *dv, const Shape &shape) {
    constexpr int ROWS = DKV_GROUPS * GROUP_ROWS, THREADS = DKV_GROUPS * GROUP, QUERIES = DKV_QUERIES;
    constexpr int WIDTH = HEAD > 128 ? 128 : HEAD;
    constexpr u32 STAGE = tile_bytes(QUERIES), NUMBERS = 8 * QUERIES;
    Place at = place_of_keys(shape, ROWS, blockIdx.x);
    u32 k_tile = shared_begin(), v_tile = k_tile + tile_bytes(ROWS), q_tiles = v_tile + tile_bytes(ROWS);
    u32 dy_tiles = q_tiles + 2 * STAGE, statistics = dy_tiles + 2 * STAGE, meetings = statistics + 2 * NUMBERS;
    Slot own_slot = slot_at(meetings, 0);
    auto slot = [&](int turn) { return slot_at(meetings, 1 + turn % 2); };
    begin_meetings<THREADS>(meetings, 3);
    int group = (int)(shape.heads / shape.kv_heads), turn = 0, pass = 0;
    if (threadIdx.x >= THREADS) {
        few_registers();
        int me = threadIdx.x - THREADS;
        k += at.kv_head * at.head_dim;
        v += at.kv_head * at.head_dim;
        each_sequence(starts, at, [&](int sequence, int sequence_end, int first, int end) {
            int own = end - first;
            int last = behind_queries(at, sequence_end, end);
            own_slot.empty.wait(pass++ - 1);
            copy_tile<ROWS, COPYING>(k_tile, k + (i64)first * at.kv_pitch, at.kv_pitch, own, at.head_dim, me);
            copy_tile<ROWS, COPYING>(v_tile, v + (i64)first * at.kv_pitch, at.kv_pitch, own, at.head_dim, me);
            own_slot.full.arrive_with_copies();
            for (int head = at.kv_head * group; head < (at.kv_head + 1) * group; head++)
                for (int query = first_queries<QUERIES>(sequence, first); query < last; query += QUERIES, turn++) {
                    int there = min_of(last - query, QUERIES);
                    i64 from = (i64)query * at.q_pitch + head * at.head_dim, number = head * at.rows + query;
                    u32 stage = turn % 2 * STAGE, numbers = statistics + turn % 2 * NUMBERS;
                    slot(turn).empty.wait(turn / 2 - 1);
                    copy_tile<QUERIES, COPYING>(q_tiles + stage, q + from, at.q_pitch, there, at.head_dim, me);
                    copy_tile<QUERIES, COPYING>(dy_tiles + stage, dy + from, at.q_pitch, there, at.head_dim, me);
                    for (int i = me; i < 2 * QUERIES; i += COPYING) {
                        bool inside = i % QUERIES < there;
                        const float *source = (i < QUERIES ? lse : delta) + number;
                        copy_word(numbers + 4 * i, source + (inside ? i % QUERIES : 0), inside);
                    }
                    slot(turn).full.arrive_with_copies();
                }
        });
    } else {
        many_registers<DKV_GROUPS>();
        float scale = shape.scale * LOG2_E;
        int first_column = blockIdx.z * WIDTH;
        dk += at.kv_head * at.head_dim;
        dv += at.kv_head * at.head_dim;
        if (blockIdx.z == 0) {
            fill_padding<THREADS>(used_rows(starts), at, dk, at.kv_pitch);
            fill_padding<THREADS>(used_rows(starts), at, dv, at.kv_pitch);
        }
        each_sequence(starts, at, [&](int sequence, int sequence_end, int first, int end) {
            int last = behind_queries(at, sequence_end, end), begin = first_queries<QUERIES>(sequence, first), query = begin;
            int tiles = (int)((last - begin + QUERIES - 1) / QUERIES) * group;
            float k_totals[WIDTH / 8][4], v_totals[WIDTH / 8][4], scores[QUERIES / 8][4], slopes[QUERIES / 8][4];
            u32 weights[QUERIES / 16][4], left[QUERIES / 16][4];
            clear(k_totals);
            clear(v_totals);
            own_slot.full.wait_for_tile(pass++);
#pragma unroll 1
            for (int tile = 0; tile < tiles; tile++, turn++) {
                u32 stage = turn % 2 * STAGE, numbers = statistics + turn % 2 * NUMBERS;
                slot(turn).full.wait_for_tile(turn / 2);
                begin_products();
                dots<T, ROWS, QUERIES>(scores, k_tile, q_tiles + stage);
                end_products();
                dots<T, ROWS, QUERIES>(slopes, v_tile, dy_tiles + stage);
                end_products();
                wait_for_products<1>(scores);
                if (!all_see<QUERIES>(first, query, at.window)) {
                    hide_queries<QUERIES>(scores, first, query, at.window);
                }
#pragma unroll
                for (int i = 0; i < QUERIES / 8; i++) {
                    float2 logs = two_shared(numbers + 4 * (8 * i + my_column()));
#pragma unroll
                    for (int j = 0; j < 4; j++) {
                        float log = j % 2 ? logs.y : logs.x;
                        scores[i][j] = exp2_of(fmaf(scores[i][j], scale, -log * LOG2_E));
                    }
                }
                wait_for_products<0>(slopes);
#pragma unroll
                for (int i = 0; i < QUERIES / 8; i++) {
                    float2 deltas = two_shared(numbers + 4 * (QUERIES + 8 * i + my_column()));
#pragma unroll
                    for (int j = 0; j < 4; j++) {
                        slopes[i][j] = scores[i][j] * (slopes[i][j] - (j % 2 ? deltas.y : deltas.x));
                    }
                }
                as_left<T, QUERIES>(weights, scores);
                as_left<T, QUERIES>(left, slopes);
                begin_products();
                gather<T, QUERIES, WIDTH>(v_totals, weights, dy_tiles + stage, first_column);
                gather<T, QUERIES, WIDTH>(k_totals, left, q_tiles + stage, first_column);
                end_products();
                // The next head of the group begins anew.
                query = query + QUERIES < last ? query + QUERIES : begin;
                // All registers are taken: what is computed beside these products is another warpgroup's.
                wait_for_products<0>(v_totals);
                wait_for_products<0>(k_totals);
                slot(turn).empty.leave_tile();
            }
            own_slot.empty.leave_tile();
            float ones[2] = {1.0f, 1.0f}, scales[2] = {shape.scale, shape.scale};
            int there = end - first;
            store(dv + (i64)first * at.kv_pitch, at.kv_pitch, there, at.head_dim, first_column, v_totals, ones);
            store(dk + (i64)first * at.kv_pitch, at.kv_pitch, there, at.head_dim, first_column, k_totals, scales);
        });
    }
}

