// The norm of every head and the turn that follows it in one pass, and the gradient of both. Heads are 64, 128 or 256
// elements, all of which turn; others take the two kernels one after the other. The bits are theirs: the same lots, the same
// sums, and what is rounded between the two is rounded here.

// As in rows.cu: threads of a block, and a thread's lots of a head. Lots i and i + HALF of a thread turn together.
#define THREADS 256
#define LOTS 4
#define HALF (LOTS / 2)

// Heads that so many threads have, next to each other.
template <int SPAN> struct Heads {
    static constexpr u32 WIDTH = SPAN * LOTS * LOT, PAIRS = WIDTH / 2, SLOTS = THREADS / SPAN;

    // Elements from a thread's lot to its next.
    static constexpr u32 STEP = SPAN * LOT;

    // A head's mean of what its threads have, the same in each. Widths are powers of two, so a product divides exactly.
    __device__ __forceinline__ static float mean(float value) {
        for (u32 step = SPAN / 2; step > 0; step /= 2) value += __shfl_xor_sync(ALL_LANES, value, step);
        return value * (1.0f / WIDTH);
    }

    // Where the angles of a head's token begin. 32 bits divide faster.
    __device__ __forceinline__ static u64 angles(u64 head, u64 heads) {
        return (head < 1ull << 32 ? (u32)head / (u32)heads : head / heads) * PAIRS;
    }

    // Asks for the cosines and sines of a token, 128 bytes a thread: they are read later, where registers are free.
    __device__ __forceinline__ static void ask_for_angles(const float *cosines, const float *sines, u64 angles,
                                                          u32 lane) {
        const float *line = (lane < SPAN / 2 ? cosines + angles : sines + angles - PAIRS) + lane * 32;
        asm volatile("prefetch.global.L1 [%0];" ::"l"(line));
    }
};

// Turns two lots by their angles, `sign` -1: back.
template <typename T>
__device__ __forceinline__ void turn(Packed<T> &first, Packed<T> &second, const Packed<float> &cosines,
                                     const Packed<float> &sines, float sign) {
    float u[LOT], v[LOT], cosine[LOT], sine[LOT];
    unpack(u, first);
    unpack(v, second);
    unpack(cosine, cosines);
    unpack(sine, sines);
#pragma unroll
    for (int j = 0; j < LOT; j++) {
        float turned = u[j] * cosine[j] - v[j] * (sine[j] * sign);
        v[j] = v[j] * cosine[j] + u[j] * (sine[j] * sign);
        u[j] = turned;
    }
    first = pack<T>(u);
    second = pack<T>(v);
}

// The threads of a head have it in registers.
template <typename T, int SPAN>
__device__ __forceinline__ void head_norm_rope(const T *x, const T *w, const float *cosines, const float *sines, T *y,
                                               float *rstds, u64 rows, u64 heads, float eps) {
    using Of = Heads<SPAN>;
    u64 row = (u64)blockIdx.x * Of::SLOTS + threadIdx.x / SPAN;
    u32 lane = threadIdx.x % SPAN;
    // Threads without a head have a part in sums all the same, and write nothing.
    bool mine = row < rows;
    if (!mine) row = rows - 1;
    u64 at = row * Of::WIDTH + lane * LOT, angles = Of::angles(row, heads);
    Packed<T> kept[LOTS];
    float squares = 0.0f, lot[LOT];
#pragma unroll
    for (int i = 0; i < LOTS; i++) kept[i] = read_packed(x + at + i * Of::STEP);
    Of::ask_for_angles(cosines, sines, angles, lane);
    angles += lane * LOT;
#pragma unroll
    for (int i = 0; i < LOTS; i++) {
        unpack(lot, kept[i]);
#pragma unroll
        for (int j = 0; j < LOT; j++) squares = fmaf(lot[j], lot[j], squares);
    }
    float rstd = 1.0f / sqrtf(Of::mean(squares) + eps);
    if (!mine) return;
#pragma unroll
    for (int i = 0; i < LOTS; i++) {
        float weight[LOT];
        read_lot(weight, w + lane * LOT + i * Of::STEP);
        unpack(lot, kept[i]);
#pragma unroll
        for (int j = 0; j < LOT; j++) lot[j] = lot[j] * rstd;
        // What is normed is rounded before it meets its weight, and again before it turns.
        unpack(lot, pack<T>(lot));
#pragma unroll
        for (int j = 0; j < LOT; j++) lot[j] = weight[j] * lot[j];
        kept[i] = pack<T>(lot);
    }
#pragma unroll
    for (int i = 0; i < HALF; i++) {
        turn(kept[i], kept[i + HALF], read_packed(cosines + angles + i * Of::STEP),
             read_packed(sines + angles + i * Of::STEP), 1.0f);
        write_packed(y + at + i * Of::STEP, kept[i]);
        write_packed(y + at + (i + HALF) * Of::STEP, kept[i + HALF]);
    }
    if (lane == 0) rstds[row] = rstd;
}

// A copy that goes on while the thread computes.
__device__ __forceinline__ void ask(uint4 *to, const void *from) {
    u32 place = (u32)__cvta_generic_to_shared(to);
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16;" ::"r"(place), "l"(from) : "memory");
}

__device__ __forceinline__ void await() { asm volatile("cp.async.wait_all;" ::: "memory"); }

// Of a block: first what is on its way to its threads, then their sums.
typedef uint4 Stage[2 * LOTS][THREADS];
static_assert(sizeof(Stage) == THREADS * LOTS * LOT * sizeof(float), "as many bytes as sums");

// A block has `block_rows` heads, and adds up its part of the gradient of w on the way. In types of 16 bits what a thread
// reads next is on its way while it computes.
template <typename T, int SPAN>
__device__ __forceinline__ void head_norm_rope_backward(const T *dy, const T *h, const float *rstds, const T *w,
                                                        const float *cosines, const float *sines, T *dh,
                                                        float *partials, u64 rows, u64 heads, u64 block_rows,
                                                        Stage &stage) {
    using Of = Heads<SPAN>;
    constexpr bool AHEAD = sizeof(T) == 2;
    u32 slot = threadIdx.x / SPAN, lane = threadIdx.x % SPAN;
    u64 begin = (u64)blockIdx.x * block_rows, end = begin + block_rows < rows ? begin + block_rows : rows;
    float sums[LOTS][LOT] = {};
    auto ask_for = [&](u64 row) {
        if (row >= end) return;
        u64 at = row * Of::WIDTH + lane * LOT;
#pragma unroll
        for (int i = 0; i < LOTS; i++) {
            ask(&stage[i][threadIdx.x], dy + at + i * Of::STEP);
            ask(&stage[LOTS + i][threadIdx.x], h + at + i * Of::STEP);
        }
        Of::ask_for_angles(cosines, sines, Of::angles(row, heads), lane);
    };
    if constexpr (AHEAD) ask_for(begin + slot);
    float next = begin + slot < end ? rstds[begin + slot] : 0.0f;
    for (u64 first = begin; first < end; first += Of::SLOTS) {
        u64 row = first + slot, at = row * Of::WIDTH + lane * LOT;
        bool mine = row < end;
        Packed<T> grads[LOTS], normed[LOTS];
        float rstd = next;
        next = row + Of::SLOTS < end ? rstds[row + Of::SLOTS] : 0.0f;
        u64 angles = Of::angles(row, heads) + lane * LOT;
        Packed<float> cosine[HALF], sine[HALF];
        if (mine) {
#pragma unroll
            for (int i = 0; i < HALF; i++) {
                cosine[i] = read_packed(cosines + angles + i * Of::STEP);
                sine[i] = read_packed(sines + angles + i * Of::STEP);
            }
        }
        if constexpr (AHEAD) {
            await();
#pragma unroll
            for (int i = 0; i < LOTS; i++) {
                grads[i].pieces[0] = stage[i][threadIdx.x];
                normed[i].pieces[0] = stage[LOTS + i][threadIdx.x];
            }
            // What was read has been read before its place is asked for again.
            __syncwarp();
            ask_for(row + Of::SLOTS);
        } else if (mine) {
#pragma unroll
            for (int i = 0; i < LOTS; i++) {
                grads[i] = read_packed(dy + at + i * Of::STEP);
                normed[i] = read_packed(h + at + i * Of::STEP);
            }
        }
        float grad[LOT], norm[LOT], weight[LOT], along = 0.0f;
        if (mine) {
#pragma unroll
            for (int i = 0; i < HALF; i++) turn(grads[i], grads[i + HALF], cosine[i], sine[i], -1.0f);
#pragma unroll
            for (int i = 0; i < LOTS; i++) {
                unpack(grad, grads[i]);
                unpack(norm, normed[i]);
                read_lot(weight, w + lane * LOT + i * Of::STEP);
#pragma unroll
                for (int j = 0; j < LOT; j++) {
                    norm[j] *= rstd;
                    sums[i][j] = fmaf(grad[j], norm[j], sums[i][j]);
                    along = fmaf(grad[j] * weight[j], norm[j], along);
                }
            }
        }
        along = Of::mean(along);
        if (!mine) continue;
#pragma unroll
        for (int i = 0; i < LOTS; i++) {
            unpack(grad, grads[i]);
            unpack(norm, normed[i]);
            read_lot(weight, w + lane * LOT + i * Of::STEP);
#pragma unroll
            for (int j = 0; j < LOT; j++) grad[j] = rstd * fmaf(grad[j], weight[j], -(norm[j] * rstd * along));
            write_lot(dh + at + i * Of::STEP, grad);
        }
    }
    // The heads that ran beside each other, in order.
    __syncthreads();
    float *all = (float *)stage;
#pragma unroll
    for (int i = 0; i < LOTS; i++)
#pragma unroll
        for (int j = 0; j < LOT; j++) all[slot * Of::WIDTH + lane * LOT + i * Of::STEP + j] = sums[i][j];
    __syncthreads();
    for (u32 column = threadIdx.x; column < Of::WIDTH; column += THREADS) {
        float total = all[column];
        for (u32 i = 1; i < Of::SLOTS; i++) total += all[i * Of::WIDTH + column];
        partials[(u64)blockIdx.x * Of::WIDTH + column] = total;
    }
}

#define NORM_ROPE(NAME, T)                                                                                            \
    extern "C" __global__ void __launch_bounds__(THREADS, 4)                                                          \
        head_norm_rope_##NAME(const T *x, const T *w, const float *cosines, const float *sines, T *y, float *rstds,   \
                              u64 rows, u64 heads, float eps, u64 span) {                                             \
        if (span == 2) head_norm_rope<T, 2>(x, w, cosines, sines, y, rstds, rows, heads, eps);                        \
        else if (span == 4) head_norm_rope<T, 4>(x, w, cosines, sines, y, rstds, rows, heads, eps);                   \
        else head_norm_rope<T, 8>(x, w, cosines, sines, y, rstds, rows, heads, eps);                                  \
    }                                                                                                                 \
    extern "C" __global__ void __launch_bounds__(THREADS, 2)                                                          \
        head_norm_rope_backward_##NAME(const T *dy, const T *h, const float *rstds, const T *w, const float *cosines, \
                                       const float *sines, T *dh, float *partials, u64 rows, u64 heads, u64 span,     \
                                       u64 block_rows) {                                                              \
        __shared__ Stage stage;                                                                                       \
        if (span == 2)                                                                                                \
            head_norm_rope_backward<T, 2>(dy, h, rstds, w, cosines, sines, dh, partials, rows, heads, block_rows,     \
                                          stage);                                                                     \
        else if (span == 4)                                                                                           \
            head_norm_rope_backward<T, 4>(dy, h, rstds, w, cosines, sines, dh, partials, rows, heads, block_rows,     \
                                          stage);                                                                     \
        else                                                                                                          \
            head_norm_rope_backward<T, 8>(dy, h, rstds, w, cosines, sines, dh, partials, rows, heads, block_rows,     \
                                          stage);                                                                     \
    }

EACH_TYPE(NORM_ROPE)
