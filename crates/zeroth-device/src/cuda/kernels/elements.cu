// Element by element: activations, rotations, dropout, casts and sums of what ranks sent.

template <typename T>
__device__ void swiglu(const T *gate, const T *up, T *y, u64 count) {
    u64 i = thread_of_grid();
    if (i >= count) return;
    float g = to_f32(gate[i]);
    y[i] = from_f32<T>(g * (1.0f / (1.0f + expf(-g))) * to_f32(up[i]));
}

template <typename T>
__device__ void swiglu_backward(const T *dy, const T *gate, const T *up, T *dgate, T *dup, u64 count) {
    u64 i = thread_of_grid();
    if (i >= count) return;
    float d = to_f32(dy[i]), g = to_f32(gate[i]), u = to_f32(up[i]);
    float sigmoid = 1.0f / (1.0f + expf(-g));
    float silu = g * sigmoid;
    dgate[i] = from_f32<T>(d * u * (sigmoid + silu * (1.0f - sigmoid)));
    dup[i] = from_f32<T>(d * silu);
}

template <typename T>
__device__ void sum(const T *a, const T *b, T *y, u64 count) {
    u64 i = thread_of_grid();
    if (i < count) y[i] = from_f32<T>(to_f32(a[i]) + to_f32(b[i]));
}

// `broken`, where it is given, becomes 1 if a result is not finite. All who write it write the same.
template <typename A, typename B>
__device__ void convert(const A *from, B *to, u64 count, u64 *broken) {
    u64 i = thread_of_grid();
    if (i >= count) return;
    B stored = from_f32<B>(to_f32(from[i]));
    to[i] = stored;
    if (broken && (__float_as_uint(to_f32(stored)) & 0x7f800000u) == 0x7f800000u) *broken = 1;
}

// Ranks are added in their order, then to what is there.
template <typename T>
__device__ void sum_ranks(const T *parts, u64 ranks, float *to, u64 count, u64 add) {
    u64 i = thread_of_grid();
    if (i >= count || ranks == 0) return;
    float total = to_f32(parts[i]);
    for (u64 rank = 1; rank < ranks; rank++) total += to_f32(parts[rank * count + i]);
    to[i] = add ? to[i] + total : total;
}

// A thread turns one pair of a head or copies one element behind the rotated ones, so x and y may be one buffer.
template <typename T>
__device__ void rope(const float *cosines, const float *sines, const T *x, T *y, u64 rows, u64 heads,
                     u64 head_dim, u64 rotated, float sign) {
    u64 pairs = rotated / 2, items = head_dim - pairs, i = thread_of_grid();
    if (i >= rows * heads * items) return;
    u64 item = i % items, head = i / items, row = head / heads;
    u64 first = head * head_dim + item;
    if (item >= pairs) {
        y[first + pairs] = x[first + pairs];
        return;
    }
    u64 second = first + pairs;
    float u = to_f32(x[first]), v = to_f32(x[second]);
    float cosine = cosines[row * pairs + item], sine = sines[row * pairs + item] * sign;
    y[first] = from_f32<T>(u * cosine - v * sine);
    y[second] = from_f32<T>(v * cosine + u * sine);
}

struct RowKey { u64 sample; u32 position; u32 epoch; };
static_assert(sizeof(RowKey) == 16, "layout of the host");

// A thread has four columns of a row: one call gives four words.
template <typename T>
__device__ void dropout(const RowKey *keys, const T *x, T *y, u64 rows, u64 width, u64 threshold, float scale,
                        u64 seed, u64 op) {
    u64 quads = (width + 3) / 4, i = thread_of_grid();
    if (i >= rows * quads) return;
    u64 row = i / quads, quad = i % quads;
    RowKey key = keys[row];
    Words of_row = {{key.epoch, (u32)op, (u32)key.sample, (u32)(key.sample >> 32)}};
    of_row = philox(of_row, (u32)seed, (u32)(seed >> 32));
    Words of_quad = {{(u32)quad, key.position, of_row.at[2], of_row.at[3]}};
    of_quad = philox(of_quad, of_row.at[0], of_row.at[1]);
    for (u64 column = quad * 4; column < width && column < quad * 4 + 4; column++) {
        bool dropped = (u64)of_quad.at[column % 4] < threshold;
        u64 at = row * width + column;
        y[at] = from_f32<T>(dropped ? 0.0f : to_f32(x[at]) * scale);
    }
}

#define ELEMENTS(NAME, T)                                                                                         \
    extern "C" __global__ void swiglu_##NAME(const T *gate, const T *up, T *y, u64 count) {                       \
        swiglu(gate, up, y, count);                                                                               \
    }                                                                                                             \
    extern "C" __global__ void swiglu_backward_##NAME(const T *dy, const T *gate, const T *up, T *dgate, T *dup,  \
                                                      u64 count) {                                                \
        swiglu_backward(dy, gate, up, dgate, dup, count);                                                         \
    }                                                                                                             \
    extern "C" __global__ void sum_##NAME(const T *a, const T *b, T *y, u64 count) { sum(a, b, y, count); }       \
    extern "C" __global__ void sum_ranks_##NAME(const T *parts, u64 ranks, float *to, u64 count, u64 add) {       \
        sum_ranks(parts, ranks, to, count, add);                                                                  \
    }                                                                                                             \
    extern "C" __global__ void rope_##NAME(const float *cosines, const float *sines, const T *x, T *y, u64 rows,  \
                                           u64 heads, u64 head_dim, u64 rotated, float sign) {                    \
        rope(cosines, sines, x, y, rows, heads, head_dim, rotated, sign);                                         \
    }                                                                                                             \
    extern "C" __global__ void dropout_##NAME(const RowKey *keys, const T *x, T *y, u64 rows, u64 width,          \
                                              u64 threshold, float scale, u64 seed, u64 op) {                     \
        dropout(keys, x, y, rows, width, threshold, scale, seed, op);                                             \
    }                                                                                                             \
    extern "C" __global__ void convert_##NAME##_f32(const T *from, float *to, u64 count, u64 *broken) {           \
        convert(from, to, count, broken);                                                                         \
    }                                                                                                             \
    extern "C" __global__ void convert_##NAME##_bf16(const T *from, Bf16 *to, u64 count, u64 *broken) {           \
        convert(from, to, count, broken);                                                                         \
    }                                                                                                             \
    extern "C" __global__ void convert_##NAME##_f16(const T *from, F16 *to, u64 count, u64 *broken) {             \
        convert(from, to, count, broken);                                                                         \
    }

EACH_TYPE(ELEMENTS)
