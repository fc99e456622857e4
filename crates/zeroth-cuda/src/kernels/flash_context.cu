// What flash attention does with a context: biases by distance, their gradients, and dropout of softmax weights.

#define LN2 0.69314718055994530942f

INLINE float load_shared(u32 at) {
    float value;
    asm volatile("ld.shared.f32 %0, [%1];" : "=f"(value) : "r"(at) : "memory");
    return value;
}

INLINE uint2 load_shared_u32x2(u32 at) {
    uint2 pair;
    asm volatile("ld.shared.v2.u32 {%0, %1}, [%2];" : "=r"(pair.x), "=r"(pair.y) : "r"(at) : "memory");
    return pair;
}

INLINE void store_shared(u32 at, float value) {
    asm volatile("st.shared.f32 [%0], %1;" ::"r"(at), "f"(value) : "memory");
}

INLINE void store_shared(u32 at, float low, float high) {
    asm volatile("st.shared.v2.f32 [%0], {%1, %2};" ::"r"(at), "f"(low), "f"(high) : "memory");
}

// Biases of consecutive heads in shared memory, times log2(e), for tiles with N columns. A head's are those by distance
// from -most to most, repeated at both ends, so that no distance of a tile that has one between them is beyond the table.
template <int N> struct BiasTable {
    static constexpr int PADDING = N + 16;
    u32 at;
    int most;

    // Copies the biases; a barrier publishes them.
    template <int THREADS> INLINE static BiasTable copy(const Context &context, int first_head, int heads, u32 to) {
        BiasTable table = {to, context.max_distance};
        if constexpr (BIAS) {
            int distances = 2 * table.most + 1, entries = table.entries();
            const float *from = context.bias + (i64)first_head * distances;
            for (int i = threadIdx.x; i < heads * entries; i += THREADS) {
                int own = imin(imax(i % entries - PADDING, 0), distances - 1);
                store_shared(to + 4 * i, from[i / entries * distances + own] * LOG2_E);
            }
        }
        return table;
    }

    INLINE int entries() const { return 2 * (most + PADDING) + 1; }

    // What follows the table.
    INLINE u32 end(int heads) const { return BIAS ? at + (4 * heads * entries() + 15) / 16 * 16 : at; }

    // The table of the head that is so many after.
    INLINE BiasTable after(int heads) const { return {at + 4 * heads * entries(), most}; }

    // The address of a distance, which may be beyond the table.
    INLINE u32 address(int distance) const { return at + 4 * (distance + most + PADDING); }
};

// Replaces scores by scores * scale + bias. `distance` is that of the tile's first column and first row; it grows with
// columns, which are keys, or shrinks where they are queries (TRANSPOSED). A thread's fragment is a Toeplitz matrix of
// biases: its rows differ by 8, as do its pairs of columns.
template <int N, bool TRANSPOSED>
INLINE void add_biases(float (&scores)[N / 8][4], float scale, const BiasTable<N> &biases, int distance) {
    constexpr int SIGN = TRANSPOSED ? -1 : 1;
    int first_row = threadIdx.x / WARP * 16, most = biases.most;
    // Distances of a warp: those of its last row and first column, and the other way round.
    int one = distance - SIGN * (first_row + 15), other = distance - SIGN * (first_row - (N - 1));
    if (imax(one, other) <= -most || imin(one, other) >= most) {
        float bias = load_shared(biases.address(one < 0 ? -most : most));
#pragma unroll
        for (int i = 0; i < N / 8; i++)
#pragma unroll
            for (int j = 0; j < 4; j++) scores[i][j] = fmaf(scores[i][j], scale, bias);
        return;
    }
    u32 at = biases.address(distance + SIGN * (thread_column() - thread_row()));
    float before[2] = {load_shared(at - (u32)(SIGN * 32)), load_shared(at - (u32)(SIGN * 28))};
#pragma unroll
    for (int i = 0; i < N / 8; i++) {
        float own[2] = {load_shared(at + (u32)(SIGN * 32 * i)), load_shared(at + (u32)(SIGN * (32 * i + 4)))};
#pragma unroll
        for (int j = 0; j < 2; j++) {
            scores[i][j] = fmaf(scores[i][j], scale, own[j]);
            scores[i][2 + j] = fmaf(scores[i][2 + j], scale, before[j]);
            before[j] = own[j];
        }
    }
}

// Sums of score gradients by distance: a row of each warp in shared memory, and each thread's sums of those at or
// beyond the largest distances. The rows of a warp's fragment go through a buffer, of which a thread adds diagonals.
template <int N, int WARPS> struct DistanceSums {
    static constexpr int BUFFER_ROW = N + 8;
    static constexpr u32 BUFFER = 4 * 8 * BUFFER_ROW;
    u32 table, row_bytes, buffer;
    int most;
    float below, above;

    INLINE DistanceSums(const Context &context, u32 at) {
        if constexpr (!BIAS) return;
        int warp = threadIdx.x / WARP;
        most = context.max_distance;
        row_bytes = (8 * most + 4 + 15) / 16 * 16;
        table = at;
        buffer = at + WARPS * row_bytes + warp * BUFFER;
        below = above = 0.0f;
        for (int i = threadIdx.x % WARP; i <= 2 * most; i += WARP) store_shared(row() + 4 * i, 0.0f);
        __syncwarp();
    }

    INLINE u32 row() const { return table + threadIdx.x / WARP * row_bytes; }

    // `distance` is that of the tile's first key and first query.
    INLINE void add(const float (&grads)[N / 8][4], int distance) {
        int lane = threadIdx.x % WARP;
        distance -= threadIdx.x / WARP * 16;
        bool all_below = distance + N - 1 <= -most, all_above = distance - 15 >= most;
        if (all_below || all_above) {
            float sum = 0.0f;
#pragma unroll
            for (int i = 0; i < N / 8; i++) sum += (grads[i][0] + grads[i][1]) + (grads[i][2] + grads[i][3]);
            if (all_below) below += sum;
            else above += sum;
            return;
        }
        u32 to = buffer + 4 * (lane / 4 * BUFFER_ROW + lane % 4 * 2);
        store_shared(to, grads[0][2], grads[0][3]);
#pragma unroll
        for (int i = 0; i < N / 8; i++) {
            // Row 8 + r at column 8 + c has the distance of row r at column c.
            bool has_next = i + 1 < N / 8;
            store_shared(to + 32 * (i + 1), grads[i][0] + (has_next ? grads[i + 1 < N / 8 ? i + 1 : 0][2] : 0.0f),
                         grads[i][1] + (has_next ? grads[i + 1 < N / 8 ? i + 1 : 0][3] : 0.0f));
        }
        __syncwarp();
        for (int i = lane; i < N + 15; i += WARP) {
            int column = i - 7, own = distance - 8 + column;
            float sum = 0.0f;
#pragma unroll
            for (int j = 0; j < 8; j++)
                if ((u32)(column + j) < (u32)BUFFER_ROW) sum += load_shared(buffer + 4 * (j * BUFFER_ROW + column + j));
            if (own <= -most) below += sum;
            else if (own >= most) above += sum;
            else {
                u32 at = row() + 4 * (own + most);
                store_shared(at, load_shared(at) + sum);
            }
        }
        __syncwarp();
    }

    // Adds the ends to the warp's row; a barrier publishes it.
    INLINE void finish() {
        below = warp_reduce_sum(below);
        above = warp_reduce_sum(above);
        if (threadIdx.x % WARP > 0) return;
        store_shared(row(), load_shared(row()) + below);
        u32 last = row() + 8 * most;
        store_shared(last, load_shared(last) + above);
    }

    // Writes the sums over all warps.
    INLINE void store(float *to) const {
        for (int i = threadIdx.x; i <= 2 * most; i += WARPS * WARP) {
            float sum = 0.0f;
#pragma unroll
            for (int warp = 0; warp < WARPS; warp++) sum += load_shared(table + warp * row_bytes + 4 * i);
            to[i] = sum;
        }
    }
};

// The partial sums of a block: [tiles, heads, distances].
INLINE float *partials_of(float *partials, const Context &context, const BlockTile &block, i64 heads, int rows) {
    return partials + ((i64)(block.tile / rows) * heads + block.head) * (2 * context.max_distance + 1);
}

// Random numbers of a thread's two queries, the first of them `first`.
struct ThreadDropout {
    DropoutRow rows[2];

    INLINE ThreadDropout(const Context &context, const BlockTile &block, int first) {
        if constexpr (DROPOUT) {
#pragma unroll
            for (int half = 0; half < 2; half++) {
                int row = imin(first + thread_row() + 8 * half, (int)block.rows - 1);
                rows[half] = dropout_row(context, context.keys[row], (u32)block.head);
            }
        }
    }

    // Zeroes the values of the dropped ones of N keys from `key` of the sequence on, a multiple of 32.
    template <int N> INLINE void drop(float (&values)[N / 8][4], u32 threshold, int key) const {
#pragma unroll
        for (int half = 0; half < 2; half++) {
            DropoutRow row = rows[half];
            // Else the compiler keeps the keys of all rounds in registers, which it does not have.
            asm volatile("" : "+r"(row.key[0]), "+r"(row.key[1]));
#pragma unroll
            for (int group = 0; group < N / 32; group++) {
                PhiloxBlock bits = dropout_bits(row, (u32)key / 32 + group, threadIdx.x % 4);
#pragma unroll
                for (int i = 0; i < 4; i++) {
                    float (&four)[4] = values[4 * group + i];
                    if ((bits.word[i] & 0xffffu) < threshold) four[2 * half] = 0.0f;
                    if (bits.word[i] >> 16 < threshold) four[2 * half + 1] = 0.0f;
                }
            }
        }
    }
};

// Which weights dropout leaves, for a tile of transposed scores: a bit per key, in words by 32 keys and query.
template <int ROWS, int QUERIES> struct KeptBits {
    static constexpr u32 BYTES = DROPOUT ? 4 * QUERIES * (ROWS / 32) : 0;

    // Four of THREADS threads compute the words of a query. `key` is the first one's place in its sequence, `query` the
    // row of the first query, of which `valid` exist. The random numbers of 32 keys of the sequence may be those of
    // keys of two words.
    template <int THREADS>
    INLINE static void store(u32 to, const Context &context, int head, int key, int query, int valid, int thread) {
        u32 shift = key % 32, quarter = thread % 4;
        int words = ROWS / 32 + (shift ? 1 : 0);
        for (int i = thread / 4; i < QUERIES; i += THREADS / 4) {
            DropoutRow row = dropout_row(context, context.keys[query + imin(i, valid - 1)], (u32)head);
            u32 before = 0;
#pragma unroll 1
            for (int word = 0; word < words; word++) {
                // As in `drop`.
                asm volatile("" : "+r"(row.key[0]), "+r"(row.key[1]));
                PhiloxBlock bits = dropout_bits(row, (u32)(key / 32 + word), quarter);
                u32 kept = 0;
#pragma unroll
                for (int j = 0; j < 4; j++) {
                    u32 low = (bits.word[j] & 0xffffu) >= context.threshold;
                    u32 high = bits.word[j] >> 16 >= context.threshold;
                    kept |= (low | high << 1) << 8 * j;
                }
                kept <<= 2 * quarter;
                kept |= __shfl_xor_sync(FULL_MASK, kept, 1);
                kept |= __shfl_xor_sync(FULL_MASK, kept, 2);
                int done = shift ? word - 1 : word;
                u32 whole = shift ? (u32)(((u64)kept << 32 | before) >> shift) : kept;
                if (quarter == 0 && done >= 0) store_shared(to + 4 * (done * QUERIES + i), __uint_as_float(whole));
                before = kept;
            }
        }
    }

    // Zeroes dropped weights, and replaces the gradients of weights by those of scores.
    INLINE static void apply(float (&weights)[QUERIES / 8][4], float (&grads)[QUERIES / 8][4], u32 from, u32 deltas,
                             float scale) {
        from += 4 * (thread_row() / 32 * QUERIES + thread_column());
        u32 shift = thread_row() % 32;
#pragma unroll
        for (int i = 0; i < QUERIES / 8; i++) {
            uint2 words = load_shared_u32x2(from + 32 * i);
            float2 delta = load_shared_f32x2(deltas + 4 * (8 * i + thread_column()));
            u32 kept_bits[2] = {words.x >> shift, words.y >> shift};
#pragma unroll
            for (int j = 0; j < 4; j++) {
                bool kept = kept_bits[j % 2] >> 8 * (j / 2) & 1;
                float grad = kept ? grads[i][j] * scale : 0.0f;
                grads[i][j] = weights[i][j] * (grad - (j % 2 ? delta.y : delta.x));
                if (!kept) weights[i][j] = 0.0f;
            }
        }
    }
};
