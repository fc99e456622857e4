// Attention over packed sequences, forward and backward, in tiles of 64 queries and 64 keys.
//
// f32 arithmetic on CUDA cores: for fp32, and for head dims and GPUs that flash.cu does not support. A block computes
// one tile of rows of one head, and at most 128 columns of its result. Tiles of the other operand start at the
// beginning of the sequence, so a row's result does not depend on its sequence's position in the pack. Sums run in a
// fixed order without atomics: dq is summed per query, dk and dv per key, over the heads of a group in sequence, and
// the gradients of biases per tile of queries.

#define TILE 64
#define THREADS 256
// Elements of a head in shared memory at a time; the padded stride avoids bank conflicts.
#define CHUNK 32
#define CHUNK_STRIDE (CHUNK + 1)
// Chunks of its result that a block computes.
#define CHUNKS_PER_BLOCK 4

// Loads one chunk of a head for a tile's rows from `first` on, as f32. Elements past `end` or the head are 0.
template <typename T>
__device__ void load_tile(float (*to)[CHUNK_STRIDE], const T *from, i64 row_stride, i64 first, i64 end, int chunk,
                          i64 head_dim) {
    int row = threadIdx.x / CHUNK, column = threadIdx.x % CHUNK;
    bool in_range = chunk * CHUNK + column < head_dim;
    from += (first + row) * row_stride + chunk * CHUNK + column;
#pragma unroll
    for (int i = 0; i < TILE; i += THREADS / CHUNK) {
        to[row + i][column] = in_range && first + row + i < end ? to_f32(from[i * row_stride]) : 0.0f;
    }
}

// A thread accumulates a 4 x 4 part of a tile of dot products: 4 consecutive rows, 4 columns 16 apart.
__device__ __forceinline__ void accumulate_dots(float (*a_tile)[CHUNK_STRIDE], float (*b_tile)[CHUNK_STRIDE],
                                                float (&sums)[4][4]) {
    int row = threadIdx.x / 16 * 4, column = threadIdx.x % 16;
#pragma unroll 4
    for (int at = 0; at < CHUNK; at++) {
        float a[4], b[4];
#pragma unroll
        for (int i = 0; i < 4; i++) a[i] = a_tile[row + i][at];
#pragma unroll
        for (int j = 0; j < 4; j++) b[j] = b_tile[column + 16 * j][at];
#pragma unroll
        for (int i = 0; i < 4; i++)
#pragma unroll
            for (int j = 0; j < 4; j++) sums[i][j] = fmaf(a[i], b[j], sums[i][j]);
    }
}

// sums = a @ b^T over two tiles of rows.
template <typename T>
__device__ void tile_dots(float (*a_tile)[CHUNK_STRIDE], float (*b_tile)[CHUNK_STRIDE], const T *a, i64 a_stride,
                          i64 a_first, i64 a_end, const T *b, i64 b_stride, i64 b_first, i64 b_end, i64 head_dim,
                          float (&sums)[4][4]) {
#pragma unroll
    for (int i = 0; i < 4; i++)
#pragma unroll
        for (int j = 0; j < 4; j++) sums[i][j] = 0.0f;
#pragma unroll 1
    for (int chunk = 0; chunk * CHUNK < head_dim; chunk++) {
        load_tile(a_tile, a, a_stride, a_first, a_end, chunk, head_dim);
        load_tile(b_tile, b, b_stride, b_first, b_end, chunk, head_dim);
        __syncthreads();
        accumulate_dots(a_tile, b_tile, sums);
        __syncthreads();
    }
}

// acc += weights @ b: a thread accumulates its 4 rows and 2 columns of each chunk.
template <typename T>
__device__ void accumulate_weighted(float (*weights)[TILE + 1], float (*b_tile)[CHUNK_STRIDE], const T *b, i64 b_stride,
                                    i64 b_first, i64 b_end, i64 head_dim, float (&acc)[CHUNKS_PER_BLOCK][4][2]) {
    int row = threadIdx.x / 16 * 4, column = threadIdx.x % 16, first_chunk = blockIdx.z * CHUNKS_PER_BLOCK;
#pragma unroll
    for (int chunk = 0; chunk < CHUNKS_PER_BLOCK; chunk++) {
        if ((first_chunk + chunk) * CHUNK >= head_dim) break;
        load_tile(b_tile, b, b_stride, b_first, b_end, first_chunk + chunk, head_dim);
        __syncthreads();
#pragma unroll 4
        for (int at = 0; at < TILE; at++) {
            float low = b_tile[at][column], high = b_tile[at][column + 16];
#pragma unroll
            for (int i = 0; i < 4; i++) {
                float weight = weights[row + i][at];
                acc[chunk][i][0] = fmaf(weight, low, acc[chunk][i][0]);
                acc[chunk][i][1] = fmaf(weight, high, acc[chunk][i][1]);
            }
        }
        __syncthreads();
    }
}

__device__ void clear(float (&acc)[CHUNKS_PER_BLOCK][4][2]) {
#pragma unroll
    for (int chunk = 0; chunk < CHUNKS_PER_BLOCK; chunk++)
#pragma unroll
        for (int i = 0; i < 4; i++) acc[chunk][i][0] = acc[chunk][i][1] = 0.0f;
}

// Stores rows first..end of one head, each divided by its divisor.
template <typename T>
__device__ void store_rows(T *to, i64 row_stride, i64 first, i64 end, i64 head_dim,
                           const float (&acc)[CHUNKS_PER_BLOCK][4][2], const float (&divisors)[4]) {
    int row = threadIdx.x / 16 * 4, column = threadIdx.x % 16;
#pragma unroll
    for (int chunk = 0; chunk < CHUNKS_PER_BLOCK; chunk++)
#pragma unroll
        for (int i = 0; i < 4; i++)
#pragma unroll
            for (int j = 0; j < 2; j++) {
                i64 element = ((i64)blockIdx.z * CHUNKS_PER_BLOCK + chunk) * CHUNK + column + 16 * j;
                if (first + row + i < end && element < head_dim) {
                    to[(first + row + i) * row_stride + element] = from_f32<T>(acc[chunk][i][j] / divisors[i]);
                }
            }
}

// Zeroes all rows of a tile before sequences store theirs, so that padding rows are 0.
template <typename T>
__device__ void zero_rows(T *to, i64 row_stride, i64 first, i64 end, i64 head_dim) {
    i64 from = (i64)blockIdx.z * CHUNKS_PER_BLOCK * CHUNK, width = min64(head_dim - from, CHUNKS_PER_BLOCK * CHUNK);
    for (i64 i = threadIdx.x; i < (end - first) * width; i += THREADS) {
        to[(first + i / width) * row_stride + from + i % width] = from_f32<T>(0.0f);
    }
}

// Rows of the keys of a sequence, up to the last that a tile's queries see.
struct Keys {
    i64 first, end;
};

__device__ __forceinline__ Keys keys_of(const Shape &shape, Starts kv_starts, u64 s, i64 end) {
    if (s + 1 >= kv_starts.count) return {0, 0};
    return {(i64)kv_starts.at[s], shape.causal ? end : min64(kv_starts.at[s + 1], shape.kv_rows)};
}

// `query` is counted in the rows of the keys: that of the key at the same position of its sequence.
__device__ __forceinline__ bool is_visible(const Shape &shape, Keys keys, i64 query, i64 key) {
    if (!shape.causal) return key < keys.end;
    return key <= query && key >= first_visible_key(shape, keys.first, query);
}

__device__ __forceinline__ i64 limited(const Context &context, i64 distance) {
    return min64(max64(distance, -context.max_distance), context.max_distance);
}

__device__ __forceinline__ float bias_at(const Context &context, const float *bias, i64 distance) {
    return bias[limited(context, distance) + context.max_distance];
}

// Whether dropout leaves the weight of a key of the sequence.
__device__ __forceinline__ bool is_kept(const Context &context, const DropoutRow &row, u32 key) {
    PhiloxBlock bits = dropout_bits(row, key / 32, key % 8 / 2);
    u32 pair[2] = {key & 8 ? bits.word[1] : bits.word[0], key & 8 ? bits.word[3] : bits.word[2]};
    u32 word = key & 16 ? pair[1] : pair[0];
    return (key % 2 ? word >> 16 : word & 0xffffu) >= context.threshold;
}

template <typename T>
__device__ void attention(Starts starts, const T *q, const T *k, const T *v, T *y, float *lse, Shape shape,
                          Context context) {
    __shared__ float a_tile[TILE][CHUNK_STRIDE], b_tile[TILE][CHUNK_STRIDE], weights[TILE][TILE + 1];
    i64 head = blockIdx.y, head_dim = shape.head_dim, kv_head = head / (shape.heads / shape.kv_heads);
    i64 q_stride = shape.heads * head_dim, kv_stride = shape.kv_heads * head_dim;
    i64 tile = (i64)blockIdx.x * TILE, tile_end = min64(tile + TILE, shape.rows);
    int row = threadIdx.x / 16 * 4, column = threadIdx.x % 16;
    q += head * head_dim;
    y += head * head_dim;
    k += kv_head * head_dim;
    v += kv_head * head_dim;
    lse += head * shape.rows;
    const float *bias = context.bias ? context.bias + head * (2 * context.max_distance + 1) : nullptr;
    zero_rows(y, q_stride, tile, tile_end, head_dim);
    if (blockIdx.z == 0 && tile + threadIdx.x < tile_end) lse[tile + threadIdx.x] = 0.0f;
    __syncthreads();
    for (u64 s = sequence_at(starts, tile); s + 1 < starts.count && (i64)starts.at[s] < tile_end; s++) {
        i64 sequence = starts.at[s], first = max64(sequence, tile), end = min64(starts.at[s + 1], tile_end);
        Keys keys = keys_of(shape, context.kv_starts, s, end);
        if (first >= end || keys.first >= keys.end) continue;
        i64 shift = keys.first - sequence;
        float acc[CHUNKS_PER_BLOCK][4][2], scores[4][4], maxima[4], sums[4];
        DropoutRow dropout[4];
        clear(acc);
        for (int i = 0; i < 4; i++) {
            maxima[i] = -INF;
            sums[i] = 0.0f;
            if (context.keys)
                dropout[i] = dropout_row(context, context.keys[min64(first + row + i, shape.rows - 1)], (u32)head);
        }
        i64 key = keys.first + (first_visible_key(shape, sequence, first) - sequence) / TILE * TILE;
        for (; key < keys.end; key += TILE) {
            tile_dots(a_tile, b_tile, q, q_stride, first, end, k, kv_stride, key, keys.end, head_dim, scores);
#pragma unroll
            for (int i = 0; i < 4; i++) {
                i64 query = first + row + i + shift;
                float largest = -INF;
#pragma unroll
                for (int j = 0; j < 4; j++) {
                    i64 own_key = key + column + 16 * j;
                    scores[i][j] *= shape.scale;
                    if (bias) scores[i][j] += bias_at(context, bias, own_key - query);
                    if (is_visible(shape, keys, query, own_key)) largest = fmaxf(largest, scores[i][j]);
                }
                // The 16 threads of a row are consecutive lanes.
                for (int step = 8; step > 0; step /= 2)
                    largest = fmaxf(largest, __shfl_xor_sync(FULL_MASK, largest, step));
                bool all_masked =
                    shape.causal && (query < key || first_visible_key(shape, keys.first, query) >= key + TILE);
                float maximum = fmaxf(maxima[i], largest), rescale = all_masked ? 1.0f : expf(maxima[i] - maximum),
                      sum = 0.0f;
#pragma unroll
                for (int j = 0; j < 4; j++) {
                    i64 own_key = key + column + 16 * j;
                    bool visible = is_visible(shape, keys, query, own_key);
                    float weight = visible ? expf(scores[i][j] - maximum) : 0.0f;
                    sum += weight;
                    if (context.keys && !is_kept(context, dropout[i], (u32)(own_key - keys.first))) weight = 0.0f;
                    weights[row + i][column + 16 * j] = weight;
                }
                for (int step = 8; step > 0; step /= 2) sum += __shfl_xor_sync(FULL_MASK, sum, step);
                sums[i] = sums[i] * rescale + sum;
                maxima[i] = all_masked ? maxima[i] : maximum;
#pragma unroll
                for (int chunk = 0; chunk < CHUNKS_PER_BLOCK; chunk++) {
                    acc[chunk][i][0] *= rescale;
                    acc[chunk][i][1] *= rescale;
                }
            }
            accumulate_weighted(weights, b_tile, v, kv_stride, key, keys.end, head_dim, acc);
        }
        float divisors[4];
        for (int i = 0; i < 4; i++) divisors[i] = context.keys ? sums[i] / context.dropout_scale : sums[i];
        store_rows(y, q_stride, first, end, head_dim, acc, divisors);
        for (int i = 0; i < 4; i++) {
            bool writes_lse = blockIdx.z == 0 && column == 0 && first + row + i < end;
            if (writes_lse) lse[first + row + i] = maxima[i] + logf(sums[i]);
        }
    }
}

// Recomputes a softmax weight, and the gradient of its score, of the weight's gradient. With dropout the weight becomes
// the one that was multiplied with the value.
__device__ __forceinline__ void softmax_backward(const Shape &shape, const Context &context, bool visible, bool kept,
                                                 float bias, float lse, float delta, float &score, float &grad) {
    float scaled = score * shape.scale, weight = visible ? expf((context.bias ? scaled + bias : scaled) - lse) : 0.0f;
    if (context.keys) grad = kept ? grad * context.dropout_scale : 0.0f;
    grad = visible ? weight * (grad - delta) : 0.0f;
    score = weight;
    if (context.keys) score = kept ? weight * context.dropout_scale : 0.0f;
}

// Adds the diagonals of a tile of score gradients to those of their distances; `distance` is that of the first key and
// the first query. Distances beyond the largest are summed in `ends`, by the thread of each diagonal.
__device__ void add_diagonals(float (*grads)[TILE + 1], const Context &context, i64 distance, float *sums,
                              float (&ends)[2]) {
    int diagonal = (int)threadIdx.x - (TILE - 1);
    if (diagonal >= TILE) return;
    float sum = 0.0f;
    for (int row = diagonal < 0 ? -diagonal : 0; row < TILE && row + diagonal < TILE; row++)
        sum += grads[row][row + diagonal];
    distance += diagonal;
    if (distance <= -context.max_distance) ends[0] += sum;
    else if (distance >= context.max_distance) ends[1] += sum;
    else sums[distance + context.max_distance] += sum;
}

// `partials`, if given, is [tiles, heads, distances]: the gradients of the biases, of a tile's queries.
template <typename T>
__device__ void attention_dq(Starts starts, const T *q, const T *k, const T *v, const float *lse, const T *dy,
                             const float *delta, T *dq, float *partials, Shape shape, Context context) {
    __shared__ float a_tile[TILE][CHUNK_STRIDE], b_tile[TILE][CHUNK_STRIDE], weights[TILE][TILE + 1];
    i64 head = blockIdx.y, head_dim = shape.head_dim, kv_head = head / (shape.heads / shape.kv_heads);
    i64 q_stride = shape.heads * head_dim, kv_stride = shape.kv_heads * head_dim;
    i64 tile = (i64)blockIdx.x * TILE, tile_end = min64(tile + TILE, shape.rows);
    i64 distances = 2 * (i64)context.max_distance + 1;
    int row = threadIdx.x / 16 * 4, column = threadIdx.x % 16;
    q += head * head_dim;
    dy += head * head_dim;
    dq += head * head_dim;
    k += kv_head * head_dim;
    v += kv_head * head_dim;
    const float *bias = context.bias ? context.bias + head * distances : nullptr;
    // The blocks of a head's other columns compute the same.
    if (blockIdx.z > 0) partials = nullptr;
    if (partials) partials += (blockIdx.x * shape.heads + head) * distances;
    float ends[2] = {0.0f, 0.0f};
    for (i64 i = threadIdx.x; partials && i < distances; i += THREADS) partials[i] = 0.0f;
    zero_rows(dq, q_stride, tile, tile_end, head_dim);
    __syncthreads();
    for (u64 s = sequence_at(starts, tile); s + 1 < starts.count && (i64)starts.at[s] < tile_end; s++) {
        i64 sequence = starts.at[s], first = max64(sequence, tile), end = min64(starts.at[s + 1], tile_end);
        if (first >= end) continue;
        Keys keys = keys_of(shape, context.kv_starts, s, end);
        i64 shift = keys.first - sequence;
        float acc[CHUNKS_PER_BLOCK][4][2], scores[4][4], grads[4][4];
        DropoutRow dropout[4];
        clear(acc);
        for (int i = 0; i < 4 && context.keys; i++)
            dropout[i] = dropout_row(context, context.keys[min64(first + row + i, shape.rows - 1)], (u32)head);
        i64 key = keys.first + (first_visible_key(shape, sequence, first) - sequence) / TILE * TILE;
        for (; key < keys.end; key += TILE) {
            tile_dots(a_tile, b_tile, q, q_stride, first, end, k, kv_stride, key, keys.end, head_dim, scores);
            tile_dots(a_tile, b_tile, dy, q_stride, first, end, v, kv_stride, key, keys.end, head_dim, grads);
#pragma unroll
            for (int i = 0; i < 4; i++) {
                i64 query = first + row + i;
                i64 at = head * shape.rows + min64(query, shape.rows - 1);
#pragma unroll
                for (int j = 0; j < 4; j++) {
                    i64 own_key = key + column + 16 * j;
                    bool visible = query < end && is_visible(shape, keys, query + shift, own_key);
                    bool kept = !context.keys || is_kept(context, dropout[i], (u32)(own_key - keys.first));
                    float added = bias ? bias_at(context, bias, own_key - query - shift) : 0.0f;
                    softmax_backward(shape, context, visible, kept, added, lse[at], delta[at], scores[i][j],
                                     grads[i][j]);
                    if (partials) weights[row + i][column + 16 * j] = grads[i][j];
                    grads[i][j] *= shape.scale;
                }
            }
            if (partials) {
                __syncthreads();
                add_diagonals(weights, context, key - first - shift, partials, ends);
                __syncthreads();
            }
#pragma unroll
            for (int i = 0; i < 4; i++)
#pragma unroll
                for (int j = 0; j < 4; j++) weights[row + i][column + 16 * j] = grads[i][j];
            accumulate_weighted(weights, b_tile, k, kv_stride, key, keys.end, head_dim, acc);
        }
        float ones[4] = {1.0f, 1.0f, 1.0f, 1.0f};
        store_rows(dq, q_stride, first, end, head_dim, acc, ones);
    }
    if (!partials) return;
    float *all_ends = &a_tile[0][0];
    static_assert(sizeof a_tile >= 2 * THREADS * sizeof(float), "the ends fit into a tile");
    __syncthreads();
    all_ends[threadIdx.x] = ends[0];
    all_ends[THREADS + threadIdx.x] = ends[1];
    __syncthreads();
    if (threadIdx.x > 0) return;
    for (int side = 0; side < 2; side++) {
        float sum = 0.0f;
        for (int i = 0; i < 2 * TILE - 1; i++) sum += all_ends[side * THREADS + i];
        partials[side * (distances - 1)] += sum;
    }
}

// One block per tile of keys: rows of its tiles are keys, columns are queries.
template <typename T>
__device__ void attention_dkv(Starts starts, const T *q, const T *k, const T *v, const float *lse, const T *dy,
                              const float *delta, T *dk, T *dv, Shape shape, Context context) {
    __shared__ float a_tile[TILE][CHUNK_STRIDE], b_tile[TILE][CHUNK_STRIDE], weights[TILE][TILE + 1];
    Starts kv_starts = context.kv_starts;
    i64 kv_head = blockIdx.y, head_dim = shape.head_dim, group = shape.heads / shape.kv_heads;
    i64 q_stride = shape.heads * head_dim, kv_stride = shape.kv_heads * head_dim;
    i64 tile = (i64)blockIdx.x * TILE, tile_end = min64(tile + TILE, shape.kv_rows);
    int row = threadIdx.x / 16 * 4, column = threadIdx.x % 16;
    k += kv_head * head_dim;
    v += kv_head * head_dim;
    dk += kv_head * head_dim;
    dv += kv_head * head_dim;
    zero_rows(dk, kv_stride, tile, tile_end, head_dim);
    zero_rows(dv, kv_stride, tile, tile_end, head_dim);
    __syncthreads();
    for (u64 s = sequence_at(kv_starts, tile); s + 1 < kv_starts.count && (i64)kv_starts.at[s] < tile_end; s++) {
        i64 sequence = kv_starts.at[s], sequence_end = min64(kv_starts.at[s + 1], shape.kv_rows);
        i64 first = max64(sequence, tile), end = min64(sequence_end, tile_end);
        if (first >= end || s + 1 >= starts.count) continue;
        i64 first_query = starts.at[s], last = min64(starts.at[s + 1], shape.rows), shift = sequence - first_query;
        if (shape.window) last = min64(last, end - 1 + shape.window);
        float dk_acc[CHUNKS_PER_BLOCK][4][2], dv_acc[CHUNKS_PER_BLOCK][4][2], scores[4][4], grads[4][4];
        clear(dk_acc);
        clear(dv_acc);
        for (i64 head = kv_head * group; head < (kv_head + 1) * group; head++) {
            const T *q_head = q + head * head_dim, *dy_head = dy + head * head_dim;
            const float *bias = context.bias ? context.bias + head * (2 * (i64)context.max_distance + 1) : nullptr;
            i64 query = first_query + (shape.causal ? (first - sequence) / TILE * TILE : 0);
            for (; query < last; query += TILE) {
                tile_dots(a_tile, b_tile, k, kv_stride, first, end, q_head, q_stride, query, last, head_dim, scores);
                tile_dots(a_tile, b_tile, v, kv_stride, first, end, dy_head, q_stride, query, last, head_dim, grads);
#pragma unroll
                for (int j = 0; j < 4; j++) {
                    i64 own_query = query + column + 16 * j, row_of_q = min64(own_query, shape.rows - 1);
                    i64 at = head * shape.rows + row_of_q;
                    DropoutRow dropout;
                    if (context.keys) dropout = dropout_row(context, context.keys[row_of_q], (u32)head);
#pragma unroll
                    for (int i = 0; i < 4; i++) {
                        i64 key = first + row + i;
                        bool visible = own_query < last && key < end &&
                                       is_visible(shape, {sequence, sequence_end}, own_query + shift, key);
                        bool kept = !context.keys || is_kept(context, dropout, (u32)(key - sequence));
                        float added = bias ? bias_at(context, bias, key - own_query - shift) : 0.0f;
                        softmax_backward(shape, context, visible, kept, added, lse[at], delta[at], scores[i][j],
                                         grads[i][j]);
                        grads[i][j] *= shape.scale;
                        weights[row + i][column + 16 * j] = scores[i][j];
                    }
                }
                accumulate_weighted(weights, b_tile, dy_head, q_stride, query, last, head_dim, dv_acc);
#pragma unroll
                for (int i = 0; i < 4; i++)
#pragma unroll
                    for (int j = 0; j < 4; j++) weights[row + i][column + 16 * j] = grads[i][j];
                accumulate_weighted(weights, b_tile, q_head, q_stride, query, last, head_dim, dk_acc);
            }
        }
        float ones[4] = {1.0f, 1.0f, 1.0f, 1.0f};
        store_rows(dk, kv_stride, first, end, head_dim, dk_acc, ones);
        store_rows(dv, kv_stride, first, end, head_dim, dv_acc, ones);
    }
}

extern "C" __global__ void __launch_bounds__(THREADS)
    attention_forward(const u32 *starts, u64 capacity, const DTYPE *q, const DTYPE *k, const DTYPE *v, DTYPE *y,
                      float *lse, SHAPE, CONTEXT) {
    attention(read_starts(starts, capacity), q, k, v, y, lse, READ_SHAPE, READ_CONTEXT);
}

extern "C" __global__ void __launch_bounds__(THREADS)
    attention_backward_dq(const u32 *starts, u64 capacity, const DTYPE *q, const DTYPE *k, const DTYPE *v,
                          const float *lse, const DTYPE *dy, const float *delta, DTYPE *dq, SHAPE, CONTEXT,
                          float *partials) {
    attention_dq(read_starts(starts, capacity), q, k, v, lse, dy, delta, dq, GENERAL ? partials : nullptr, READ_SHAPE,
                 READ_CONTEXT);
}

extern "C" __global__ void __launch_bounds__(THREADS)
    attention_backward_dkv(const u32 *starts, u64 capacity, const DTYPE *q, const DTYPE *k, const DTYPE *v,
                           const float *lse, const DTYPE *dy, const float *delta, DTYPE *dk, DTYPE *dv, SHAPE,
                           CONTEXT) {
    attention_dkv(read_starts(starts, capacity), q, k, v, lse, dy, delta, dk, dv, READ_SHAPE, READ_CONTEXT);
}
