// Fallback matmul for shapes and strides that cuBLASLt has no algorithm for. Sums run along k in order.

#define TILE 64
#define TILE_K 32
#define THREADS 256

// d [m, n] = scale * a [m, k] @ b [k, n], plus bias[j] or plus d if `accumulate`; rounded once.
template <typename T, typename D>
__device__ void matmul(const T *a, u64 a_row_stride, u64 a_col_stride, const T *b, u64 b_row_stride, u64 b_col_stride,
                       D *d, u64 d_row_stride, const D *bias, u64 m, u64 n, u64 k, float scale, u64 accumulate) {
    __shared__ float a_tile[TILE][TILE_K + 1], b_tile[TILE][TILE_K + 1];
    u64 first_row = (u64)blockIdx.x * TILE, first_column = (u64)blockIdx.y * TILE;
    int row = threadIdx.x / 16 * 4, column = threadIdx.x % 16;
    float sums[4][4] = {};
    for (u64 first = 0; first < k; first += TILE_K) {
        for (int i = threadIdx.x; i < TILE * TILE_K; i += THREADS) {
            // Coalesced: consecutive threads read consecutive elements.
            int tile_row = a_col_stride == 1 ? i / TILE_K : i % TILE, at = a_col_stride == 1 ? i % TILE_K : i / TILE;
            bool valid = first_row + tile_row < m && first + at < k;
            a_tile[tile_row][at] =
                valid ? to_f32(a[(first_row + tile_row) * a_row_stride + (first + at) * a_col_stride]) : 0.0f;
        }
        for (int i = threadIdx.x; i < TILE * TILE_K; i += THREADS) {
            int tile_row = b_row_stride == 1 ? i / TILE_K : i % TILE, at = b_row_stride == 1 ? i % TILE_K : i / TILE;
            bool valid = first_column + tile_row < n && first + at < k;
            b_tile[tile_row][at] =
                valid ? to_f32(b[(first + at) * b_row_stride + (first_column + tile_row) * b_col_stride]) : 0.0f;
        }
        __syncthreads();
#pragma unroll 8
        for (int at = 0; at < TILE_K; at++) {
            float x[4], y[4];
#pragma unroll
            for (int i = 0; i < 4; i++) x[i] = a_tile[row + i][at];
#pragma unroll
            for (int j = 0; j < 4; j++) y[j] = b_tile[column + 16 * j][at];
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
            D *to = d + to_row * d_row_stride + to_column;
            float sum = scale * sums[i][j];
            if (bias) sum += to_f32(bias[to_column]);
            if (accumulate) sum += to_f32(*to);
            *to = from_f32<D>(sum);
        }
}

#define INSTANTIATE_MATMUL(NAME, T, TO, D)                                                                      \
    extern "C" __global__ void matmul_##NAME##_##TO(const T *a, u64 a_row_stride, u64 a_col_stride, const T *b, \
                                                    u64 b_row_stride, u64 b_col_stride, D *d, u64 d_row_stride, \
                                                    const D *bias, u64 m, u64 n, u64 k, float scale,            \
                                                    u64 accumulate) {                                           \
        matmul(a, a_row_stride, a_col_stride, b, b_row_stride, b_col_stride, d, d_row_stride, bias, m, n, k,    \
               scale, accumulate);                                                                              \
    }

INSTANTIATE_MATMUL(f32, float, f32, float)
INSTANTIATE_MATMUL(bf16, Bf16, f32, float)
INSTANTIATE_MATMUL(bf16, Bf16, bf16, Bf16)
INSTANTIATE_MATMUL(f16, F16, f32, float)
INSTANTIATE_MATMUL(f16, F16, f16, F16)

// For autotuning: uniform random values in [-1, 1), and a bitwise comparison of two results.
template <typename T>
__device__ void fill_random(T *to, u64 count, u64 seed) {
    u64 quad = global_thread();
    if (quad * 4 >= count) return;
    PhiloxBlock counter = {{(u32)quad, (u32)(quad >> 32), 0, 0}};
    PhiloxBlock drawn = philox(counter, (u32)seed, 0);
    for (u64 i = 0; i < 4 && quad * 4 + i < count; i++) {
        to[quad * 4 + i] = from_f32<T>((float)(i32)drawn.word[i] * 4.656612873077393e-10f);
    }
}

// Sets `mismatch` to 1 where two words differ. The race is benign: every writer stores the same value.
extern "C" __global__ void compare_words(const u32 *a, const u32 *b, u64 words, u64 *mismatch) {
    u64 i = global_thread();
    if (i < words && a[i] != b[i]) *mismatch = 1;
}

#define INSTANTIATE_RANDOM(NAME, T) \
    extern "C" __global__ void fill_random_##NAME(T *to, u64 count, u64 seed) { fill_random(to, count, seed); }

FOR_EACH_DTYPE(INSTANTIATE_RANDOM)
