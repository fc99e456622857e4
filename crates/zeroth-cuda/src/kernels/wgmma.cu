// Tile matmuls by Hopper's warpgroup-level wgmma, and the producer/consumer pipeline between copying and computing
// threads.

// Producer threads of a block: they copy tiles to shared memory.
#define PRODUCERS WARPGROUP

// Bytes of the mbarriers of a block, before what follows them.
#define BARRIERS 128

// One stage of the pipeline: a tile in shared memory with its two barriers.
struct PipelineSlot {
    Barrier full, empty;
};

__device__ __forceinline__ PipelineSlot slot_at(u32 barriers, int index) {
    return {{barriers + 16 * index}, {barriers + 16 * index + 8}};
}

// One thread initializes all barriers before any thread uses them. A slot is full after so many arrivals.
template <int CONSUMERS>
__device__ __forceinline__ void init_barriers(u32 barriers, int slots, int arrivals = PRODUCERS) {
    if (threadIdx.x == 0) {
        for (int i = 0; i < slots; i++) {
            slot_at(barriers, i).full.init(arrivals);
            slot_at(barriers, i).empty.init(CONSUMERS / WARP);
        }
    }
    __syncthreads();
}

template <typename T> struct Wgmma;

// `mma_abt`: both operands are K-major in shared memory. `mma_ab`: A is in registers, and B is MN-major in shared
// memory.
#define INSTANTIATE_WGMMA(T, TYPE)                                                                      \
    template <> struct Wgmma<T> {                                                                       \
        __device__ __forceinline__ static void mma_abt(float (&d)[8][4], u64 a, u64 b, int add) {       \
            asm volatile("{\n.reg .pred p;\nsetp.ne.b32 p, %34, 0;\n"                                   \
                         "wgmma.mma_async.sync.aligned.m64n64k16.f32." TYPE "." TYPE " {" REGISTERS_32  \
                         "}, %32, %33, p, 1, 1, 0, 0;\n}\n"                                             \
                         : ALL_32(d)                                                                    \
                         : "l"(a), "l"(b), "r"(add));                                                   \
        }                                                                                               \
        __device__ __forceinline__ static void mma_abt(float (&d)[16][4], u64 a, u64 b, int add) {      \
            asm volatile("{\n.reg .pred p;\nsetp.ne.b32 p, %66, 0;\n"                                   \
                         "wgmma.mma_async.sync.aligned.m64n128k16.f32." TYPE "." TYPE " {" REGISTERS_64 \
                         "}, %64, %65, p, 1, 1, 0, 0;\n}\n"                                             \
                         : ALL_64(d)                                                                    \
                         : "l"(a), "l"(b), "r"(add));                                                   \
        }                                                                                               \
        __device__ __forceinline__ static void mma_ab(float (&d)[8][4], const u32 (&a)[4], u64 b) {     \
            asm volatile("{\n.reg .pred p;\nsetp.eq.b32 p, 0, 0;\n"                                     \
                         "wgmma.mma_async.sync.aligned.m64n64k16.f32." TYPE "." TYPE " {" REGISTERS_32  \
                         "}, {%32, %33, %34, %35}, %36, p, 1, 1, 1;\n}\n"                               \
                         : ALL_32(d)                                                                    \
                         : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b));                         \
        }                                                                                               \
        __device__ __forceinline__ static void mma_ab(float (&d)[16][4], const u32 (&a)[4], u64 b) {    \
            asm volatile("{\n.reg .pred p;\nsetp.eq.b32 p, 0, 0;\n"                                     \
                         "wgmma.mma_async.sync.aligned.m64n128k16.f32." TYPE "." TYPE " {" REGISTERS_64 \
                         "}, {%64, %65, %66, %67}, %68, p, 1, 1, 1;\n}\n"                               \
                         : ALL_64(d)                                                                    \
                         : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b));                         \
        }                                                                                               \
    };

INSTANTIATE_WGMMA(Bf16, "bf16")
INSTANTIATE_WGMMA(F16, "f16")

// sums = A @ B^T: the warpgroup's 64 rows of tile A with the N rows of tile B.
template <typename T, int A_ROWS, int N>
__device__ __forceinline__ void mma_abt(float (&sums)[N / 8][4], u32 a_tile, u32 b_tile) {
    u64 a = smem_descriptor(a_tile + threadIdx.x / WARPGROUP * (WARPGROUP_ROWS * 128), 16),
        b = smem_descriptor(b_tile, 16);
#pragma unroll
    for (int i = 0; i < HEAD_DIM / 16; i++) {
        u32 a_offset = i / 4 * A_ROWS * 128 + i % 4 * 32, b_offset = i / 4 * N * 128 + i % 4 * 32;
        Wgmma<T>::mma_abt(sums, a + (a_offset >> 4), b + (b_offset >> 4), i > 0);
    }
}

// acc += A @ B: a register fragment with WIDTH columns of tile B, starting at column `first`.
template <typename T, int N, int WIDTH>
__device__ __forceinline__ void mma_ab(float (&acc)[WIDTH / 8][4], const u32 (&a_fragment)[N / 16][4], u32 b_tile,
                                       int first) {
    constexpr int N_STEP = WIDTH > 128 ? 128 : WIDTH;
#pragma unroll
    for (int column = 0; column < WIDTH; column += N_STEP) {
        float (&part)[N_STEP / 8][4] = *(float (*)[N_STEP / 8][4]) & acc[column / 8];
        u64 b = smem_descriptor(b_tile + (first + column) / 64 * N * 128, N * 128);
#pragma unroll
        for (int i = 0; i < N / 16; i++) Wgmma<T>::mma_ab(part, a_fragment[i], b + (i * 2048 >> 4));
    }
}
