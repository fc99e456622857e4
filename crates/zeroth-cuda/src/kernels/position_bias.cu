// Biases of relative positions: the table by distance of a learned table by bucket, and its gradient.

struct Buckets {
    u64 buckets, max_distance, bidirectional;
};

// The bucket of a key's position less the query's, in f64 as on the host: a quotient within 1e-6 of a whole number is
// that number, so that the last bits of a logarithm do not matter.
__device__ u64 bucket_of(const Buckets &dims, i64 distance) {
    u64 buckets = dims.bidirectional ? dims.buckets / 2 : dims.buckets, exact = buckets / 2;
    u64 first = dims.bidirectional && distance > 0 ? buckets : 0;
    u64 far = distance < 0 ? (u64)-distance : dims.bidirectional ? (u64)distance : 0;
    if (far < exact) return first + far;
    double scale = log((double)dims.max_distance / (double)exact);
    double quotient = log((double)far / (double)exact) / scale * (double)(buckets - exact);
    double nearest = round(quotient), whole = fabs(quotient - nearest) < 1e-6 ? nearest : floor(quotient);
    // One that is negative or NaN counts as 0.
    u64 beyond = whole >= (double)buckets ? buckets : whole > 0.0 ? (u64)whole : 0;
    return first + (exact + beyond < buckets ? exact + beyond : buckets - 1);
}

// One thread per entry of table [heads, distances], of w [buckets, heads].
template <typename T>
__device__ void position_bias(const T *w, float *table, Buckets dims, u64 heads) {
    u64 distances = 2 * dims.max_distance + 1, i = global_thread();
    if (i >= heads * distances) return;
    u64 bucket = bucket_of(dims, (i64)(i % distances) - (i64)dims.max_distance);
    table[i] = to_f32(w[bucket * heads + i / distances]);
}

// One block per bucket, one thread per head: adds the entries of a bucket in the order of their distances.
extern "C" __global__ void position_bias_backward(const float *dtable, float *dw, u64 buckets, u64 max_distance,
                                                  u64 bidirectional, u64 heads) {
    Buckets dims = {buckets, max_distance, bidirectional};
    u64 distances = 2 * max_distance + 1, head = (u64)blockIdx.y * blockDim.x + threadIdx.x;
    float sum = head < heads ? dw[blockIdx.x * heads + head] : 0.0f;
    for (u64 i = 0; i < distances; i++) {
        // The same of all threads.
        if (bucket_of(dims, (i64)i - (i64)max_distance) != blockIdx.x || head >= heads) continue;
        sum += dtable[head * distances + i];
    }
    if (head < heads) dw[blockIdx.x * heads + head] = sum;
}

#define INSTANTIATE(NAME, T)                                                                                 \
    extern "C" __global__ void position_bias_##NAME(const T *w, float *table, u64 buckets, u64 max_distance, \
                                                    u64 bidirectional, u64 heads) {                          \
        position_bias(w, table, Buckets{buckets, max_distance, bidirectional}, heads);                       \
    }

FOR_EACH_DTYPE(INSTANTIATE)
