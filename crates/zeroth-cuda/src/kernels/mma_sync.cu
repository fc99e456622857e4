// The instructions of warp-level matmuls, for all GPUs since Ampere.

template <typename T> struct Mma;

#define INSTANTIATE_MMA(T, TYPE)                                                                       \
    template <> struct Mma<T> {                                                                        \
        __device__ __forceinline__ static void add(float (&d)[4], const u32 (&a)[4], u32 b0, u32 b1) { \
            asm("mma.sync.aligned.m16n8k16.row.col.f32." TYPE "." TYPE                                 \
                ".f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"                 \
                : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])                                       \
                : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));                       \
        }                                                                                              \
    };

INSTANTIATE_MMA(Bf16, "bf16")
INSTANTIATE_MMA(F16, "f16")

// Loads four 8 x 8 matrices; each lane passes the address of one row.
__device__ __forceinline__ void ldmatrix_x4(u32 (&registers)[4], u32 at) {
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
                 : "=r"(registers[0]), "=r"(registers[1]), "=r"(registers[2]), "=r"(registers[3])
                 : "r"(at)
                 : "memory");
}

__device__ __forceinline__ void ldmatrix_x4_trans(u32 (&registers)[4], u32 at) {
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0, %1, %2, %3}, [%4];"
                 : "=r"(registers[0]), "=r"(registers[1]), "=r"(registers[2]), "=r"(registers[3])
                 : "r"(at)
                 : "memory");
}
