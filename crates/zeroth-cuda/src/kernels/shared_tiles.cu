// Tiles of a head in shared memory.
//
// A tile has rows of HEAD_DIM 2-byte elements, in panels of 64 columns. A panel row is 128 bytes; its eight 16-byte
// chunks are swizzled by XOR with the row number, so that column accesses hit all banks (the 128-byte swizzle of
// wgmma.cu; mma.cu reads it by ldmatrix). In both cases a warp owns 16 rows of a result, and a thread the same fragment
// of them: of every 8 columns, two in row lane / 4 and two in row lane / 4 + 8.

#define CHUNKS (HEAD_DIM / 8)
#define WARPGROUP 128
#define WARPGROUP_ROWS 64
#define LOG2_E 1.44269504088896340736f

extern __shared__ unsigned char shared_bytes[];

// Swizzled panels need 1,024-byte alignment; the host requests the extra bytes.
__device__ __forceinline__ u32 shared_begin() { return ((u32)__cvta_generic_to_shared(shared_bytes) + 1023u) & ~1023u; }

__host__ __device__ constexpr u32 tile_bytes(int rows) { return rows * HEAD_DIM * 2; }

__device__ __forceinline__ u32 chunk_address(u32 tile, int rows, int row, int chunk) {
    return tile + (chunk / 8) * rows * 128 + row * 128 + ((chunk ^ row) & 7) * 16;
}

// Writes zeros instead of reading if not `valid`.
__device__ __forceinline__ void cp_async_16(u32 to, const void *from, bool valid) {
    int bytes = valid ? 16 : 0;
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(to), "l"(from), "r"(bytes) : "memory");
}

__device__ __forceinline__ void cp_async_4(u32 to, const float *from, bool valid) {
    int bytes = valid ? 4 : 0;
    asm volatile("cp.async.ca.shared.global [%0], [%1], 4, %2;" ::"r"(to), "l"(from), "r"(bytes) : "memory");
}

// Copies the share of `thread` (of THREADS) of a tile. Rows from `valid` on and columns past head_dim become 0.
template <int ROWS, int THREADS, typename T>
__device__ __forceinline__ void copy_tile(u32 tile, const T *from, int row_stride, int valid, int head_dim,
                                          int thread) {
    static_assert(ROWS * CHUNKS % THREADS == 0 && THREADS % CHUNKS == 0,
                  "every thread copies the same number of chunks, all in one column");
    constexpr int ROW_STEP = THREADS / CHUNKS;
    int row = thread / CHUNKS, chunk = thread % CHUNKS;
    if (chunk * 8 >= head_dim) valid = 0;
    from += (i64)row * row_stride + chunk * 8;
#pragma unroll
    for (int i = 0; i < ROWS; i += ROW_STEP) {
        cp_async_16(chunk_address(tile, ROWS, row + i, chunk), from, row + i < valid);
        from += (i64)ROW_STEP * row_stride;
    }
}

template <typename T> struct Pair;

template <> struct Pair<Bf16> {
    __device__ __forceinline__ static u32 pack(float low, float high) {
        u32 pair;
        asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(pair) : "f"(high), "f"(low));
        return pair;
    }
};

template <> struct Pair<F16> {
    __device__ __forceinline__ static u32 pack(float low, float high) {
        u32 pair;
        asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(pair) : "f"(high), "f"(low));
        return pair;
    }
};

// Converts a 16-row accumulator to the A operand of the next matmul.
template <typename T, int N>
__device__ __forceinline__ void to_a_fragment(u32 (&fragment)[N / 16][4], const float (&values)[N / 8][4]) {
#pragma unroll
    for (int i = 0; i < N / 16; i++) {
        fragment[i][0] = Pair<T>::pack(values[2 * i][0], values[2 * i][1]);
        fragment[i][1] = Pair<T>::pack(values[2 * i][2], values[2 * i][3]);
        fragment[i][2] = Pair<T>::pack(values[2 * i + 1][0], values[2 * i + 1][1]);
        fragment[i][3] = Pair<T>::pack(values[2 * i + 1][2], values[2 * i + 1][3]);
    }
}

__device__ __forceinline__ float2 load_shared_f32x2(u32 at) {
    float2 pair;
    asm volatile("ld.shared.v2.f32 {%0, %1}, [%2];" : "=f"(pair.x), "=f"(pair.y) : "r"(at) : "memory");
    return pair;
}

__device__ __forceinline__ float fast_exp2(float value) {
    float result;
    asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(result) : "f"(value));
    return result;
}
