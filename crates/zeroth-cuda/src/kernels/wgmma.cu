// Products of tiles on Hopper's tensor cores, by warpgroups, and how threads that copy hand tiles to threads that compute.

// Threads of a block that copy.
#define COPYING GROUP

// Where threads that copy and threads that compute meet. A tile is `full` when the copies of all COPYING threads are there,
// and `empty` when every computing warp is done with it. A wait names the turn it waits for, counted from 0; turn -1 is
// over from the beginning.
struct Meeting {
    u32 at;

    __device__ __forceinline__ void begin(int arrivals) const {
        asm volatile("mbarrier.init.shared.b64 [%0], %1;" ::"r"(at), "r"(arrivals) : "memory");
    }

    __device__ __forceinline__ void arrive() const {
        asm volatile("{\n.reg .b64 state;\nmbarrier.arrive.shared.b64 state, [%0];\n}\n" ::"r"(at) : "memory");
    }

    // As soon as this thread's copies so far are there.
    __device__ __forceinline__ void arrive_with_copies() const {
        asm volatile("cp.async.mbarrier.arrive.noinc.shared.b64 [%0];" ::"r"(at) : "memory");
    }

    __device__ __forceinline__ void wait(int turn) const {
        u32 done = 0;
        while (!done) {
            asm volatile("{\n.reg .pred p;\nmbarrier.try_wait.parity.shared.b64 p, [%1], %2;\nselp.u32 %0, 1, 0, p;\n}\n"
                         : "=r"(done)
                         : "r"(at), "r"(turn & 1)
                         : "memory");
        }
    }

    // What was copied may be read by the tensor cores.
    __device__ __forceinline__ void wait_for_tile(int turn) const {
        wait(turn);
        asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
    }

    __device__ __forceinline__ void leave_tile() const {
        if (threadIdx.x % WARP == 0) arrive();
    }
};

// A tile in shared memory, or two in turn, with its meetings.
struct Slot {
    Meeting full, empty;
};

__device__ __forceinline__ Slot slot_at(u32 meetings, int number) {
    return {{meetings + 16 * number}, {meetings + 16 * number + 8}};
}

// One thread makes all meetings before anybody comes to one.
template <int COMPUTING>
__device__ __forceinline__ void begin_meetings(u32 meetings, int slots) {
    if (threadIdx.x == 0) {
        for (int i = 0; i < slots; i++) {
            slot_at(meetings, i).full.begin(COPYING);
            slot_at(meetings, i).empty.begin(COMPUTING / WARP);
        }
    }
    __syncthreads();
}

// Registers move from the threads that copy to those that compute, of which there are one or two warpgroups.
__device__ __forceinline__ void few_registers() { asm volatile("setmaxnreg.dec.sync.aligned.u32 56;"); }

template <int GROUPS> __device__ __forceinline__ void many_registers() {
    if constexpr (GROUPS == 1) asm volatile("setmaxnreg.inc.sync.aligned.u32 200;");
    else asm volatile("setmaxnreg.inc.sync.aligned.u32 224;");
}

// The products of a warpgroup run beside its other work: `begin`, products, `end`, and later `wait`.
__device__ __forceinline__ void begin_products() { asm volatile("wgmma.fence.sync.aligned;" ::: "memory"); }
__device__ __forceinline__ void end_products() { asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory"); }

// Until all but the last `OPEN` groups of products are done, of which `values` are a result.
template <int OPEN, int N>
__device__ __forceinline__ void wait_for_products(float (&values)[N][4]) {
    asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(OPEN) : "memory");
#pragma unroll
    for (int i = 0; i < N; i++)
#pragma unroll
        for (int j = 0; j < 4; j++) asm volatile("" : "+f"(values[i][j])::"memory");
}

// Panels of 128-byte rows, exchanged pieces; `apart`: bytes from a panel to the next where columns are not summed over.
__device__ __forceinline__ u64 described(u32 at, u32 apart) {
    return (u64)((at & 0x3ffffu) >> 4) | (u64)(apart >> 4) << 16 | (u64)(1024 >> 4) << 32 | 1ull << 62;
}

#define REGISTERS_32 \
    "%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, " \
    "%16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31"
#define REGISTERS_64 \
    "%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, " \
    "%16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31, " \
    "%32, %33, %34, %35, %36, %37, %38, %39, %40, %41, %42, %43, %44, %45, %46, %47, " \
    "%48, %49, %50, %51, %52, %53, %54, %55, %56, %57, %58, %59, %60, %61, %62, %63"
#define FOUR(d, i) "+f"(d[i][0]), "+f"(d[i][1]), "+f"(d[i][2]), "+f"(d[i][3])
#define EIGHT(d, i) FOUR(d, i), FOUR(d, i + 1)
#define ALL_32(d) EIGHT(d, 0), EIGHT(d, 2), EIGHT(d, 4), EIGHT(d, 6)
#define ALL_64(d) ALL_32(d), EIGHT(d, 8), EIGHT(d, 10), EIGHT(d, 12), EIGHT(d, 14)

template <typename T> struct Multiply;

// `dots`: both sides are rows in shared memory. `gather`: the left side is in registers, and the right side's rows are
// summed over.
#define MULTIPLY(T, TYPE)                                                                                         \
    template <> struct Multiply<T> {                                                                              \
        __device__ __forceinline__ static void dots(float (&d)[8][4], u64 a, u64 b, int add) {                    \
            asm volatile("{\n.reg .pred p;\nsetp.ne.b32 p, %34, 0;\n"                                             \
                         "wgmma.mma_async.sync.aligned.m64n64k16.f32." TYPE "." TYPE " {" REGISTERS_32            \
                         "}, %32, %33, p, 1, 1, 0, 0;\n}\n"                                                       \
                         : ALL_32(d)                                                                              \
                         : "l"(a), "l"(b), "r"(add));                                                             \
        }                                                                                                         \
        __device__ __forceinline__ static void dots(float (&d)[16][4], u64 a, u64 b, int add) {                   \
            asm volatile("{\n.reg .pred p;\nsetp.ne.b32 p, %66, 0;\n"                                             \
                         "wgmma.mma_async.sync.aligned.m64n128k16.f32." TYPE "." TYPE " {" REGISTERS_64           \
                         "}, %64, %65, p, 1, 1, 0, 0;\n}\n"                                                       \
                         : ALL_64(d)                                                                              \
                         : "l"(a), "l"(b), "r"(add));                                                             \
        }                                                                                                         \
        __device__ __forceinline__ static void gather(float (&d)[8][4], const u32 (&a)[4], u64 b) {               \
            asm volatile("{\n.reg .pred p;\nsetp.eq.b32 p, 0, 0;\n"                                               \
                         "wgmma.mma_async.sync.aligned.m64n64k16.f32." TYPE "." TYPE " {" REGISTERS_32            \
                         "}, {%32, %33, %34, %35}, %36, p, 1, 1, 1;\n}\n"                                         \
                         : ALL_32(d)                                                                              \
                         : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b));                                   \
        }                                                                                                         \
        __device__ __forceinline__ static void gather(float (&d)[16][4], const u32 (&a)[4], u64 b) {              \
            asm volatile("{\n.reg .pred p;\nsetp.eq.b32 p, 0, 0;\n"                                               \
                         "wgmma.mma_async.sync.aligned.m64n128k16.f32." TYPE "." TYPE " {" REGISTERS_64           \
                         "}, {%64, %65, %66, %67}, %68, p, 1, 1, 1;\n}\n"                                         \
                         : ALL_64(d)                                                                              \
                         : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b));                                   \
        }                                                                                                         \
    };

MULTIPLY(Bf16, "bf16")
MULTIPLY(F16, "f16")

// dots = the warpgroup's 64 rows of the left tile · the N rows of the right one.
template <typename T, int LEFT_ROWS, int N>
__device__ __forceinline__ void dots(float (&sums)[N / 8][4], u32 left, u32 right) {
    u64 a = described(left + threadIdx.x / GROUP * (GROUP_ROWS * 128), 16), b = described(right, 16);
#pragma unroll
    for (int i = 0; i < HEAD / 16; i++) {
        u32 of_left = i / 4 * LEFT_ROWS * 128 + i % 4 * 32, of_right = i / 4 * N * 128 + i % 4 * 32;
        Multiply<T>::dots(sums, a + (of_left >> 4), b + (of_right >> 4), i > 0);
    }
}

// totals += left · WIDTH columns of the right tile, from column `first` on.
template <typename T, int N, int WIDTH>
__device__ __forceinline__ void gather(float (&totals)[WIDTH / 8][4], const u32 (&left)[N / 16][4], u32 right, int first) {
    constexpr int STEP = WIDTH > 128 ? 128 : WIDTH;
#pragma unroll
    for (int column = 0; column < WIDTH; column += STEP) {
        float(&part)[STEP / 8][4] = *(float(*)[STEP / 8][4]) & totals[column / 8];
        u64 b = described(right + (first + column) / 64 * N * 128, N * 128);
#pragma unroll
        for (int i = 0; i < N / 16; i++) Multiply<T>::gather(part, left[i], b + (i * 2048 >> 4));
    }
}
