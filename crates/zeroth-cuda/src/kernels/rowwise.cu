// Row-wise kernels (embedding, gather of last rows, RMSNorm) and two-level column sums.

// Threads per block, and vectors of a row per thread, in the vectorized kernels.
#define THREADS 256
#define VECS 4

// One block copies one row; ids outside the table yield zeros.
template <typename T>
__device__ void embedding(const i32 *ids, const T *table, T *y, u64 vocab, u64 width) {
    u64 row = blockIdx.x, chunks = width * sizeof(T) / 16;
    i32 id = ids[row];
    bool in_range = id >= 0 && (u64)id < vocab;
    if (width * sizeof(T) % 16 == 0 && aligned16(table, y)) {
        const uint4 *from = (const uint4 *)table + (u64)id * chunks;
        uint4 *to = (uint4 *)y + row * chunks;
        for (u64 i = threadIdx.x; i < chunks; i += blockDim.x) to[i] = in_range ? from[i] : make_uint4(0, 0, 0, 0);
        return;
    }
    for (u64 column = threadIdx.x; column < width; column += blockDim.x) {
        y[row * width + column] = in_range ? table[(u64)id * width + column] : from_f32<T>(0.0f);
    }
}

// Deterministic scatter-add without atomics. A thread handles COLUMNS columns; blockIdx.y partitions the columns. The
// block of an id's first occurrence sums all rows with that id, in order; blocks of later occurrences exit. A thread
// compares 4 ids at a time, and the block compacts the matches among 1,024 ids into shared memory before it sums their
// rows.
template <typename T, int COLUMNS>
__device__ void embedding_backward(const i32 *ids, const T *dy, float *dtable, u64 rows, u64 vocab, u64 width) {
    __shared__ u32 matches[4 * THREADS], warp_sums[THREADS / WARP];
    u64 row = blockIdx.x, column = ((u64)blockIdx.y * THREADS + threadIdx.x) * COLUMNS;
    i32 id = ids[row];
    if (id < 0 || (u64)id >= vocab) return;
    u32 lane = threadIdx.x % WARP, warp = threadIdx.x / WARP;
    bool in_range = column < width;
    float sums[COLUMNS];
    float *to = dtable + (u64)id * width + column;
#pragma unroll
    for (int i = 0; i < COLUMNS; i++) sums[i] = in_range ? to[i] : 0.0f;
    for (u64 first = 0; first < rows; first += 4 * THREADS) {
        u64 at = first + 4 * threadIdx.x;
        u32 match_mask = 0;
#pragma unroll
        for (int i = 0; i < 4; i++) match_mask |= (at + i < rows && ids[at + i] == id ? 1u : 0u) << i;
        bool earlier = match_mask != 0 && at + __ffs(match_mask) - 1 < row;
        if (__syncthreads_or(earlier)) return;
        // Prefix sum of match counts: within the warp, then across warps.
        u32 before = 0, count = __popc(match_mask);
        for (u32 step = 1; step < WARP; step *= 2) {
            u32 other = __shfl_up_sync(FULL_MASK, count, step);
            if (lane >= step) count += other;
        }
        if (lane == WARP - 1) warp_sums[warp] = count;
        __syncthreads();
        u32 all = 0;
        for (u32 i = 0; i < THREADS / WARP; i++) {
            if (i == warp) before = all;
            all += warp_sums[i];
        }
        u32 write_at = before + count - __popc(match_mask);
#pragma unroll
        for (int i = 0; i < 4; i++)
            if (match_mask >> i & 1) matches[write_at++] = (u32)(at + i - first);
        __syncthreads();
        if (in_range) {
            // Unrolled to keep several loads in flight: a frequent id has thousands of rows.
#pragma unroll 4
            for (u32 i = 0; i < all; i++) {
                const T *from = dy + (first + matches[i]) * width + column;
                float vec[VEC];
                if constexpr (COLUMNS == VEC) load_vec(vec, from);
                else vec[0] = to_f32(from[0]);
#pragma unroll
                for (int j = 0; j < COLUMNS; j++) sums[j] += vec[j];
            }
        }
        __syncthreads();
    }
#pragma unroll
    for (int i = 0; i < COLUMNS; i++)
        if (in_range) to[i] = sums[i];
}

// One block copies the last row of one sequence; absent, empty and out-of-range sequences yield zeros. `starts` holds
// the number of entries followed by the entries; `capacity` is the size of the entry array.
template <typename T>
__device__ void gather_last_rows(const u32 *starts, u64 capacity, const T *x, T *last, u64 rows, u64 width) {
    u64 sequence = blockIdx.x, entries = starts[0] < capacity ? starts[0] : capacity;
    bool valid = sequence + 1 < entries;
    u64 begin = valid ? starts[sequence + 1] : 0, end = valid ? starts[sequence + 2] : 0;
    bool in_range = begin < end && end <= rows;
    for (u64 column = threadIdx.x; column < width; column += blockDim.x) {
        last[sequence * width + column] = in_range ? x[(end - 1) * width + column] : from_f32<T>(0.0f);
    }
}

// Limits a sum to +-limit; keeps NaN.
__device__ __forceinline__ float limited(float sum, float limit) {
    return sum < -limit ? -limit : sum > limit ? limit : sum;
}

// One warp per row. With a residual, h = residual + x, within +-limit, is stored and normalized.
template <typename T>
__device__ void rms_norm(const T *x, const T *residual, const T *w, T *h, T *y, float *rstds, u64 rows, u64 width,
                         float eps, float limit) {
    u64 row = (u64)blockIdx.x * (blockDim.x / WARP) + threadIdx.x / WARP;
    if (row >= rows) return;
    u64 lane = threadIdx.x % WARP, at = row * width;
    float squares = 0.0f;
    for (u64 i = lane; i < width; i += WARP) {
        T stored = x[at + i];
        if (residual) {
            stored = from_f32<T>(limited(to_f32(residual[at + i]) + to_f32(stored), limit));
            h[at + i] = stored;
        }
        float value = to_f32(stored);
        squares += value * value;
    }
    float rstd = inverse_rms(warp_reduce_sum(squares) / (float)width, eps);
    const T *normed = residual ? h : x;
    for (u64 i = lane; i < width; i += WARP) {
        float n = to_f32(from_f32<T>(to_f32(normed[at + i]) * rstd));
        y[at + i] = from_f32<T>(to_f32(w[i]) * n);
    }
    if (lane == 0) rstds[row] = rstd;
}

// One warp per row; the gradient of w is computed by `column_sums`.
template <typename T>
__device__ void rms_norm_backward(const T *dy, const T *h, const float *rstds, const T *w, const T *residual, T *dh,
                                  u64 rows, u64 width) {
    u64 row = (u64)blockIdx.x * (blockDim.x / WARP) + threadIdx.x / WARP;
    if (row >= rows) return;
    u64 lane = threadIdx.x % WARP, at = row * width;
    float rstd = rstds[row], mean = 0.0f;
    for (u64 i = lane; i < width; i += WARP) {
        mean += to_f32(dy[at + i]) * to_f32(w[i]) * (to_f32(h[at + i]) * rstd);
    }
    mean = warp_reduce_sum(mean) / (float)width;
    for (u64 i = lane; i < width; i += WARP) {
        float slope = rstd * (to_f32(dy[at + i]) * to_f32(w[i]) - to_f32(h[at + i]) * rstd * mean);
        dh[at + i] = from_f32<T>(residual ? slope + to_f32(residual[at + i]) : slope);
    }
}

// Sum over the `row_threads` consecutive threads of a row, broadcast to each of them. `row_threads` is a power of two.
__device__ __forceinline__ float row_reduce_sum(float value, u32 row_threads) {
    __shared__ float warp_sums[THREADS / WARP];
    for (u32 step = (row_threads < WARP ? row_threads : WARP) / 2; step > 0; step /= 2) {
        value += __shfl_xor_sync(FULL_MASK, value, step);
    }
    if (row_threads <= WARP) return value;
    u32 warps = row_threads / WARP, first = threadIdx.x / row_threads * warps;
    if (threadIdx.x % WARP == 0) warp_sums[threadIdx.x / WARP] = value;
    __syncthreads();
    float total = warp_sums[first];
    for (u32 i = 1; i < warps; i++) total += warp_sums[first + i];
    __syncthreads();
    return total;
}

// `rms_norm` for widths that are a multiple of VEC: `row_threads` threads hold a row in registers.
template <typename T>
__device__ void rms_norm_vec(const T *x, const T *residual, const T *w, T *h, T *y, float *rstds, u64 rows, u32 width,
                             float eps, u32 row_threads, float limit) {
    u64 row = (u64)blockIdx.x * (THREADS / row_threads) + threadIdx.x / row_threads, at = row * width;
    u32 lane = threadIdx.x % row_threads;
    Packed<T> x_vecs[VECS], residual_vecs[VECS];
    float squares = 0.0f, vec[VEC];
#pragma unroll
    for (int i = 0; i < VECS; i++) {
        u32 column = (i * row_threads + lane) * VEC;
        bool valid = row < rows && column < width;
        if (valid) x_vecs[i] = load_packed(x + at + column);
        if (valid && residual) residual_vecs[i] = load_packed(residual + at + column);
    }
#pragma unroll
    for (int i = 0; i < VECS; i++) {
        u32 column = (i * row_threads + lane) * VEC;
        if (row >= rows || column >= width) continue;
        unpack(vec, x_vecs[i]);
        if (residual) {
            float other[VEC];
            unpack(other, residual_vecs[i]);
#pragma unroll
            for (int j = 0; j < VEC; j++) vec[j] = limited(other[j] + vec[j], limit);
            x_vecs[i] = pack<T>(vec);
            store_packed(h + at + column, x_vecs[i]);
            unpack(vec, x_vecs[i]);
        }
#pragma unroll
        for (int j = 0; j < VEC; j++) squares = fmaf(vec[j], vec[j], squares);
    }
    float rstd = inverse_rms(row_reduce_sum(squares, row_threads) / (float)width, eps);
    if (row >= rows) return;
#pragma unroll
    for (int i = 0; i < VECS; i++) {
        u32 column = (i * row_threads + lane) * VEC;
        if (column >= width) continue;
        float weights[VEC];
        load_vec(weights, w + column);
        unpack(vec, x_vecs[i]);
#pragma unroll
        for (int j = 0; j < VEC; j++) vec[j] = vec[j] * rstd;
        // The normalized value is rounded before the multiplication with its weight.
        unpack(vec, pack<T>(vec));
#pragma unroll
        for (int j = 0; j < VEC; j++) vec[j] = weights[j] * vec[j];
        store_vec(y + at + column, vec);
    }
    if (lane == 0) rstds[row] = rstd;
}

// Fuses `rms_norm_backward` with the first level of `column_sums`: a block processes `block_rows` rows and accumulates
// its part of the gradient of w. A gradient whose address is null is skipped.
template <typename T>
__device__ void rms_norm_backward_vec(const T *dy, const T *h, const float *rstds, const T *w, const T *residual, T *dh,
                                      float *partials, u64 rows, u32 width, u32 row_threads, u64 block_rows) {
    __shared__ float shared[THREADS * VECS * VEC];
    u32 row_slots = THREADS / row_threads, row_slot = threadIdx.x / row_threads, lane = threadIdx.x % row_threads;
    u64 begin = (u64)blockIdx.x * block_rows, end = begin + block_rows < rows ? begin + block_rows : rows;
    float sums[VECS][VEC] = {};
    for (u64 first = begin; first < end; first += row_slots) {
        u64 row = first + row_slot, at = row * width;
        Packed<T> grads[VECS], normed[VECS], residuals[VECS];
        float grad[VEC], norm[VEC], weight[VEC], mean = 0.0f, rstd = row < end ? rstds[row] : 0.0f;
#pragma unroll
        for (int i = 0; i < VECS; i++) {
            u32 column = (i * row_threads + lane) * VEC;
            if (row >= end || column >= width) continue;
            grads[i] = load_packed(dy + at + column);
            normed[i] = load_packed(h + at + column);
            if (residual) residuals[i] = load_packed(residual + at + column);
        }
#pragma unroll
        for (int i = 0; i < VECS; i++) {
            u32 column = (i * row_threads + lane) * VEC;
            if (row >= end || column >= width) continue;
            unpack(grad, grads[i]);
            unpack(norm, normed[i]);
            load_vec(weight, w + column);
#pragma unroll
            for (int j = 0; j < VEC; j++) {
                norm[j] *= rstd;
                sums[i][j] = fmaf(grad[j], norm[j], sums[i][j]);
                mean = fmaf(grad[j] * weight[j], norm[j], mean);
            }
        }
        if (!dh) continue;
        mean = row_reduce_sum(mean, row_threads) / (float)width;
#pragma unroll
        for (int i = 0; i < VECS; i++) {
            u32 column = (i * row_threads + lane) * VEC;
            if (row >= end || column >= width) continue;
            unpack(grad, grads[i]);
            unpack(norm, normed[i]);
            load_vec(weight, w + column);
#pragma unroll
            for (int j = 0; j < VEC; j++) grad[j] = rstd * fmaf(grad[j], weight[j], -(norm[j] * rstd * mean));
            if (residual) {
                unpack(norm, residuals[i]);
#pragma unroll
                for (int j = 0; j < VEC; j++) grad[j] += norm[j];
            }
            store_vec(dh + at + column, grad);
        }
    }
    if (!partials) return;
    // Reduce over the rows processed side by side, in order.
#pragma unroll
    for (int i = 0; i < VECS; i++)
#pragma unroll
        for (int j = 0; j < VEC; j++)
            shared[row_slot * (row_threads * VECS * VEC) + (i * row_threads + lane) * VEC + j] = sums[i][j];
    __syncthreads();
    for (u32 column = threadIdx.x; column < width; column += THREADS) {
        float total = shared[column];
        for (u32 i = 1; i < row_slots; i++) total += shared[i * (row_threads * VECS * VEC) + column];
        partials[(u64)blockIdx.x * width + column] = total;
    }
}

// delta [heads, rows] = row sums of y * dy. One warp handles one row of one head; where head_dim is a multiple of VEC,
// `row_threads` threads do (a power of two).
template <typename T>
__device__ void attention_delta(const T *y, const T *dy, float *delta, u64 rows, u64 heads, u64 head_dim,
                                u64 row_threads) {
    u32 threads = row_threads ? (u32)row_threads : WARP, lane = threadIdx.x % threads;
    u64 item = (u64)blockIdx.x * (blockDim.x / threads) + threadIdx.x / threads, at = item * head_dim;
    float sum = 0.0f;
    if (item < rows * heads && row_threads) {
        for (u64 i = lane * VEC; i < head_dim; i += threads * VEC) {
            float one[VEC], other[VEC];
            load_vec(one, y + at + i);
            load_vec(other, dy + at + i);
#pragma unroll
            for (int j = 0; j < VEC; j++) sum = fmaf(one[j], other[j], sum);
        }
    } else if (item < rows * heads) {
        for (u64 i = lane; i < head_dim; i += WARP) sum = fmaf(to_f32(y[at + i]), to_f32(dy[at + i]), sum);
    }
    for (u32 step = threads / 2; step > 0; step /= 2) sum += __shfl_xor_sync(FULL_MASK, sum, step);
    if (lane == 0 && item < rows * heads) delta[item % heads * rows + item / heads] = sum;
}

#define BLOCK_ROWS 64

// First level: a thread sums one column of BLOCK_ROWS rows. With h, the terms are dy * (h * rstd).
template <typename T>
__device__ void column_sums(const T *dy, const T *h, const float *rstds, float *partials, u64 rows, u64 width) {
    u64 column = (u64)blockIdx.y * blockDim.x + threadIdx.x;
    if (column >= width) return;
    u64 first = (u64)blockIdx.x * BLOCK_ROWS, end = first + BLOCK_ROWS < rows ? first + BLOCK_ROWS : rows;
    float total = 0.0f;
    for (u64 row = first; row < end; row++) {
        float term = to_f32(dy[row * width + column]);
        total += h ? term * (to_f32(h[row * width + column]) * rstds[row]) : term;
    }
    partials[blockIdx.x * width + column] = total;
}

// Second level: 32 threads per column, each summing every 32nd block in order; then the 32 partial sums, then `total`.
extern "C" __global__ void add_column_sums(const float *partials, float *total, u64 blocks, u64 width) {
    __shared__ float parts[WARP][WARP];
    u64 column = (u64)blockIdx.x * WARP + threadIdx.x % WARP, part = threadIdx.x / WARP;
    float sum = 0.0f;
#pragma unroll 8
    for (u64 block = part; block < blocks; block += WARP)
        sum += column < width ? partials[block * width + column] : 0.0f;
    parts[part][threadIdx.x % WARP] = sum;
    __syncthreads();
    if (part > 0 || column >= width) return;
    for (int i = 1; i < WARP; i++) sum += parts[i][threadIdx.x];
    total[column] += sum;
}

#define INSTANTIATE(NAME, T)                                                                                           \
    extern "C" __global__ void embedding_##NAME(const i32 *ids, const T *table, T *y, u64 vocab, u64 width) {          \
        embedding(ids, table, y, vocab, width);                                                                        \
    }                                                                                                                  \
    extern "C" __global__ void embedding_backward_##NAME(const i32 *ids, const T *dy, float *dtable, u64 rows,         \
                                                         u64 vocab, u64 width) {                                       \
        embedding_backward<T, 1>(ids, dy, dtable, rows, vocab, width);                                                 \
    }                                                                                                                  \
    extern "C" __global__ void embedding_backward_vec_##NAME(const i32 *ids, const T *dy, float *dtable, u64 rows,     \
                                                             u64 vocab, u64 width) {                                   \
        embedding_backward<T, VEC>(ids, dy, dtable, rows, vocab, width);                                               \
    }                                                                                                                  \
    extern "C" __global__ void gather_last_rows_##NAME(const u32 *starts, u64 capacity, const T *x, T *last, u64 rows, \
                                                       u64 width) {                                                    \
        gather_last_rows(starts, capacity, x, last, rows, width);                                                      \
    }                                                                                                                  \
    extern "C" __global__ void rms_norm_##NAME(const T *x, const T *residual, const T *w, T *h, T *y, float *rstds,    \
                                               u64 rows, u64 width, float eps, float limit) {                          \
        rms_norm(x, residual, w, h, y, rstds, rows, width, eps, limit);                                                \
    }                                                                                                                  \
    extern "C" __global__ void rms_norm_backward_##NAME(const T *dy, const T *h, const float *rstds, const T *w,       \
                                                        const T *residual, T *dh, u64 rows, u64 width) {               \
        rms_norm_backward(dy, h, rstds, w, residual, dh, rows, width);                                                 \
    }                                                                                                                  \
    extern "C" __global__ void __launch_bounds__(THREADS)                                                              \
        rms_norm_vec_##NAME(const T *x, const T *residual, const T *w, T *h, T *y, float *rstds, u64 rows, u64 width,  \
                            float eps, u64 row_threads, float limit) {                                                 \
        rms_norm_vec(x, residual, w, h, y, rstds, rows, (u32)width, eps, (u32)row_threads, limit);                     \
    }                                                                                                                  \
    extern "C" __global__ void __launch_bounds__(THREADS, 2)                                                           \
        rms_norm_backward_vec_##NAME(const T *dy, const T *h, const float *rstds, const T *w, const T *residual,       \
                                     T *dh, float *partials, u64 rows, u64 width, u64 row_threads, u64 block_rows) {   \
        rms_norm_backward_vec(dy, h, rstds, w, residual, dh, partials, rows, (u32)width, (u32)row_threads,             \
                              block_rows);                                                                             \
    }                                                                                                                  \
    extern "C" __global__ void attention_delta_##NAME(const T *y, const T *dy, float *delta, u64 rows, u64 heads,      \
                                                      u64 head_dim, u64 row_threads) {                                 \
        attention_delta(y, dy, delta, rows, heads, head_dim, row_threads);                                             \
    }                                                                                                                  \
    extern "C" __global__ void column_sums_##NAME(const T *dy, const T *h, const float *rstds, float *partials,        \
                                                  u64 rows, u64 width) {                                               \
        column_sums(dy, h, rstds, partials, rows, width);                                                              \
    }

FOR_EACH_DTYPE(INSTANTIATE)
