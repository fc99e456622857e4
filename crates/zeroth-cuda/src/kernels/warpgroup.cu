// What kernels of Hopper's warpgroups share: mbarriers, registers that move between warpgroups, and the asynchronous
// wgmma with its descriptors of tiles in shared memory.

// An mbarrier in shared memory. A tile is `full` once its copies have landed, and `empty` once every consumer warp has
// released it. Phases count from 0; waiting for phase -1 returns at once.
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

    // The one arrival of a phase that also waits for `bytes` of bulk copies.
    __device__ __forceinline__ void expect_bytes(u32 bytes) const {
        asm volatile("mbarrier.arrive.expect_tx.shared.b64 _, [%0], %1;" ::"r"(at), "r"(bytes) : "memory");
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

// Reallocates registers from producers to consumers, which are one or two warpgroups.
__device__ __forceinline__ void release_registers() { asm volatile("setmaxnreg.dec.sync.aligned.u32 56;"); }

template <int WARPGROUPS> __device__ __forceinline__ void acquire_registers() {
    if constexpr (WARPGROUPS == 1) asm volatile("setmaxnreg.inc.sync.aligned.u32 200;");
    else asm volatile("setmaxnreg.inc.sync.aligned.u32 224;");
}

// A barrier of the consumers alone.
template <int CONSUMERS> __device__ __forceinline__ void sync_consumers() {
    asm volatile("bar.sync 1, %0;" ::"n"(CONSUMERS) : "memory");
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
#define REGISTERS_128                                                                          \
    REGISTERS_64 ", "                                                                          \
    "%64, %65, %66, %67, %68, %69, %70, %71, %72, %73, %74, %75, %76, %77, %78, %79, "         \
    "%80, %81, %82, %83, %84, %85, %86, %87, %88, %89, %90, %91, %92, %93, %94, %95, "         \
    "%96, %97, %98, %99, %100, %101, %102, %103, %104, %105, %106, %107, %108, %109, %110, "   \
    "%111, %112, %113, %114, %115, %116, %117, %118, %119, %120, %121, %122, %123, %124, "     \
    "%125, %126, %127"
#define FOUR(d, i) "+f"(d[i][0]), "+f"(d[i][1]), "+f"(d[i][2]), "+f"(d[i][3])
#define EIGHT(d, i) FOUR(d, i), FOUR(d, i + 1)
#define ALL_32(d) EIGHT(d, 0), EIGHT(d, 2), EIGHT(d, 4), EIGHT(d, 6)
#define HALF_64(d, i) EIGHT(d, i), EIGHT(d, i + 2), EIGHT(d, i + 4), EIGHT(d, i + 6)
#define ALL_64(d) HALF_64(d, 0), HALF_64(d, 8)
#define ALL_128(d) ALL_64(d), HALF_64(d, 16), HALF_64(d, 24)
