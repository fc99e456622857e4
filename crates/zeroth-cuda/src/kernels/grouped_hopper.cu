// Grouped matmuls of experts on Hopper's tensor cores: y = x w^T, dx = dy w and dw = dy^T x per expert, in bf16 or fp16
// with sums in f32. Slots are sorted by expert; offsets[e] .. offsets[e + 1] are those of expert e, known here only.
//
// A persistent grid walks over the output tiles of all experts. A producer thread copies the operands of a tile by bulk
// tensor copies, STAGES k-steps ahead and on into the next tile; two consumer warpgroups multiply 64 of the tile's
// ROWS rows each. Every output element is summed by one thread in the order of k, so bits do not depend on the grid.

#define WARPGROUP 128
#define CONSUMERS 256
#define THREADS 384
#define ROWS 128
// k-step, and columns of a panel: 128 bytes.
#define PANEL 64
#define PANEL_BYTES (PANEL * 128)

// A CUtensorMap, opaque.
struct alignas(64) TensorMap {
    u64 words[16];
};

enum Kind { FORWARD, DX, DW };

extern __shared__ unsigned char shared_bytes[];

// Copies a box of a tensor to shared memory; elements outside of the tensor become 0.
__device__ __forceinline__ void copy_box(u32 to, const TensorMap &map, int x, int y, Barrier full) {
    asm volatile("cp.async.bulk.tensor.2d.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1, {%2, %3}], [%4];"
                 ::"r"(to), "l"((u64)&map), "r"(x), "r"(y), "r"(full.at)
                 : "memory");
}

__device__ __forceinline__ void copy_box(u32 to, const TensorMap &map, int x, int y, int z, Barrier full) {
    asm volatile(
        "cp.async.bulk.tensor.3d.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1, {%2, %3, %4}], [%5];"
        ::"r"(to), "l"((u64)&map), "r"(x), "r"(y), "r"(z), "r"(full.at)
        : "memory");
}

template <typename T> struct GroupedWgmma;

#define WGMMA_STEP(N, COUNT, TYPE, A, B, ADD, TRANSPOSED)                                                             \
    asm volatile("{\n.reg .pred p;\nsetp.ne.b32 p, %" ADD ", 0;\n"                                                    \
                 "wgmma.mma_async.sync.aligned.m64n" N "k16.f32." TYPE "." TYPE " {" REGISTERS_##COUNT "}, %" A ", %" \
                 B ", p, 1, 1, " TRANSPOSED ";\n}\n"                                                                  \
                 : ALL_##COUNT(d)                                                                                     \
                 : "l"(a), "l"(b), "r"(add))

#define WGMMA_KINDS(N, COUNT, TYPE, A, B, ADD)                                                       \
    template <Kind KIND>                                                                             \
    __device__ __forceinline__ static void step(float (&d)[COUNT / 4][4], u64 a, u64 b, int add) {   \
        if constexpr (KIND == FORWARD) WGMMA_STEP(N, COUNT, TYPE, A, B, ADD, "0, 0");                \
        if constexpr (KIND == DX) WGMMA_STEP(N, COUNT, TYPE, A, B, ADD, "0, 1");                     \
        if constexpr (KIND == DW) WGMMA_STEP(N, COUNT, TYPE, A, B, ADD, "1, 1");                     \
    }

#define INSTANTIATE_GROUPED_WGMMA(T, TYPE)                      \
    template <> struct GroupedWgmma<T> {                        \
        WGMMA_KINDS("64", 32, TYPE, "32", "33", "34")           \
        WGMMA_KINDS("256", 128, TYPE, "128", "129", "130")      \
    };

INSTANTIATE_GROUPED_WGMMA(Bf16, "bf16")
INSTANTIATE_GROUPED_WGMMA(F16, "f16")

// An output tile. Forward and dx: rows from `first`, `rows` of which are left in the expert. dw: rows from `row` of the
// expert's matrix, a sum over `rows` slots from `first`.
struct Tile {
    int expert, row, column, first, rows;
};

// Tiles in the order in which the grid takes them: rows first, so that tiles with the same weights run together.
template <Kind KIND> struct TileWalk {
    // offsets [experts + 1], and the row tiles before each expert.
    const int *offsets, *tiles_before;
    int experts, row_tiles, column_tiles, columns, expert;

    __device__ __forceinline__ bool find(Tile &tile, int number) {
        int local, row_tile, tiles;
        if constexpr (KIND == DW) {
            tiles = row_tiles;
            expert = number / (row_tiles * column_tiles);
            local = number % (row_tiles * column_tiles);
        } else {
            while (expert < experts && number >= tiles_before[expert + 1] * column_tiles) expert++;
            if (expert < experts) {
                tiles = tiles_before[expert + 1] - tiles_before[expert];
                local = number - tiles_before[expert] * column_tiles;
            }
        }
        if (expert >= experts) return false;
        row_tile = local % tiles;
        tile.column = local / tiles * columns;
        tile.expert = expert;
        tile.row = row_tile * ROWS;
        tile.first = offsets[expert] + (KIND == DW ? 0 : tile.row);
        tile.rows = offsets[expert + 1] - tile.first;
        return true;
    }
};

// Word i of thread q in a group of four goes to word q of thread i. Its own inverse.
__device__ __forceinline__ void transpose_quad(u32 (&words)[4]) {
    bool odd = threadIdx.x & 1, high = threadIdx.x & 2;
    u32 first = __shfl_xor_sync(FULL_MASK, odd ? words[0] : words[1], 1);
    u32 second = __shfl_xor_sync(FULL_MASK, odd ? words[2] : words[3], 1);
    if (odd) words[0] = first, words[2] = second;
    else words[1] = first, words[3] = second;
    first = __shfl_xor_sync(FULL_MASK, high ? words[0] : words[2], 2);
    second = __shfl_xor_sync(FULL_MASK, high ? words[1] : words[3], 2);
    if (high) words[0] = first, words[1] = second;
    else words[2] = first, words[3] = second;
}

// Two 16-bit elements in a word.
template <typename T> struct TwoOf;

#define INSTANTIATE_TWO(T, TYPE)                                                                 \
    template <> struct TwoOf<T> {                                                                \
        __device__ __forceinline__ static u32 pack(float low, float high) {                      \
            u32 pair;                                                                            \
            asm("cvt.rn." TYPE "x2.f32 %0, %1, %2;" : "=r"(pair) : "f"(high), "f"(low));         \
            return pair;                                                                         \
        }                                                                                        \
        __device__ __forceinline__ static u32 times_zero_plus(u32 pair, u32 sum) {               \
            asm("fma.rn." TYPE "x2 %0, %1, %2, %0;" : "+r"(sum) : "r"(pair), "r"(0));            \
            return sum;                                                                          \
        }                                                                                        \
    };

INSTANTIATE_TWO(Bf16, "bf16")
INSTANTIATE_TWO(F16, "f16")

// Stores scale * acc, plus what is there if `add`, to the first `rows` rows and `columns` columns at `to`, the
// warpgroup's corner of the tile; false if a stored value is not finite. Neighbouring threads exchange halves of two
// blocks of 8 columns, so that each accesses 16 bytes. Old values are loaded in batches: a load waits for stores that
// may alias it.
template <int N>
__device__ __forceinline__ bool store(float (&acc)[N / 8][4], float *to, i64 stride, int rows, int columns,
                                      float scale, bool add) {
    constexpr int BATCH = N / 16 < 8 ? N / 16 : 8;
    int lane = threadIdx.x % WARP, row = threadIdx.x % WARPGROUP / WARP * 16 + lane / 4;
    int shift = lane % 2 * 8 + lane % 4 / 2 * 4;
    bool odd = lane % 2;
    // NaN once a value is not finite.
    float poison = 0.0f;
#pragma unroll
    for (int half = 0; half < 2; half++, row += 8) {
        float *line = to + row * stride + shift;
        int end = row < rows ? columns - shift : 0;
#pragma unroll
        for (int first = 0; first < N / 16; first += BATCH) {
            float4 old[BATCH];
#pragma unroll
            for (int i = 0; i < BATCH; i++) {
                int column = 16 * (first + i);
                old[i] = add && column < end ? *(float4 *)(line + column) : make_float4(0.0f, 0.0f, 0.0f, 0.0f);
            }
#pragma unroll
            for (int i = 0; i < BATCH; i++) {
                int column = 16 * (first + i), block = 2 * (first + i);
                float low[2] = {scale * acc[block][2 * half], scale * acc[block][2 * half + 1]};
                float high[2] = {scale * acc[block + 1][2 * half], scale * acc[block + 1][2 * half + 1]};
                float x = __shfl_xor_sync(FULL_MASK, odd ? low[0] : high[0], 1);
                float y = __shfl_xor_sync(FULL_MASK, odd ? low[1] : high[1], 1);
                float4 sum = odd ? make_float4(x, y, high[0], high[1]) : make_float4(low[0], low[1], x, y);
                if (add) {
                    sum.x += old[i].x;
                    sum.y += old[i].y;
                    sum.z += old[i].z;
                    sum.w += old[i].w;
                }
                if (column >= end) continue;
                poison = fmaf(sum.x, 0.0f, fmaf(sum.y, 0.0f, fmaf(sum.z, 0.0f, fmaf(sum.w, 0.0f, poison))));
                *(float4 *)(line + column) = sum;
            }
        }
    }
    return poison == poison;
}

// As above in 16 bits: a thread of four stores 8 columns of every 32.
template <int N, typename D>
__device__ __forceinline__ bool store(float (&acc)[N / 8][4], D *to, i64 stride, int rows, int columns, float scale,
                                      bool add) {
    int lane = threadIdx.x % WARP, row = threadIdx.x % WARPGROUP / WARP * 16 + lane / 4;
    u32 poison = 0;
#pragma unroll
    for (int half = 0; half < 2; half++, row += 8) {
        D *line = to + row * stride + lane % 4 * 8;
        int end = row < rows ? columns - lane % 4 * 8 : 0;
        uint4 old[N / 32];
#pragma unroll
        for (int i = 0; i < N / 32; i++)
            old[i] = add && 32 * i < end ? *(uint4 *)(line + 32 * i) : make_uint4(0, 0, 0, 0);
#pragma unroll
        for (int i = 0; i < N / 32; i++) {
            u32 words[4], olds[4] = {old[i].x, old[i].y, old[i].z, old[i].w};
            if (add) transpose_quad(olds);
#pragma unroll
            for (int j = 0; j < 4; j++) {
                float low = scale * acc[4 * i + j][2 * half], high = scale * acc[4 * i + j][2 * half + 1];
                if (add) {
                    low += to_f32(D{(u16)olds[j]});
                    high += to_f32(D{(u16)(olds[j] >> 16)});
                }
                words[j] = TwoOf<D>::pack(low, high);
            }
            transpose_quad(words);
            if (32 * i >= end) continue;
#pragma unroll
            for (int j = 0; j < 4; j++) poison = TwoOf<D>::times_zero_plus(words[j], poison);
            *(uint4 *)(line + 32 * i) = make_uint4(words[0], words[1], words[2], words[3]);
        }
    }
    // 0 or -0, unless a value is not finite.
    return (poison & 0x7fff7fffu) == 0;
}

template <int N, typename D>
__device__ __forceinline__ void store_zeros(D *to, i64 stride, int rows, int columns) {
    constexpr int CHUNK = 16 / sizeof(D), CHUNKS = N / CHUNK;
    for (int i = threadIdx.x; i < ROWS * CHUNKS; i += CONSUMERS) {
        int row = i / CHUNKS, column = i % CHUNKS * CHUNK;
        if (row < rows && column < columns) *(uint4 *)(to + row * stride + column) = make_uint4(0, 0, 0, 0);
    }
}

template <typename T, typename D, Kind KIND, int N, int STAGES>
__device__ __forceinline__ void grouped(const TensorMap &a_map, const TensorMap &b_map, D *to, i64 to_stride,
                                        const i32 *offsets, int experts, int m, int n, int k, float scale, bool add,
                                        u64 *found_inf) {
    constexpr u32 A_BYTES = 2 * PANEL_BYTES, STAGE = A_BYTES + N / PANEL * PANEL_BYTES;
    u32 tiles = ((u32)__cvta_generic_to_shared(shared_bytes) + 1023u) & ~1023u, barriers = tiles + STAGES * STAGE;
    int *table = (int *)(shared_bytes + (barriers - (u32)__cvta_generic_to_shared(shared_bytes)) + 16 * STAGES);
    auto full = [&](int stage) { return Barrier{barriers + 16 * stage}; };
    auto empty = [&](int stage) { return Barrier{barriers + 16 * stage + 8}; };
    if (threadIdx.x == 0) {
        for (int i = 0; i < STAGES; i++) {
            full(i).init(1);
            empty(i).init(CONSUMERS / WARP);
        }
        // Visible to the copies, too.
        asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
    }
    int *tiles_before = table + experts + 1;
    for (int i = threadIdx.x; i <= experts; i += THREADS) table[i] = offsets[i];
    __syncthreads();
    if (KIND != DW && threadIdx.x < WARP) {
        int sum = 0;
        for (int first = 0; first < experts; first += WARP) {
            int expert = first + threadIdx.x;
            int count = expert < experts ? (table[expert + 1] - table[expert] + ROWS - 1) / ROWS : 0;
#pragma unroll
            for (int step = 1; step < WARP; step *= 2) {
                int other = __shfl_up_sync(FULL_MASK, count, step);
                if (threadIdx.x >= step) count += other;
            }
            if (expert < experts) tiles_before[expert + 1] = sum + count;
            sum += __shfl_sync(FULL_MASK, count, WARP - 1);
        }
        if (threadIdx.x == 0) tiles_before[0] = 0;
    }
    __syncthreads();
    TileWalk<KIND> walk = {table, tiles_before, experts, (m + ROWS - 1) / ROWS, (n + N - 1) / N, N, 0};
    int k_steps = (k + PANEL - 1) / PANEL, stage = 0, phase = 0;
    auto advance = [&] {
        if (++stage == STAGES) stage = 0, phase ^= 1;
    };
    Tile tile;
    if (threadIdx.x >= CONSUMERS) {
        release_registers();
        if (threadIdx.x == CONSUMERS) {
            for (int number = blockIdx.x; walk.find(tile, number); number += gridDim.x) {
                int steps = KIND == DW ? (tile.rows + PANEL - 1) / PANEL : k_steps;
                for (int step = 0; step < steps; step++, advance()) {
                    empty(stage).wait(phase ^ 1);
                    full(stage).expect_bytes(STAGE);
                    u32 a = tiles + stage * STAGE, b = a + A_BYTES;
                    int at = step * PANEL;
#pragma unroll
                    for (int half = 0; half < 2; half++) {
                        int x = KIND == DW ? tile.row + half * PANEL : at;
                        int y = tile.first + (KIND == DW ? at : half * PANEL);
                        copy_box(a + half * PANEL_BYTES, a_map, x, y, full(stage));
                    }
                    if constexpr (KIND == FORWARD) {
                        copy_box(b, b_map, at, tile.column, tile.expert, full(stage));
                    } else {
#pragma unroll
                        for (int i = 0; i < N / PANEL; i++) {
                            u32 panel = b + i * PANEL_BYTES;
                            int x = tile.column + i * PANEL;
                            if constexpr (KIND == DX) copy_box(panel, b_map, x, at, tile.expert, full(stage));
                            else copy_box(panel, b_map, x, tile.first + at, full(stage));
                        }
                    }
                }
            }
        }
    } else {
        acquire_registers<2>();
        int warpgroup = threadIdx.x / WARPGROUP;
        for (int number = blockIdx.x; walk.find(tile, number); number += gridDim.x) {
            int steps = KIND == DW ? (tile.rows + PANEL - 1) / PANEL : k_steps;
            if (KIND == DW && steps == 0) {
                // Nothing to add; otherwise an expert without slots stores zeros.
                D *corner = to + ((i64)tile.expert * m + tile.row) * to_stride + tile.column;
                if (!add) store_zeros<N>(corner, to_stride, m - tile.row, n - tile.column);
                continue;
            }
            float acc[N / 8][4];
            int previous = 0;
            for (int step = 0; step < steps; step++, advance()) {
                full(stage).wait(phase);
                u32 a = tiles + stage * STAGE, b = a + A_BYTES;
                if constexpr (KIND == DW) {
                    // Slots of the next expert, and those past the last one, in the last 16 that are multiplied.
                    int valid = tile.rows - step * PANEL, zeros = (-valid & 15) * 8;
                    if (valid < PANEL && zeros) {
                        for (int i = threadIdx.x; i < zeros * (2 + N / PANEL); i += CONSUMERS) {
                            u32 to = a + i / zeros * PANEL_BYTES + valid * 128 + i % zeros * 16;
                            asm volatile("st.shared.v4.u32 [%0], {%1, %1, %1, %1};" ::"r"(to), "r"(0) : "memory");
                        }
                        asm volatile("fence.proxy.async.shared::cta;\nbar.sync 1, %0;" ::"n"(CONSUMERS) : "memory");
                    }
                }
                // The warpgroup's rows of A: 64 rows of 128 bytes, or a panel of 64 columns.
                u64 a_tile = smem_descriptor(a + warpgroup * PANEL_BYTES, KIND == DW ? PANEL_BYTES : 16);
                u64 b_tile = smem_descriptor(b, KIND == FORWARD ? 16 : PANEL_BYTES);
                constexpr u32 A_STEP = (KIND == DW ? 2048 : 32) >> 4, B_STEP = (KIND == FORWARD ? 32 : 2048) >> 4;
                wgmma_fence();
                auto multiply = [&](int slots) {
#pragma unroll
                    for (int i = 0; i < PANEL / 16; i++)
                        if (i * 16 < slots)
                            GroupedWgmma<T>::template step<KIND>(acc, a_tile + i * A_STEP, b_tile + i * B_STEP,
                                                                 step + i > 0);
                };
                if (KIND == DW && tile.rows - step * PANEL < PANEL) multiply(tile.rows - step * PANEL);
                else multiply(PANEL);
                wgmma_commit();
                // The matmuls of the previous step have completed.
                asm volatile("wgmma.wait_group.sync.aligned 1;" ::: "memory");
                if (step > 0) empty(previous).release_tile();
                previous = stage;
            }
            wgmma_wait<0>(acc);
            empty(previous).release_tile();
            int row = warpgroup * PANEL;
            i64 first = KIND == DW ? (i64)tile.expert * m + tile.row : tile.first;
            int rows = (KIND == DW ? m - tile.row : tile.rows) - row;
            bool finite = store<N>(acc, to + (first + row) * to_stride + tile.column, to_stride, rows, n - tile.column,
                                   scale, add);
            // The race is benign: every writer stores the same value.
            if (found_inf && !finite) *found_inf = 1;
        }
    }
}

#define INSTANTIATE_GROUPED(NAME, D, KIND, N, STAGES)                                                                 \
    extern "C" __global__ void __launch_bounds__(THREADS, 1)                                                          \
        NAME(const __grid_constant__ TensorMap a_map, const __grid_constant__ TensorMap b_map, D *to, u64 to_stride,  \
             const i32 *offsets, u64 experts, u64 m, u64 n, u64 k, float scale, u64 add, u64 *found_inf) {            \
        grouped<DTYPE, D, KIND, N, STAGES>(a_map, b_map, to, to_stride, offsets, experts, m, n, k, scale, add,        \
                                           found_inf);                                                                \
    }

// Wide tiles, and narrow ones for the ranks of low-rank adapters.
INSTANTIATE_GROUPED(grouped_forward_256, DTYPE, FORWARD, 256, 4)
INSTANTIATE_GROUPED(grouped_forward_64, DTYPE, FORWARD, 64, 6)
INSTANTIATE_GROUPED(grouped_dx_256, DTYPE, DX, 256, 4)
INSTANTIATE_GROUPED(grouped_dx_64, DTYPE, DX, 64, 6)
INSTANTIATE_GROUPED(grouped_dw_256, DTYPE, DW, 256, 4)
INSTANTIATE_GROUPED(grouped_dw_64, DTYPE, DW, 64, 6)
INSTANTIATE_GROUPED(grouped_dw_f32_256, float, DW, 256, 4)
INSTANTIATE_GROUPED(grouped_dw_f32_64, float, DW, 64, 6)
