// Tiles of a head in shared memory.
//
// A tile has rows of HEAD elements of 2 bytes, in panels of 64 columns. A row of a panel is 128 bytes, and its eight pieces
// of 16 bytes are exchanged by the row's number, so that one piece of eight rows lies in all banks. Hopper's instructions
// know this layout (wgmma.cu); for the others `ldmatrix` reads it (mma.cu). Both give a warp 16 rows of a result, and a
// thread the same elements of them: of each 8 columns, two in row lane / 4 and two in row lane / 4 + 8.

#define PIECES (HEAD / 8)
#define GROUP 128
#define GROUP_ROWS 64
#define LOG2_E 1.44269504088896340736f

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

// Thread `me` of THREADS copies its share of a tile. Rows that are not `there` and columns behind the head become 0.
template <int ROWS, int THREADS, typename T>
__device__ __forceinline__ void copy_tile(u32 tile, const T *from, int pitch, int there, int head_dim, int me) {
    static_assert(ROWS * PIECES % THREADS == 0 && THREADS % PIECES == 0, "all threads copy as many pieces of one column");
    constexpr int STEP = THREADS / PIECES;
    int row = me / PIECES, piece = me % PIECES;
    if (piece * 8 >= head_dim) there = 0;
    from += (i64)row * pitch + piece * 8;
#pragma unroll
    for (int i = 0; i < ROWS; i += STEP) {
        copy_piece(piece_at(tile, ROWS, row + i, piece), from, row + i < there);
        from += (i64)STEP * pitch;
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
