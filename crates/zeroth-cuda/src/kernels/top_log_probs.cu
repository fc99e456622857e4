// The k largest logits of each row and their log-probabilities.

// Bits that order as the values do; -0 equals 0.
__device__ __forceinline__ u32 ordered(float value) {
    u32 bits = __float_as_uint(value + 0.0f);
    return bits & 0x80000000u ? ~bits : bits | 0x80000000u;
}

// Ascending in these is descending in keys, then ascending in ids.
__device__ __forceinline__ u64 candidate(u32 key, u64 id) { return (u64)~key << 32 | id; }

// Candidates that are sorted in shared memory.
#define SORTED_IN_SHARED 2048
#define BINS 256

// Ascending bitonic sort of a power of two of distinct keys by the whole block.
__device__ void bitonic_sort(u64 *keys, u64 count) {
    for (u64 width = 2; width <= count; width *= 2) {
        for (u64 step = width / 2; step > 0; step /= 2) {
            for (u64 i = threadIdx.x; i < count / 2; i += THREADS) {
                u64 low = 2 * i - (i & (step - 1)), high = low + step;
                u64 a = keys[low], b = keys[high];
                bool ascending = (low & width) == 0;
                if ((a > b) == ascending) {
                    keys[low] = b;
                    keys[high] = a;
                }
            }
            __syncthreads();
        }
    }
}

// The k-th largest key of a row, 8 bits at a time, and how many of those that equal it are among the k largest.
__device__ void find_threshold(const DTYPE *row, u64 vocab, u32 k, u32 &threshold, u32 &equal) {
    __shared__ u32 bins[BINS], chosen_bin, above_bin;
    threshold = 0;
    equal = k;
    for (int shift = 24; shift >= 0; shift -= 8) {
        for (int bin = threadIdx.x; bin < BINS; bin += THREADS) bins[bin] = 0;
        __syncthreads();
        for (u64 i = threadIdx.x; i < vocab; i += THREADS) {
            u32 key = ordered(to_f32(row[i]));
            if (shift == 24 || key >> (shift + 8) == threshold >> (shift + 8)) atomicAdd(&bins[key >> shift & 255], 1u);
        }
        __syncthreads();
        if (threadIdx.x == 0) {
            u32 above = 0;
            int bin = BINS - 1;
            while (bin > 0 && above + bins[bin] < equal) above += bins[bin--];
            chosen_bin = bin;
            above_bin = above;
        }
        __syncthreads();
        threshold |= chosen_bin << shift;
        equal -= above_bin;
        __syncthreads();
    }
}

// Stores all keys above the k-th largest, and the first of those that equal it. Tiles of a row come in order, so that these have
// the lowest ids.
__device__ void collect(const DTYPE *row, u64 vocab, u32 k, u64 *keys) {
    __shared__ u32 warp_counts[2][WARPS];
    u32 threshold, equal, counts[2] = {0, 0}, lane = threadIdx.x % WARP, warp = threadIdx.x / WARP;
    find_threshold(row, vocab, k, threshold, equal);
    for (u64 tile = 0; tile < vocab; tile += THREADS) {
        u64 id = tile + threadIdx.x;
        u32 key = id < vocab ? ordered(to_f32(row[id])) : 0;
        bool is[2] = {id < vocab && key > threshold, id < vocab && key == threshold};
        u32 before[2];
        for (int which = 0; which < 2; which++) {
            u32 votes = __ballot_sync(FULL_MASK, is[which]);
            before[which] = __popc(votes & ((1u << lane) - 1));
            if (lane == 0) warp_counts[which][warp] = __popc(votes);
        }
        __syncthreads();
        for (int which = 0; which < 2; which++) {
            u32 at = counts[which] + before[which];
            for (int w = 0; w < WARPS; w++) {
                u32 of_warp = warp_counts[which][w];
                if (w < (int)warp) at += of_warp;
                counts[which] += of_warp;
            }
            if (is[which] && (which == 0 || at < equal)) keys[which == 0 ? at : k - equal + at] = candidate(key, id);
        }
        __syncthreads();
    }
}

// For few: of THREADS maxima, each of a share of the row, k are at least the k-th largest of them, so that no smaller logit is among
// the k largest. Stores the others, in any order; returns how many there are, of which only SORTED_IN_SHARED are stored.
__device__ u32 collect_few(const DTYPE *row, u64 vocab, u64 k, float mine, u64 *keys) {
    __shared__ u32 count;
    keys[threadIdx.x] = candidate(ordered(mine), threadIdx.x);
    if (threadIdx.x == 0) count = 0;
    __syncthreads();
    bitonic_sort(keys, THREADS);
    u32 least = ~(u32)(keys[k - 1] >> 32);
    __syncthreads();
    float vec[VEC];
    for (u64 first = threadIdx.x * VEC; first < vocab; first += SPAN) {
        load_vec(vec, row + first);
#pragma unroll
        for (int i = 0; i < VEC; i++) {
            u32 key = ordered(vec[i]);
            if (first + i >= vocab || key < least) continue;
            u32 at = atomicAdd(&count, 1u);
            if (at < SORTED_IN_SHARED) keys[at] = candidate(key, first + i);
        }
    }
    __syncthreads();
    return count;
}

// One block per row: the `k` largest logits, descending, the lowest id first among equals, and their log-probabilities.
// `candidates` [rows, places] is scratch; `places` is the power of two from k on.
extern "C" __global__ void __launch_bounds__(THREADS, 2)
    top_log_probs(const DTYPE *logits, u64 row_stride, u64 vocab, u64 k, u64 places, float inverse, u64 *candidates,
                  i32 *ids, float *log_probs) {
    __shared__ u64 sorted[SORTED_IN_SHARED];
    const DTYPE *row = logits + (u64)blockIdx.x * row_stride;
    ids += (u64)blockIdx.x * k;
    log_probs += (u64)blockIdx.x * k;
    Denominators<DTYPE, false, true> all;
    float vec[VEC];
    for (u64 first = threadIdx.x * VEC; first < vocab; first += SPAN) {
        load_vec(vec, row + first);
        if (first + VEC > vocab) mask(vec, first, vocab);
        all.add(vec, inverse);
    }
    float mine = all.maximum;
    all.reduce(inverse);
    float log_total = logf(all.kd);
    if (!(fabsf(all.maximum) < INF && fabsf(log_total) < INF)) {
        for (u64 i = threadIdx.x; i < k; i += THREADS) {
            ids[i] = (i32)i;
            log_probs[i] = QUIET_NAN;
        }
        return;
    }
    u64 *keys = places <= SORTED_IN_SHARED ? sorted : candidates + (u64)blockIdx.x * places;
    u64 count = k <= THREADS ? collect_few(row, vocab, k, mine, keys) : SORTED_IN_SHARED + 1;
    if (count > SORTED_IN_SHARED) {
        collect(row, vocab, (u32)k, keys);
        count = k;
    }
    u64 width = 1;
    while (width < count) width *= 2;
    for (u64 i = count + threadIdx.x; i < width; i += THREADS) keys[i] = ~0ull;
    __syncthreads();
    bitonic_sort(keys, width);
    for (u64 i = threadIdx.x; i < k; i += THREADS) {
        u32 id = (u32)keys[i];
        ids[i] = (i32)id;
        log_probs[i] = fmaf(to_f32(row[id]) - all.maximum, inverse, -log_total);
    }
}
