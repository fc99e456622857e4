// Grouped matmuls of experts for any size and stride: 16-bit types on the tensor cores of any GPU since Ampere, f32 on
// CUDA cores. y = x w^T, dx = dy w and dw = dy^T x per expert. Slots are sorted by expert; offsets[e] .. offsets[e + 1]
// are those of expert e, known here only. The grid has a block for every tile that there can be.
//
// Every output element is summed by one thread in the order of k, so bits do not depend on the grid.

#define THREADS 256
#define TILE_K 32

// Rows and columns of a tile (`TILES` in grouped.rs).
template <typename T> struct TileSize {
    static constexpr int SIDE = sizeof(T) == 4 ? 64 : 128;
};

enum Kind { FORWARD, DX, DW };

// A matrix operand [lines, count] of a tile: element (line, at) stands at line * stride + at. Forward and dx: a line is
// a slot, or a row of w. `lines` and `count` bound what is read.
template <typename T> struct Operand {
    const T *at;
    u64 stride;
    int lines, count;
};

// An output tile of at most SIDE rows of one expert.
struct GroupedTile {
    int expert, first, rows;
};

// The row tile number `number` of all experts; false if there is none.
template <int SIDE> __device__ bool find_tile(GroupedTile &tile, const i32 *offsets, int experts, int number) {
    __shared__ int found[3];
    if (threadIdx.x == 0) found[0] = -1;
    __syncthreads();
    if (threadIdx.x < WARP) {
        int before = 0;
        for (int first = 0; first < experts && before <= number; first += WARP) {
            int expert = first + threadIdx.x;
            int begin = expert < experts ? offsets[expert] : 0, end = expert < experts ? offsets[expert + 1] : 0;
            int count = (end - begin + SIDE - 1) / SIDE, sum = count;
#pragma unroll
            for (int step = 1; step < WARP; step *= 2) {
                int other = __shfl_up_sync(FULL_MASK, sum, step);
                if (threadIdx.x >= step) sum += other;
            }
            int local = number - (before + sum - count);
            if (local >= 0 && local < count) {
                found[0] = expert;
                found[1] = begin + local * SIDE;
                found[2] = end - found[1];
            }
            before += __shfl_sync(FULL_MASK, sum, WARP - 1);
        }
    }
    __syncthreads();
    tile.expert = found[0];
    tile.first = found[1];
    tile.rows = found[2] < SIDE ? found[2] : SIDE;
    return tile.expert >= 0;
}

__device__ __forceinline__ bool is_finite(float value) {
    return (__float_as_uint(value) & 0x7f800000u) != 0x7f800000u;
}

// Stores scale * sum + old; false if the result is not finite.
template <typename D> __device__ __forceinline__ bool store(D *to, float sum, float scale, float old) {
    D value = from_f32<D>(scale * sum + old);
    *to = value;
    return is_finite(to_f32(value));
}

// Two neighbours in memory: one access where `paired`, else only those inside.
template <typename D> struct alignas(2 * sizeof(D)) Two {
    D first, second;
};

// f32: sums[i][j] of row threadIdx.x / 16 * 4 + i and column threadIdx.x % 16 + 16 * j. A_K: the lines of A run along
// m, so that they are contiguous in k; else they run along k.
template <bool A_K, bool B_K, typename T>
__device__ __forceinline__ void multiply_plain(float (&sums)[4][4], const Operand<T> &a, const Operand<T> &b, int k) {
    constexpr int SIDE = TileSize<float>::SIDE;
    __shared__ float a_tile[SIDE][TILE_K + 1], b_tile[SIDE][TILE_K + 1];
    auto copy = [&](float (&tile)[SIDE][TILE_K + 1], const Operand<T> &from, bool along_k, int first) {
        for (int i = threadIdx.x; i < SIDE * TILE_K; i += THREADS) {
            // Coalesced: consecutive threads read consecutive elements.
            int row = along_k ? i / TILE_K : i % SIDE, at = along_k ? i % TILE_K : i / SIDE;
            int line = along_k ? row : first + at, element = along_k ? first + at : row;
            bool valid = line < from.lines && element < from.count;
            tile[row][at] = valid ? to_f32(from.at[line * from.stride + element]) : 0.0f;
        }
    };
    int row = threadIdx.x / 16 * 4, column = threadIdx.x % 16;
    for (int first = 0; first < k; first += TILE_K) {
        copy(a_tile, a, A_K, first);
        copy(b_tile, b, B_K, first);
        __syncthreads();
#pragma unroll 8
        for (int at = 0; at < TILE_K; at++)
#pragma unroll
            for (int i = 0; i < 4; i++)
#pragma unroll
                for (int j = 0; j < 4; j++)
                    sums[i][j] = fmaf(a_tile[row + i][at], b_tile[column + 16 * j][at], sums[i][j]);
        __syncthreads();
    }
}

// A tile of 16-bit elements in shared memory, rows padded against bank conflicts: [SIDE][TILE_K] where lines are
// contiguous in k, else [TILE_K][SIDE]. Elements outside of the operand are 0.
template <typename T, bool ALONG_K> struct SharedTile {
    static constexpr int SIDE = TileSize<T>::SIDE, WIDTH = ALONG_K ? TILE_K : SIDE, ROW = WIDTH + 8;
    static constexpr int CHUNKS = WIDTH / 8, COPIES = SIDE * TILE_K / 8 / THREADS;
    u16 elements[ALONG_K ? SIDE : TILE_K][ROW];

    // 8 elements per thread and copy; 16-byte loads where `vectorized`.
    static __device__ __forceinline__ void load(uint4 (&held)[COPIES], const Operand<T> &from, int first,
                                                bool vectorized) {
#pragma unroll
        for (int i = 0; i < COPIES; i++) {
            int chunk = threadIdx.x + i * THREADS, line = chunk / CHUNKS, at = chunk % CHUNKS * 8;
            if (ALONG_K) at += first;
            else line += first;
            const T *source = from.at + line * from.stride + at;
            bool valid = line < from.lines;
            if (vectorized) {
                held[i] = valid && at < from.count ? *(const uint4 *)source : make_uint4(0, 0, 0, 0);
            } else {
                u32 words[4];
#pragma unroll
                for (int j = 0; j < 4; j++) {
                    u32 low = valid && at + 2 * j < from.count ? source[2 * j].bits : 0;
                    u32 high = valid && at + 2 * j + 1 < from.count ? source[2 * j + 1].bits : 0;
                    words[j] = low | high << 16;
                }
                held[i] = make_uint4(words[0], words[1], words[2], words[3]);
            }
        }
    }

    __device__ __forceinline__ void store(const uint4 (&held)[COPIES]) {
#pragma unroll
        for (int i = 0; i < COPIES; i++) {
            int chunk = threadIdx.x + i * THREADS;
            *(uint4 *)&elements[chunk / CHUNKS][chunk % CHUNKS * 8] = held[i];
        }
    }

    // The A fragment of 16 rows from `row` and 16 steps from `at`.
    __device__ __forceinline__ void a_fragment(u32 (&fragment)[4], int row, int at) const {
        int lane = threadIdx.x % WARP;
        if constexpr (ALONG_K) {
            ldmatrix_x4(fragment, (u32)__cvta_generic_to_shared(&elements[row + lane % 16][at + lane / 16 * 8]));
        } else {
            const u16 *from = &elements[at + lane % 8 + lane / 16 * 8][row + lane / 8 % 2 * 8];
            ldmatrix_x4_trans(fragment, (u32)__cvta_generic_to_shared(from));
        }
    }

    // The B fragments of 16 columns from `column` and 16 steps from `at`.
    __device__ __forceinline__ void b_fragments(u32 (&fragments)[4], int column, int at) const {
        int lane = threadIdx.x % WARP;
        if constexpr (ALONG_K) {
            const u16 *from = &elements[column + lane / 16 * 8 + lane % 8][at + lane / 8 % 2 * 8];
            ldmatrix_x4(fragments, (u32)__cvta_generic_to_shared(from));
        } else {
            const u16 *from = &elements[at + lane % 16][column + lane / 16 * 8];
            ldmatrix_x4_trans(fragments, (u32)__cvta_generic_to_shared(from));
        }
    }
};

// 16-bit: a warp sums 64 rows and 32 columns of the tile. The next step's elements are loaded during the current one.
template <bool A_K, bool B_K, typename T>
__device__ __forceinline__ void multiply_mma(float (&sums)[4][4][4], const Operand<T> &a, const Operand<T> &b, int k,
                                             bool a_vectorized, bool b_vectorized) {
    using A = SharedTile<T, A_K>;
    using B = SharedTile<T, B_K>;
    __shared__ alignas(16) unsigned char a_bytes[sizeof(A)], b_bytes[sizeof(B)];
    A &a_tile = *(A *)a_bytes;
    B &b_tile = *(B *)b_bytes;
    int row = threadIdx.x / WARP / 4 * 64, column = threadIdx.x / WARP % 4 * 32;
    uint4 a_held[A::COPIES], b_held[B::COPIES];
    A::load(a_held, a, 0, a_vectorized);
    B::load(b_held, b, 0, b_vectorized);
    for (int first = 0; first < k; first += TILE_K) {
        __syncthreads();
        a_tile.store(a_held);
        b_tile.store(b_held);
        __syncthreads();
        if (first + TILE_K < k) {
            A::load(a_held, a, first + TILE_K, a_vectorized);
            B::load(b_held, b, first + TILE_K, b_vectorized);
        }
#pragma unroll
        for (int at = 0; at < TILE_K; at += 16) {
            u32 b_parts[2][4];
#pragma unroll
            for (int j = 0; j < 2; j++) b_tile.b_fragments(b_parts[j], column + 16 * j, at);
#pragma unroll
            for (int i = 0; i < 4; i++) {
                u32 a_part[4];
                a_tile.a_fragment(a_part, row + 16 * i, at);
#pragma unroll
                for (int j = 0; j < 4; j++)
                    Mma<T>::add(sums[i][j], a_part, b_parts[j / 2][j % 2 * 2], b_parts[j / 2][j % 2 * 2 + 1]);
            }
        }
    }
}

// `a` and `b` are x and w, dy and w, or dy and x; `to` has rows of `to_stride` elements. m: rows of dw per expert; n:
// columns of `to`; k: length of the sums of forward and dx.
template <typename T, typename D, Kind KIND>
__device__ __forceinline__ void grouped(const T *a, u64 a_stride, const T *b, u64 b_stride, D *to, u64 to_stride,
                                        const i32 *offsets, int experts, int m, int n, int k, float scale, bool add,
                                        u64 *found_inf, u64 a_vectorized, u64 b_vectorized) {
    constexpr int SIDE = TileSize<T>::SIDE;
    constexpr bool A_K = KIND != DW, B_K = KIND == FORWARD;
    GroupedTile tile;
    int column = blockIdx.y * SIDE, rows;
    Operand<T> a_part, b_part;
    if constexpr (KIND == DW) {
        int row_tiles = (m + SIDE - 1) / SIDE, row = blockIdx.x % row_tiles * SIDE;
        tile.expert = blockIdx.x / row_tiles;
        tile.first = offsets[tile.expert];
        k = offsets[tile.expert + 1] - tile.first;
        // Nothing to add; otherwise an expert without slots stores zeros.
        if (add && k == 0) return;
        a_part = {a + tile.first * a_stride + row, a_stride, k, m - row};
        b_part = {b + tile.first * b_stride + column, b_stride, k, n - column};
        to += ((u64)tile.expert * m + row) * to_stride;
        rows = m - row;
    } else {
        if (!find_tile<SIDE>(tile, offsets, experts, blockIdx.x)) return;
        a_part = {a + tile.first * a_stride, a_stride, tile.rows, k};
        if constexpr (KIND == FORWARD) b_part = {b + ((u64)tile.expert * n + column) * b_stride, b_stride, n - column, k};
        else b_part = {b + (u64)tile.expert * k * b_stride + column, b_stride, k, n - column};
        to += tile.first * to_stride;
        rows = tile.rows;
    }
    to += column;
    bool finite = true;
    if constexpr (sizeof(T) == 4) {
        float sums[4][4] = {};
        multiply_plain<A_K, B_K>(sums, a_part, b_part, k);
        int row = threadIdx.x / 16 * 4, at = threadIdx.x % 16;
#pragma unroll
        for (int i = 0; i < 4; i++)
#pragma unroll
            for (int j = 0; j < 4; j++)
                if (row + i < rows && column + at + 16 * j < n) {
                    D *element = to + (row + i) * to_stride + at + 16 * j;
                    finite &= store(element, sums[i][j], scale, add ? to_f32(*element) : 0.0f);
                }
    } else {
        float sums[4][4][4] = {};
        multiply_mma<A_K, B_K>(sums, a_part, b_part, k, a_vectorized, b_vectorized);
        int lane = threadIdx.x % WARP, warp = threadIdx.x / WARP;
        int row = warp / 4 * 64 + lane / 4, at = warp % 4 * 32 + lane % 4 * 2;
        bool paired = (u64)to % sizeof(Two<D>) == 0 && to_stride % 2 == 0 && n % 2 == 0;
#pragma unroll
        for (int i = 0; i < 4; i++) {
            // Loads in batches: a load waits for stores that may alias it.
            Two<D> old[4][2];
#pragma unroll
            for (int j = 0; j < 4; j++)
#pragma unroll
                for (int half = 0; half < 2; half++) {
                    int to_row = row + 16 * i + 8 * half, to_column = at + 8 * j;
                    const D *from = to + to_row * to_stride + to_column;
                    bool first = add && to_row < rows && column + to_column < n;
                    bool second = first && column + to_column + 1 < n;
                    old[j][half] = {from_f32<D>(0.0f), from_f32<D>(0.0f)};
                    if (paired && first) old[j][half] = *(const Two<D> *)from;
                    if (!paired && first) old[j][half].first = from[0];
                    if (!paired && second) old[j][half].second = from[1];
                }
#pragma unroll
            for (int j = 0; j < 4; j++)
#pragma unroll
                for (int half = 0; half < 2; half++) {
                    int to_row = row + 16 * i + 8 * half, to_column = at + 8 * j;
                    if (to_row >= rows || column + to_column >= n) continue;
                    D *there = to + to_row * to_stride + to_column;
                    Two<D> sum = {from_f32<D>(scale * sums[i][j][2 * half] + to_f32(old[j][half].first)),
                                  from_f32<D>(scale * sums[i][j][2 * half + 1] + to_f32(old[j][half].second))};
                    bool second = column + to_column + 1 < n;
                    if (paired) *(Two<D> *)there = sum;
                    else there[0] = sum.first;
                    if (!paired && second) there[1] = sum.second;
                    finite &= is_finite(to_f32(sum.first)) && (!second || is_finite(to_f32(sum.second)));
                }
        }
    }
    // The race is benign: every writer stores the same value.
    if (found_inf && !finite) *found_inf = 1;
}

#define INSTANTIATE_GROUPED(NAME, D, KIND)                                                                             \
    extern "C" __global__ void __launch_bounds__(THREADS)                                                              \
        NAME(const DTYPE *a, u64 a_stride, const DTYPE *b, u64 b_stride, D *to, u64 to_stride, const i32 *offsets,     \
             u64 experts, u64 m, u64 n, u64 k, float scale, u64 add, u64 *found_inf, u64 a_vectorized,                 \
             u64 b_vectorized) {                                                                                       \
        grouped<DTYPE, D, KIND>(a, a_stride, b, b_stride, to, to_stride, offsets, experts, m, n, k, scale, add,        \
                                found_inf, a_vectorized, b_vectorized);                                                \
    }

INSTANTIATE_GROUPED(grouped_forward, DTYPE, FORWARD)
INSTANTIATE_GROUPED(grouped_dx, DTYPE, DX)
INSTANTIATE_GROUPED(grouped_dw, DTYPE, DW)
INSTANTIATE_GROUPED(grouped_dw_f32, float, DW)
