// The functions of attention on the tensor cores, for the type that the host names. Where a block has one computing
// warpgroup, two blocks share a processor.

#define SHAPE i64 rows, i64 heads, i64 kv_heads, i64 head_dim, i64 window, float scale
#define BOUNDS(GROUPS) __launch_bounds__(GROUPS *GROUP + COPYING, GROUPS == 1 ? 2 : 1)

extern "C" __global__ void BOUNDS(FORWARD_GROUPS)
    flash_forward(const u32 *starts, u64 room, const NUMBER *q, const NUMBER *k, const NUMBER *v, NUMBER *y, float *lse,
                  SHAPE) {
    flash(starts_of(starts, room), q, k, v, y, lse, Shape{rows, heads, kv_heads, head_dim, window, scale});
}

extern "C" __global__ void BOUNDS(DQ_GROUPS)
    flash_to_queries(const u32 *starts, u64 room, const NUMBER *q, const NUMBER *k, const NUMBER *v, const float *lse,
                     const NUMBER *dy, const float *delta, NUMBER *dq, SHAPE) {
    flash_dq(starts_of(starts, room), q, k, v, lse, dy, delta, dq,
             Shape{rows, heads, kv_heads, head_dim, window, scale});
}

extern "C" __global__ void BOUNDS(DKV_GROUPS)
    flash_to_keys(const u32 *starts, u64 room, const NUMBER *q, const NUMBER *k, const NUMBER *v, const float *lse,
                  const NUMBER *dy, const float *delta, NUMBER *dk, NUMBER *dv, SHAPE) {
    flash_dkv(starts_of(starts, room), q, k, v, lse, dy, delta, dk, dv,
              Shape{rows, heads, kv_heads, head_dim, window, scale});
}
