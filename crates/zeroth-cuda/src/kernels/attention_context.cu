// What attention reads besides q, k and v: the sequences of the keys, biases by distance, and dropout of softmax
// weights.

// Identifies a row of q, wherever it is in a micro-batch.
struct RowKey {
    u64 sample;
    u32 position;
    u32 epoch;
};
static_assert(sizeof(RowKey) == 16, "layout shared with the host");

struct Context {
    Starts kv_starts;
    // Biases of every head by distance, from -max_distance to max_distance; null: none.
    const float *bias;
    int max_distance;
    // One per row of q; null: no dropout.
    const RowKey *keys;
    u64 seed;
    u32 op;
    // A weight is dropped where its 16 bits are below the threshold, else multiplied by the scale.
    u32 threshold;
    float dropout_scale;
};

// Parameters of the kernels after their operands. Where GENERAL is 0, only those of the shape are read.
#define SHAPE i64 rows, i64 heads, i64 kv_heads, i64 head_dim, i64 window, float scale
#define CONTEXT                                                                                          \
    const u32 *kv_starts, u64 kv_capacity, i64 kv_rows, u64 causal, const float *bias, i64 max_distance, \
        const RowKey *keys, u64 seed, u64 op, u64 threshold, float dropout_scale
#define READ_SHAPE \
    Shape { rows, heads, kv_heads, head_dim, window, scale, GENERAL ? kv_rows : rows, GENERAL ? causal != 0 : true }
#define READ_CONTEXT                                                                                           \
    Context {                                                                                                  \
        read_starts(GENERAL ? kv_starts : starts, GENERAL ? kv_capacity : capacity), GENERAL ? bias : nullptr, \
            (int)max_distance, GENERAL ? keys : nullptr, seed, (u32)op, (u32)threshold, dropout_scale          \
    }

// Random numbers of one row of softmax weights.
struct DropoutRow {
    u32 key[2], counter[3];
};

__device__ __forceinline__ DropoutRow dropout_row(const Context &context, RowKey key, u32 head) {
    PhiloxBlock row = {{key.epoch, context.op, (u32)key.sample, (u32)(key.sample >> 32)}};
    row = philox(row, (u32)context.seed, (u32)(context.seed >> 32));
    return {{row.word[0], row.word[1]}, {key.position, row.word[2], row.word[3] ^ head}};
}

// The bits of 8 of the 32 keys of a group, the keys 2 * quarter and 2 * quarter + 1 of every 8: word i has those of the
// i-th 8, the even key's in its low half.
__device__ __forceinline__ PhiloxBlock dropout_bits(const DropoutRow &row, u32 group, u32 quarter) {
    return philox({{4 * group + quarter, row.counter[0], row.counter[1], row.counter[2]}}, row.key[0], row.key[1]);
}
