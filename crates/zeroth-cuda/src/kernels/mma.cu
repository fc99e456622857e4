// Products of tiles on tensor cores of all cards since Ampere, by warps. All threads copy, and all compute.

#define COPYING 0

__device__ __forceinline__ void end_of_copies() { asm volatile("cp.async.commit_group;" ::: "memory"); }

// All copies of this thread are there; a barrier says so to the other threads.
__device__ __forceinline__ void wait_for_copies() { asm volatile("cp.async.wait_group 0;" ::: "memory"); }

template <typename T> struct Multiply;

#define MULTIPLY(T, TYPE)                                                                                         \
    template <> struct Multiply<T> {                                                                              \
        __device__ __forceinline__ static void add(float (&d)[4], const u32 (&a)[4], u32 b0, u32 b1) {            \
            asm("mma.sync.aligned.m16n8k16.row.col.f32." TYPE "." TYPE                                            \
                ".f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"                            \
                : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])                                                  \
                : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));                                  \
        }                                                                                                         \
    };

MULTIPLY(Bf16, "bf16")
MULTIPLY(F16, "f16")

// Four squares of 8 by 8; a lane names a row of one.
__device__ __forceinline__ void squares(u32 (&found)[4], u32 at) {
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
                 : "=r"(found[0]), "=r"(found[1]), "=r"(found[2]), "=r"(found[3])
                 : "r"(at)
                 : "memory");
}

__device__ __forceinline__ void turned_squares(u32 (&found)[4], u32 at) {
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0, %1, %2, %3}, [%4];"
                 : "=r"(found[0]), "=r"(found[1]), "=r"(found[2]), "=r"(found[3])
                 : "r"(at)
                 : "memory");
}

// dots = the warp's 16 rows of the left tile · the N rows of the right one.
template <typename T, int LEFT_ROWS, int N>
__device__ __forceinline__ void dots(float (&sums)[N / 8][4], u32 left, u32 right) {
    int lane = threadIdx.x % WARP, row = threadIdx.x / WARP * 16 + lane % 16;
#pragma unroll
    for (int i = 0; i < N / 8; i++) sums[i][0] = sums[i][1] = sums[i][2] = sums[i][3] = 0.0f;
#pragma unroll
    for (int i = 0; i < HEAD / 16; i++) {
        u32 a[4];
        squares(a, piece_at(left, LEFT_ROWS, row, 2 * i + lane / 16));
#pragma unroll
        for (int j = 0; j < N / 16; j++) {
            u32 b[4];
            squares(b, piece_at(right, N, j * 16 + lane / 16 * 8 + lane % 8, 2 * i + lane / 8 % 2));
            Multiply<T>::add(sums[2 * j], a, b[0], b[1]);
            Multiply<T>::add(sums[2 * j + 1], a, b[2], b[3]);
        }
    }
}

// totals += left · WIDTH columns of the right tile, from column `first` on.
template <typename T, int N, int WIDTH>
__device__ __forceinline__ void gather(float (&totals)[WIDTH / 8][4], const u32 (&left)[N / 16][4], u32 right, int first) {
    int lane = threadIdx.x % WARP;
#pragma unroll
    for (int i = 0; i < N / 16; i++)
#pragma unroll
        for (int j = 0; j < WIDTH / 16; j++) {
            u32 b[4];
            turned_squares(b, piece_at(right, N, i * 16 + lane % 16, first / 8 + 2 * j + lane / 16));
            Multiply<T>::add(totals[2 * j], left[i], b[0], b[1]);
            Multiply<T>::add(totals[2 * j + 1], left[i], b[2], b[3]);
        }
}
