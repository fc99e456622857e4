// Tile matmuls by warp-level mma.sync, for all GPUs since Ampere. Every thread copies and computes.

#define PRODUCERS 0

__device__ __forceinline__ void commit_copies() { asm volatile("cp.async.commit_group;" ::: "memory"); }

// Waits for this thread's copies only; a barrier publishes them to the other threads.
__device__ __forceinline__ void wait_for_copies() { asm volatile("cp.async.wait_group 0;" ::: "memory"); }

// sums = A @ B^T: the warp's 16 rows of tile A with the N rows of tile B.
template <typename T, int A_ROWS, int N>
__device__ __forceinline__ void mma_abt(float (&sums)[N / 8][4], u32 a_tile, u32 b_tile) {
    int lane = threadIdx.x % WARP, row = threadIdx.x / WARP * 16 + lane % 16;
#pragma unroll
    for (int i = 0; i < N / 8; i++) sums[i][0] = sums[i][1] = sums[i][2] = sums[i][3] = 0.0f;
#pragma unroll
    for (int i = 0; i < HEAD_DIM / 16; i++) {
        u32 a[4];
        ldmatrix_x4(a, chunk_address(a_tile, A_ROWS, row, 2 * i + lane / 16));
#pragma unroll
        for (int j = 0; j < N / 16; j++) {
            u32 b[4];
            ldmatrix_x4(b, chunk_address(b_tile, N, j * 16 + lane / 16 * 8 + lane % 8, 2 * i + lane / 8 % 2));
            Mma<T>::add(sums[2 * j], a, b[0], b[1]);
            Mma<T>::add(sums[2 * j + 1], a, b[2], b[3]);
        }
    }
}

// acc += A @ B: a register fragment with WIDTH columns of tile B, starting at column `first`.
template <typename T, int N, int WIDTH>
__device__ __forceinline__ void mma_ab(float (&acc)[WIDTH / 8][4], const u32 (&a_fragment)[N / 16][4], u32 b_tile,
                                       int first) {
    int lane = threadIdx.x % WARP;
#pragma unroll
    for (int i = 0; i < N / 16; i++)
#pragma unroll
        for (int j = 0; j < WIDTH / 16; j++) {
            u32 b[4];
            ldmatrix_x4_trans(b, chunk_address(b_tile, N, i * 16 + lane % 16, first / 8 + 2 * j + lane / 16));
            Mma<T>::add(acc[2 * j], a_fragment[i], b[0], b[1]);
            Mma<T>::add(acc[2 * j + 1], a_fragment[i], b[2], b[3]);
        }
}
