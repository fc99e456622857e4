// Attention over cached keys and values, for decoding: every row is one query of its own sequence.
//
// A block computes one row, one head, and at most THREADS elements of its result, in tiles of THREADS keys. A warp
// computes a score at a time, a thread sums one element of the result. Sums run in a fixed order.

#define THREADS 128
#define WARPS (THREADS / WARP)

// The cache rows of a token's sequence, its own last; empty for padding.
struct CacheRange {
    u32 first, end;
};

static_assert(sizeof(CacheRange) == 8, "CacheRange of the host");

// One block copies one row; padding and rows beyond the cache are not stored.
template <typename T>
__device__ void store_rows(const CacheRange *ranges, const T *x, T *cache, u64 width, u64 cached) {
    u64 row = blockIdx.x, first = ranges[row].first, end = ranges[row].end;
    if (first >= end || end > cached) return;
    for (u64 column = threadIdx.x; column < width; column += blockDim.x) {
        cache[(end - 1) * width + column] = x[row * width + column];
    }
}

template <typename T>
__device__ void cached_attention(const CacheRange *ranges, const T *q, const T *k, const T *v, T *y, u64 heads,
                                 u64 kv_heads, u64 head_dim, u64 cached, u64 window, float scale, const float *bias,
                                 u64 max_distance) {
    __shared__ float weights[THREADS], warp_maxima[WARPS];
    u64 row = blockIdx.x, head = blockIdx.y, kv_head = head / (heads / kv_heads), kv_stride = kv_heads * head_dim;
    u64 element = (u64)blockIdx.z * THREADS + threadIdx.x;
    u32 lane = threadIdx.x % WARP, warp = threadIdx.x / WARP;
    u64 first = ranges[row].first, end = ranges[row].end;
    // The host checks ranges; one beyond the cache is never read.
    if (end > cached) end = 0;
    bool is_empty = first >= end;
    if (window && !is_empty && end - first > window) first = end - window;
    q += (row * heads + head) * head_dim;
    y += (row * heads + head) * head_dim;
    k += kv_head * head_dim;
    v += kv_head * head_dim;
    if (bias) bias += head * (2 * max_distance + 1);
    float maximum = -INF, sum = 0.0f, acc = 0.0f;
    for (u64 tile = first; tile < end; tile += THREADS) {
        u32 keys = end - tile < THREADS ? (u32)(end - tile) : THREADS;
        for (u32 key = warp; key < keys; key += WARPS) {
            const T *at = k + (tile + key) * kv_stride;
            float dot = 0.0f;
            for (u64 i = lane; i < head_dim; i += WARP) dot = fmaf(to_f32(q[i]), to_f32(at[i]), dot);
            dot = warp_reduce_sum(dot);
            // The query is at the last key: distances are at most 0.
            u64 distance = end - 1 - (tile + key);
            float added = bias ? bias[max_distance - (distance < max_distance ? distance : max_distance)] : 0.0f;
            if (lane == 0) weights[key] = bias ? dot * scale + added : dot * scale;
        }
        __syncthreads();
        float score = threadIdx.x < keys ? weights[threadIdx.x] : -INF, largest = score;
        for (int step = WARP / 2; step > 0; step /= 2)
            largest = fmaxf(largest, __shfl_xor_sync(FULL_MASK, largest, step));
        if (lane == 0) warp_maxima[warp] = largest;
        __syncthreads();
        float updated = maximum;
        for (u32 i = 0; i < WARPS; i++) updated = fmaxf(updated, warp_maxima[i]);
        // A thread overwrites only the score that it has read itself.
        weights[threadIdx.x] = threadIdx.x < keys ? expf(score - updated) : 0.0f;
        __syncthreads();
        float rescale = expf(maximum - updated);
        sum *= rescale;
        acc *= rescale;
        for (u32 key = 0; key < keys; key++) {
            sum += weights[key];
            if (element < head_dim) acc = fmaf(weights[key], to_f32(v[(tile + key) * kv_stride + element]), acc);
        }
        maximum = updated;
        // The next tile overwrites the weights.
        __syncthreads();
    }
    if (element < head_dim) y[element] = from_f32<T>(is_empty ? 0.0f : acc / sum);
}

#define INSTANTIATE(NAME, T)                                                                                           \
    extern "C" __global__ void store_rows_##NAME(const CacheRange *ranges, const T *x, T *cache, u64 width,            \
                                                 u64 cached) {                                                         \
        store_rows(ranges, x, cache, width, cached);                                                                   \
    }                                                                                                                  \
    extern "C" __global__ void cached_attention_##NAME(const CacheRange *ranges, const T *q, const T *k, const T *v,   \
                                                       T *y, u64 heads, u64 kv_heads, u64 head_dim, u64 cached,        \
                                                       u64 window, float scale, const float *bias,                     \
                                                       u64 max_distance) {                                             \
        cached_attention(ranges, q, k, v, y, heads, kv_heads, head_dim, cached, window, scale, bias, max_distance);    \
    }

FOR_EACH_DTYPE(INSTANTIATE)
