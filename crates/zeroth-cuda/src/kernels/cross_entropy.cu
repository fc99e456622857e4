// Cross-entropy of the LM head over a slice of logits, and the sum of the losses.

#define THREADS 1024
#define WARPS (THREADS / WARP)

// Running maximum and denominator of a softmax.
struct OnlineSoftmax {
    float maximum, total;

    template <typename T> __device__ __forceinline__ void add(const float (&vec)[VEC]) {
        float new_maximum = maximum;
#pragma unroll
        for (int i = 0; i < VEC; i++) new_maximum = fmaxf(new_maximum, vec[i]);
        // If all values so far are -inf, -inf - -inf would be NaN; their exps are 0.
        float base = new_maximum == -INF ? 0.0f : new_maximum, sum = 0.0f;
#pragma unroll
        for (int i = 0; i < VEC; i++) sum += exp_for<T>(vec[i] - base);
        total = total * exp_for<T>(maximum - base) + sum;
        maximum = new_maximum;
    }

    template <typename T> __device__ __forceinline__ void add(float value) {
        float vec[VEC] = {value, -INF, -INF, -INF, -INF, -INF, -INF, -INF};
        add<T>(vec);
    }
};

// Vectors that a thread keeps in flight.
#define UNROLL 4

// One block per row: computes its loss and, with `loss_weight`, overwrites the logits with their gradients. The second
// pass walks backwards, so that it starts with what the first pass left in L2.
template <typename T>
__device__ void cross_entropy(T *logits, u64 row_stride, const i32 *labels, float *losses, u64 vocab,
                              const double *loss_weight, const double *loss_scale) {
    T *row = logits + (u64)blockIdx.x * row_stride;
    bool with_grad = loss_weight != nullptr;
    i32 label = labels[blockIdx.x];
    if (label < 0 || (u64)label >= vocab) {
        // Negative labels are ignored; a label past the vocabulary is an error and yields a NaN loss.
        if (threadIdx.x == 0) losses[blockIdx.x] = label < 0 ? 0.0f : QUIET_NAN;
        for (u64 i = threadIdx.x; with_grad && i < vocab; i += THREADS) row[i] = from_f32<T>(0.0f);
        return;
    }
    const u64 stride = THREADS * VEC;
    OnlineSoftmax softmax = {-INF, 0.0f};
    Packed<T> vecs[UNROLL];
    float vec[VEC];
    // Rows are 16-byte aligned; the padding past the vocabulary is ignored.
    u64 vec_end = vocab / VEC * VEC;
    for (u64 begin = threadIdx.x * VEC; begin < vec_end; begin += UNROLL * stride) {
#pragma unroll
        for (int i = 0; i < UNROLL; i++)
            if (begin + i * stride < vec_end) vecs[i] = load_packed(row + begin + i * stride);
#pragma unroll
        for (int i = 0; i < UNROLL; i++) {
            if (begin + i * stride >= vec_end) continue;
            unpack(vec, vecs[i]);
            softmax.add<T>(vec);
        }
    }
    if (vec_end + threadIdx.x < vocab) softmax.add<T>(to_f32(row[vec_end + threadIdx.x]));
    float maximum = block_reduce<true, WARPS>(softmax.maximum);
    float total = block_reduce<false, WARPS>(softmax.total * exp_for<T>(softmax.maximum - maximum));
    if (threadIdx.x == 0) losses[blockIdx.x] = logf(total) - (to_f32(row[label]) - maximum);
    if (!with_grad) return;
    float scale = (float)(*loss_weight * *loss_scale), grad_scale = scale / total;
    __syncthreads();
    for (u64 round = (vocab + UNROLL * stride - 1) / (UNROLL * stride); round-- > 0;) {
        // The last vector may extend into the row's padding, which nothing reads.
        u64 begin = round * UNROLL * stride + threadIdx.x * VEC;
#pragma unroll
        for (int i = 0; i < UNROLL; i++)
            if (begin + i * stride < vocab) vecs[i] = load_packed(row + begin + i * stride);
#pragma unroll
        for (int i = 0; i < UNROLL; i++) {
            u64 first = begin + i * stride;
            if (first >= vocab) continue;
            unpack(vec, vecs[i]);
#pragma unroll
            for (int j = 0; j < VEC; j++) vec[j] = exp_for<T>(vec[j] - maximum) * grad_scale;
            if ((u64)label - first < VEC) {
#pragma unroll
                for (int j = 0; j < VEC; j++) vec[j] -= (u64)label == first + j ? scale : 0.0f;
            }
            store_vec(row + first, vec);
        }
    }
}

// One block: each thread sums a strided share in f64, a tree reduction follows, and the total is added to `loss`.
extern "C" __global__ void sum_losses(const float *losses, u64 count, double *loss) {
    __shared__ double partials[THREADS];
    double mine = 0.0;
    for (u64 i = threadIdx.x; i < count; i += THREADS) mine += (double)losses[i];
    partials[threadIdx.x] = mine;
    __syncthreads();
    for (int half = THREADS / 2; half > 0; half /= 2) {
        if (threadIdx.x < half) partials[threadIdx.x] += partials[threadIdx.x + half];
        __syncthreads();
    }
    if (threadIdx.x == 0) *loss += partials[0];
}

#define INSTANTIATE(NAME, T)                                                                         \
    extern "C" __global__ void __launch_bounds__(THREADS)                                            \
        cross_entropy_##NAME(T *logits, u64 row_stride, const i32 *labels, float *losses, u64 vocab, \
                             const double *loss_weight, const double *loss_scale) {                  \
        cross_entropy(logits, row_stride, labels, losses, vocab, loss_weight, loss_scale);           \
    }

FOR_EACH_DTYPE(INSTANTIATE)
