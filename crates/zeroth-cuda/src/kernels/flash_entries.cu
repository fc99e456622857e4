// Entry points of flash attention for the element type DTYPE. Blocks with one consumer warpgroup run two per SM.

#define SHAPE i64 rows, i64 heads, i64 kv_heads, i64 head_dim, i64 window, float scale
#define BOUNDS(GROUPS) __launch_bounds__(GROUPS *WARPGROUP + PRODUCERS, GROUPS == 1 ? 2 : 1)

extern "C" __global__ void BOUNDS(FORWARD_WARPGROUPS)
    flash_forward(const u32 *starts, u64 capacity, const DTYPE *q, const DTYPE *k, const DTYPE *v, DTYPE *y, float *lse,
                  SHAPE) {
    flash(read_starts(starts, capacity), q, k, v, y, lse, Shape{rows, heads, kv_heads, head_dim, window, scale});
}

extern "C" __global__ void BOUNDS(DQ_WARPGROUPS)
    flash_backward_dq(const u32 *starts, u64 capacity, const DTYPE *q, const DTYPE *k, const DTYPE *v, const float *lse,
                      const DTYPE *dy, const float *delta, DTYPE *dq, SHAPE) {
    flash_dq(read_starts(starts, capacity), q, k, v, lse, dy, delta, dq,
             Shape{rows, heads, kv_heads, head_dim, window, scale});
}

extern "C" __global__ void BOUNDS(DKV_WARPGROUPS)
    flash_backward_dkv(const u32 *starts, u64 capacity, const DTYPE *q, const DTYPE *k, const DTYPE *v,
                       const float *lse, const DTYPE *dy, const float *delta, DTYPE *dk, DTYPE *dv, SHAPE) {
    flash_dkv(read_starts(starts, capacity), q, k, v, lse, dy, delta, dk, dv,
              Shape{rows, heads, kv_heads, head_dim, window, scale});
}
