// Prepended to every program: element types, vectorized loads and stores, and reductions in a fixed order. It includes
// no header, so that NVRTC alone can compile it. Compiled with --fmad=false: a multiply and an add fuse only where the
// source calls fmaf.

typedef unsigned short u16;
typedef unsigned int u32;
typedef unsigned long long u64;
typedef int i32;
typedef long long i64;

static_assert(sizeof(u64) == 8 && sizeof(u32) == 4, "integer sizes assumed by the host");

#define WARP 32
#define FULL_MASK 0xffffffffu
#define QUIET_NAN __uint_as_float(0x7fc00000u)
#define INF __uint_as_float(0x7f800000u)

// 1 / sqrt(mean + eps) of a mean of squares; NaN where the squares of finite values overflowed: 0 would make the row, and every
// gradient through it, zero without a word.
__device__ __forceinline__ float inverse_rms(float mean, float eps) {
    return mean == INF ? QUIET_NAN : 1.0f / sqrtf(mean + eps);
}

// 16-bit storage types: widened to f32 on load, rounded to nearest even on store.
struct Bf16 {
    u16 bits;
};
struct F16 {
    u16 bits;
};

__device__ __forceinline__ float to_f32(float value) { return value; }

__device__ __forceinline__ float to_f32(Bf16 value) { return __uint_as_float((u32)value.bits << 16); }

__device__ __forceinline__ float to_f32(F16 value) {
    float wide;
    asm("cvt.f32.f16 %0, %1;" : "=f"(wide) : "h"(value.bits));
    return wide;
}

template <typename T> struct Stored;

template <> struct Stored<float> {
    __device__ __forceinline__ static float from(float value) { return value; }
};

template <> struct Stored<Bf16> {
    // NaN payloads match the CPU kernels.
    __device__ __forceinline__ static Bf16 from(float value) {
        u32 bits = __float_as_uint(value);
        u32 rounded = (bits + 0x7fffu + ((bits >> 16) & 1u)) >> 16;
        u32 quiet = (bits >> 16) | 0x40u;
        Bf16 stored;
        stored.bits = (u16)(value != value ? quiet : rounded);
        return stored;
    }
};

template <> struct Stored<F16> {
    __device__ __forceinline__ static F16 from(float value) {
        F16 stored;
        asm("cvt.rn.f16.f32 %0, %1;" : "=h"(stored.bits) : "f"(value));
        return stored;
    }
};

template <typename T> __device__ __forceinline__ T from_f32(float value) { return Stored<T>::from(value); }

template <typename T> __device__ __forceinline__ float rounded(float value) { return to_f32(from_f32<T>(value)); }

// Two 16-bit elements packed into one 32-bit word.
template <typename T> __device__ __forceinline__ u32 pack_pair(float low, float high) {
    return (u32)from_f32<T>(low).bits | (u32)from_f32<T>(high).bits << 16;
}

template <> __device__ __forceinline__ u32 pack_pair<Bf16>(float low, float high) {
    u32 pair;
    asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(pair) : "f"(high), "f"(low));
    // The instruction canonicalizes NaN; the CPU kernels keep the payload.
    bool has_nan = low != low || high != high;
    return has_nan ? (u32)from_f32<Bf16>(low).bits | (u32)from_f32<Bf16>(high).bits << 16 : pair;
}

// Elements per thread in memory-bound kernels, moved in 16-byte chunks.
#define VEC 8

// VEC elements in storage format: 16-bit types need half the registers of f32.
template <typename T> struct Packed {
    uint4 chunks[VEC * sizeof(T) / 16];
};

// `from` is 16-byte aligned.
template <typename T> __device__ __forceinline__ Packed<T> load_packed(const T *from) {
    Packed<T> vec;
#pragma unroll
    for (int i = 0; i < VEC * (int)sizeof(T) / 16; i++) vec.chunks[i] = ((const uint4 *)from)[i];
    return vec;
}

template <typename T> __device__ __forceinline__ void unpack(float (&vec)[VEC], const Packed<T> &packed) {
#pragma unroll
    for (int chunk = 0; chunk < VEC * (int)sizeof(T) / 16; chunk++) {
        uint4 words = packed.chunks[chunk];
        u32 word[4] = {words.x, words.y, words.z, words.w};
#pragma unroll
        for (int i = 0; i < 4; i++) {
            if constexpr (sizeof(T) == 4) {
                vec[4 * chunk + i] = __uint_as_float(word[i]);
            } else {
                vec[2 * i] = to_f32(T{(u16)word[i]});
                vec[2 * i + 1] = to_f32(T{(u16)(word[i] >> 16)});
            }
        }
    }
}

template <typename T> __device__ __forceinline__ void load_vec(float (&vec)[VEC], const T *from) {
    unpack(vec, load_packed(from));
}

template <typename T> __device__ __forceinline__ Packed<T> pack(const float (&vec)[VEC]) {
    Packed<T> packed;
#pragma unroll
    for (int chunk = 0; chunk < VEC * (int)sizeof(T) / 16; chunk++) {
        u32 word[4];
#pragma unroll
        for (int i = 0; i < 4; i++) {
            if constexpr (sizeof(T) == 4) word[i] = __float_as_uint(vec[4 * chunk + i]);
            else word[i] = pack_pair<T>(vec[2 * i], vec[2 * i + 1]);
        }
        packed.chunks[chunk] = make_uint4(word[0], word[1], word[2], word[3]);
    }
    return packed;
}

// One NaN check per vector: a branch per pair doubles the cost of packing.
template <> __device__ __forceinline__ Packed<Bf16> pack<Bf16>(const float (&vec)[VEC]) {
    u32 word[4];
    bool has_nan = false;
#pragma unroll
    for (int i = 0; i < 4; i++) {
        asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(word[i]) : "f"(vec[2 * i + 1]), "f"(vec[2 * i]));
        has_nan |= vec[2 * i] != vec[2 * i] || vec[2 * i + 1] != vec[2 * i + 1];
    }
    // The instruction canonicalizes NaN; the CPU kernels keep the payload.
    if (has_nan) {
#pragma unroll
        for (int i = 0; i < 4; i++)
            word[i] = (u32)from_f32<Bf16>(vec[2 * i]).bits | (u32)from_f32<Bf16>(vec[2 * i + 1]).bits << 16;
    }
    Packed<Bf16> packed;
    packed.chunks[0] = make_uint4(word[0], word[1], word[2], word[3]);
    return packed;
}

template <typename T> __device__ __forceinline__ void store_packed(T *to, const Packed<T> &packed) {
#pragma unroll
    for (int i = 0; i < VEC * (int)sizeof(T) / 16; i++) ((uint4 *)to)[i] = packed.chunks[i];
}

template <typename T> __device__ __forceinline__ void store_vec(T *to, const float (&vec)[VEC]) {
    store_packed(to, pack<T>(vec));
}

// Loads or stores VEC of `count` elements starting at `first`. Elements past the end load as 0 and are not stored.
// `full`: all VEC elements are in range and 16-byte aligned.
template <typename T>
__device__ __forceinline__ void load_bounded(float (&vec)[VEC], const T *from, u64 first, u64 count, bool full) {
    if (full) {
        load_vec(vec, from + first);
    } else {
#pragma unroll
        for (int i = 0; i < VEC; i++) vec[i] = first + i < count ? to_f32(from[first + i]) : 0.0f;
    }
}

template <typename T>
__device__ __forceinline__ void store_bounded(T *to, u64 first, u64 count, bool full, const float (&vec)[VEC]) {
    if (full) {
        store_vec(to + first, vec);
    } else {
#pragma unroll
        for (int i = 0; i < VEC; i++)
            if (first + i < count) to[first + i] = from_f32<T>(vec[i]);
    }
}

__device__ __forceinline__ bool aligned16(const void *a, const void *b = nullptr, const void *c = nullptr,
                                          const void *d = nullptr, const void *e = nullptr) {
    return (((u64)a | (u64)b | (u64)c | (u64)d | (u64)e) & 15) == 0;
}

// exp: full f32 accuracy for f32 results, the hardware approximation for 16-bit results.
template <typename T> __device__ __forceinline__ float exp_for(float value) {
    if constexpr (sizeof(T) == 4) return expf(value);
    float result;
    asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(result) : "f"(value * 1.44269504088896340736f));
    return result;
}

template <typename T> __device__ __forceinline__ float rcp_for(float value) {
    if constexpr (sizeof(T) == 4) return 1.0f / value;
    float result;
    asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(result) : "f"(value));
    return result;
}

__device__ __forceinline__ u64 global_thread() { return (u64)blockIdx.x * blockDim.x + threadIdx.x; }

// Butterfly reduction: every lane gets the warp's sum.
__device__ __forceinline__ float warp_reduce_sum(float value) {
    for (int step = WARP / 2; step > 0; step /= 2) value += __shfl_xor_sync(FULL_MASK, value, step);
    return value;
}

struct PhiloxBlock {
    u32 word[4];
};

// Philox4x32-10.
__device__ __forceinline__ PhiloxBlock philox(PhiloxBlock counter, u32 key0, u32 key1) {
    for (int round = 0; round < 10; round++) {
        u64 first = (u64)0xD2511F53u * counter.word[0], second = (u64)0xCD9E8D57u * counter.word[2];
        PhiloxBlock next;
        next.word[0] = (u32)(second >> 32) ^ counter.word[1] ^ key0;
        next.word[1] = (u32)second;
        next.word[2] = (u32)(first >> 32) ^ counter.word[3] ^ key1;
        next.word[3] = (u32)first;
        counter = next;
        key0 += 0x9E3779B9u;
        key1 += 0xBB67AE85u;
    }
    return counter;
}

#define FOR_EACH_DTYPE(DEFINE) DEFINE(f32, float) DEFINE(bf16, Bf16) DEFINE(f16, F16)
