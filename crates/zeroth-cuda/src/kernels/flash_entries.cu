// Entry points of flash attention for the element type DTYPE. Blocks with one consumer warpgroup run two per SM.

#define BOUNDS(GROUPS) __launch_bounds__(GROUPS *WARPGROUP + PRODUCERS, GROUPS == 1 ? 2 : 1)

extern "C" __global__ void BOUNDS(FORWARD_WARPGROUPS)
    flash_forward(const u32 *starts, u64 capacity, const DTYPE *q, const DTYPE *k, const DTYPE *v, DTYPE *y, float *lse,
                  SHAPE, CONTEXT) {
    flash(read_starts(starts, capacity), q, k, v, y, lse, READ_SHAPE, READ_CONTEXT);
}

extern "C" __global__ void BOUNDS(DQ_WARPGROUPS)
    flash_backward_dq(const u32 *starts, u64 capacity, const DTYPE *q, const DTYPE *k, const DTYPE *v, const float *lse,
                      const DTYPE *dy, const float *delta, DTYPE *dq, SHAPE, CONTEXT, float *partials) {
    flash_dq(read_starts(starts, capacity), q, k, v, lse, dy, delta, dq, partials, READ_SHAPE, READ_CONTEXT);
}

extern "C" __global__ void BOUNDS(DKV_WARPGROUPS)
    flash_backward_dkv(const u32 *starts, u64 capacity, const DTYPE *q, const DTYPE *k, const DTYPE *v,
                       const float *lse, const DTYPE *dy, const float *delta, DTYPE *dk, DTYPE *dv, SHAPE, CONTEXT) {
    flash_dkv(read_starts(starts, capacity), q, k, v, lse, dy, delta, dk, dv, READ_SHAPE, READ_CONTEXT);
}
