// Causal attention over packed sequences, forward and backward, in tiles of 64 queries and 64 keys.
//
// f32 arithmetic on CUDA cores: for fp32, and for head dims and GPUs that flash.cu does not support. A block computes
// one tile of rows of one head, and at most 128 columns of its result. Tiles of the other operand start at the
// beginning of the sequence, so a row's result does not depend on its sequence's position in the pack. Sums run in a
// fixed order without atomics: dq is summed per query, dk and dv per key, over the heads of a group in sequence.

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

template <typename T>
__device__ void attention(Starts starts, const T *q, const T *k, const T *v, T *y, float *lse, Shape shape) {
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
    zero_rows(y, q_stride, tile, tile_end, head_dim);
    if (blockIdx.z == 0 && tile + threadIdx.x < tile_end) lse[tile + threadIdx.x] = 0.0f;
    __syncthreads();
    for (u64 s = sequence_at(starts, tile); s + 1 < starts.count && (i64)starts.at[s] < tile_end; s++) {
        i64 sequence = starts.at[s], first = max64(sequence, tile), end = min64(starts.at[s + 1], tile_end);
        if (first >= end) continue;
        float acc[CHUNKS_PER_BLOCK][4][2], scores[4][4], maxima[4], sums[4];
        clear(acc);
        for (int i = 0; i < 4; i++) {
            maxima[i] = -INF;
            sums[i] = 0.0f;
        }
        i64 key = sequence + (first_visible_key(shape, sequence, first) - sequence) / TILE * TILE;
        for (; key < end; key += TILE) {
            tile_dots(a_tile, b_tile, q, q_stride, first, end, k, kv_stride, key, end, head_dim, scores);
#pragma unroll
            for (int i = 0; i < 4; i++) {
                i64 query = first + row + i;
                float largest = -INF;
#pragma unroll
                for (int j = 0; j < 4; j++) {
                    scores[i][j] *= shape.scale;
                    if (is_visible(shape, sequence, query, key + column + 16 * j))
                        largest = fmaxf(largest, scores[i][j]);
                }
                // The 16 threads of a row are consecutive lanes.
                for (int step = 8; step > 0; step /= 2)
                    largest = fmaxf(largest, __shfl_xor_sync(FULL_MASK, largest, step));
                bool all_masked = query < key || first_visible_key(shape, sequence, query) >= key + TILE;
                float maximum = fmaxf(maxima[i], largest), rescale = all_masked ? 1.0f : expf(maxima[i] - maximum),
                      sum = 0.0f;
#pragma unroll
                for (int j = 0; j < 4; j++) {
                    bool visible = is_visible(shape, sequence, query, key + column + 16 * j);
                    float weight = visible ? expf(scores[i][j] - maximum) : 0.0f;
                    weights[row + i][column + 16 * j] = weight;
                    sum += weight;
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
            accumulate_weighted(weights, b_tile, v, kv_stride, key, end, head_dim, acc);
        }
        store_rows(y, q_stride, first, end, head_dim, acc, sums);
        for (int i = 0; i < 4; i++) {
            bool writes_lse = blockIdx.z == 0 && column == 0 && first + row + i < end;
            if (writes_lse) lse[first + row + i] = maxima[i] + logf(sums[i]);
        }
    }
}

// Recomputes a softmax weight, and the gradient of its raw score.
__device__ __forceinline__ void softmax_backward(const Shape &shape, bool visible, float lse, float delta, float &score,
                                                 float &grad) {
    score = visible ? expf(score * shape.scale - lse) : 0.0f;
    grad = visible ? score * (grad - delta) * shape.scale : 0.0f;
}

template <typename T>
__device__ void attention_dq(Starts starts, const T *q, const T *k, const T *v, const float *lse, const T *dy,
                             const float *delta, T *dq, Shape shape) {
    __shared__ float a_tile[TILE][CHUNK_STRIDE], b_tile[TILE][CHUNK_STRIDE], weights[TILE][TILE + 1];
    i64 head = blockIdx.y, head_dim = shape.head_dim, kv_head = head / (shape.heads / shape.kv_heads);
    i64 q_stride = shape.heads * head_dim, kv_stride = shape.kv_heads * head_dim;
    i64 tile = (i64)blockIdx.x * TILE, tile_end = min64(tile + TILE, shape.rows);
    int row = threadIdx.x / 16 * 4, column = threadIdx.x % 16;
    q += head * head_dim;
    dy += head * head_dim;
    dq += head * head_dim;
    k += kv_head * head_dim;
    v += kv_head * head_dim;
    zero_rows(dq, q_stride, tile, tile_end, head_dim);
    __syncthreads();
    for (u64 s = sequence_at(starts, tile); s + 1 < starts.count && (i64)starts.at[s] < tile_end; s++) {
        i64 sequence = starts.at[s], first = max64(sequence, tile), end = min64(starts.at[s + 1], tile_end);
        if (first >= end) continue;
        float acc[CHUNKS_PER_BLOCK][4][2], scores[4][4], grads[4][4];
        clear(acc);
        i64 key = sequence + (first_visible_key(shape, sequence, first) - sequence) / TILE * TILE;
        for (; key < end; key += TILE) {
            tile_dots(a_tile, b_tile, q, q_stride, first, end, k, kv_stride, key, end, head_dim, scores);
            tile_dots(a_tile, b_tile, dy, q_stride, first, end, v, kv_stride, key, end, head_dim, grads);
#pragma unroll
            for (int i = 0; i < 4; i++) {
                i64 query = first + row + i;
                i64 at = head * shape.rows + min64(query, shape.rows - 1);
#pragma unroll
                for (int j = 0; j < 4; j++) {
                    bool visible = query < end && is_visible(shape, sequence, query, key + column + 16 * j);
                    softmax_backward(shape, visible, lse[at], delta[at], scores[i][j], grads[i][j]);
                    weights[row + i][column + 16 * j] = grads[i][j];
                }
            }
            accumulate_weighted(weights, b_tile, k, kv_stride, key, end, head_dim, acc);
        }
        float ones[4] = {1.0f, 1.0f, 1.0f, 1.0f};
        store_rows(dq, q_stride, first, end, head_dim, acc, ones);
    }
}

// One block per tile of keys: rows of its tiles are keys, columns are queries.
template <typename T>
__device__ void attention_dkv(Starts starts, const T *q, const T *k, const T *v, const float *lse, const T *dy,
                              const float *delta, T *dk, T *dv, Shape shape) {
    __shared__ float a_tile[TILE][CHUNK_STRIDE], b_tile[TILE][CHUNK_STRIDE], weights[TILE][TILE + 1];
    i64 kv_head = blockIdx.y, head_dim = shape.head_dim, group = shape.heads / shape.kv_heads;
    i64 q_stride = shape.heads * head_dim, kv_stride = shape.kv_heads * head_dim;
    i64 tile = (i64)blockIdx.x * TILE, tile_end = min64(tile + TILE, shape.rows);
    int row = threadIdx.x / 16 * 4, column = threadIdx.x % 16;
    k += kv_head * head_dim;
    v += kv_head * head_dim;
    dk += kv_head * head_dim;
    dv += kv_head * head_dim;
    zero_rows(dk, kv_stride, tile, tile_end, head_dim);
    zero_rows(dv, kv_stride, tile, tile_end, head_dim);
    __syncthreads();
    for (u64 s = sequence_at(starts, tile); s + 1 < starts.count && (i64)starts.at[s] < tile_end; s++) {
        i64 sequence = starts.at[s], sequence_end = min64(starts.at[s + 1], shape.rows);
        i64 first = max64(sequence, tile), end = min64(sequence_end, tile_end);
        if (first >= end) continue;
        i64 last = shape.window ? min64(sequence_end, end - 1 + shape.window) : sequence_end;
        float dk_acc[CHUNKS_PER_BLOCK][4][2], dv_acc[CHUNKS_PER_BLOCK][4][2], scores[4][4], grads[4][4];
        clear(dk_acc);
        clear(dv_acc);
        for (i64 head = kv_head * group; head < (kv_head + 1) * group; head++) {
            const T *q_head = q + head * head_dim, *dy_head = dy + head * head_dim;
            i64 query = sequence + (first - sequence) / TILE * TILE;
            for (; query < last; query += TILE) {
                tile_dots(a_tile, b_tile, k, kv_stride, first, end, q_head, q_stride, query, last, head_dim, scores);
                tile_dots(a_tile, b_tile, v, kv_stride, first, end, dy_head, q_stride, query, last, head_dim, grads);
#pragma unroll
                for (int j = 0; j < 4; j++) {
                    i64 own_query = query + column + 16 * j;
                    i64 at = head * shape.rows + min64(own_query, shape.rows - 1);
#pragma unroll
                    for (int i = 0; i < 4; i++) {
                        i64 key = first + row + i;
                        bool visible = own_query < last && key < end && is_visible(shape, sequence, own_query, key);
                        softmax_backward(shape, visible, lse[at], delta[at], scores[i][j], grads[i][j]);
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

#define SHAPE i64 rows, i64 heads, i64 kv_heads, i64 head_dim, i64 window, float scale

extern "C" __global__ void __launch_bounds__(THREADS)
    attention_forward(const u32 *starts, u64 capacity, const DTYPE *q, const DTYPE *k, const DTYPE *v, DTYPE *y,
                      float *lse, SHAPE) {
    attention(read_starts(starts, capacity), q, k, v, y, lse, Shape{rows, heads, kv_heads, head_dim, window, scale});
}

extern "C" __global__ void __launch_bounds__(THREADS)
    attention_backward_dq(const u32 *starts, u64 capacity, const DTYPE *q, const DTYPE *k, const DTYPE *v,
                          const float *lse, const DTYPE *dy, const float *delta, DTYPE *dq, SHAPE) {
    attention_dq(read_starts(starts, capacity), q, k, v, lse, dy, delta, dq,
                 Shape{rows, heads, kv_heads, head_dim, window, scale});
}

extern "C" __global__ void __launch_bounds__(THREADS)
    attention_backward_dkv(const u32 *starts, u64 capacity, const DTYPE *q, const DTYPE *k, const DTYPE *v,
                           const float *lse, const DTYPE *dy, const float *delta, DTYPE *dk, DTYPE *dv, SHAPE) {
    attention_dkv(read_starts(starts, capacity), q, k, v, lse, dy, delta, dk, dv,
                  Shape{rows, heads, kv_heads, head_dim, window, scale});
}
