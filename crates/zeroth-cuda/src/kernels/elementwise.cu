// Elementwise kernels: activations, RoPE, dropout, casts and reductions over ranks. One thread handles VEC elements.

template <typename F, typename T>
__device__ void activation(const T *x, T *y, u64 count) {
    u64 first = global_thread() * VEC;
    if (first >= count) return;
    bool full = first + VEC <= count && aligned16(x, y);
    float vec[VEC];
    load_bounded(vec, x, first, count, full);
#pragma unroll
    for (int i = 0; i < VEC; i++) vec[i] = F::template value<T>(vec[i]);
    store_bounded(y, first, count, full, vec);
}

template <typename F, typename T>
__device__ void activation_backward(const T *dy, const T *x, T *dx, u64 count) {
    u64 first = global_thread() * VEC;
    if (first >= count) return;
    bool full = first + VEC <= count && aligned16(dy, x, dx);
    float grad[VEC], vec[VEC];
    load_bounded(grad, dy, first, count, full);
    load_bounded(vec, x, first, count, full);
#pragma unroll
    for (int i = 0; i < VEC; i++) {
        float slope;
        F::template value_and_slope<T>(vec[i], slope);
        grad[i] *= slope;
    }
    store_bounded(dx, first, count, full, grad);
}

template <typename T>
__device__ void scale(float factor, const T *x, T *y, u64 count) {
    u64 first = global_thread() * VEC;
    if (first >= count) return;
    bool full = first + VEC <= count && aligned16(x, y);
    float vec[VEC];
    load_bounded(vec, x, first, count, full);
#pragma unroll
    for (int i = 0; i < VEC; i++) vec[i] *= factor;
    store_bounded(y, first, count, full, vec);
}

template <typename F, typename T>
__device__ void gated_activation(const T *gate, const T *up, T *y, u64 count) {
    u64 first = global_thread() * VEC;
    if (first >= count) return;
    bool full = first + VEC <= count && aligned16(gate, up, y);
    float g[VEC], u[VEC];
    load_bounded(g, gate, first, count, full);
    load_bounded(u, up, first, count, full);
#pragma unroll
    for (int i = 0; i < VEC; i++) g[i] = F::template value<T>(g[i]) * u[i];
    store_bounded(y, first, count, full, g);
}

template <typename F, typename T>
__device__ void gated_activation_backward(const T *dy, const T *gate, const T *up, T *dgate, T *dup, u64 count) {
    u64 first = global_thread() * VEC;
    if (first >= count) return;
    bool full = first + VEC <= count && aligned16(dy, gate, up, dgate, dup);
    float d[VEC], g[VEC], u[VEC];
    load_bounded(d, dy, first, count, full);
    load_bounded(g, gate, first, count, full);
    load_bounded(u, up, first, count, full);
#pragma unroll
    for (int i = 0; i < VEC; i++) {
        float slope, value = F::template value_and_slope<T>(g[i], slope);
        g[i] = d[i] * u[i] * slope;
        u[i] = d[i] * value;
    }
    store_bounded(dgate, first, count, full, g);
    store_bounded(dup, first, count, full, u);
}

template <typename T>
__device__ void add(const T *a, const T *b, T *y, u64 count) {
    u64 first = global_thread() * VEC;
    if (first >= count) return;
    bool full = first + VEC <= count && aligned16(a, b, y);
    float total[VEC], other[VEC];
    load_bounded(total, a, first, count, full);
    load_bounded(other, b, first, count, full);
#pragma unroll
    for (int i = 0; i < VEC; i++) total[i] += other[i];
    store_bounded(y, first, count, full, total);
}

// Sets `found_inf`, if given, to 1 where a result is not finite. The race is benign: every writer stores the same
// value.
template <typename A, typename B>
__device__ void convert(const A *from, B *to, u64 count, u64 *found_inf) {
    u64 first = global_thread() * VEC;
    if (first >= count) return;
    bool full = first + VEC <= count && aligned16(from, to), non_finite = false;
    float vec[VEC];
    load_bounded(vec, from, first, count, full);
    store_bounded(to, first, count, full, vec);
    if (!found_inf) return;
#pragma unroll
    for (int i = 0; i < VEC; i++) non_finite |= (__float_as_uint(rounded<B>(vec[i])) & 0x7f800000u) == 0x7f800000u;
    if (non_finite) *found_inf = 1;
}

// Sets `found_inf` to 1 if a value is not finite.
template <typename T>
__device__ void check_finite(const T *values, u64 count, u64 *found_inf) {
    u64 first = global_thread() * VEC;
    if (first >= count) return;
    bool non_finite = false;
    float vec[VEC];
    load_bounded(vec, values, first, count, first + VEC <= count && aligned16(values));
#pragma unroll
    for (int i = 0; i < VEC; i++) non_finite |= (__float_as_uint(vec[i]) & 0x7f800000u) == 0x7f800000u;
    if (non_finite) *found_inf = 1;
}

// The values of the nf4 codes.
__constant__ float nf4_codebook[16] = {
    -1.0f,        -0.6961928f, -0.52507305f, -0.3949175f, -0.28444138f, -0.18477343f, -0.091050036f, 0.0f,
    0.0795803f,   0.1609302f,  0.2461123f,   0.33791524f, 0.44070983f,  0.562617f,    0.72295684f,   1.0f,
};

// Records of 2,048 elements: 1,024 bytes of codes, two a byte with the first in the high half, and 32 scales. A thread
// unpacks the 8 codes of a word. Lanes ask for different codes, which constant memory would answer one at a time.
template <typename T>
__device__ void unpack_nf4(const unsigned char *records, T *to, u64 count) {
    __shared__ float codebook[16];
    if (threadIdx.x < 16) codebook[threadIdx.x] = nf4_codebook[threadIdx.x];
    __syncthreads();
    u64 first = global_thread() * VEC;
    if (first >= count) return;
    const unsigned char *record = records + first / 2048 * 1152;
    unsigned place = first % 2048;
    unsigned codes = *(const unsigned *)(record + place / 2);
    float scale = *(const float *)(record + 1024 + place / 64 * 4), vec[VEC];
#pragma unroll
    for (int i = 0; i < VEC; i++) vec[i] = codebook[codes >> (4 * (i ^ 1)) & 15] * scale;
    store_bounded(to, first, count, first + VEC <= count && aligned16(to), vec);
}

// Sums ranks in rank order, then adds to `to` if `accumulate`.
template <typename T, typename S>
__device__ void sum_ranks(const T *parts, u64 ranks, S *to, u64 count, u64 accumulate) {
    u64 first = global_thread() * VEC;
    if (first >= count || ranks == 0) return;
    bool full = first + VEC <= count && aligned16(parts, to) && (ranks == 1 || count % VEC == 0);
    float total[VEC], other[VEC];
    load_bounded(total, parts, first, count, full);
    for (u64 rank = 1; rank < ranks; rank++) {
        load_bounded(other, parts + rank * count, first, count, full);
#pragma unroll
        for (int i = 0; i < VEC; i++) total[i] += other[i];
    }
    if (accumulate) {
        load_bounded(other, to, first, count, full);
#pragma unroll
        for (int i = 0; i < VEC; i++) total[i] = other[i] + total[i];
    }
    store_bounded(to, first, count, full, total);
}

// A thread rotates one pair of a head, or copies one of the elements that are not rotated; x and y may alias. With
// `vectorized` it handles VEC pairs or copies: both halves of the rotation are multiples of VEC elements and 16-byte
// aligned.
template <typename T>
__device__ void rope(const float *cosines, const float *sines, const T *x, T *y, u64 rows, u64 heads, u64 head_dim,
                     u64 rotated, float sign, u64 vectorized) {
    u64 pairs = rotated / 2, items = head_dim - pairs, i = global_thread();
    if (vectorized) items /= VEC;
    if (i >= rows * heads * items) return;
    // 32-bit division is faster.
    u64 head = i < 1ull << 32 ? (u32)i / (u32)items : i / items, item = i - head * items;
    u64 row = head < 1ull << 32 ? (u32)head / (u32)heads : head / heads;
    if (vectorized) item *= VEC;
    u64 first = head * head_dim + item, second = first + pairs;
    if (vectorized && item >= pairs) {
        ((uint4 *)(y + second))[0] = ((const uint4 *)(x + second))[0];
        if (sizeof(T) == 4) ((uint4 *)(y + second))[1] = ((const uint4 *)(x + second))[1];
    } else if (vectorized) {
        float u[VEC], v[VEC], cosine[VEC], sine[VEC];
        load_vec(u, x + first);
        load_vec(v, x + second);
        load_vec(cosine, cosines + row * pairs + item);
        load_vec(sine, sines + row * pairs + item);
#pragma unroll
        for (int j = 0; j < VEC; j++) {
            float rotated_u = u[j] * cosine[j] - v[j] * (sine[j] * sign);
            v[j] = v[j] * cosine[j] + u[j] * (sine[j] * sign);
            u[j] = rotated_u;
        }
        store_vec(y + first, u);
        store_vec(y + second, v);
    } else if (item >= pairs) {
        y[second] = x[second];
    } else {
        float u = to_f32(x[first]), v = to_f32(x[second]);
        float cosine = cosines[row * pairs + item], sine = sines[row * pairs + item] * sign;
        y[first] = from_f32<T>(u * cosine - v * sine);
        y[second] = from_f32<T>(v * cosine + u * sine);
    }
}

struct RowKey {
    u64 sample;
    u32 position;
    u32 epoch;
};
static_assert(sizeof(RowKey) == 16, "layout shared with the host");

// Vectors of a row that a thread handles: the row's key is a Philox call of its own.
#define DROPOUT_VECS 4

// One Philox call yields the words of four columns. `vectorized`: rows are whole vectors, 16-byte aligned.
template <typename T>
__device__ void dropout(const RowKey *keys, const T *x, T *y, u64 rows, u64 width, u64 threshold, float scale, u64 seed,
                        u64 op, u64 vectorized) {
    u64 row_vecs = (width + VEC - 1) / VEC, row_threads = (row_vecs + DROPOUT_VECS - 1) / DROPOUT_VECS;
    u64 i = global_thread();
    if (i >= rows * row_threads) return;
    // 32-bit division is faster.
    u64 row = i < 1ull << 32 ? (u32)i / (u32)row_threads : i / row_threads;
    RowKey key = keys[row];
    PhiloxBlock of_row = {{key.epoch, (u32)op, (u32)key.sample, (u32)(key.sample >> 32)}};
    of_row = philox(of_row, (u32)seed, (u32)(seed >> 32));
    // Neighbouring threads access neighbouring vectors.
    for (u64 vec = i - row * row_threads; vec < row_vecs; vec += row_threads) {
        u64 first = vec * VEC;
        float values[VEC];
        load_bounded(values, x + row * width, first, width, vectorized);
#pragma unroll
        for (int quad = 0; quad < VEC / 4; quad++) {
            PhiloxBlock of_quad = {{(u32)(first / 4 + quad), key.position, of_row.word[2], of_row.word[3]}};
            of_quad = philox(of_quad, of_row.word[0], of_row.word[1]);
#pragma unroll
            for (int j = 0; j < 4; j++) {
                float &value = values[4 * quad + j];
                value = (u64)of_quad.word[j] < threshold ? 0.0f : value * scale;
            }
        }
        store_bounded(y + row * width, first, width, vectorized, values);
    }
}

#define INSTANTIATE_ACTIVATION(GATED, PLAIN, F, NAME, T)                                                               \
    extern "C" __global__ void PLAIN##_##NAME(const T *x, T *y, u64 count) { activation<F>(x, y, count); }             \
    extern "C" __global__ void PLAIN##_backward_##NAME(const T *dy, const T *x, T *dx, u64 count) {                    \
        activation_backward<F>(dy, x, dx, count);                                                                      \
    }                                                                                                                  \
    extern "C" __global__ void GATED##_##NAME(const T *gate, const T *up, T *y, u64 count) {                           \
        gated_activation<F>(gate, up, y, count);                                                                       \
    }                                                                                                                  \
    extern "C" __global__ void GATED##_backward_##NAME(const T *dy, const T *gate, const T *up, T *dgate, T *dup,      \
                                                       u64 count) {                                                    \
        gated_activation_backward<F>(dy, gate, up, dgate, dup, count);                                                 \
    }

#define INSTANTIATE(NAME, T)                                                                                           \
    INSTANTIATE_ACTIVATION(swiglu, silu, Silu, NAME, T)                                                                \
    INSTANTIATE_ACTIVATION(geglu, gelu, Gelu, NAME, T)                                                                 \
    INSTANTIATE_ACTIVATION(geglu_tanh, gelu_tanh, GeluTanh, NAME, T)                                                   \
    INSTANTIATE_ACTIVATION(reglu, relu, Relu, NAME, T)                                                                 \
    extern "C" __global__ void scale_##NAME(float factor, const T *x, T *y, u64 count) { scale(factor, x, y, count); } \
    extern "C" __global__ void add_##NAME(const T *a, const T *b, T *y, u64 count) { add(a, b, y, count); }            \
    extern "C" __global__ void sum_ranks_##NAME##_f32(const T *parts, u64 ranks, float *to, u64 count,                 \
                                                      u64 accumulate) {                                                \
        sum_ranks(parts, ranks, to, count, accumulate);                                                                \
    }                                                                                                                  \
    extern "C" __global__ void sum_ranks_##NAME##_bf16(const T *parts, u64 ranks, Bf16 *to, u64 count,                 \
                                                       u64 accumulate) {                                               \
        sum_ranks(parts, ranks, to, count, accumulate);                                                                \
    }                                                                                                                  \
    extern "C" __global__ void sum_ranks_##NAME##_f16(const T *parts, u64 ranks, F16 *to, u64 count, u64 accumulate) { \
        sum_ranks(parts, ranks, to, count, accumulate);                                                                \
    }                                                                                                                  \
    extern "C" __global__ void rope_##NAME(const float *cosines, const float *sines, const T *x, T *y, u64 rows,       \
                                           u64 heads, u64 head_dim, u64 rotated, float sign, u64 vectorized) {         \
        rope(cosines, sines, x, y, rows, heads, head_dim, rotated, sign, vectorized);                                  \
    }                                                                                                                  \
    extern "C" __global__ void dropout_##NAME(const RowKey *keys, const T *x, T *y, u64 rows, u64 width,               \
                                              u64 threshold, float scale, u64 seed, u64 op, u64 vectorized) {          \
        dropout(keys, x, y, rows, width, threshold, scale, seed, op, vectorized);                                      \
    }                                                                                                                  \
    extern "C" __global__ void check_finite_##NAME(const T *values, u64 count, u64 *found_inf) {                       \
        check_finite(values, count, found_inf);                                                                        \
    }                                                                                                                  \
    extern "C" __global__ void unpack_nf4_##NAME(const unsigned char *records, T *to, u64 count) {                     \
        unpack_nf4(records, to, count);                                                                                \
    }                                                                                                                  \
    extern "C" __global__ void convert_##NAME##_f32(const T *from, float *to, u64 count, u64 *found_inf) {             \
        convert(from, to, count, found_inf);                                                                           \
    }                                                                                                                  \
    extern "C" __global__ void convert_##NAME##_bf16(const T *from, Bf16 *to, u64 count, u64 *found_inf) {             \
        convert(from, to, count, found_inf);                                                                           \
    }                                                                                                                  \
    extern "C" __global__ void convert_##NAME##_f16(const T *from, F16 *to, u64 count, u64 *found_inf) {               \
        convert(from, to, count, found_inf);                                                                           \
    }

FOR_EACH_DTYPE(INSTANTIATE)
