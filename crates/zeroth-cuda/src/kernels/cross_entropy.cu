// The head's softmax and cross-entropy over a slice of logits, and the sum of the losses.

#define THREADS 1024
#define WARPS (THREADS / WARP)

// The largest or the sum over a block, the same in every thread.
template <bool LARGEST>
__device__ float over_block(float value) {
    __shared__ float of_warp[WARPS];
    for (int step = WARP / 2; step > 0; step /= 2) {
        float other = __shfl_xor_sync(ALL_LANES, value, step);
        value = LARGEST ? fmaxf(value, other) : value + other;
    }
    if (threadIdx.x % WARP == 0) of_warp[threadIdx.x / WARP] = value;
    __syncthreads();
    float total = of_warp[0];
    for (int warp = 1; warp < WARPS; warp++) total = LARGEST ? fmaxf(total, of_warp[warp]) : total + of_warp[warp];
    __syncthreads();
    return total;
}

// The softmax of what was added so far.
struct Softmax {
    float peak, total;

    template <typename T> __device__ __forceinline__ void add(const float (&lot)[LOT]) {
        float largest = peak;
#pragma unroll
        for (int i = 0; i < LOT; i++) largest = fmaxf(largest, lot[i]);
        // Nothing but -inf so far: weights are 0 and not the NaN of -inf - -inf.
        float base = largest == -INFINITE ? 0.0f : largest, sum = 0.0f;
#pragma unroll
        for (int i = 0; i < LOT; i++) sum += exp_of<T>(lot[i] - base);
        total = total * exp_of<T>(peak - base) + sum;
        peak = largest;
    }

    template <typename T> __device__ __forceinline__ void add(float value) {
        float lot[LOT] = {value, -INFINITE, -INFINITE, -INFINITE, -INFINITE, -INFINITE, -INFINITE, -INFINITE};
        add<T>(lot);
    }
};

// Lots that a thread has on their way at a time.
#define BESIDE 4

// A block turns one row of logits into its loss and, where asked, into its gradient, in the row's own memory. The second
// pass begins with what the first one read last, which the card's cache still holds.
template <typename T>
__device__ void softmax_loss(T *logits, u64 pitch, const i32 *labels, float *losses, u64 vocab,
                             const double *loss_weight, const double *loss_scale) {
    T *row = logits + (u64)blockIdx.x * pitch;
    bool differentiate = loss_weight != nullptr;
    i32 label = labels[blockIdx.x];
    if (label < 0 || (u64)label >= vocab) {
        // A label beyond the vocabulary is a mistake that must not pass for training: its loss is no number.
        if (threadIdx.x == 0) losses[blockIdx.x] = label < 0 ? 0.0f : NOT_A_NUMBER;
        for (u64 i = threadIdx.x; differentiate && i < vocab; i += THREADS) row[i] = from_f32<T>(0.0f);
        return;
    }
    const u64 stride = THREADS * LOT;
    Softmax all = {-INFINITE, 0.0f};
    Packed<T> lots[BESIDE];
    float lot[LOT];
    // Rows begin at multiples of 16 bytes; what is behind the vocabulary is not looked at.
    u64 whole = vocab / LOT * LOT;
    for (u64 begin = threadIdx.x * LOT; begin < whole; begin += BESIDE * stride) {
#pragma unroll
        for (int i = 0; i < BESIDE; i++)
            if (begin + i * stride < whole) lots[i] = read_packed(row + begin + i * stride);
#pragma unroll
        for (int i = 0; i < BESIDE; i++) {
            if (begin + i * stride >= whole) continue;
            unpack(lot, lots[i]);
            all.add<T>(lot);
        }
    }
    if (whole + threadIdx.x < vocab) all.add<T>(to_f32(row[whole + threadIdx.x]));
    float peak = over_block<true>(all.peak);
    float total = over_block<false>(all.total * exp_of<T>(all.peak - peak));
    if (threadIdx.x == 0) losses[blockIdx.x] = logf(total) - (to_f32(row[label]) - peak);
    if (!differentiate) return;
    float scale = (float)(*loss_weight * *loss_scale), share = scale / total;
    __syncthreads();
    for (u64 round = (vocab + BESIDE * stride - 1) / (BESIDE * stride); round-- > 0;) {
        // The row's end within its pitch: padding is read and written, and nobody looks at it.
        u64 begin = round * BESIDE * stride + threadIdx.x * LOT;
#pragma unroll
        for (int i = 0; i < BESIDE; i++)
            if (begin + i * stride < vocab) lots[i] = read_packed(row + begin + i * stride);
#pragma unroll
        for (int i = 0; i < BESIDE; i++) {
            u64 first = begin + i * stride;
            if (first >= vocab) continue;
            unpack(lot, lots[i]);
#pragma unroll
            for (int j = 0; j < LOT; j++) lot[j] = exp_of<T>(lot[j] - peak) * share;
            if ((u64)label - first < LOT) {
#pragma unroll
                for (int j = 0; j < LOT; j++) lot[j] -= (u64)label == first + j ? scale : 0.0f;
            }
            write_lot(row + first, lot);
        }
    }
}

// One block: every thread sums its share in f64, lanes are folded in halves, and the total is added to what is there.
extern "C" __global__ void sum_losses(const float *losses, u64 count, double *loss) {
    __shared__ double lanes[THREADS];
    double mine = 0.0;
    for (u64 i = threadIdx.x; i < count; i += THREADS) mine += (double)losses[i];
    lanes[threadIdx.x] = mine;
    __syncthreads();
    for (int half = THREADS / 2; half > 0; half /= 2) {
        if (threadIdx.x < half) lanes[threadIdx.x] += lanes[threadIdx.x + half];
        __syncthreads();
    }
    if (threadIdx.x == 0) *loss += lanes[0];
}

#define HEAD(NAME, T)                                                                                             \
    extern "C" __global__ void __launch_bounds__(THREADS)                                                         \
        softmax_loss_##NAME(T *logits, u64 pitch, const i32 *labels, float *losses, u64 vocab,                    \
                            const double *loss_weight, const double *loss_scale) {                                \
        softmax_loss(logits, pitch, labels, losses, vocab, loss_weight, loss_scale);                              \
    }

EACH_TYPE(HEAD)
