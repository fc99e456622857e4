// A product of matrices of any shape and stride, for what the library has no form for. Sums run along k in order.

#define TILE 64
#define DEPTH 32
#define THREADS 256

// d[i, j] = sum over k of a[i · a_row + k · a_column] · b[k · b_row + j · b_column], then + bias[j] or + what d holds;
// rounded once.
template <typename T, typename D>
__device__ void product(const T *a, u64 a_row, u64 a_column, const T *b, u64 b_row, u64 b_column, D *d, u64 d_pitch,
                        const D *bias, u64 m, u64 n, u64 depth, u64 add) {
    __shared__ float left[TILE][DEPTH + 1], right[TILE][DEPTH + 1];
    u64 first_row = (u64)blockIdx.x * TILE, first_column = (u64)blockIdx.y * TILE;
    int row = threadIdx.x / 16 * 4, column = threadIdx.x % 16;
    float sums[4][4] = {};
    for (u64 first = 0; first < depth; first += DEPTH) {
        for (int i = threadIdx.x; i < TILE * DEPTH; i += THREADS) {
            // Threads next to each other read what lies next to each other.
            int line = a_column == 1 ? i / DEPTH : i % TILE, at = a_column == 1 ? i % DEPTH : i / TILE;
            bool there = first_row + line < m && first + at < depth;
            left[line][at] = there ? to_f32(a[(first_row + line) * a_row + (first + at) * a_column]) : 0.0f;
        }
        for (int i = threadIdx.x; i < TILE * DEPTH; i += THREADS) {
            int line = b_row == 1 ? i / DEPTH : i % TILE, at = b_row == 1 ? i % DEPTH : i / TILE;
            bool there = first_column + line < n && first + at < depth;
            right[line][at] = there ? to_f32(b[(first + at) * b_row + (first_column + line) * b_column]) : 0.0f;
        }
        __syncthreads();
#pragma unroll 8
        for (int at = 0; at < DEPTH; at++) {
            float x[4], y[4];
#pragma unroll
            for (int i = 0; i < 4; i++) x[i] = left[row + i][at];
#pragma unroll
            for (int j = 0; j < 4; j++) y[j] = right[column + 16 * j][at];
#pragma unroll
            for (int i = 0; i < 4; i++)
#pragma unroll
                for (int j = 0; j < 4; j++) sums[i][j] = fmaf(x[i], y[j], sums[i][j]);
        }
        __syncthreads();
    }
#pragma unroll
    for (int i = 0; i < 4; i++)
#pragma unroll
        for (int j = 0; j < 4; j++) {
            u64 to_row = first_row + row + i, to_column = first_column + column + 16 * j;
            if (to_row >= m || to_column >= n) continue;
            D *to = d + to_row * d_pitch + to_column;
            float sum = sums[i][j];
            if (bias) sum += to_f32(bias[to_column]);
            if (add) sum += to_f32(*to);
            *to = from_f32<D>(sum);
        }
}

#define PRODUCT_TO(NAME, T, TO, D)                                                                                \
    extern "C" __global__ void product_##NAME##_##TO(const T *a, u64 a_row, u64 a_column, const T *b, u64 b_row,  \
                                                     u64 b_column, D *d, u64 d_pitch, const D *bias, u64 m,       \
                                                     u64 n, u64 depth, u64 add) {                                 \
        product(a, a_row, a_column, b, b_row, b_column, d, d_pitch, bias, m, n, depth, add);                      \
    }

PRODUCT_TO(f32, float, f32, float)
PRODUCT_TO(bf16, Bf16, f32, float)
PRODUCT_TO(bf16, Bf16, bf16, Bf16)
PRODUCT_TO(f16, F16, f32, float)
PRODUCT_TO(f16, F16, f16, F16)

// What the library's algorithms are compared with: numbers between -1 and 1, and whether two results are the same.
template <typename T>
__device__ void noise(T *to, u64 count, u64 seed) {
    u64 quad = thread_of_grid();
    if (quad * 4 >= count) return;
    Words counter = {{(u32)quad, (u32)(quad >> 32), 0, 0}};
    Words drawn = philox(counter, (u32)seed, 0);
    for (u64 i = 0; i < 4 && quad * 4 + i < count; i++) {
        to[quad * 4 + i] = from_f32<T>((float)(i32)drawn.at[i] * 4.656612873077393e-10f);
    }
}

// `found` becomes 1 where two words are not the same. All who write it write the same.
extern "C" __global__ void differ(const u32 *a, const u32 *b, u64 words, u64 *found) {
    u64 i = thread_of_grid();
    if (i < words && a[i] != b[i]) *found = 1;
}

#define NOISE(NAME, T)                                                                                            \
    extern "C" __global__ void noise_##NAME(T *to, u64 count, u64 seed) { noise(to, count, seed); }

EACH_TYPE(NOISE)
