// Reductions over a block, in a fixed order.

// Maximum or sum over a block of so many warps, broadcast to every thread.
template <bool MAX, int WARPS>
__device__ float block_reduce(float value) {
    __shared__ float warp_values[WARPS];
    for (int step = WARP / 2; step > 0; step /= 2) {
        float other = __shfl_xor_sync(FULL_MASK, value, step);
        value = MAX ? fmaxf(value, other) : value + other;
    }
    if (threadIdx.x % WARP == 0) warp_values[threadIdx.x / WARP] = value;
    __syncthreads();
    float total = warp_values[0];
    for (int warp = 1; warp < WARPS; warp++) total = MAX ? fmaxf(total, warp_values[warp]) : total + warp_values[warp];
    __syncthreads();
    return total;
}
