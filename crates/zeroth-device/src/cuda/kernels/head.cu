// The head's softmax and cross-entropy over a slice of logits, and the sum of the losses.

#define THREADS 512
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

// A block turns one row of logits into its loss and, where asked, into its gradient in the run's type, in the row's own
// memory. Element i is written only after all threads have read the elements up to i, so a narrower type overwrites
// nothing that is still to be read.
template <typename T>
__device__ void softmax_loss(float *logits, u64 pitch, const i32 *labels, float *losses, u64 vocab,
                             const double *loss_weight, const double *loss_scale) {
    float *row = logits + (u64)blockIdx.x * pitch;
    T *grads = (T *)row;
    bool differentiate = loss_weight != nullptr;
    i32 label = labels[blockIdx.x];
    if (label < 0 || (u64)label >= vocab) {
        // A label beyond the vocabulary is a mistake that must not pass for training: its loss is no number.
        if (threadIdx.x == 0) losses[blockIdx.x] = label < 0 ? 0.0f : NOT_A_NUMBER;
        for (u64 i = threadIdx.x; differentiate && i < vocab; i += THREADS) grads[i] = from_f32<T>(0.0f);
        return;
    }
    float peak = -INFINITE;
    for (u64 i = threadIdx.x; i < vocab; i += THREADS) peak = fmaxf(peak, row[i]);
    peak = over_block<true>(peak);
    float total = 0.0f;
    for (u64 i = threadIdx.x; i < vocab; i += THREADS) total += expf(row[i] - peak);
    total = over_block<false>(total);
    if (threadIdx.x == 0) losses[blockIdx.x] = logf(total) - (row[label] - peak);
    if (!differentiate) return;
    float scale = (float)(*loss_weight * *loss_scale);
    float share = scale / total;
    for (u64 first = 0; first < vocab; first += THREADS) {
        u64 i = first + threadIdx.x;
        float logit = i < vocab ? row[i] : 0.0f;
        __syncthreads();
        if (i < vocab) {
            float grad = expf(logit - peak) * share;
            grads[i] = from_f32<T>(i == (u64)label ? grad - scale : grad);
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
    extern "C" __global__ void softmax_loss_##NAME(float *logits, u64 pitch, const i32 *labels, float *losses,    \
                                                   u64 vocab, const double *loss_weight,                          \
                                                   const double *loss_scale) {                                    \
        softmax_loss<T>(logits, pitch, labels, losses, vocab, loss_weight, loss_scale);                           \
    }

EACH_TYPE(HEAD)
