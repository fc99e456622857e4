// Per-head RMSNorm fused with RoPE, forward and backward, for head_dim 64, 128 or 256 with all elements rotated; other
// shapes run the two kernels in sequence. Results are bitwise equal to theirs: the same vectors, the same order of
// sums, the same roundings between.

// As in rowwise.cu: threads per block, and vectors of a head per thread. Vectors i and i + HALF of a thread form
// rotated pairs.
#define THREADS 256
#define VECS 4
#define HALF (VECS / 2)

// A head held by HEAD_THREADS consecutive threads.
template <int HEAD_THREADS> struct HeadLayout {
    static constexpr u32 WIDTH = HEAD_THREADS * VECS * VEC, PAIRS = WIDTH / 2, HEADS_PER_PASS = THREADS / HEAD_THREADS;

    // Elements between two vectors of a thread.
    static constexpr u32 VEC_STRIDE = HEAD_THREADS * VEC;

    // Mean over a head, broadcast to its threads. Widths are powers of two, so the multiplication by 1 / WIDTH is
    // exact.
    __device__ __forceinline__ static float mean(float value) {
        for (u32 step = HEAD_THREADS / 2; step > 0; step /= 2) value += __shfl_xor_sync(FULL_MASK, value, step);
        return value * (1.0f / WIDTH);
    }

    // Offset of the angles of a head's token. 32-bit division is faster.
    __device__ __forceinline__ static u64 angles(u64 head, u64 heads) {
        return (head < 1ull << 32 ? (u32)head / (u32)heads : head / heads) * PAIRS;
    }

    // Prefetches the cosines and sines of a token into L1, 128 bytes per thread; they are loaded later, when registers
    // are free.
    __device__ __forceinline__ static void prefetch_angles(const float *cosines, const float *sines, u64 angles,
                                                           u32 lane) {
        const float *angle = (lane < HEAD_THREADS / 2 ? cosines + angles : sines + angles - PAIRS) + lane * 32;
        asm volatile("prefetch.global.L1 [%0];" ::"l"(angle));
    }
};

// Rotates two vectors by their angles; `sign` -1 rotates back.
template <typename T>
__device__ __forceinline__ void rotate(Packed<T> &first, Packed<T> &second, const Packed<float> &cosines,
                                       const Packed<float> &sines, float sign) {
    float u[VEC], v[VEC], cosine[VEC], sine[VEC];
    unpack(u, first);
    unpack(v, second);
    unpack(cosine, cosines);
    unpack(sine, sines);
#pragma unroll
    for (int j = 0; j < VEC; j++) {
        float rotated_u = u[j] * cosine[j] - v[j] * (sine[j] * sign);
        v[j] = v[j] * cosine[j] + u[j] * (sine[j] * sign);
        u[j] = rotated_u;
    }
    first = pack<T>(u);
    second = pack<T>(v);
}

// The threads of a head hold it in registers.
template <typename T, int HEAD_THREADS>
__device__ __forceinline__ void head_norm_rope(const T *x, const T *w, const float *cosines, const float *sines, T *y,
                                               float *rstds, u64 rows, u64 heads, float eps) {
    using Layout = HeadLayout<HEAD_THREADS>;
    u64 row = (u64)blockIdx.x * Layout::HEADS_PER_PASS + threadIdx.x / HEAD_THREADS;
    u32 lane = threadIdx.x % HEAD_THREADS;
    // Threads past the last head still take part in the shuffles, but store nothing.
    bool in_range = row < rows;
    if (!in_range) row = rows - 1;
    u64 at = row * Layout::WIDTH + lane * VEC, angles = Layout::angles(row, heads);
    Packed<T> x_vecs[VECS];
    float squares = 0.0f, vec[VEC];
#pragma unroll
    for (int i = 0; i < VECS; i++) x_vecs[i] = load_packed(x + at + i * Layout::VEC_STRIDE);
    Layout::prefetch_angles(cosines, sines, angles, lane);
    angles += lane * VEC;
#pragma unroll
    for (int i = 0; i < VECS; i++) {
        unpack(vec, x_vecs[i]);
#pragma unroll
        for (int j = 0; j < VEC; j++) squares = fmaf(vec[j], vec[j], squares);
    }
    float rstd = inverse_rms(Layout::mean(squares), eps);
    if (!in_range) return;
#pragma unroll
    for (int i = 0; i < VECS; i++) {
        float weight[VEC];
        load_vec(weight, w + lane * VEC + i * Layout::VEC_STRIDE);
        unpack(vec, x_vecs[i]);
#pragma unroll
        for (int j = 0; j < VEC; j++) vec[j] = vec[j] * rstd;
        // Rounded before the multiplication with the weight, and again before the rotation.
        unpack(vec, pack<T>(vec));
#pragma unroll
        for (int j = 0; j < VEC; j++) vec[j] = weight[j] * vec[j];
        x_vecs[i] = pack<T>(vec);
    }
#pragma unroll
    for (int i = 0; i < HALF; i++) {
        rotate(x_vecs[i], x_vecs[i + HALF], load_packed(cosines + angles + i * Layout::VEC_STRIDE),
               load_packed(sines + angles + i * Layout::VEC_STRIDE), 1.0f);
        store_packed(y + at + i * Layout::VEC_STRIDE, x_vecs[i]);
        store_packed(y + at + (i + HALF) * Layout::VEC_STRIDE, x_vecs[i + HALF]);
    }
    if (lane == 0) rstds[row] = rstd;
}

// Asynchronous 16-byte copy to shared memory.
__device__ __forceinline__ void cp_async_16(uint4 *to, const void *from) {
    u32 shared = (u32)__cvta_generic_to_shared(to);
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16;" ::"r"(shared), "l"(from) : "memory");
}

__device__ __forceinline__ void cp_async_wait_all() { asm volatile("cp.async.wait_all;" ::: "memory"); }

// Shared memory of a block: staging for asynchronous copies, reused for the final sums.
typedef uint4 StagingBuffer[2 * VECS][THREADS];
static_assert(sizeof(StagingBuffer) == THREADS * VECS * VEC * sizeof(float), "staging buffer and sums share memory");

// A block processes `block_rows` heads and accumulates its part of the gradient of w. For 16-bit types the next row is
// copied asynchronously while the current one is computed. A gradient whose address is null is skipped.
template <typename T, int HEAD_THREADS>
__device__ __forceinline__ void head_norm_rope_backward(const T *dy, const T *h, const float *rstds, const T *w,
                                                        const float *cosines, const float *sines, T *dh,
                                                        float *partials, u64 rows, u64 heads, u64 block_rows,
                                                        StagingBuffer &staging) {
    using Layout = HeadLayout<HEAD_THREADS>;
    constexpr bool PREFETCH = sizeof(T) == 2;
    u32 head_slot = threadIdx.x / HEAD_THREADS, lane = threadIdx.x % HEAD_THREADS;
    u64 begin = (u64)blockIdx.x * block_rows, end = begin + block_rows < rows ? begin + block_rows : rows;
    float sums[VECS][VEC] = {};
    auto prefetch_row = [&](u64 row) {
        if (row >= end) return;
        u64 at = row * Layout::WIDTH + lane * VEC;
#pragma unroll
        for (int i = 0; i < VECS; i++) {
            cp_async_16(&staging[i][threadIdx.x], dy + at + i * Layout::VEC_STRIDE);
            cp_async_16(&staging[VECS + i][threadIdx.x], h + at + i * Layout::VEC_STRIDE);
        }
        Layout::prefetch_angles(cosines, sines, Layout::angles(row, heads), lane);
    };
    if constexpr (PREFETCH) prefetch_row(begin + head_slot);
    float next = begin + head_slot < end ? rstds[begin + head_slot] : 0.0f;
    for (u64 first = begin; first < end; first += Layout::HEADS_PER_PASS) {
        u64 row = first + head_slot, at = row * Layout::WIDTH + lane * VEC;
        bool in_range = row < end;
        Packed<T> grads[VECS], h_vecs[VECS];
        float rstd = next;
        next = row + Layout::HEADS_PER_PASS < end ? rstds[row + Layout::HEADS_PER_PASS] : 0.0f;
        u64 angles = Layout::angles(row, heads) + lane * VEC;
        Packed<float> cosine[HALF], sine[HALF];
        if (in_range) {
#pragma unroll
            for (int i = 0; i < HALF; i++) {
                cosine[i] = load_packed(cosines + angles + i * Layout::VEC_STRIDE);
                sine[i] = load_packed(sines + angles + i * Layout::VEC_STRIDE);
            }
        }
        if constexpr (PREFETCH) {
            cp_async_wait_all();
#pragma unroll
            for (int i = 0; i < VECS; i++) {
                grads[i].chunks[0] = staging[i][threadIdx.x];
                h_vecs[i].chunks[0] = staging[VECS + i][threadIdx.x];
            }
            // All lanes have read their staged data before it is overwritten.
            __syncwarp();
            prefetch_row(row + Layout::HEADS_PER_PASS);
        } else if (in_range) {
#pragma unroll
            for (int i = 0; i < VECS; i++) {
                grads[i] = load_packed(dy + at + i * Layout::VEC_STRIDE);
                h_vecs[i] = load_packed(h + at + i * Layout::VEC_STRIDE);
            }
        }
        float grad[VEC], norm[VEC], weight[VEC], mean_dot = 0.0f;
        if (in_range) {
#pragma unroll
            for (int i = 0; i < HALF; i++) rotate(grads[i], grads[i + HALF], cosine[i], sine[i], -1.0f);
#pragma unroll
            for (int i = 0; i < VECS; i++) {
                unpack(grad, grads[i]);
                unpack(norm, h_vecs[i]);
                load_vec(weight, w + lane * VEC + i * Layout::VEC_STRIDE);
#pragma unroll
                for (int j = 0; j < VEC; j++) {
                    norm[j] *= rstd;
                    sums[i][j] = fmaf(grad[j], norm[j], sums[i][j]);
                    mean_dot = fmaf(grad[j] * weight[j], norm[j], mean_dot);
                }
            }
        }
        mean_dot = Layout::mean(mean_dot);
        if (!in_range || !dh) continue;
#pragma unroll
        for (int i = 0; i < VECS; i++) {
            unpack(grad, grads[i]);
            unpack(norm, h_vecs[i]);
            load_vec(weight, w + lane * VEC + i * Layout::VEC_STRIDE);
#pragma unroll
            for (int j = 0; j < VEC; j++) grad[j] = rstd * fmaf(grad[j], weight[j], -(norm[j] * rstd * mean_dot));
            store_vec(dh + at + i * Layout::VEC_STRIDE, grad);
        }
    }
    if (!partials) return;
    // Reduce over the heads processed side by side, in order.
    __syncthreads();
    float *shared_sums = (float *)staging;
#pragma unroll
    for (int i = 0; i < VECS; i++)
#pragma unroll
        for (int j = 0; j < VEC; j++)
            shared_sums[head_slot * Layout::WIDTH + lane * VEC + i * Layout::VEC_STRIDE + j] = sums[i][j];
    __syncthreads();
    for (u32 column = threadIdx.x; column < Layout::WIDTH; column += THREADS) {
        float total = shared_sums[column];
        for (u32 i = 1; i < Layout::HEADS_PER_PASS; i++) total += shared_sums[i * Layout::WIDTH + column];
        partials[(u64)blockIdx.x * Layout::WIDTH + column] = total;
    }
}

#define INSTANTIATE(NAME, T)                                                                                        \
    extern "C" __global__ void __launch_bounds__(THREADS, 4)                                                        \
        head_norm_rope_##NAME(const T *x, const T *w, const float *cosines, const float *sines, T *y, float *rstds, \
                              u64 rows, u64 heads, float eps, u64 head_threads) {                                   \
        if (head_threads == 2) head_norm_rope<T, 2>(x, w, cosines, sines, y, rstds, rows, heads, eps);              \
        else if (head_threads == 4) head_norm_rope<T, 4>(x, w, cosines, sines, y, rstds, rows, heads, eps);         \
        else head_norm_rope<T, 8>(x, w, cosines, sines, y, rstds, rows, heads, eps);                                \
    }                                                                                                               \
    extern "C" __global__ void __launch_bounds__(THREADS, 2) head_norm_rope_backward_##NAME(                        \
        const T *dy, const T *h, const float *rstds, const T *w, const float *cosines, const float *sines, T *dh,   \
        float *partials, u64 rows, u64 heads, u64 head_threads, u64 block_rows) {                                   \
        __shared__ StagingBuffer staging;                                                                           \
        if (head_threads == 2)                                                                                      \
            head_norm_rope_backward<T, 2>(dy, h, rstds, w, cosines, sines, dh, partials, rows, heads, block_rows,   \
                                          staging);                                                                 \
        else if (head_threads == 4)                                                                                 \
            head_norm_rope_backward<T, 4>(dy, h, rstds, w, cosines, sines, dh, partials, rows, heads, block_rows,   \
                                          staging);                                                                 \
        else                                                                                                        \
            head_norm_rope_backward<T, 8>(dy, h, rstds, w, cosines, sines, dh, partials, rows, heads, block_rows,   \
                                          staging);                                                                 \
    }

FOR_EACH_DTYPE(INSTANTIATE)
