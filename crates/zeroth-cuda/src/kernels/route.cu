// Routing of tokens to experts: softmax, the largest k, and a stable counting sort of the slots by expert. A slot is a
// pair of a row and one of its k experts. Sums have a fixed order, and no result depends on the order of atomics.

#define THREADS 256

// Rows before the end of the last sequence; every row without a table.
__device__ u64 routed_rows(const u32 *starts, u64 capacity, u64 rows) {
    if (!starts) return rows;
    Starts table = read_starts(starts, capacity);
    u64 end = table.count ? table.at[table.count - 1] : 0;
    return end < rows ? end : rows;
}

__device__ __forceinline__ float warp_reduce_max(float value) {
    for (int step = WARP / 2; step > 0; step /= 2) value = fmaxf(value, __shfl_xor_sync(FULL_MASK, value, step));
    return value;
}

// Orders experts by their logit, the lower index first among equal ones. NaN is below -inf.
__device__ __forceinline__ u64 sort_key(float logit, u64 expert) {
    // -0 becomes 0.
    u32 bits = __float_as_uint(logit + 0.0f);
    u32 ordered = logit != logit ? 0u : bits & 0x80000000u ? ~bits : bits | 0x80000000u;
    return (u64)ordered << 32 | (0xffffffffu - (u32)expert);
}

// Maximum and denominator of the softmax of a row, for the whole warp.
template <typename T> __device__ float2 softmax_of(const T *logits, u64 count) {
    float greatest = -INF, sum = 0.0f;
    for (u64 e = threadIdx.x % WARP; e < count; e += WARP) greatest = fmaxf(greatest, to_f32(logits[e]));
    greatest = warp_reduce_max(greatest);
    for (u64 e = threadIdx.x % WARP; e < count; e += WARP) sum += expf(to_f32(logits[e]) - greatest);
    return make_float2(greatest, warp_reduce_sum(sum));
}

// One warp per row. `statistics`, if given, gets the maximum and denominator of its softmax.
template <typename T>
__device__ void route(const u32 *starts, u64 capacity, const T *logits, u64 rows, u64 count, u64 k, u64 normalized,
                      u64 row_stride, i32 *experts, float *weights, float2 *statistics) {
    u64 row = global_thread() / WARP, lane = threadIdx.x % WARP;
    if (row >= rows) return;
    experts += row * k;
    weights += row * k;
    if (row >= routed_rows(starts, capacity, rows)) {
        for (u64 j = lane; j < k; j += WARP) {
            experts[j] = (i32)count;
            weights[j] = 0.0f;
        }
        return;
    }
    logits += row * row_stride;
    float2 softmax = softmax_of(logits, count);
    if (statistics && lane == 0) statistics[row] = softmax;
    u64 previous = ~0ull;
    float total = 0.0f;
    for (u64 j = 0; j < k; j++) {
        u64 best = 0;
        for (u64 e = lane; e < count; e += WARP) {
            u64 key = sort_key(to_f32(logits[e]), e);
            if (key < previous && key > best) best = key;
        }
        for (int step = WARP / 2; step > 0; step /= 2) {
            u64 other = __shfl_xor_sync(FULL_MASK, best, step);
            if (other > best) best = other;
        }
        previous = best;
        u32 expert = 0xffffffffu - (u32)best;
        float weight = expf(to_f32(logits[expert]) - softmax.x) / softmax.y;
        total += weight;
        if (lane == 0) {
            experts[j] = (i32)expert;
            weights[j] = weight;
        }
    }
    if (!normalized) return;
    __syncwarp();
    for (u64 j = lane; j < k; j += WARP) weights[j] /= total;
}

// The sort takes segments of slots, one warp each. `bins`: the experts, and padding. First the slots of each expert in
// each segment: counts [bins, segments].
extern "C" __global__ void route_count(const i32 *experts, u64 slots, u64 bins, u64 segment, u32 *counts) {
    extern __shared__ u32 histogram[];
    for (u64 e = threadIdx.x; e < bins; e += WARP) histogram[e] = 0;
    __syncwarp();
    u64 first = blockIdx.x * segment, end = first + segment < slots ? first + segment : slots;
    for (; first < end; first += WARP) {
        bool valid = first + threadIdx.x < end;
        u32 expert = valid ? (u32)experts[first + threadIdx.x] : 0xffffffffu;
        u32 same = __match_any_sync(FULL_MASK, expert);
        if (valid && threadIdx.x == __ffs(same) - 1) histogram[expert] += __popc(same);
        __syncwarp();
    }
    for (u64 e = threadIdx.x; e < bins; e += WARP) counts[e * gridDim.x + blockIdx.x] = histogram[e];
}

// One block, a warp per expert at a time: replaces counts by the slots of the expert in earlier segments, and writes
// the first place of each expert. BATCHES of 32 segments are the most that there are (`MAX_SEGMENTS` in route.rs).
#define SCAN_THREADS 1024
#define BATCHES 16
extern "C" __global__ __launch_bounds__(SCAN_THREADS) void route_scan(u32 *counts, u64 segments, u64 bins,
                                                                     i32 *offsets) {
    extern __shared__ u32 totals[];
    u32 lane = threadIdx.x % WARP;
    for (u64 e = threadIdx.x / WARP; e < bins; e += SCAN_THREADS / WARP) {
        u32 *own = counts + e * segments, sum = 0, batch[BATCHES];
#pragma unroll
        for (int i = 0; i < BATCHES; i++) batch[i] = i * WARP + lane < segments ? own[i * WARP + lane] : 0;
#pragma unroll
        for (int i = 0; i < BATCHES; i++) {
            if (i * WARP >= segments) break;
            u32 up_to = batch[i];
#pragma unroll
            for (int step = 1; step < WARP; step *= 2) {
                u32 other = __shfl_up_sync(FULL_MASK, up_to, step);
                if (lane >= step) up_to += other;
            }
            if (i * WARP + lane < segments) own[i * WARP + lane] = sum + up_to - batch[i];
            sum += __shfl_sync(FULL_MASK, up_to, WARP - 1);
        }
        if (lane == 0) totals[e] = sum;
    }
    __syncthreads();
    if (threadIdx.x >= WARP) return;
    u32 before = 0;
    for (u64 first = 0; first < bins; first += WARP) {
        u64 e = first + threadIdx.x;
        u32 own = e < bins ? totals[e] : 0, sum = own;
        for (int step = 1; step < WARP; step *= 2) {
            u32 other = __shfl_up_sync(FULL_MASK, sum, step);
            if (threadIdx.x >= step) sum += other;
        }
        if (e < bins) offsets[e] = (i32)(before + sum - own);
        before += __shfl_sync(FULL_MASK, sum, WARP - 1);
    }
}

// The place of every slot: those of its expert in earlier segments, then those before it in its own.
extern "C" __global__ void route_place(const i32 *experts, u64 slots, u64 bins, u64 segment, const u32 *counts,
                                       const i32 *offsets, i32 *order, i32 *places) {
    extern __shared__ u32 next[];
    for (u64 e = threadIdx.x; e < bins; e += WARP) next[e] = (u32)offsets[e] + counts[e * gridDim.x + blockIdx.x];
    __syncwarp();
    u64 first = blockIdx.x * segment, end = first + segment < slots ? first + segment : slots;
    for (; first < end; first += WARP) {
        u64 slot = first + threadIdx.x;
        bool valid = slot < end;
        u32 expert = valid ? (u32)experts[slot] : 0xffffffffu;
        u32 same = __match_any_sync(FULL_MASK, expert);
        if (valid) {
            u32 place = next[expert] + __popc(same & ((1u << threadIdx.x) - 1));
            places[slot] = (i32)place;
            order[place] = (i32)slot;
        }
        __syncwarp();
        if (valid && threadIdx.x == __ffs(same) - 1) next[expert] += __popc(same);
        __syncwarp();
    }
}

// Sums of the probabilities of each expert over `chunk` routed rows.
template <typename T>
__device__ void route_probabilities(const u32 *starts, u64 capacity, const T *logits, const float2 *statistics, u64 rows,
                                    u64 count, u64 row_stride, u64 chunk, float *partials) {
    u64 routed = routed_rows(starts, capacity, rows), first = blockIdx.x * chunk;
    u64 end = first + chunk < routed ? first + chunk : routed;
    for (u64 e = threadIdx.x; e < count; e += blockDim.x) {
        float sum = 0.0f;
        for (u64 row = first; row < end; row++) {
            float2 softmax = statistics[row];
            sum += expf(to_f32(logits[row * row_stride + e]) - softmax.x) / softmax.y;
        }
        partials[blockIdx.x * count + e] = sum;
    }
}

// Adds the slots of each expert, and its sum of probabilities, to those of the layers before.
extern "C" __global__ void route_balance(const float *partials, u64 chunks, const i32 *offsets, u64 count,
                                         const float *before, float *after) {
    u64 e = global_thread();
    if (e >= count) return;
    double sum = 0.0;
#pragma unroll 8
    for (u64 i = 0; i < chunks; i++) sum += (double)partials[i * count + e];
    after[e] = (before ? before[e] : 0.0f) + (float)(offsets[e + 1] - offsets[e]);
    after[count + e] = (before ? before[count + e] : 0.0f) + (float)sum;
}

// One warp per row. `slopes`: the gradient of the sums of probabilities.
template <typename T>
__device__ void route_backward(const u32 *starts, u64 capacity, const T *logits, const i32 *experts,
                               const float *weights, const float *dweights, const float *slopes, u64 rows, u64 count,
                               u64 k, u64 normalized, u64 row_stride, T *dlogits) {
    u64 row = global_thread() / WARP, lane = threadIdx.x % WARP;
    if (row >= rows) return;
    logits += row * row_stride;
    dlogits += row * row_stride;
    if (row >= routed_rows(starts, capacity, rows)) {
        for (u64 e = lane; e < count; e += WARP) dlogits[e] = from_f32<T>(0.0f);
        return;
    }
    experts += row * k;
    weights += row * k;
    if (dweights) dweights += row * k;
    float2 softmax = softmax_of(logits, count);
    auto probability = [&](u64 e) { return expf(to_f32(logits[e]) - softmax.x) / softmax.y; };
    // The gradient of a chosen probability is (dw - mean) / total.
    float mean = 0.0f, total = 1.0f;
    if (dweights && normalized) {
        total = 0.0f;
        for (u64 j = 0; j < k; j++) {
            total += probability((u64)experts[j]);
            mean += weights[j] * dweights[j];
        }
    }
    auto slope = [&](u64 e) {
        float sum = slopes ? slopes[e] : 0.0f;
        for (u64 j = 0; dweights && j < k; j++)
            if ((u64)experts[j] == e) sum += (dweights[j] - mean) / total;
        return sum;
    };
    float sum = 0.0f;
    for (u64 e = lane; e < count; e += WARP) sum += probability(e) * slope(e);
    sum = warp_reduce_sum(sum);
    for (u64 e = lane; e < count; e += WARP) dlogits[e] = from_f32<T>(probability(e) * (slope(e) - sum));
}

// One block: the loss that balances experts and, with `slopes`, its gradient. `balance` has the slots of each expert,
// then its sum of probabilities, over `layers` layers.
extern "C" __global__ __launch_bounds__(THREADS) void balance_loss(const u32 *starts, u64 capacity,
                                                                  const float *balance, const i32 *labels, u64 rows,
                                                                  u64 count, u64 layers, double *loss,
                                                                  const double *loss_weight,
                                                                  const double *loss_scale, float *slopes) {
    __shared__ double sums[THREADS];
    __shared__ u64 labelled[THREADS];
    // A loss without rows is 0.
    u64 routed = routed_rows(starts, capacity, rows);
    double each = routed ? 1.0 / ((double)layers * (double)routed) : 0.0, sum = 0.0;
    u64 mine = 0;
    for (u64 row = threadIdx.x; row < rows; row += THREADS) mine += labels[row] >= 0;
    for (u64 e = threadIdx.x; e < count; e += THREADS)
        sum += (double)balance[e] * each * ((double)balance[count + e] * each);
    sums[threadIdx.x] = sum;
    labelled[threadIdx.x] = mine;
    __syncthreads();
    for (int half = THREADS / 2; half > 0; half /= 2) {
        if (threadIdx.x < half) {
            sums[threadIdx.x] += sums[threadIdx.x + half];
            labelled[threadIdx.x] += labelled[threadIdx.x + half];
        }
        __syncthreads();
    }
    double factor = (double)labelled[0] * (double)count;
    if (threadIdx.x == 0) *loss += factor * sums[0];
    if (!slopes) return;
    double scale = factor * each * each * *loss_weight * *loss_scale;
    for (u64 e = threadIdx.x; e < count; e += THREADS) {
        slopes[e] = 0.0f;
        slopes[count + e] = (float)((double)balance[e] * scale);
    }
}

#define INSTANTIATE(NAME, T)                                                                                       \
    extern "C" __global__ void route_##NAME(const u32 *starts, u64 capacity, const T *logits, u64 rows, u64 count, \
                                            u64 k, u64 normalized, u64 row_stride, i32 *experts, float *weights,   \
                                            float2 *statistics) {                                                  \
        route(starts, capacity, logits, rows, count, k, normalized, row_stride, experts, weights, statistics);     \
    }                                                                                                              \
    extern "C" __global__ void route_probabilities_##NAME(const u32 *starts, u64 capacity, const T *logits,        \
                                                          const float2 *statistics, u64 rows, u64 count,           \
                                                          u64 row_stride, u64 chunk, float *partials) {            \
        route_probabilities(starts, capacity, logits, statistics, rows, count, row_stride, chunk, partials);       \
    }                                                                                                              \
    extern "C" __global__ void route_backward_##NAME(const u32 *starts, u64 capacity, const T *logits,             \
                                                     const i32 *experts, const float *weights,                     \
                                                     const float *dweights, const float *slopes, u64 rows,         \
                                                     u64 count, u64 k, u64 normalized, u64 row_stride,             \
                                                     T *dlogits) {                                                 \
        route_backward(starts, capacity, logits, experts, weights, dweights, slopes, rows, count, k, normalized,   \
                       row_stride, dlogits);                                                                       \
    }

FOR_EACH_DTYPE(INSTANTIATE)
