// Denominators of softmaxes over a row of logits, one block of threads for each row.

#define THREADS 512
#define WARPS (THREADS / WARP)
// Elements from one vector of a thread to its next.
#define SPAN ((u64)THREADS * VEC)

// Running maximum with the denominators of two softmaxes: at temperature 1, of cross-entropy, and at the temperature of the divergence.
template <typename T, bool CE, bool KD> struct Denominators {
    float maximum = -INF, ce = 0.0f, kd = 0.0f;

    __device__ __forceinline__ void add(const float (&vec)[VEC], float inverse) {
        float new_maximum = maximum;
#pragma unroll
        for (int i = 0; i < VEC; i++) new_maximum = fmaxf(new_maximum, vec[i]);
        // If all values so far are -inf, -inf - -inf would be NaN; their exps are 0.
        float base = new_maximum == -INF ? 0.0f : new_maximum, of_ce = 0.0f, of_kd = 0.0f;
#pragma unroll
        for (int i = 0; i < VEC; i++) {
            if (CE) of_ce += exp_for<T>(vec[i] - base);
            if (KD) of_kd += exp_for<T>((vec[i] - base) * inverse);
        }
        if (CE) ce = ce * exp_for<T>(maximum - base) + of_ce;
        if (KD) kd = kd * exp_for<T>((maximum - base) * inverse) + of_kd;
        maximum = new_maximum;
    }

    __device__ __forceinline__ void add(float value, float inverse) {
        float vec[VEC] = {value, -INF, -INF, -INF, -INF, -INF, -INF, -INF};
        add(vec, inverse);
    }

    // The same over the whole block.
    __device__ void reduce(float inverse) {
        float mine = maximum;
        maximum = block_reduce<true, WARPS>(mine);
        float base = maximum == -INF ? 0.0f : maximum;
        if (CE) ce = block_reduce<false, WARPS>(ce * exp_for<T>(mine - base));
        if (KD) kd = block_reduce<false, WARPS>(kd * exp_for<T>((mine - base) * inverse));
    }
};

// Elements at or past `end` become -inf.
__device__ __forceinline__ void mask(float (&vec)[VEC], u64 first, u64 end) {
#pragma unroll
    for (int i = 0; i < VEC; i++) vec[i] = first + i < end ? vec[i] : -INF;
}
