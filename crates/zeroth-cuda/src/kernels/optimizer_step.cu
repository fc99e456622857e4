// The end of a training step: gradient norm, loss scaling and clipping decisions, optimizers. Bitwise equal to the CPU
// kernels.

#define THREADS 256
#define BLOCK 2048
#define LIMBS 10
#define LSB_EXPONENT (-300)
#define RATES 64
#define LOSSES 4
#define GROUPS 2

struct ExactSum {
    u64 limbs[LIMBS];
    u64 found_inf;
};

struct Recipe {
    double beta1, beta2, eps, weight_decay[GROUPS], max_norm;
    double momentum, dampening, lr_decay, initial_accumulator, beta3, alpha, loss_scale, min_scale;
    u64 t_alpha, t_beta3, scale_window, hysteresis, tolerated;
    u32 dynamic, consecutive_hysteresis, nesterov, bias_correction;
};

struct StepInput {
    double loss_means[LOSSES], loss_weights[LOSSES];
    u64 first_rate;
    double rates[RATES];
};

struct StepNumbers {
    float beta1, one_minus_beta1, beta2, one_minus_beta2, eps, decay_rate, decay, rate, adam_rate, root_correction,
        adagrad_rate;
    float beta3, one_minus_beta3, slow_rate;
    float momentum, velocity, one_minus_dampening;
    u32 nesterov;
    float unscale, clip;
};

struct Control {
    u64 applied, skipped;
    double loss_scale;
    u64 iteration;
    i64 last_overflow;
    u32 hysteresis_left, halted, at_min_scale, apply;
    StepNumbers numbers[GROUPS];
};

struct Record {
    double loss, norm, rate, loss_scale;
    u64 applied, skipped;
    i64 found_inf_flat, found_inf_rank;
    u32 apply, halted, at_min_scale, found_inf;
};

static_assert(sizeof(ExactSum) == 88 && sizeof(Recipe) == 168 && sizeof(StepInput) == 584,
              "layout shared with the host");
static_assert(sizeof(Control) == 216 && sizeof(Record) == 80, "layout shared with the host");

__device__ bool is_finite(double value) {
    u64 exponent = 0x7ff0000000000000ull;
    return ((u64)__double_as_longlong(value) & exponent) != exponent;
}

__device__ double quiet_nan() { return __longlong_as_double(0x7ff8000000000000ll); }

__device__ void clear(ExactSum &sum) {
#pragma unroll
    for (int i = 0; i < LIMBS; i++) sum.limbs[i] = 0;
    sum.found_inf = 0;
}

__device__ void merge(ExactSum &sum, const ExactSum &other) {
    u64 carry = 0;
#pragma unroll
    for (int i = 0; i < LIMBS; i++) {
        u64 first = sum.limbs[i] + other.limbs[i];
        u64 second = first + carry;
        carry = (first < other.limbs[i]) | (second < first);
        sum.limbs[i] = second;
    }
    sum.found_inf |= other.found_inf | carry;
}

__device__ void add(ExactSum &sum, double value) {
    if (!(is_finite(value) && value >= 0.0)) {
        sum.found_inf = 1;
        return;
    }
    u64 bits = (u64)__double_as_longlong(value);
    int exponent = (int)(bits >> 52);
    if (exponent == 0) return;
    u64 digits = (bits & ((1ull << 52) - 1)) | (1ull << 52);
    int offset = exponent - 1075 - LSB_EXPONENT;
    if (offset < 0) {
        digits = offset > -64 ? digits >> -offset : 0;
        offset = 0;
    }
    int limb = offset / 64, shift = offset % 64;
    if (limb + 1 >= LIMBS) {
        sum.found_inf = 1;
        return;
    }
    u64 low = digits << shift, high = shift ? digits >> (64 - shift) : 0;
    ExactSum other;
    other.found_inf = 0;
#pragma unroll
    for (int i = 0; i < LIMBS; i++) other.limbs[i] = i == limb ? low : i == limb + 1 ? high : 0;
    merge(sum, other);
}

// NaN if a non-finite value was added.
__device__ double to_double(const ExactSum &sum) {
    double total = 0.0;
#pragma unroll
    for (int i = 0; i < LIMBS; i++) {
        u64 biased_exponent = (u64)(64 * i + LSB_EXPONENT + 1023);
        total += (double)sum.limbs[i] * __longlong_as_double((i64)(biased_exponent << 52));
    }
    return sum.found_inf ? quiet_nan() : total;
}

// Merges the sums of all threads into lane 0. The sums are exact, so the order does not matter.
__device__ void block_merge(ExactSum *lanes, const ExactSum &mine) {
    lanes[threadIdx.x] = mine;
    __syncthreads();
    for (int half = THREADS / 2; half > 0; half /= 2) {
        if (threadIdx.x < half) merge(lanes[threadIdx.x], lanes[threadIdx.x + half]);
        __syncthreads();
    }
}

// A block sums the squares of BLOCK elements: element i in lane i % THREADS, then a tree reduction. Elements are loaded
// in 16-byte chunks and redistributed through shared memory.
template <typename T>
__device__ void block_squares(const T *values, u64 count, double *sums) {
    __shared__ double lanes[THREADS];
    __shared__ __align__(16) T block[BLOCK];
    u64 first = (u64)blockIdx.x * BLOCK, valid = count - first < BLOCK ? count - first : BLOCK;
    if (valid == BLOCK && aligned16(values)) {
        constexpr int CHUNKS = BLOCK * (int)sizeof(T) / 16;
        const uint4 *from = (const uint4 *)(values + first);
#pragma unroll
        for (int i = 0; i < CHUNKS; i += THREADS) ((uint4 *)block)[i + threadIdx.x] = from[i + threadIdx.x];
    } else {
        for (u64 i = threadIdx.x; i < BLOCK; i += THREADS) block[i] = i < valid ? values[first + i] : from_f32<T>(0.0f);
    }
    __syncthreads();
    double mine = 0.0;
#pragma unroll
    for (int i = 0; i < BLOCK; i += THREADS) {
        double value = (double)to_f32(block[i + threadIdx.x]);
        mine += value * value;
    }
    lanes[threadIdx.x] = mine;
    __syncthreads();
    for (int half = THREADS / 2; half >= WARP; half /= 2) {
        if (threadIdx.x < half) lanes[threadIdx.x] += lanes[threadIdx.x + half];
        __syncthreads();
    }
    if (threadIdx.x >= WARP) return;
    mine = lanes[threadIdx.x];
    for (int half = WARP / 2; half > 0; half /= 2) mine += __shfl_down_sync(FULL_MASK, mine, half);
    if (threadIdx.x == 0) sums[blockIdx.x] = mine;
}

// Converts block sums to exact sums in a grid-stride loop.
extern "C" __global__ void exact_sums(const double *sums, u64 count, ExactSum *to) {
    __shared__ ExactSum lanes[THREADS];
    ExactSum mine;
    clear(mine);
    for (u64 i = global_thread(); i < count; i += (u64)gridDim.x * THREADS) add(mine, sums[i]);
    block_merge(lanes, mine);
    if (threadIdx.x == 0) to[blockIdx.x] = lanes[0];
}

// One block merges all exact sums into one.
extern "C" __global__ void merge_sums(const ExactSum *sums, u64 count, ExactSum *to) {
    __shared__ ExactSum lanes[THREADS];
    ExactSum mine;
    clear(mine);
    for (u64 i = threadIdx.x; i < count; i += THREADS) merge(mine, sums[i]);
    block_merge(lanes, mine);
    if (threadIdx.x == 0) *to = lanes[0];
}

// Exponentiation by squaring, in the same order as the host.
__device__ double powi(double base, u64 exponent) {
    double result = 1.0;
    while (exponent > 0) {
        if (exponent % 2 == 1) result *= base;
        base *= base;
        exponent /= 2;
    }
    return result;
}

// ln(x) for 0 <= x < 1, as on the host.
__device__ double logarithm(double x) {
    if (x == 0.0) return -__longlong_as_double(0x7ff0000000000000ll);
    double factor = -2.0;
    while (x < 0.9) {
        x = sqrt(x);
        factor *= 2.0;
    }
    double z = (1.0 - x) / (1.0 + x), sum = 0.0;
    for (int k = 8; k >= 0; k--) sum = sum * (z * z) + 1.0 / (double)(2 * k + 1);
    return factor * (z * sum);
}

// e^x for x <= 0, as on the host.
__device__ double exponential(double x) {
    if (x < -700.0) return 0.0;
    int halvings = 0;
    while (x < -0.0625) {
        x *= 0.5;
        halvings += 1;
    }
    double power = 1.0;
    for (int k = 10; k >= 1; k--) power = 1.0 + x * power / (double)k;
    for (int i = 0; i < halvings; i++) power *= power;
    return power;
}

// AdEMAMix's schedules, as on the host.
__device__ double scheduled_alpha(const Recipe &recipe, u64 step) {
    return step >= recipe.t_alpha ? recipe.alpha : (double)step * recipe.alpha / (double)recipe.t_alpha;
}

__device__ double scheduled_beta3(const Recipe &recipe, u64 step) {
    if (step >= recipe.t_beta3 || recipe.beta3 <= recipe.beta1) return recipe.beta3;
    double done = (double)step / (double)recipe.t_beta3, ln_beta3 = logarithm(recipe.beta3);
    return exponential(ln_beta3 / ((1.0 - done) * (ln_beta3 / logarithm(recipe.beta1)) + done));
}

__device__ StepNumbers step_numbers(const Recipe &recipe, int group, u64 step, double rate, float unscale, float clip) {
    StepNumbers numbers;
    bool corrected = recipe.bias_correction != 0;
    double decay = recipe.weight_decay[group];
    numbers.beta1 = (float)recipe.beta1;
    numbers.one_minus_beta1 = (float)(1.0 - recipe.beta1);
    numbers.beta2 = (float)recipe.beta2;
    numbers.one_minus_beta2 = (float)(1.0 - recipe.beta2);
    numbers.eps = (float)recipe.eps;
    numbers.decay_rate = (float)(rate * decay);
    numbers.decay = (float)decay;
    numbers.rate = (float)rate;
    numbers.adam_rate = (float)(rate / (corrected ? 1.0 - powi(recipe.beta1, step) : 1.0));
    numbers.root_correction = (float)sqrt(corrected ? 1.0 - powi(recipe.beta2, step) : 1.0);
    numbers.adagrad_rate = (float)(rate / (1.0 + (double)(step - 1) * recipe.lr_decay));
    double beta3 = scheduled_beta3(recipe, step);
    numbers.beta3 = (float)beta3;
    numbers.one_minus_beta3 = (float)(1.0 - beta3);
    numbers.slow_rate = (float)(rate * scheduled_alpha(recipe, step));
    numbers.momentum = (float)recipe.momentum;
    numbers.velocity = step <= 1 ? 0.0f : (float)recipe.momentum;
    numbers.one_minus_dampening = step <= 1 ? 1.0f : (float)(1.0 - recipe.dampening);
    numbers.nesterov = recipe.nesterov;
    numbers.unscale = unscale;
    numbers.clip = clip;
    return numbers;
}

// DeepSpeed's dynamic loss scaler, as in the CPU kernel of the same name.
__device__ void update_loss_scale(const Recipe &recipe, bool overflow, Control *control) {
    u32 all = recipe.hysteresis < 0xffffffffu ? (u32)recipe.hysteresis : 0xffffffffu;
    if (overflow) {
        if (all <= 1 || control->hysteresis_left <= 1) {
            if (control->loss_scale == recipe.min_scale) {
                control->halted = control->at_min_scale = 1;
                return;
            }
            control->loss_scale = fmax(control->loss_scale / 2.0, recipe.min_scale);
        } else {
            control->hysteresis_left -= 1;
        }
        control->last_overflow = (i64)control->iteration;
    } else {
        if (recipe.consecutive_hysteresis != 0) control->hysteresis_left = all;
        i64 clean = (i64)control->iteration - control->last_overflow - 1;
        i64 window = recipe.scale_window > 1 ? (i64)recipe.scale_window : 1;
        if (clean > 0 && clean % window == 0) {
            control->hysteresis_left = all;
            control->loss_scale *= 2.0;
        }
    }
    control->iteration += 1;
}

// The smallest non-negative value over all threads; -1 if there is none.
__device__ i64 first_non_negative(const i64 *found) {
    i64 first = -1;
    for (int i = 0; i < THREADS; i++) {
        if (found[i] >= 0 && (first < 0 || found[i] < first)) first = found[i];
    }
    return first;
}

// Adds the rows of every expert to `counts`, and the weights that are infinite or NaN to its last.
extern "C" __global__ void count_tokens(u64 experts, u64 slots, const int *offsets, const float *weights, u32 *counts) {
    u64 at = (u64)blockIdx.x * THREADS + threadIdx.x;
    if (at < experts) counts[at] += (u32)(offsets[at + 1] - offsets[at]);
    bool lost = at < slots && (__float_as_uint(weights[at]) & 0x7f800000u) == 0x7f800000u;
    int found = __syncthreads_count(lost);
    if (threadIdx.x == 0 && found > 0) atomicAdd(counts + experts, (u32)found);
}

// One block. A rank's section of `reports` is the parts of its loss, the exact sums of its flats, and their found_inf
// flags, then the counts of its routers (u32); the means of the loss's parts, the norms of the flats and the sums of the counts
// follow the record.
extern "C" __global__ void control(u64 ranks, u64 losses, u64 flats, u64 counts, const Recipe *recipe, const StepInput *input,
                                   const u64 *reports, Control *control, Record *record) {
    __shared__ ExactSum lanes[THREADS];
    __shared__ i64 found_inf_sums[THREADS], flags[THREADS];
    const u64 sum_words = sizeof(ExactSum) / 8, first_count = losses + flats * (sum_words + 1);
    const u64 stride = first_count + (counts + 1) / 2;
    double scale = control->loss_scale;
    double *parts = (double *)(record + 1), *norms = parts + losses;
    for (u64 place = threadIdx.x; place < counts; place += THREADS) {
        u32 sum = 0;
        for (u64 rank = 0; rank < ranks; rank++) {
            sum += ((const u32 *)(reports + rank * stride + first_count))[place];
        }
        ((u32 *)(norms + flats))[place] = sum;
    }
    ExactSum mine;
    clear(mine);
    i64 found_inf_sum = -1, flag = -1;
    for (u64 flat = threadIdx.x; flat < flats; flat += THREADS) {
        ExactSum of_flat;
        clear(of_flat);
        for (u64 rank = 0; rank < ranks; rank++) {
            const u64 *report = reports + rank * stride + losses;
            merge(of_flat, *(const ExactSum *)(report + flat * sum_words));
            if (flag < 0 && report[flats * sum_words + flat] != 0) flag = (i64)(flat * ranks + rank);
        }
        merge(mine, of_flat);
        double norm = sqrt(to_double(of_flat)) / scale;
        norms[flat] = norm;
        if (norm != norm && found_inf_sum < 0) found_inf_sum = (i64)flat;
    }
    found_inf_sums[threadIdx.x] = found_inf_sum;
    flags[threadIdx.x] = flag;
    block_merge(lanes, mine);
    if (threadIdx.x != 0) return;
    found_inf_sum = first_non_negative(found_inf_sums);
    flag = first_non_negative(flags);
    double loss = 0.0;
    i64 nonfinite_rank = -1;
    for (u64 part = 0; part < losses; part++) {
        double sum = 0.0;
        for (u64 rank = 0; rank < ranks; rank++) {
            double of_rank = __longlong_as_double((i64)reports[rank * stride + part]);
            bool earlier = nonfinite_rank < 0 || (i64)rank < nonfinite_rank;
            if (earlier && !is_finite(of_rank)) nonfinite_rank = (i64)rank;
            sum += of_rank;
        }
        parts[part] = __dmul_rn(sum, input->loss_means[part]);
        double weighted = __dmul_rn(sum, input->loss_weights[part]);
        loss = part == 0 ? weighted : __dadd_rn(loss, weighted);
    }
    double norm = sqrt(to_double(lanes[0])) / scale;
    u64 offset = control->applied > input->first_rate ? control->applied - input->first_rate : 0;
    double rate = input->rates[offset < RATES - 1 ? offset : RATES - 1];
    bool found_inf = flag >= 0 || nonfinite_rank >= 0 || !is_finite(norm);
    if (found_inf) {
        control->skipped += 1;
        control->halted |= recipe->dynamic == 0 && control->skipped > recipe->tolerated;
    }
    if (recipe->dynamic != 0 && control->halted == 0) update_loss_scale(*recipe, found_inf, control);
    control->apply = !found_inf && control->halted == 0;
    if (control->apply) {
        control->applied += 1;
        double clip = 1.0;
        if (recipe->max_norm > 0.0) clip = fmin(recipe->max_norm / (norm + 1e-6), 1.0);
        for (int group = 0; group < GROUPS; group++) {
            control->numbers[group] =
                step_numbers(*recipe, group, control->applied, rate, (float)(1.0 / scale), (float)clip);
        }
    }
    record->loss = loss;
    record->norm = norm;
    record->rate = rate;
    record->loss_scale = scale;
    record->applied = control->applied;
    record->skipped = control->skipped;
    record->found_inf_flat = flag >= 0 ? flag / (i64)ranks : nonfinite_rank >= 0 ? -1 : found_inf_sum;
    record->found_inf_rank = flag >= 0 ? flag % (i64)ranks : nonfinite_rank;
    record->apply = control->apply;
    record->halted = control->halted;
    record->at_min_scale = control->at_min_scale;
    record->found_inf = found_inf;
}

enum { ADAMW = 0, ADAM = 1, SGD = 2, LION = 3, ADAGRAD = 4, ADEMAMIX = 5 };

// Optimizer moments of a flat; null where the optimizer has none. bf16 moments round to nearest unless `stochastic`.
struct Moments {
    void *first, *second, *third;
    u64 is_bf16, stochastic, seed, flat, at;
};

// Stochastic rounding to bf16.
__device__ __forceinline__ float stochastic_round(float value, u32 bits) {
    return value != value ? value : __uint_as_float((__float_as_uint(value) + bits) & 0xffff0000u);
}

// Updates one weight p. Every rounding is explicit, to match the CPU kernels bit by bit.
template <bool HAS_THIRD>
__device__ __forceinline__ void optimize_one(u64 optimizer, const StepNumbers &s, bool with_velocity, float g, float &p,
                                             float &m, float &v, float &m3) {
    g = __fmul_rn(__fmul_rn(g, s.unscale), s.clip);
    if (optimizer != ADAMW && optimizer != LION && optimizer != ADEMAMIX && s.decay != 0.0f) g = __fmaf_rn(s.decay, p, g);
    if (optimizer == ADAMW || optimizer == ADAM) {
        m = __fmaf_rn(s.beta1, m, __fmul_rn(s.one_minus_beta1, g));
        v = __fmaf_rn(s.beta2, v, __fmul_rn(s.one_minus_beta2, __fmul_rn(g, g)));
        float denominator = __fadd_rn(__fdiv_rn(__fsqrt_rn(v), s.root_correction), s.eps);
        float decay = optimizer == ADAMW ? s.decay_rate : 0.0f;
        p = __fsub_rn(p, __fmaf_rn(decay, p, __fmul_rn(s.adam_rate, __fdiv_rn(m, denominator))));
    } else if (optimizer == SGD) {
        float direction = g;
        if (with_velocity) {
            m = __fmaf_rn(s.velocity, m, __fmul_rn(s.one_minus_dampening, g));
            direction = s.nesterov ? __fmaf_rn(s.momentum, m, g) : m;
        }
        p = __fmaf_rn(-s.rate, direction, p);
    } else if (optimizer == LION) {
        float direction = __fmaf_rn(s.beta1, m, __fmul_rn(s.one_minus_beta1, g));
        float update = direction > 0.0f ? s.rate : direction < 0.0f ? -s.rate : 0.0f;
        p = __fsub_rn(p, __fmaf_rn(s.decay_rate, p, update));
        m = __fmaf_rn(s.beta2, m, __fmul_rn(s.one_minus_beta2, g));
    } else if (HAS_THIRD && optimizer == ADEMAMIX) {
        m = __fmaf_rn(s.beta1, m, __fmul_rn(s.one_minus_beta1, g));
        v = __fmaf_rn(s.beta2, v, __fmul_rn(s.one_minus_beta2, __fmul_rn(g, g)));
        m3 = __fmaf_rn(s.beta3, m3, __fmul_rn(s.one_minus_beta3, g));
        float denominator = __fadd_rn(__fdiv_rn(__fsqrt_rn(v), s.root_correction), s.eps);
        float update = __fdiv_rn(__fmaf_rn(s.adam_rate, m, __fmul_rn(s.slow_rate, m3)), denominator);
        p = __fsub_rn(p, __fmaf_rn(s.decay_rate, p, update));
    } else {
        v = __fmaf_rn(g, g, v);
        p = __fmaf_rn(-s.adagrad_rate, __fdiv_rn(g, __fadd_rn(__fsqrt_rn(v), s.eps)), p);
    }
}

// Element types selected at run time.
enum { DTYPE_F32 = 0, DTYPE_BF16 = 1, DTYPE_F16 = 2 };

__device__ __forceinline__ void load_bounded_as(float (&vec)[VEC], const void *from, u64 type, u64 first, u64 count,
                                                bool full) {
    if (type == DTYPE_F32) load_bounded(vec, (const float *)from, first, count, full);
    else if (type == DTYPE_BF16) load_bounded(vec, (const Bf16 *)from, first, count, full);
    else load_bounded(vec, (const F16 *)from, first, count, full);
}

__device__ __forceinline__ void store_bounded_as(void *to, u64 type, u64 first, u64 count, bool full,
                                                 const float (&vec)[VEC]) {
    if (type == DTYPE_F32) store_bounded((float *)to, first, count, full, vec);
    else if (type == DTYPE_BF16) store_bounded((Bf16 *)to, first, count, full, vec);
    else store_bounded((F16 *)to, first, count, full, vec);
}

// Canonical form of the fp32 master weight of a bf16 weight: see `master.rs` of zeroth-cpu.
__device__ __forceinline__ float canonical_master(float master) {
    u32 bits = __float_as_uint(master);
    return __uint_as_float(bits - ((bits & 0x1ffff) == 0x8000));
}

// Master weights from the bf16 weights in `vec` and their low-order bits, which are loaded like bf16 elements.
__device__ __forceinline__ void load_split_master(float (&vec)[VEC], const Bf16 *low_bits, u64 first, u64 count,
                                                  bool full) {
    float upper[VEC];
    load_bounded(upper, low_bits, first, count, full);
#pragma unroll
    for (int i = 0; i < VEC; i++) {
        i32 low_half = (i32)__float_as_uint(upper[i]) >> 16;
        vec[i] = __uint_as_float(__float_as_uint(vec[i]) + (u32)low_half);
    }
}

// Low-order bits of canonical master weights relative to their bf16 weights.
__device__ __forceinline__ void store_split_master(Bf16 *low_bits, u64 first, u64 count, bool full,
                                                   const float (&vec)[VEC]) {
    u32 low_half[VEC];
#pragma unroll
    for (int i = 0; i < VEC; i++)
        low_half[i] = (__float_as_uint(vec[i]) - __float_as_uint(rounded<Bf16>(vec[i]))) & 0xffffu;
    if (full) {
        Packed<Bf16> packed;
        packed.chunks[0] = make_uint4(low_half[0] | low_half[1] << 16, low_half[2] | low_half[3] << 16,
                                      low_half[4] | low_half[5] << 16, low_half[6] | low_half[7] << 16);
        store_packed(low_bits + first, packed);
    } else {
#pragma unroll
        for (int i = 0; i < VEC; i++)
            if (first + i < count) low_bits[first + i].bits = (u16)low_half[i];
    }
}

// Gradients and weights may have any element type; the arithmetic is the same for all. Two moments need fewer registers
// than three, so they have a kernel of their own.
template <bool HAS_THIRD>
__device__ __forceinline__ void optimize_vec(u64 optimizer, u64 group, const Control *control, const void *grads,
                                             u64 grad_type, void *master, bool is_split, Moments moments, void *weights,
                                             u64 weight_type, u64 count) {
    if (!HAS_THIRD) moments.third = nullptr;
    u64 first = global_thread() * VEC;
    if (first >= count) return;
    bool full = first + VEC <= count && aligned16(grads, master, moments.first, moments.second, weights) &&
                aligned16(moments.third);
    float p[VEC], g[VEC], m[VEC], v[VEC], m3[VEC];
    if (is_split) {
        load_bounded(p, (const Bf16 *)weights, first, count, full);
        load_split_master(p, (const Bf16 *)master, first, count, full);
    } else {
        load_bounded(p, (const float *)master, first, count, full);
    }
    if (control->apply == 0) {
        // A skipped step still writes the weights, which may live in another buffer; split masters already share it.
        if (weights && !is_split) store_bounded_as(weights, weight_type, first, count, full, p);
        return;
    }
    const StepNumbers s = control->numbers[group];
    if (optimizer == SGD && s.momentum == 0.0f) moments.first = 0;
    load_bounded_as(g, grads, grad_type, first, count, full);
    load_bounded_as(m, moments.first, moments.is_bf16, first, moments.first ? count : 0, moments.first && full);
    load_bounded_as(v, moments.second, moments.is_bf16, first, moments.second ? count : 0, moments.second && full);
    load_bounded_as(m3, moments.third, moments.is_bf16, first, moments.third ? count : 0, moments.third && full);
#pragma unroll
    for (int i = 0; i < VEC; i++) optimize_one<HAS_THIRD>(optimizer, s, moments.first != 0, g[i], p[i], m[i], v[i], m3[i]);
    if (moments.is_bf16 && moments.stochastic) {
#pragma unroll
        for (int i = 0; i < VEC; i++) {
            u64 at = moments.at + first + i;
            PhiloxBlock counter = {{(u32)control->applied, (u32)moments.flat, (u32)at, (u32)(at >> 32)}};
            PhiloxBlock drawn = philox(counter, (u32)moments.seed, (u32)(moments.seed >> 32));
            m[i] = stochastic_round(m[i], drawn.word[0] >> 16);
            v[i] = stochastic_round(v[i], drawn.word[1] >> 16);
            m3[i] = stochastic_round(m3[i], drawn.word[2] >> 16);
        }
    }
    // `is_bf16` doubles as the element type: DTYPE_F32 or DTYPE_BF16.
    if (moments.first) store_bounded_as(moments.first, moments.is_bf16, first, count, full, m);
    if (moments.second) store_bounded_as(moments.second, moments.is_bf16, first, count, full, v);
    if (moments.third) store_bounded_as(moments.third, moments.is_bf16, first, count, full, m3);
    if (weights && weight_type == DTYPE_BF16) {
#pragma unroll
        for (int i = 0; i < VEC; i++) p[i] = canonical_master(p[i]);
    }
    if (is_split) store_split_master((Bf16 *)master, first, count, full, p);
    else store_bounded((float *)master, first, count, full, p);
    if (weights) store_bounded_as(weights, weight_type, first, count, full, p);
}

#define OPTIMIZE(NAME, HAS_THIRD)                                                                                       \
    extern "C" __global__ void NAME(u64 optimizer, u64 group, const Control *control, const void *grads,                \
                                    u64 grad_type, void *master, u64 is_split, void *first, void *second, void *third,  \
                                    u64 is_bf16, u64 stochastic, u64 seed, u64 flat, u64 at, void *weights,             \
                                    u64 weight_type, u64 count) {                                                       \
        Moments moments = {first, second, third, is_bf16, stochastic, seed, flat, at};                                  \
        optimize_vec<HAS_THIRD>(optimizer, group, control, grads, grad_type, master, is_split != 0, moments, weights,   \
                                weight_type, count);                                                                    \
    }

OPTIMIZE(optimize, false)
OPTIMIZE(optimize_with_third, true)

#define INSTANTIATE(NAME, T)                                                                    \
    extern "C" __global__ void block_squares_##NAME(const T *values, u64 count, double *sums) { \
        block_squares(values, count, sums);                                                     \
    }

FOR_EACH_DTYPE(INSTANTIATE)
