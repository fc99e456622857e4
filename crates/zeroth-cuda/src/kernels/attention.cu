// Causal attention over packed sequences, forward and backward, in tiles of 64 queries and 64 keys.
//
// In plain f32 arithmetic: for fp32, and for heads and cards that flash.cu is not for. A block has a tile of rows of one
// head, and at most 128 elements of its result. Tiles of the other side are counted from the beginning of the sequence, so a
// row's result does not depend on where in the pack its sequence stands. Every sum runs in one order; there are no
// atomics: dq is summed by query, dk and dv by key, heads of a group one after another.

#define TILE 64
#define THREADS 256
// Elements of a head that are in shared memory at a time; the pitch keeps columns in different banks.
#define PART 32
#define PITCH (PART + 1)
// Parts of its result that a block has.
#define PARTS 4

// A tile's rows from `first` on, of one part of a head, as f32. What is beyond `end` or the head is 0.
template <typename T>
__device__ void stage(float (*to)[PITCH], const T *from, i64 pitch, i64 first, i64 end, int part, i64 head_dim) {
    int row = threadIdx.x / PART, column = threadIdx.x % PART;
    bool inside = part * PART + column < head_dim;
    from += (first + row) * pitch + part * PART + column;
#pragma unroll
    for (int i = 0; i < TILE; i += THREADS / PART) {
        to[row + i][column] = inside && first + row + i < end ? to_f32(from[i * pitch]) : 0.0f;
    }
}

// A thread has 4 rows next to each other and 4 columns 16 apart: its part of a tile of dot products.
__device__ __forceinline__ void multiply(float (*left)[PITCH], float (*right)[PITCH], float (&sums)[4][4]) {
    int row = threadIdx.x / 16 * 4, column = threadIdx.x % 16;
#pragma unroll 4
    for (int at = 0; at < PART; at++) {
        float a[4], b[4];
#pragma unroll
        for (int i = 0; i < 4; i++) a[i] = left[row + i][at];
#pragma unroll
        for (int j = 0; j < 4; j++) b[j] = right[column + 16 * j][at];
#pragma unroll
        for (int i = 0; i < 4; i++)
#pragma unroll
            for (int j = 0; j < 4; j++) sums[i][j] = fmaf(a[i], b[j], sums[i][j]);
    }
}

// sums = the dot products of the rows of two tiles.
template <typename T>
__device__ void dots(float (*left)[PITCH], float (*right)[PITCH], const T *a, i64 a_pitch, i64 a_first, i64 a_end,
                     const T *b, i64 b_pitch, i64 b_first, i64 b_end, i64 head_dim, float (&sums)[4][4]) {
#pragma unroll
    for (int i = 0; i < 4; i++)
#pragma unroll
        for (int j = 0; j < 4; j++) sums[i][j] = 0.0f;
#pragma unroll 1
    for (int part = 0; part * PART < head_dim; part++) {
        stage(left, a, a_pitch, a_first, a_end, part, head_dim);
        stage(right, b, b_pitch, b_first, b_end, part, head_dim);
        __syncthreads();
        multiply(left, right, sums);
        __syncthreads();
    }
}

// totals += weights · the rows of a tile: a thread has its 4 rows and 2 columns of each part.
template <typename T>
__device__ void gather(float (*weights)[TILE + 1], float (*right)[PITCH], const T *b, i64 b_pitch, i64 b_first,
                       i64 b_end, i64 head_dim, float (&totals)[PARTS][4][2]) {
    int row = threadIdx.x / 16 * 4, column = threadIdx.x % 16, first_part = blockIdx.z * PARTS;
#pragma unroll
    for (int part = 0; part < PARTS; part++) {
        if ((first_part + part) * PART >= head_dim) break;
        stage(right, b, b_pitch, b_first, b_end, first_part + part, head_dim);
        __syncthreads();
#pragma unroll 4
        for (int at = 0; at < TILE; at++) {
            float low = right[at][column], high = right[at][column + 16];
#pragma unroll
            for (int i = 0; i < 4; i++) {
                float weight = weights[row + i][at];
                totals[part][i][0] = fmaf(weight, low, totals[part][i][0]);
                totals[part][i][1] = fmaf(weight, high, totals[part][i][1]);
            }
        }
        __syncthreads();
    }
}

__device__ void clear(float (&totals)[PARTS][4][2]) {
#pragma unroll
    for (int part = 0; part < PARTS; part++)
#pragma unroll
        for (int i = 0; i < 4; i++) totals[part][i][0] = totals[part][i][1] = 0.0f;
}

// Writes rows first..end of one head, each divided by its number.
template <typename T>
__device__ void store(T *to, i64 pitch, i64 first, i64 end, i64 head_dim, const float (&totals)[PARTS][4][2],
                      const float (&divisors)[4]) {
    int row = threadIdx.x / 16 * 4, column = threadIdx.x % 16;
#pragma unroll
    for (int part = 0; part < PARTS; part++)
#pragma unroll
        for (int i = 0; i < 4; i++)
#pragma unroll
            for (int j = 0; j < 2; j++) {
                i64 element = ((i64)blockIdx.z * PARTS + part) * PART + column + 16 * j;
                if (first + row + i < end && element < head_dim) {
                    to[(first + row + i) * pitch + element] = from_f32<T>(totals[part][i][j] / divisors[i]);
                }
            }
}

// Rows of padding give zeros: all rows of a tile do, before sequences write theirs.
template <typename T>
__device__ void fill(T *to, i64 pitch, i64 first, i64 end, i64 head_dim) {
    i64 from = (i64)blockIdx.z * PARTS * PART, width = smaller(head_dim - from, PARTS * PART);
    for (i64 i = threadIdx.x; i < (end - first) * width; i += THREADS) {
        to[(first + i / width) * pitch + from + i % width] = from_f32<T>(0.0f);
    }
}

template <typename T>
__device__ void attention(Starts starts, const T *q, const T *k, const T *v, T *y, float *lse, Shape shape) {
    __shared__ float left[TILE][PITCH], right[TILE][PITCH], weights[TILE][TILE + 1];
    i64 head = blockIdx.y, head_dim = shape.head_dim, kv_head = head / (shape.heads / shape.kv_heads);
    i64 q_pitch = shape.heads * head_dim, kv_pitch = shape.kv_heads * head_dim;
    i64 tile = (i64)blockIdx.x * TILE, tile_end = smaller(tile + TILE, shape.rows);
    int row = threadIdx.x / 16 * 4, column = threadIdx.x % 16;
    q += head * head_dim;
    y += head * head_dim;
    k += kv_head * head_dim;
    v += kv_head * head_dim;
    lse += head * shape.rows;
    fill(y, q_pitch, tile, tile_end, head_dim);
    if (blockIdx.z == 0 && tile + threadIdx.x < tile_end) lse[tile + threadIdx.x] = 0.0f;
    __syncthreads();
    for (u64 s = sequence_at(starts, tile); s + 1 < starts.count && (i64)starts.at[s] < tile_end; s++) {
        i64 sequence = starts.at[s], first = larger(sequence, tile), end = smaller(starts.at[s + 1], tile_end);
        if (first >= end) continue;
        float totals[PARTS][4][2], scores[4][4], peaks[4], sums[4];
        clear(totals);
        for (int i = 0; i < 4; i++) {
            peaks[i] = -INFINITE;
            sums[i] = 0.0f;
        }
        i64 key = sequence + (first_key(shape, sequence, first) - sequence) / TILE * TILE;
        for (; key < end; key += TILE) {
            dots(left, right, q, q_pitch, first, end, k, kv_pitch, key, end, head_dim, scores);
#pragma unroll
            for (int i = 0; i < 4; i++) {
                i64 query = first + row + i;
                float best = -INFINITE;
#pragma unroll
                for (int j = 0; j < 4; j++) {
                    scores[i][j] *= shape.scale;
                    if (sees(shape, sequence, query, key + column + 16 * j)) best = fmaxf(best, scores[i][j]);
                }
                // The 16 threads of a row are lanes next to each other.
                for (int step = 8; step > 0; step /= 2) best = fmaxf(best, __shfl_xor_sync(ALL_LANES, best, step));
                bool none = query < key || first_key(shape, sequence, query) >= key + TILE;
                float peak = fmaxf(peaks[i], best), shrink = none ? 1.0f : expf(peaks[i] - peak), sum = 0.0f;
#pragma unroll
                for (int j = 0; j < 4; j++) {
                    bool seen = sees(shape, sequence, query, key + column + 16 * j);
                    float weight = seen ? expf(scores[i][j] - peak) : 0.0f;
                    weights[row + i][column + 16 * j] = weight;
                    sum += weight;
                }
                for (int step = 8; step > 0; step /= 2) sum += __shfl_xor_sync(ALL_LANES, sum, step);
                sums[i] = sums[i] * shrink + sum;
                peaks[i] = none ? peaks[i] : peak;
#pragma unroll
                for (int part = 0; part < PARTS; part++) {
                    totals[part][i][0] *= shrink;
                    totals[part][i][1] *= shrink;
                }
            }
            gather(weights, right, v, kv_pitch, key, end, head_dim, totals);
        }
        store(y, q_pitch, first, end, head_dim, totals, sums);
        for (int i = 0; i < 4; i++) {
            bool mine = blockIdx.z == 0 && column == 0 && first + row + i < end;
            if (mine) lse[first + row + i] = peaks[i] + logf(sums[i]);
        }
    }
}

// The softmax's weight of a score, and the gradient of the raw score.
__device__ __forceinline__ void differentiate(const Shape &shape, bool seen, float lse, float delta, float &score,
                                              float &grad) {
    score = seen ? expf(score * shape.scale - lse) : 0.0f;
    grad = seen ? score * (grad - delta) * shape.scale : 0.0f;
}

template <typename T>
__device__ void attention_dq(Starts starts, const T *q, const T *k, const T *v, const float *lse, const T *dy,
                             const float *delta, T *dq, Shape shape) {
    __shared__ float left[TILE][PITCH], right[TILE][PITCH], weights[TILE][TILE + 1];
    i64 head = blockIdx.y, head_dim = shape.head_dim, kv_head = head / (shape.heads / shape.kv_heads);
    i64 q_pitch = shape.heads * head_dim, kv_pitch = shape.kv_heads * head_dim;
    i64 tile = (i64)blockIdx.x * TILE, tile_end = smaller(tile + TILE, shape.rows);
    int row = threadIdx.x / 16 * 4, column = threadIdx.x % 16;
    q += head * head_dim;
    dy += head * head_dim;
    dq += head * head_dim;
    k += kv_head * head_dim;
    v += kv_head * head_dim;
    fill(dq, q_pitch, tile, tile_end, head_dim);
    __syncthreads();
    for (u64 s = sequence_at(starts, tile); s + 1 < starts.count && (i64)starts.at[s] < tile_end; s++) {
        i64 sequence = starts.at[s], first = larger(sequence, tile), end = smaller(starts.at[s + 1], tile_end);
        if (first >= end) continue;
        float totals[PARTS][4][2], scores[4][4], grads[4][4];
        clear(totals);
        i64 key = sequence + (first_key(shape, sequence, first) - sequence) / TILE * TILE;
        for (; key < end; key += TILE) {
            dots(left, right, q, q_pitch, first, end, k, kv_pitch, key, end, head_dim, scores);
            dots(left, right, dy, q_pitch, first, end, v, kv_pitch, key, end, head_dim, grads);
#pragma unroll
            for (int i = 0; i < 4; i++) {
                i64 query = first + row + i;
                i64 at = head * shape.rows + smaller(query, shape.rows - 1);
#pragma unroll
                for (int j = 0; j < 4; j++) {
                    bool seen = query < end && sees(shape, sequence, query, key + column + 16 * j);
                    differentiate(shape, seen, lse[at], delta[at], scores[i][j], grads[i][j]);
                    weights[row + i][column + 16 * j] = grads[i][j];
                }
            }
            gather(weights, right, k, kv_pitch, key, end, head_dim, totals);
        }
        float ones[4] = {1.0f, 1.0f, 1.0f, 1.0f};
        store(dq, q_pitch, first, end, head_dim, totals, ones);
    }
}

// A block has a tile of keys; rows of its tiles are keys and columns are queries.
template <typename T>
__device__ void attention_dkv(Starts starts, const T *q, const T *k, const T *v, const float *lse, const T *dy,
                              const float *delta, T *dk, T *dv, Shape shape) {
    __shared__ float left[TILE][PITCH], right[TILE][PITCH], weights[TILE][TILE + 1];
    i64 kv_head = blockIdx.y, head_dim = shape.head_dim, group = shape.heads / shape.kv_heads;
    i64 q_pitch = shape.heads * head_dim, kv_pitch = shape.kv_heads * head_dim;
    i64 tile = (i64)blockIdx.x * TILE, tile_end = smaller(tile + TILE, shape.rows);
    int row = threadIdx.x / 16 * 4, column = threadIdx.x % 16;
    k += kv_head * head_dim;
    v += kv_head * head_dim;
    dk += kv_head * head_dim;
    dv += kv_head * head_dim;
    fill(dk, kv_pitch, tile, tile_end, head_dim);
    fill(dv, kv_pitch, tile, tile_end, head_dim);
    __syncthreads();
    for (u64 s = sequence_at(starts, tile); s + 1 < starts.count && (i64)starts.at[s] < tile_end; s++) {
        i64 sequence = starts.at[s], sequence_end = smaller(starts.at[s + 1], shape.rows);
        i64 first = larger(sequence, tile), end = smaller(sequence_end, tile_end);
        if (first >= end) continue;
        i64 last = shape.window ? smaller(sequence_end, end - 1 + shape.window) : sequence_end;
        float k_totals[PARTS][4][2], v_totals[PARTS][4][2], scores[4][4], grads[4][4];
        clear(k_totals);
        clear(v_totals);
        for (i64 head = kv_head * group; head < (kv_head + 1) * group; head++) {
            const T *q_head = q + head * head_dim, *dy_head = dy + head * head_dim;
            i64 query = sequence + (first - sequence) / TILE * TILE;
            for (; query < last; query += TILE) {
                dots(left, right, k, kv_pitch, first, end, q_head, q_pitch, query, last, head_dim, scores);
                dots(left, right, v, kv_pitch, first, end, dy_head, q_pitch, query, last, head_dim, grads);
#pragma unroll
                for (int j = 0; j < 4; j++) {
                    i64 mine = query + column + 16 * j;
                    i64 at = head * shape.rows + smaller(mine, shape.rows - 1);
#pragma unroll
                    for (int i = 0; i < 4; i++) {
                        i64 key = first + row + i;
                        bool seen = mine < last && key < end && sees(shape, sequence, mine, key);
                        differentiate(shape, seen, lse[at], delta[at], scores[i][j], grads[i][j]);
                        weights[row + i][column + 16 * j] = scores[i][j];
                    }
                }
                gather(weights, right, dy_head, q_pitch, query, last, head_dim, v_totals);
#pragma unroll
                for (int i = 0; i < 4; i++)
#pragma unroll
                    for (int j = 0; j < 4; j++) weights[row + i][column + 16 * j] = grads[i][j];
                gather(weights, right, q_head, q_pitch, query, last, head_dim, k_totals);
            }
        }
        float ones[4] = {1.0f, 1.0f, 1.0f, 1.0f};
        store(dk, kv_pitch, first, end, head_dim, k_totals, ones);
        store(dv, kv_pitch, first, end, head_dim, v_totals, ones);
    }
}

#define SHAPE i64 rows, i64 heads, i64 kv_heads, i64 head_dim, i64 window, float scale

extern "C" __global__ void __launch_bounds__(THREADS)
    plain_forward(const u32 *starts, u64 room, const NUMBER *q, const NUMBER *k, const NUMBER *v, NUMBER *y, float *lse,
                  SHAPE) {
    attention(starts_of(starts, room), q, k, v, y, lse, Shape{rows, heads, kv_heads, head_dim, window, scale});
}

extern "C" __global__ void __launch_bounds__(THREADS)
    plain_to_queries(const u32 *starts, u64 room, const NUMBER *q, const NUMBER *k, const NUMBER *v, const float *lse,
                     const NUMBER *dy, const float *delta, NUMBER *dq, SHAPE) {
    attention_dq(starts_of(starts, room), q, k, v, lse, dy, delta, dq,
                 Shape{rows, heads, kv_heads, head_dim, window, scale});
}

extern "C" __global__ void __launch_bounds__(THREADS)
    plain_to_keys(const u32 *starts, u64 room, const NUMBER *q, const NUMBER *k, const NUMBER *v, const float *lse,
                  const NUMBER *dy, const float *delta, NUMBER *dk, NUMBER *dv, SHAPE) {
    attention_dkv(starts_of(starts, room), q, k, v, lse, dy, delta, dk, dv,
                  Shape{rows, heads, kv_heads, head_dim, window, scale});
}
