// Tile matmuls by Hopper's warpgroup-level wgmma, and the producer/consumer pipeline between copying and computing
// threads.

// Producer threads of a block: they copy tiles to shared memory.
#define PRODUCERS WARPGROUP

// An mbarrier in shared memory. A tile is `full` once the copies of all PRODUCERS have landed, and `empty` once every
// consumer warp has released it. Phases count from 0; waiting for phase -1 returns at once.
struct Barrier {
    u32 at;

    __device__ __forceinline__ void init(int arrivals) const {
        asm volatile("mbarrier.init.shared.b64 [%0], %1;" ::"r"(at), "r"(arrivals) : "memory");
    }

    __device__ __forceinline__ void arrive() const {
        asm volatile("{\n.reg .b64 state;\nmbarrier.arrive.shared.b64 state, [%0];\n}\n" ::"r"(at) : "memory");
    }

    // Arrives once this thread's outstanding copies have landed.
    __device__ __forceinline__ void arrive_with_copies() const {
        asm volatile("cp.async.mbarrier.arrive.noinc.shared.b64 [%0];" ::"r"(at) : "memory");
    }

    __device__ __forceinline__ void wait(int phase) const {
        u32 done = 0;
        while (!done) {
            asm volatile(
                "{\n.reg .pred p;\nmbarrier.try_wait.parity.shared.b64 p, [%1], %2;\nselp.u32 %0, 1, 0, p;\n}\n"
                : "=r"(done)
                : "r"(at), "r"(phase & 1)
                : "memory");
        }
    }

    // Orders the copies before reads by the tensor cores (async proxy).
    __device__ __forceinline__ void wait_for_tile(int phase) const {
        wait(phase);
        asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
    }

    __device__ __forceinline__ void release_tile() const {
        if (threadIdx.x % WARP == 0) arrive();
    }
};

// One stage of the pipeline: a tile in shared memory with its two barriers.
struct PipelineSlot {
    Barrier full, empty;
};

__device__ __forceinline__ PipelineSlot slot_at(u32 barriers, int index) {
    return {{barriers + 16 * index}, {barriers + 16 * index + 8}};
}

// One thread initializes all barriers before any thread uses them.
template <int CONSUMERS>
__device__ __forceinline__ void init_barriers(u32 barriers, int slots) {
    if (threadIdx.x == 0) {
        for (int i = 0; i < slots; i++) {
            slot_at(barriers, i).full.init(PRODUCERS);
            slot_at(barriers, i).empty.init(CONSUMERS / WARP);
        }
    }
    __syncthreads();
}

// Reallocates registers from producers to consumers, which are one or two warpgroups.
__device__ __forceinline__ void release_registers() { asm volatile("setmaxnreg.dec.sync.aligned.u32 56;"); }

template <int WARPGROUPS> __device__ __forceinline__ void acquire_registers() {
    if constexpr (WARPGROUPS == 1) asm volatile("setmaxnreg.inc.sync.aligned.u32 200;");
    else asm volatile("setmaxnreg.inc.sync.aligned.u32 224;");
}

// wgmma is asynchronous: fence, issue, commit, and later wait.
__device__ __forceinline__ void wgmma_fence() { asm volatile("wgmma.fence.sync.aligned;" ::: "memory"); }
__device__ __forceinline__ void wgmma_commit() { asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory"); }

// Waits until at most PENDING committed groups are in flight. `values` is a result of a completed group.
template <int PENDING, int N>
__device__ __forceinline__ void wgmma_wait(float (&values)[N][4]) {
    asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(PENDING) : "memory");
#pragma unroll
    for (int i = 0; i < N; i++)
#pragma unroll
        for (int j = 0; j < 4; j++) asm volatile("" : "+f"(values[i][j])::"memory");
}

// Matrix descriptor with 128-byte swizzle. `panel_stride`: bytes between panels along the dimension that is not
// reduced.
__device__ __forceinline__ u64 smem_descriptor(u32 at, u32 panel_stride) {
    return (u64)((at & 0x3ffffu) >> 4) | (u64)(panel_stride >> 4) << 16 | (u64)(1024 >> 4) << 32 | 1ull << 62;
}

#define REGISTERS_32                                                         \
    "%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, " \
    "%16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31"
#define REGISTERS_64                                                                   \
    "%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, "           \
    "%16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31, " \
    "%32, %33, %34, %35, %36, %37, %38, %39, %40, %41, %42, %43, %44, %45, %46, %47, " \
    "%48, %49, %50, %51, %52, %53, %54, %55, %56, %57, %58, %59, %60, %61, %62, %63"
#define FOUR(d, i) "+f"(d[i][0]), "+f"(d[i][1]), "+f"(d[i][2]), "+f"(d[i][3])
#define EIGHT(d, i) FOUR(d, i), FOUR(d, i + 1)
#define ALL_32(d) EIGHT(d, 0), EIGHT(d, 2), EIGHT(d, 4), EIGHT(d, 6)
#define ALL_64(d) ALL_32(d), EIGHT(d, 8), EIGHT(d, 10), EIGHT(d, 12), EIGHT(d, 14)

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
