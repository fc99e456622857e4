// Tiles of a head in shared memory, and products of tiles on the tensor cores.
//
// A tile has rows of HEAD elements of 2 bytes, in panels of 64 columns. A row of a panel is 128 bytes, and its eight pieces
// of 16 bytes are exchanged by the row's number, so that one piece of eight rows lies in all banks. Hopper's instructions
// know this layout; for the others `ldmatrix` reads it. Both give a warp 16 rows of a result, and a thread the same
// elements of them: of each 8 columns, two in row lane / 4 and two in row lane / 4 + 8.

#define PIECES (HEAD / 8)
#define GROUP 128
#define GROUP_ROWS 64
#define LOG2_E 1.44269504088896340736f

#if defined(__CUDA_ARCH_FEAT_SM90_ALL) && !defined(PORTABLE)
#define HOPPER 1
#else
#define HOPPER 0
#endif

extern __shared__ unsigned char shared_bytes[];

// Panels must begin at multiples of 1,024 bytes; the host asks for that many more.
__device__ __forceinline__ u32 shared_begin() {
    return ((u32)__cvta_generic_to_shared(shared_bytes) + 1023u) & ~1023u;
}

__host__ __device__ constexpr u32 tile_bytes(int rows) { return rows * HEAD * 2; }

__device__ __forceinline__ u32 piece_at(u32 tile, int rows, int row, int piece) {
    return tile + (piece / 8) * rows * 128 + row * 128 + ((piece ^ row) & 7) * 16;
}

// What is not `there` becomes 0 and is not read.
__device__ __forceinline__ void copy_piece(u32 to, const void *from, bool there) {
    int bytes = there ? 16 : 0;
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(to), "l"(from), "r"(bytes) : "memory");
}

__device__ __forceinline__ void copy_word(u32 to, const float *from, bool there) {
    int bytes = there ? 4 : 0;
    asm volatile("cp.async.ca.shared.global [%0], [%1], 4, %2;" ::"r"(to), "l"(from), "r"(bytes) : "memory");
}

__device__ __forceinline__ void end_of_copies() { asm volatile("cp.async.commit_group;" ::: "memory"); }

// All copies of this thread are there and may be read by the tensor cores; a barrier says so to the other threads.
__device__ __forceinline__ void wait_for_copies() {
    asm volatile("cp.async.wait_group 0;" ::: "memory");
#if HOPPER
    asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
#endif
}

// Rows that are not `there` and columns behind the head become 0.
template <int ROWS, int THREADS, typename T>
__device__ __forceinline__ void copy_tile(u32 tile, const T *from, int pitch, int there, int head_dim) {
#pragma unroll
    for (int i = 0; i < ROWS * PIECES; i += THREADS) {
        int row = (i + (int)threadIdx.x) / PIECES, piece = (i + (int)threadIdx.x) % PIECES;
        bool inside = row < there && piece * 8 < head_dim;
        copy_piece(piece_at(tile, ROWS, row, piece), from + (inside ? (i64)row * pitch + piece * 8 : 0), inside);
    }
}

template <typename T> struct Pair;

template <> struct Pair<Bf16> {
    __device__ __forceinline__ static u32 of(float low, float high) {
        u32 pair;
        asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(pair) : "f"(high), "f"(low));
        return pair;
    }
};

template <> struct Pair<F16> {
    __device__ __forceinline__ static u32 of(float low, float high) {
        u32 pair;
        asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(pair) : "f"(high), "f"(low));
        return pair;
    }
};

// A result of 16 rows as the left side of the next product.
template <typename T, int N>
__device__ __forceinline__ void as_left(u32 (&left)[N / 16][4], const float (&values)[N / 8][4]) {
#pragma unroll
    for (int i = 0; i < N / 16; i++) {
        left[i][0] = Pair<T>::of(values[2 * i][0], values[2 * i][1]);
        left[i][1] = Pair<T>::of(values[2 * i][2], values[2 * i][3]);
        left[i][2] = Pair<T>::of(values[2 * i + 1][0], values[2 * i + 1][1]);
        left[i][3] = Pair<T>::of(values[2 * i + 1][2], values[2 * i + 1][3]);
    }
}

__device__ __forceinline__ float2 two_shared(u32 at) {
    float2 found;
    asm volatile("ld.shared.v2.f32 {%0, %1}, [%2];" : "=f"(found.x), "=f"(found.y) : "r"(at) : "memory");
    return found;
}

__device__ __forceinline__ float exp2_of(float value) {
    float result;
    asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(result) : "f"(value));
    return result;
}

#if HOPPER

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

#else

__device__ __forceinline__ void begin_products() {}
__device__ __forceinline__ void end_products() {}
template <int OPEN, int N> __device__ __forceinline__ void wait_for_products(float (&)[N][4]) {}

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

#endif
