// Rows of activations in the order of experts: their copies, their sums, and their gated activation. `routed` is the
// number of rows that belong to a token; those after them are neither read nor written.

// Vectors that a thread keeps in flight.
#define UNROLL 4

// One warp per row: y[p] = x[order[p] / k].
template <typename T>
__device__ void gather_rows(const i32 *order, const i32 *routed, const T *x, T *y, u64 k, u64 width, u64 stride,
                            u64 vectorized) {
    u64 place = global_thread() / WARP, lane = threadIdx.x % WARP;
    if (place >= (u64)*routed) return;
    x += (u64)order[place] / k * stride;
    y += place * stride;
    if (!vectorized) {
        for (u64 i = lane; i < width; i += WARP) y[i] = x[i];
        return;
    }
    constexpr u64 STEP = WARP * VEC;
    for (u64 first = lane * VEC; first < width; first += UNROLL * STEP) {
        Packed<T> vecs[UNROLL];
#pragma unroll
        for (int i = 0; i < UNROLL; i++)
            if (first + i * STEP < width) vecs[i] = load_packed(x + first + i * STEP);
#pragma unroll
        for (int i = 0; i < UNROLL; i++)
            if (first + i * STEP < width) store_packed(y + first + i * STEP, vecs[i]);
    }
}

// One thread per VEC elements: y[t] = sum of x[places[t, j]] in the order of j. Places of padding count as 0.
template <typename T>
__device__ void combine_rows(const i32 *places, const i32 *routed, const T *x, T *y, u64 rows, u64 k, u64 width,
                             u64 stride, u64 vectorized) {
    u64 vecs = (width + VEC - 1) / VEC, row = global_thread() / vecs, first = global_thread() % vecs * VEC;
    if (row >= rows) return;
    u64 end = (u64)*routed;
    bool full = vectorized && first + VEC <= width;
    float sum[VEC] = {};
    places += row * k;
#pragma unroll 4
    for (u64 j = 0; j < k; j++) {
        u64 place = (u64)places[j];
        if (place >= end) continue;
        float vec[VEC];
        load_bounded(vec, x + place * stride, first, width, full);
#pragma unroll
        for (int i = 0; i < VEC; i++) sum[i] += vec[i];
    }
    store_bounded(y + row * stride, first, width, full, sum);
}

// One thread per VEC elements: y[p] = f(gate) * up * weights[order[p]].
template <typename F, typename T>
__device__ void gated_rows(const i32 *order, const i32 *routed, const float *weights, const T *gate_up, T *y, u64 width,
                           u64 gate_up_stride, u64 y_stride, u64 vectorized) {
    u64 vecs = (width + VEC - 1) / VEC, place = global_thread() / vecs, first = global_thread() % vecs * VEC;
    if (place >= (u64)*routed) return;
    bool full = vectorized && first + VEC <= width;
    const T *gate = gate_up + place * gate_up_stride;
    float weight = weights[order[place]], g[VEC], u[VEC];
    load_bounded(g, gate, first, width, full);
    load_bounded(u, gate + width, first, width, full);
#pragma unroll
    for (int i = 0; i < VEC; i++) g[i] = F::template value<T>(g[i]) * u[i] * weight;
    store_bounded(y + place * y_stride, first, width, full, g);
}

// One warp per row of all `slots`. dweights, if wanted, of padding are 0.
template <typename F, typename T>
__device__ void gated_rows_backward(const i32 *order, const i32 *routed, const float *weights, const T *gate_up,
                                    const T *dy, T *dgate_up, float *dweights, u64 slots, u64 width,
                                    u64 gate_up_stride, u64 y_stride, u64 vectorized) {
    u64 place = global_thread() / WARP, lane = threadIdx.x % WARP;
    if (place >= slots) return;
    u64 slot = (u64)order[place];
    if (place >= (u64)*routed) {
        if (dweights && lane == 0) dweights[slot] = 0.0f;
        return;
    }
    float weight = weights[slot], sum = 0.0f;
    const T *gate = gate_up + place * gate_up_stride;
    T *dgate = dgate_up + place * gate_up_stride;
    dy += place * y_stride;
    for (u64 first = lane * VEC; first < width; first += WARP * VEC) {
        bool full = vectorized && first + VEC <= width;
        float d[VEC], g[VEC], u[VEC];
        load_bounded(d, dy, first, width, full);
        load_bounded(g, gate, first, width, full);
        load_bounded(u, gate + width, first, width, full);
#pragma unroll
        for (int i = 0; i < VEC; i++) {
            float slope, value = F::template value_and_slope<T>(g[i], slope);
            sum += d[i] * value * u[i];
            g[i] = d[i] * weight * u[i] * slope;
            u[i] = d[i] * weight * value;
        }
        store_bounded(dgate, first, width, full, g);
        store_bounded(dgate + width, first, width, full, u);
    }
    sum = warp_reduce_sum(sum);
    if (dweights && lane == 0) dweights[slot] = sum;
}

#define INSTANTIATE(NAME, T)                                                                                      \
    extern "C" __global__ void gather_rows_##NAME(const i32 *order, const i32 *routed, const T *x, T *y, u64 k,   \
                                                  u64 width, u64 stride, u64 vectorized) {                        \
        gather_rows(order, routed, x, y, k, width, stride, vectorized);                                           \
    }                                                                                                             \
    extern "C" __global__ void combine_rows_##NAME(const i32 *places, const i32 *routed, const T *x, T *y,        \
                                                   u64 rows, u64 k, u64 width, u64 stride, u64 vectorized) {      \
        combine_rows(places, routed, x, y, rows, k, width, stride, vectorized);                                   \
    }                                                                                                             \
    INSTANTIATE_GATED(swiglu_rows, NAME, Silu, T)                                                                 \
    INSTANTIATE_GATED(geglu_rows, NAME, Gelu, T)                                                                  \
    INSTANTIATE_GATED(geglu_tanh_rows, NAME, GeluTanh, T)                                                         \
    INSTANTIATE_GATED(reglu_rows, NAME, Relu, T)

#define INSTANTIATE_GATED(GATED, NAME, F, T)                                                                      \
    extern "C" __global__ void GATED##_##NAME(const i32 *order, const i32 *routed, const float *weights,          \
                                              const T *gate_up, T *y, u64 width, u64 gate_up_stride,              \
                                              u64 y_stride, u64 vectorized) {                                     \
        gated_rows<F>(order, routed, weights, gate_up, y, width, gate_up_stride, y_stride, vectorized);           \
    }                                                                                                             \
    extern "C" __global__ void GATED##_backward_##NAME(                                                           \
        const i32 *order, const i32 *routed, const float *weights, const T *gate_up, const T *dy, T *dgate_up,    \
        float *dweights, u64 slots, u64 width, u64 gate_up_stride, u64 y_stride, u64 vectorized) {                \
        gated_rows_backward<F>(order, routed, weights, gate_up, dy, dgate_up, dweights, slots, width,             \
                               gate_up_stride, y_stride, vectorized);                                             \
    }

FOR_EACH_DTYPE(INSTANTIATE)
