// By rows and by columns: embedding, last rows of sequences, root-mean-square norm, and sums of columns in two levels.

// A block copies one row; an id that is no row of the table gives zeros.
template <typename T>
__device__ void embedding(const i32 *ids, const T *table, T *y, u64 vocab, u64 width) {
    u64 row = blockIdx.x;
    i32 id = ids[row];
    bool known = id >= 0 && (u64)id < vocab;
    for (u64 column = threadIdx.x; column < width; column += blockDim.x) {
        y[row * width + column] = known ? table[(u64)id * width + column] : from_f32<T>(0.0f);
    }
}

// The block of an id's first row adds all rows of that id, in order. The others find an earlier one and leave.
template <typename T>
__device__ void embedding_backward(const i32 *ids, const T *dy, float *dtable, u64 rows, u64 vocab, u64 width) {
    __shared__ u32 same[256];
    u64 row = blockIdx.x;
    i32 id = ids[row];
    if (id < 0 || (u64)id >= vocab) return;
    int earlier = 0;
    for (u64 other = threadIdx.x; other < row; other += blockDim.x) earlier |= ids[other] == id;
    if (__syncthreads_or(earlier)) return;
    float *sums = dtable + (u64)id * width;
    for (u64 first = row; first < rows; first += blockDim.x) {
        u64 mine = first + threadIdx.x;
        same[threadIdx.x] = mine < rows && ids[mine] == id;
        __syncthreads();
        for (u64 other = 0; other < blockDim.x; other++) {
            if (!same[other]) continue;
            const T *from = dy + (first + other) * width;
            for (u64 column = threadIdx.x; column < width; column += blockDim.x) sums[column] += to_f32(from[column]);
        }
        __syncthreads();
    }
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

// Second level: the blocks in order, then to what is there.
extern "C" __global__ void add_column_sums(const float *partials, float *total, u64 blocks, u64 width) {
    u64 column = thread_of_grid();
    if (column >= width) return;
    float sum = 0.0f;
    for (u64 block = 0; block < blocks; block++) sum += partials[block * width + column];
    total[column] += sum;
}

#define ROWS(NAME, T)                                                                                             \
    extern "C" __global__ void embedding_##NAME(const i32 *ids, const T *table, T *y, u64 vocab, u64 width) {     \
        embedding(ids, table, y, vocab, width);                                                                   \
    }                                                                                                             \
    extern "C" __global__ void embedding_backward_##NAME(const i32 *ids, const T *dy, float *dtable, u64 rows,    \
                                                         u64 vocab, u64 width) {                                  \
        embedding_backward(ids, dy, dtable, rows, vocab, width);                                                  \
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
    extern "C" __global__ void column_sums_##NAME(const T *dy, const T *h, const float *rstds, float *partials,   \
                                                  u64 rows, u64 width) {                                          \
        column_sums(dy, h, rstds, partials, rows, width);                                                         \
    }

EACH_TYPE(ROWS)
