// Element by element: activations, rotations, dropout, casts and sums of what ranks sent. A thread has eight elements.

template <typename T>
__device__ void swiglu(const T *gate, const T *up, T *y, u64 count) {
    u64 first = thread_of_grid() * LOT;
    if (first >= count) return;
    bool whole = first + LOT <= count && in_sixteens(gate, up, y);
    float g[LOT], u[LOT];
    take(g, gate, first, count, whole);
    take(u, up, first, count, whole);
#pragma unroll
    for (int i = 0; i < LOT; i++) g[i] = g[i] * inverse_of<T>(1.0f + exp_of<T>(-g[i])) * u[i];
    put(y, first, count, whole, g);
}

template <typename T>
__device__ void swiglu_backward(const T *dy, const T *gate, const T *up, T *dgate, T *dup, u64 count) {
    u64 first = thread_of_grid() * LOT;
    if (first >= count) return;
    bool whole = first + LOT <= count && in_sixteens(dy, gate, up, dgate, dup);
    float d[LOT], g[LOT], u[LOT];
    take(d, dy, first, count, whole);
    take(g, gate, first, count, whole);
    take(u, up, first, count, whole);
#pragma unroll
    for (int i = 0; i < LOT; i++) {
        float sigmoid = inverse_of<T>(1.0f + exp_of<T>(-g[i])), silu = g[i] * sigmoid;
        g[i] = d[i] * u[i] * (sigmoid + silu * (1.0f - sigmoid));
        u[i] = d[i] * silu;
    }
    put(dgate, first, count, whole, g);
    put(dup, first, count, whole, u);
}

template <typename T>
__device__ void sum(const T *a, const T *b, T *y, u64 count) {
    u64 first = thread_of_grid() * LOT;
    if (first >= count) return;
    bool whole = first + LOT <= count && in_sixteens(a, b, y);
    float one[LOT], other[LOT];
    take(one, a, first, count, whole);
    take(other, b, first, count, whole);
#pragma unroll
    for (int i = 0; i < LOT; i++) one[i] += other[i];
    put(y, first, count, whole, one);
}

// `broken`, where it is given, becomes 1 if a result is not finite. All who write it write the same.
template <typename A, typename B>
__device__ void convert(const A *from, B *to, u64 count, u64 *broken) {
    u64 first = thread_of_grid() * LOT;
    if (first >= count) return;
    bool whole = first + LOT <= count && in_sixteens(from, to), found = false;
    float lot[LOT];
    take(lot, from, first, count, whole);
    put(to, first, count, whole, lot);
    if (!broken) return;
#pragma unroll
    for (int i = 0; i < LOT; i++) found |= (__float_as_uint(rounded<B>(lot[i])) & 0x7f800000u) == 0x7f800000u;
    if (found) *broken = 1;
}

// `broken` becomes 1 if a value is not finite.
template <typename T>
__device__ void look(const T *values, u64 count, u64 *broken) {
    u64 first = thread_of_grid() * LOT;
    if (first >= count) return;
    bool found = false;
    float lot[LOT];
    take(lot, values, first, count, first + LOT <= count && in_sixteens(values));
#pragma unroll
    for (int i = 0; i < LOT; i++) found |= (__float_as_uint(lot[i]) & 0x7f800000u) == 0x7f800000u;
    if (found) *broken = 1;
}

// Ranks are added in their order, then to what is there.
template <typename T, typename S>
__device__ void sum_ranks(const T *parts, u64 ranks, S *to, u64 count, u64 add) {
    u64 first = thread_of_grid() * LOT;
    if (first >= count || ranks == 0) return;
    bool whole = first + LOT <= count && in_sixteens(parts, to) && (ranks == 1 || count % LOT == 0);
    float total[LOT], other[LOT];
    take(total, parts, first, count, whole);
    for (u64 rank = 1; rank < ranks; rank++) {
        take(other, parts + rank * count, first, count, whole);
#pragma unroll
        for (int i = 0; i < LOT; i++) total[i] += other[i];
    }
    if (add) {
        take(other, to, first, count, whole);
#pragma unroll
        for (int i = 0; i < LOT; i++) total[i] = other[i] + total[i];
    }
    put(to, first, count, whole, total);
}

// A thread turns one pair of a head or copies one element behind the rotated ones, so x and y may be one buffer. With
// `lots` it has a lot of pairs or of copies: both sides of the turn are whole lots at multiples of 16 bytes.
template <typename T>
__device__ void rope(const float *cosines, const float *sines, const T *x, T *y, u64 rows, u64 heads,
                     u64 head_dim, u64 rotated, float sign, u64 lots) {
    u64 pairs = rotated / 2, items = head_dim - pairs, i = thread_of_grid();
    if (lots) items /= LOT;
    if (i >= rows * heads * items) return;
    // 32 bits divide faster.
    u64 head = i < 1ull << 32 ? (u32)i / (u32)items : i / items, item = i - head * items;
    u64 row = head < 1ull << 32 ? (u32)head / (u32)heads : head / heads;
    if (lots) item *= LOT;
    u64 first = head * head_dim + item, second = first + pairs;
    if (lots && item >= pairs) {
        ((uint4 *)(y + second))[0] = ((const uint4 *)(x + second))[0];
        if (sizeof(T) == 4) ((uint4 *)(y + second))[1] = ((const uint4 *)(x + second))[1];
    } else if (lots) {
        float u[LOT], v[LOT], cosine[LOT], sine[LOT];
        read_lot(u, x + first);
        read_lot(v, x + second);
        read_lot(cosine, cosines + row * pairs + item);
        read_lot(sine, sines + row * pairs + item);
#pragma unroll
        for (int j = 0; j < LOT; j++) {
            float turned = u[j] * cosine[j] - v[j] * (sine[j] * sign);
            v[j] = v[j] * cosine[j] + u[j] * (sine[j] * sign);
            u[j] = turned;
        }
        write_lot(y + first, u);
        write_lot(y + second, v);
    } else if (item >= pairs) {
        y[second] = x[second];
    } else {
        float u = to_f32(x[first]), v = to_f32(x[second]);
        float cosine = cosines[row * pairs + item], sine = sines[row * pairs + item] * sign;
        y[first] = from_f32<T>(u * cosine - v * sine);
        y[second] = from_f32<T>(v * cosine + u * sine);
    }
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
    extern "C" __global__ void sum_ranks_##NAME##_f32(const T *parts, u64 ranks, float *to, u64 count, u64 add) { \
        sum_ranks(parts, ranks, to, count, add);                                                                  \
    }                                                                                                             \
    extern "C" __global__ void sum_ranks_##NAME##_bf16(const T *parts, u64 ranks, Bf16 *to, u64 count, u64 add) { \
        sum_ranks(parts, ranks, to, count, add);                                                                  \
    }                                                                                                             \
    extern "C" __global__ void sum_ranks_##NAME##_f16(const T *parts, u64 ranks, F16 *to, u64 count, u64 add) {   \
        sum_ranks(parts, ranks, to, count, add);                                                                  \
    }                                                                                                             \
    extern "C" __global__ void rope_##NAME(const float *cosines, const float *sines, const T *x, T *y, u64 rows,  \
                                           u64 heads, u64 head_dim, u64 rotated, float sign, u64 lots) {          \
        rope(cosines, sines, x, y, rows, heads, head_dim, rotated, sign, lots);                                   \
    }                                                                                                             \
    extern "C" __global__ void dropout_##NAME(const RowKey *keys, const T *x, T *y, u64 rows, u64 width,          \
                                              u64 threshold, float scale, u64 seed, u64 op) {                     \
        dropout(keys, x, y, rows, width, threshold, scale, seed, op);                                             \
    }                                                                                                             \
    extern "C" __global__ void look_##NAME(const T *values, u64 count, u64 *broken) {                             \
        look(values, count, broken);                                                                              \
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
