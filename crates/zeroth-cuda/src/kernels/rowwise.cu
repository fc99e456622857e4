// By rows and by columns: embedding, last rows of sequences, root-mean-square norm, and sums of columns in two levels.

// Threads of a block that works on rows in lots, and a thread's lots of a row.
#define THREADS 256
#define LOTS 4

// A block copies one row; an id that is no row of the table gives zeros.
template <typename T>
__device__ void embedding(const i32 *ids, const T *table, T *y, u64 vocab, u64 width) {
    u64 row = blockIdx.x, pieces = width * sizeof(T) / 16;
    i32 id = ids[row];
    bool known = id >= 0 && (u64)id < vocab;
    if (width * sizeof(T) % 16 == 0 && in_sixteens(table, y)) {
        const uint4 *from = (const uint4 *)table + (u64)id * pieces;
        uint4 *to = (uint4 *)y + row * pieces;
        for (u64 i = threadIdx.x; i < pieces; i += blockDim.x) to[i] = known ? from[i] : make_uint4(0, 0, 0, 0);
        return;
    }
    for (u64 column = threadIdx.x; column < width; column += blockDim.x) {
        y[row * width + column] = known ? table[(u64)id * width + column] : from_f32<T>(0.0f);
    }
}

// A thread has a lot of columns, or one where they are not whole lots; blocks in y share the columns. The block of an id's
// first row adds all rows of that id, in order; the others find an earlier one and leave. A thread looks at 4 ids at a
// time, and the block lists those of 1,024 that are the same before it adds them.
template <typename T, int COLUMNS>
__device__ void embedding_backward(const i32 *ids, const T *dy, float *dtable, u64 rows, u64 vocab, u64 width) {
    __shared__ u32 listed[4 * THREADS], of_warp[THREADS / WARP];
    u64 row = blockIdx.x, column = ((u64)blockIdx.y * THREADS + threadIdx.x) * COLUMNS;
    i32 id = ids[row];
    if (id < 0 || (u64)id >= vocab) return;
    u32 lane = threadIdx.x % WARP, warp = threadIdx.x / WARP;
    bool mine = column < width;
    float sums[COLUMNS];
    float *to = dtable + (u64)id * width + column;
#pragma unroll
    for (int i = 0; i < COLUMNS; i++) sums[i] = mine ? to[i] : 0.0f;
    for (u64 first = 0; first < rows; first += 4 * THREADS) {
        u64 at = first + 4 * threadIdx.x;
        u32 same = 0;
#pragma unroll
        for (int i = 0; i < 4; i++) same |= (at + i < rows && ids[at + i] == id ? 1u : 0u) << i;
        bool earlier = same != 0 && at + __ffs(same) - 1 < row;
        if (__syncthreads_or(earlier)) return;
        // Where this thread's ids stand among those of its warp, and its warp among the warps.
        u32 before = 0, count = __popc(same);
        for (u32 step = 1; step < WARP; step *= 2) {
            u32 other = __shfl_up_sync(ALL_LANES, count, step);
            if (lane >= step) count += other;
        }
        if (lane == WARP - 1) of_warp[warp] = count;
        __syncthreads();
        u32 all = 0;
        for (u32 i = 0; i < THREADS / WARP; i++) {
            if (i == warp) before = all;
            all += of_warp[i];
        }
        u32 place = before + count - __popc(same);
#pragma unroll
        for (int i = 0; i < 4; i++)
            if (same >> i & 1) listed[place++] = (u32)(at + i - first);
        __syncthreads();
        if (mine) {
            // A few rows are on their way before the first is added: a frequent id has thousands.
#pragma unroll 4
            for (u32 i = 0; i < all; i++) {
                const T *from = dy + (first + listed[i]) * width + column;
                float lot[LOT];
                if constexpr (COLUMNS == LOT) read_lot(lot, from);
                else lot[0] = to_f32(from[0]);
#pragma unroll
                for (int j = 0; j < COLUMNS; j++) sums[j] += lot[j];
            }
        }
        __syncthreads();
    }
#pragma unroll
    for (int i = 0; i < COLUMNS; i++)
        if (mine) to[i] = sums[i];
}

// A block copies the last row of one sequence; one that is not there, empty or beyond the rows gives zeros. `starts` holds
// the number of entries and then the entries, of which there is room for so many.
template <typename T>
__device__ void last_rows(const u32 *starts, u64 room, const T *x, T *last, u64 rows, u64 width) {
    u64 sequence = blockIdx.x, entries = starts[0] < room ? starts[0] : room;
    bool there = sequence + 1 < entries;
    u64 begin = there ? starts[sequence + 1] : 0, end = there ? starts[sequence + 2] : 0;
    bool known = begin < end && end <= rows;
    for (u64 column = threadIdx.x; column < width; column += blockDim.x) {
        last[sequence * width + column] = known ? x[(end - 1) * width + column] : from_f32<T>(0.0f);
    }
}

// A warp norms one row. With a residual, h = residual + x is written and normed.
template <typename T>
__device__ void rms_norm(const T *x, const T *residual, const T *w, T *h, T *y, float *rstds, u64 rows, u64 width,
                         float eps) {
    u64 row = (u64)blockIdx.x * (blockDim.x / WARP) + threadIdx.x / WARP;
    if (row >= rows) return;
    u64 lane = threadIdx.x % WARP, at = row * width;
    float squares = 0.0f;
    for (u64 i = lane; i < width; i += WARP) {
        T stored = x[at + i];
        if (residual) {
            stored = from_f32<T>(to_f32(residual[at + i]) + to_f32(stored));
            h[at + i] = stored;
        }
        float value = to_f32(stored);
        squares += value * value;
    }
    float rstd = 1.0f / sqrtf(warp_sum(squares) / (float)width + eps);
    const T *normed = residual ? h : x;
    for (u64 i = lane; i < width; i += WARP) {
        float n = to_f32(from_f32<T>(to_f32(normed[at + i]) * rstd));
        y[at + i] = from_f32<T>(to_f32(w[i]) * n);
    }
    if (lane == 0) rstds[row] = rstd;
}

// A warp has one row; the gradient of w is the sum of columns below.
template <typename T>
__device__ void rms_norm_backward(const T *dy, const T *h, const float *rstds, const T *w, const T *residual, T *dh,
                                  u64 rows, u64 width) {
    u64 row = (u64)blockIdx.x * (blockDim.x / WARP) + threadIdx.x / WARP;
    if (row >= rows) return;
    u64 lane = threadIdx.x % WARP, at = row * width;
    float rstd = rstds[row], along = 0.0f;
    for (u64 i = lane; i < width; i += WARP) {
        along += to_f32(dy[at + i]) * to_f32(w[i]) * (to_f32(h[at + i]) * rstd);
    }
    along = warp_sum(along) / (float)width;
    for (u64 i = lane; i < width; i += WARP) {
        float slope = rstd * (to_f32(dy[at + i]) * to_f32(w[i]) - to_f32(h[at + i]) * rstd * along);
        dh[at + i] = from_f32<T>(residual ? slope + to_f32(residual[at + i]) : slope);
    }
}

// The sum over the threads of a row, `span` of them next to each other, the same in each. A power of two.
__device__ __forceinline__ float over_span(float value, u32 span) {
    __shared__ float of_warp[THREADS / WARP];
    for (u32 step = (span < WARP ? span : WARP) / 2; step > 0; step /= 2) {
        value += __shfl_xor_sync(ALL_LANES, value, step);
    }
    if (span <= WARP) return value;
    u32 warps = span / WARP, first = threadIdx.x / span * warps;
    if (threadIdx.x % WARP == 0) of_warp[threadIdx.x / WARP] = value;
    __syncthreads();
    float total = of_warp[first];
    for (u32 i = 1; i < warps; i++) total += of_warp[first + i];
    __syncthreads();
    return total;
}

// As `rms_norm`, for rows of whole lots: `span` threads have a row, in registers.
template <typename T>
__device__ void rms_norm_lots(const T *x, const T *residual, const T *w, T *h, T *y, float *rstds, u64 rows,
                              u32 width, float eps, u32 span) {
    u64 row = (u64)blockIdx.x * (THREADS / span) + threadIdx.x / span, at = row * width;
    u32 lane = threadIdx.x % span;
    Packed<T> kept[LOTS], others[LOTS];
    float squares = 0.0f, lot[LOT];
#pragma unroll
    for (int i = 0; i < LOTS; i++) {
        u32 column = (i * span + lane) * LOT;
        bool there = row < rows && column < width;
        if (there) kept[i] = read_packed(x + at + column);
        if (there && residual) others[i] = read_packed(residual + at + column);
    }
#pragma unroll
    for (int i = 0; i < LOTS; i++) {
        u32 column = (i * span + lane) * LOT;
        if (row >= rows || column >= width) continue;
        unpack(lot, kept[i]);
        if (residual) {
            float other[LOT];
            unpack(other, others[i]);
#pragma unroll
            for (int j = 0; j < LOT; j++) lot[j] = other[j] + lot[j];
            kept[i] = pack<T>(lot);
            write_packed(h + at + column, kept[i]);
            unpack(lot, kept[i]);
        }
#pragma unroll
        for (int j = 0; j < LOT; j++) squares = fmaf(lot[j], lot[j], squares);
    }
    float rstd = 1.0f / sqrtf(over_span(squares, span) / (float)width + eps);
    if (row >= rows) return;
#pragma unroll
    for (int i = 0; i < LOTS; i++) {
        u32 column = (i * span + lane) * LOT;
        if (column >= width) continue;
        float weights[LOT];
        read_lot(weights, w + column);
        unpack(lot, kept[i]);
#pragma unroll
        for (int j = 0; j < LOT; j++) lot[j] = lot[j] * rstd;
        // What is normed is rounded before it meets its weight.
        unpack(lot, pack<T>(lot));
#pragma unroll
        for (int j = 0; j < LOT; j++) lot[j] = weights[j] * lot[j];
        write_lot(y + at + column, lot);
    }
    if (lane == 0) rstds[row] = rstd;
}

// As `rms_norm_backward` and the first level of `column_sums` in one: a block has `block_rows` rows, and adds up its part of
// the gradient of w on the way.
template <typename T>
__device__ void rms_norm_backward_lots(const T *dy, const T *h, const float *rstds, const T *w, const T *residual,
                                       T *dh, float *partials, u64 rows, u32 width, u32 span, u64 block_rows) {
    __shared__ float shared[THREADS * LOTS * LOT];
    u32 slots = THREADS / span, slot = threadIdx.x / span, lane = threadIdx.x % span;
    u64 begin = (u64)blockIdx.x * block_rows, end = begin + block_rows < rows ? begin + block_rows : rows;
    float sums[LOTS][LOT] = {};
    for (u64 first = begin; first < end; first += slots) {
        u64 row = first + slot, at = row * width;
        Packed<T> grads[LOTS], normed[LOTS], past[LOTS];
        float grad[LOT], norm[LOT], weight[LOT], along = 0.0f, rstd = row < end ? rstds[row] : 0.0f;
#pragma unroll
        for (int i = 0; i < LOTS; i++) {
            u32 column = (i * span + lane) * LOT;
            if (row >= end || column >= width) continue;
            grads[i] = read_packed(dy + at + column);
            normed[i] = read_packed(h + at + column);
            if (residual) past[i] = read_packed(residual + at + column);
        }
#pragma unroll
        for (int i = 0; i < LOTS; i++) {
            u32 column = (i * span + lane) * LOT;
            if (row >= end || column >= width) continue;
            unpack(grad, grads[i]);
            unpack(norm, normed[i]);
            read_lot(weight, w + column);
#pragma unroll
            for (int j = 0; j < LOT; j++) {
                norm[j] *= rstd;
                sums[i][j] = fmaf(grad[j], norm[j], sums[i][j]);
                along = fmaf(grad[j] * weight[j], norm[j], along);
            }
        }
        along = over_span(along, span) / (float)width;
#pragma unroll
        for (int i = 0; i < LOTS; i++) {
            u32 column = (i * span + lane) * LOT;
            if (row >= end || column >= width) continue;
            unpack(grad, grads[i]);
            unpack(norm, normed[i]);
            read_lot(weight, w + column);
#pragma unroll
            for (int j = 0; j < LOT; j++) grad[j] = rstd * fmaf(grad[j], weight[j], -(norm[j] * rstd * along));
            if (residual) {
                unpack(norm, past[i]);
#pragma unroll
                for (int j = 0; j < LOT; j++) grad[j] += norm[j];
            }
            write_lot(dh + at + column, grad);
        }
    }
    // The rows that ran beside each other, in order.
#pragma unroll
    for (int i = 0; i < LOTS; i++)
#pragma unroll
        for (int j = 0; j < LOT; j++) shared[slot * (span * LOTS * LOT) + (i * span + lane) * LOT + j] = sums[i][j];
    __syncthreads();
    for (u32 column = threadIdx.x; column < width; column += THREADS) {
        float total = shared[column];
        for (u32 i = 1; i < slots; i++) total += shared[i * (span * LOTS * LOT) + column];
        partials[(u64)blockIdx.x * width + column] = total;
    }
}

// delta [heads, rows] = the row sums of y · dy. A warp has one row of one head, or, where heads are whole lots, `span`
// threads do, a power of two.
template <typename T>
__device__ void attention_delta(const T *y, const T *dy, float *delta, u64 rows, u64 heads, u64 head_dim, u64 span) {
    u32 threads = span ? (u32)span : WARP, lane = threadIdx.x % threads;
    u64 item = (u64)blockIdx.x * (blockDim.x / threads) + threadIdx.x / threads, at = item * head_dim;
    float sum = 0.0f;
    if (item < rows * heads && span) {
        for (u64 i = lane * LOT; i < head_dim; i += threads * LOT) {
            float one[LOT], other[LOT];
            read_lot(one, y + at + i);
            read_lot(other, dy + at + i);
#pragma unroll
            for (int j = 0; j < LOT; j++) sum = fmaf(one[j], other[j], sum);
        }
    } else if (item < rows * heads) {
        for (u64 i = lane; i < head_dim; i += WARP) sum = fmaf(to_f32(y[at + i]), to_f32(dy[at + i]), sum);
    }
    for (u32 step = threads / 2; step > 0; step /= 2) sum += __shfl_xor_sync(ALL_LANES, sum, step);
    if (lane == 0 && item < rows * heads) delta[item % heads * rows + item / heads] = sum;
}

#define BLOCK_ROWS 64

// First level: a thread sums one column of 64 rows. With h, the terms are dy · (h · rstd).
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

// Second level: 32 threads have a column, each every 32nd block in order; then the 32, and then what is there.
extern "C" __global__ void add_column_sums(const float *partials, float *total, u64 blocks, u64 width) {
    __shared__ float parts[WARP][WARP];
    u64 column = (u64)blockIdx.x * WARP + threadIdx.x % WARP, part = threadIdx.x / WARP;
    float sum = 0.0f;
#pragma unroll 8
    for (u64 block = part; block < blocks; block += WARP) sum += column < width ? partials[block * width + column] : 0.0f;
    parts[part][threadIdx.x % WARP] = sum;
    __syncthreads();
    if (part > 0 || column >= width) return;
    for (int i = 1; i < WARP; i++) sum += parts[i][threadIdx.x];
    total[column] += sum;
}

#define ROWS(NAME, T)                                                                                             \
    extern "C" __global__ void embedding_##NAME(const i32 *ids, const T *table, T *y, u64 vocab, u64 width) {     \
        embedding(ids, table, y, vocab, width);                                                                   \
    }                                                                                                             \
    extern "C" __global__ void embedding_backward_##NAME(const i32 *ids, const T *dy, float *dtable, u64 rows,    \
                                                         u64 vocab, u64 width) {                                  \
        embedding_backward<T, 1>(ids, dy, dtable, rows, vocab, width);                                            \
    }                                                                                                             \
    extern "C" __global__ void embedding_backward_lots_##NAME(const i32 *ids, const T *dy, float *dtable,         \
                                                              u64 rows, u64 vocab, u64 width) {                   \
        embedding_backward<T, LOT>(ids, dy, dtable, rows, vocab, width);                                          \
    }                                                                                                             \
    extern "C" __global__ void last_rows_##NAME(const u32 *starts, u64 room, const T *x, T *last, u64 rows,       \
                                                u64 width) {                                                      \
        last_rows(starts, room, x, last, rows, width);                                                            \
    }                                                                                                             \
    extern "C" __global__ void rms_norm_##NAME(const T *x, const T *residual, const T *w, T *h, T *y,             \
                                               float *rstds, u64 rows, u64 width, float eps) {                    \
        rms_norm(x, residual, w, h, y, rstds, rows, width, eps);                                                  \
    }                                                                                                             \
    extern "C" __global__ void rms_norm_backward_##NAME(const T *dy, const T *h, const float *rstds, const T *w,  \
                                                        const T *residual, T *dh, u64 rows, u64 width) {          \
        rms_norm_backward(dy, h, rstds, w, residual, dh, rows, width);                                            \
    }                                                                                                             \
    extern "C" __global__ void __launch_bounds__(THREADS)                                                         \
        rms_norm_lots_##NAME(const T *x, const T *residual, const T *w, T *h, T *y, float *rstds, u64 rows,       \
                             u64 width, float eps, u64 span) {                                                    \
        rms_norm_lots(x, residual, w, h, y, rstds, rows, (u32)width, eps, (u32)span);                             \
    }                                                                                                             \
    extern "C" __global__ void __launch_bounds__(THREADS, 2)                                                      \
        rms_norm_backward_lots_##NAME(const T *dy, const T *h, const float *rstds, const T *w, const T *residual, \
                                      T *dh, float *partials, u64 rows, u64 width, u64 span, u64 block_rows) {    \
        rms_norm_backward_lots(dy, h, rstds, w, residual, dh, partials, rows, (u32)width, (u32)span, block_rows); \
    }                                                                                                             \
    extern "C" __global__ void attention_delta_##NAME(const T *y, const T *dy, float *delta, u64 rows, u64 heads, \
                                                      u64 head_dim, u64 span) {                                   \
        attention_delta(y, dy, delta, rows, heads, head_dim, span);                                               \
    }                                                                                                             \
    extern "C" __global__ void column_sums_##NAME(const T *dy, const T *h, const float *rstds, float *partials,   \
                                                  u64 rows, u64 width) {                                          \
        column_sums(dy, h, rstds, partials, rows, width);                                                         \
    }

EACH_TYPE(ROWS)
