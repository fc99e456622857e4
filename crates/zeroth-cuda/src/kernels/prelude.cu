// What every file here begins with: number types and sums with a fixed tree. No header is included, so that the compiler
// library alone is enough. The compiler is told not to contract: a product and a sum are one operation only where fmaf says so.

typedef unsigned short u16;
typedef unsigned int u32;
typedef unsigned long long u64;
typedef int i32;
typedef long long i64;

static_assert(sizeof(u64) == 8 && sizeof(u32) == 4, "sizes that the host counts on");

#define WARP 32
#define ALL_LANES 0xffffffffu
#define NOT_A_NUMBER __uint_as_float(0x7fc00000u)
#define INFINITE __uint_as_float(0x7f800000u)

// Stored numbers: read as f32, written rounded to the nearest, ties to even.
struct Bf16 { u16 bits; };
struct F16 { u16 bits; };

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
    // A NaN stays the same NaN as on the processor.
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

// Two stored numbers in a word.
template <typename T> __device__ __forceinline__ u32 pair_of(float low, float high) {
    return (u32)from_f32<T>(low).bits | (u32)from_f32<T>(high).bits << 16;
}

template <> __device__ __forceinline__ u32 pair_of<Bf16>(float low, float high) {
    u32 pair;
    asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(pair) : "f"(high), "f"(low));
    // The instruction has one NaN for all.
    bool broken = low != low || high != high;
    return broken ? (u32)from_f32<Bf16>(low).bits | (u32)from_f32<Bf16>(high).bits << 16 : pair;
}

// What a thread has at a time where memory is what counts: eight numbers, moved in pieces of 16 bytes.
#define LOT 8

// A lot as it is stored: fewer registers than the numbers.
template <typename T> struct Packed { uint4 pieces[LOT * sizeof(T) / 16]; };

// From a place that is a multiple of 16 bytes.
template <typename T> __device__ __forceinline__ Packed<T> read_packed(const T *from) {
    Packed<T> lot;
#pragma unroll
    for (int i = 0; i < LOT * (int)sizeof(T) / 16; i++) lot.pieces[i] = ((const uint4 *)from)[i];
    return lot;
}

template <typename T> __device__ __forceinline__ void unpack(float (&lot)[LOT], const Packed<T> &packed) {
#pragma unroll
    for (int piece = 0; piece < LOT * (int)sizeof(T) / 16; piece++) {
        uint4 words = packed.pieces[piece];
        u32 word[4] = {words.x, words.y, words.z, words.w};
#pragma unroll
        for (int i = 0; i < 4; i++) {
            if constexpr (sizeof(T) == 4) {
                lot[4 * piece + i] = __uint_as_float(word[i]);
            } else {
                lot[2 * i] = to_f32(T{(u16)word[i]});
                lot[2 * i + 1] = to_f32(T{(u16)(word[i] >> 16)});
            }
        }
    }
}

template <typename T> __device__ __forceinline__ void read_lot(float (&lot)[LOT], const T *from) {
    unpack(lot, read_packed(from));
}

template <typename T> __device__ __forceinline__ Packed<T> pack(const float (&lot)[LOT]) {
    Packed<T> packed;
#pragma unroll
    for (int piece = 0; piece < LOT * (int)sizeof(T) / 16; piece++) {
        u32 word[4];
#pragma unroll
        for (int i = 0; i < 4; i++) {
            if constexpr (sizeof(T) == 4) word[i] = __float_as_uint(lot[4 * piece + i]);
            else word[i] = pair_of<T>(lot[2 * i], lot[2 * i + 1]);
        }
        packed.pieces[piece] = make_uint4(word[0], word[1], word[2], word[3]);
    }
    return packed;
}

// One look for NaN a lot: a branch a pair costs as much as all the rest.
template <> __device__ __forceinline__ Packed<Bf16> pack<Bf16>(const float (&lot)[LOT]) {
    u32 word[4];
    bool broken = false;
#pragma unroll
    for (int i = 0; i < 4; i++) {
        asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(word[i]) : "f"(lot[2 * i + 1]), "f"(lot[2 * i]));
        broken |= lot[2 * i] != lot[2 * i] || lot[2 * i + 1] != lot[2 * i + 1];
    }
    // The instruction has one NaN for all.
    if (broken) {
#pragma unroll
        for (int i = 0; i < 4; i++)
            word[i] = (u32)from_f32<Bf16>(lot[2 * i]).bits | (u32)from_f32<Bf16>(lot[2 * i + 1]).bits << 16;
    }
    Packed<Bf16> packed;
    packed.pieces[0] = make_uint4(word[0], word[1], word[2], word[3]);
    return packed;
}

template <typename T> __device__ __forceinline__ void write_packed(T *to, const Packed<T> &packed) {
#pragma unroll
    for (int i = 0; i < LOT * (int)sizeof(T) / 16; i++) ((uint4 *)to)[i] = packed.pieces[i];
}

template <typename T> __device__ __forceinline__ void write_lot(T *to, const float (&lot)[LOT]) {
    write_packed(to, pack<T>(lot));
}

// Eight of `count` numbers from `first` on; those behind the last are 0 or not written. `whole`: all eight are there, at a
// multiple of 16 bytes.
template <typename T>
__device__ __forceinline__ void take(float (&lot)[LOT], const T *from, u64 first, u64 count, bool whole) {
    if (whole) {
        read_lot(lot, from + first);
    } else {
#pragma unroll
        for (int i = 0; i < LOT; i++) lot[i] = first + i < count ? to_f32(from[first + i]) : 0.0f;
    }
}

template <typename T>
__device__ __forceinline__ void put(T *to, u64 first, u64 count, bool whole, const float (&lot)[LOT]) {
    if (whole) {
        write_lot(to + first, lot);
    } else {
#pragma unroll
        for (int i = 0; i < LOT; i++)
            if (first + i < count) to[first + i] = from_f32<T>(lot[i]);
    }
}

__device__ __forceinline__ bool in_sixteens(const void *a, const void *b = nullptr, const void *c = nullptr,
                                            const void *d = nullptr, const void *e = nullptr) {
    return (((u64)a | (u64)b | (u64)c | (u64)d | (u64)e) & 15) == 0;
}

// e to the power of a number: as exact as f32 can be in f32, and quickly where results have 16 bits.
template <typename T> __device__ __forceinline__ float exp_of(float value) {
    if constexpr (sizeof(T) == 4) return expf(value);
    float result;
    asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(result) : "f"(value * 1.44269504088896340736f));
    return result;
}

template <typename T> __device__ __forceinline__ float inverse_of(float value) {
    if constexpr (sizeof(T) == 4) return 1.0f / value;
    float result;
    asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(result) : "f"(value));
    return result;
}

__device__ __forceinline__ u64 thread_of_grid() { return (u64)blockIdx.x * blockDim.x + threadIdx.x; }

// The sum over a warp, the same in every lane.
__device__ __forceinline__ float warp_sum(float value) {
    for (int step = WARP / 2; step > 0; step /= 2) value += __shfl_xor_sync(ALL_LANES, value, step);
    return value;
}

struct Words { u32 at[4]; };

// Philox4x32 with ten rounds.
__device__ __forceinline__ Words philox(Words counter, u32 key0, u32 key1) {
    for (int round = 0; round < 10; round++) {
        u64 first = (u64)0xD2511F53u * counter.at[0], second = (u64)0xCD9E8D57u * counter.at[2];
        Words next;
        next.at[0] = (u32)(second >> 32) ^ counter.at[1] ^ key0;
        next.at[1] = (u32)second;
        next.at[2] = (u32)(first >> 32) ^ counter.at[3] ^ key1;
        next.at[3] = (u32)first;
        counter = next;
        key0 += 0x9E3779B9u;
        key1 += 0xBB67AE85u;
    }
    return counter;
}

#define EACH_TYPE(DEFINE) DEFINE(f32, float) DEFINE(bf16, Bf16) DEFINE(f16, F16)
