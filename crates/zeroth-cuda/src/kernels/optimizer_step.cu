// The end of a step: the gradient norm, what it decides, and the optimizers. The same bits as on the processor.

#define THREADS 256
#define BLOCK 2048
#define LIMBS 10
#define UNIT (-300)
#define RATES 64
#define GROUPS 2

struct ExactSum {
    u64 limbs[LIMBS];
    u64 broken;
};

struct Recipe {
    double beta1, beta2, eps, weight_decay[GROUPS], max_norm;
    double momentum, dampening, lr_decay, initial_accumulator, loss_scale, min_scale;
    u64 scale_window, hysteresis, tolerated;
    u32 dynamic, consecutive_hysteresis, nesterov, bias_correction;
};

struct StepInput {
    double loss_weight;
    u64 first_rate;
    double rates[RATES];
};

struct Numbers {
    float beta1, beta1_rest, beta2, beta2_rest, eps, decay_rate, decay, rate, adam_rate, root_correction, adagrad_rate;
    float momentum, velocity, velocity_rest;
    u32 nesterov;
    float unscale, clip;
};

struct Control {
    u64 applied, skipped;
    double loss_scale;
    u64 iteration;
    i64 last_overflow;
    u32 hysteresis_left, halted, at_min_scale, apply;
    Numbers numbers[GROUPS];
};

struct Record {
    double loss, norm, rate, loss_scale;
    u64 applied, skipped;
    i64 broken_flat, broken_rank;
    u32 apply, halted, at_min_scale, broken;
};

static_assert(sizeof(ExactSum) == 88 && sizeof(Recipe) == 136 && sizeof(StepInput) == 528, "layout of the host");
static_assert(sizeof(Control) == 192 && sizeof(Record) == 80, "layout of the host");

__device__ bool is_finite(double value) {
    u64 exponent = 0x7ff0000000000000ull;
    return ((u64)__double_as_longlong(value) & exponent) != exponent;
}

__device__ double not_a_number() { return __longlong_as_double(0x7ff8000000000000ll); }

__device__ void clear(ExactSum &sum) {
#pragma unroll
    for (int i = 0; i < LIMBS; i++) sum.limbs[i] = 0;
    sum.broken = 0;
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
    sum.broken |= other.broken | carry;
}

__device__ void add(ExactSum &sum, double value) {
    if (!(is_finite(value) && value >= 0.0)) {
        sum.broken = 1;
        return;
    }
    u64 bits = (u64)__double_as_longlong(value);
    int exponent = (int)(bits >> 52);
    if (exponent == 0) return;
    u64 digits = (bits & ((1ull << 52) - 1)) | (1ull << 52);
    int place = exponent - 1075 - UNIT;
    if (place < 0) {
        digits = place > -64 ? digits >> -place : 0;
        place = 0;
    }
    int limb = place / 64, shift = place % 64;
    if (limb + 1 >= LIMBS) {
        sum.broken = 1;
        return;
    }
    u64 low = digits << shift, high = shift ? digits >> (64 - shift) : 0;
    ExactSum other;
    other.broken = 0;
#pragma unroll
    for (int i = 0; i < LIMBS; i++) other.limbs[i] = i == limb ? low : i == limb + 1 ? high : 0;
    merge(sum, other);
}

// NaN once something that is not finite was added.
__device__ double total_of(const ExactSum &sum) {
    double total = 0.0;
#pragma unroll
    for (int i = 0; i < LIMBS; i++) {
        u64 power = (u64)(64 * i + UNIT + 1023);
        total += (double)sum.limbs[i] * __longlong_as_double((i64)(power << 52));
    }
    return sum.broken ? not_a_number() : total;
}

// The sums of all threads, in thread 0. Exact, so the order means nothing.
__device__ void merge_block(ExactSum *lanes, const ExactSum &mine) {
    lanes[threadIdx.x] = mine;
    __syncthreads();
    for (int half = THREADS / 2; half > 0; half /= 2) {
        if (threadIdx.x < half) merge(lanes[threadIdx.x], lanes[threadIdx.x + half]);
        __syncthreads();
    }
}

// A block sums the squares of 2,048 elements: element i in lane i mod 256, lanes folded in halves. Elements come in pieces
// of 16 bytes and change hands in shared memory.
template <typename T>
__device__ void block_squares(const T *values, u64 count, double *sums) {
    __shared__ double lanes[THREADS];
    __shared__ __align__(16) T block[BLOCK];
    u64 first = (u64)blockIdx.x * BLOCK, there = count - first < BLOCK ? count - first : BLOCK;
    if (there == BLOCK && in_sixteens(values)) {
        constexpr int PIECES = BLOCK * (int)sizeof(T) / 16;
        const uint4 *from = (const uint4 *)(values + first);
#pragma unroll
        for (int i = 0; i < PIECES; i += THREADS) ((uint4 *)block)[i + threadIdx.x] = from[i + threadIdx.x];
    } else {
        for (u64 i = threadIdx.x; i < BLOCK; i += THREADS) block[i] = i < there ? values[first + i] : from_f32<T>(0.0f);
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
    for (int half = WARP / 2; half > 0; half /= 2) mine += __shfl_down_sync(ALL_LANES, mine, half);
    if (threadIdx.x == 0) sums[blockIdx.x] = mine;
}

// Block sums become exact sums: a block has every gridDim.x-th 256 of them.
extern "C" __global__ void exact_sums(const double *sums, u64 count, ExactSum *to) {
    __shared__ ExactSum lanes[THREADS];
    ExactSum mine;
    clear(mine);
    for (u64 i = thread_of_grid(); i < count; i += (u64)gridDim.x * THREADS) add(mine, sums[i]);
    merge_block(lanes, mine);
    if (threadIdx.x == 0) to[blockIdx.x] = lanes[0];
}

// One block: exact sums become one.
extern "C" __global__ void merge_sums(const ExactSum *sums, u64 count, ExactSum *to) {
    __shared__ ExactSum lanes[THREADS];
    ExactSum mine;
    clear(mine);
    for (u64 i = threadIdx.x; i < count; i += THREADS) merge(mine, sums[i]);
    merge_block(lanes, mine);
    if (threadIdx.x == 0) *to = lanes[0];
}

// By squaring, as the host does it.
__device__ double power(double base, u64 exponent) {
    double result = 1.0;
    while (exponent > 0) {
        if (exponent % 2 == 1) result *= base;
        base *= base;
        exponent /= 2;
    }
    return result;
}

__device__ Numbers numbers_of(const Recipe &recipe, int group, u64 step, double rate, float unscale, float clip) {
    Numbers numbers;
    bool corrected = recipe.bias_correction != 0;
    double decay = recipe.weight_decay[group];
    numbers.beta1 = (float)recipe.beta1;
    numbers.beta1_rest = (float)(1.0 - recipe.beta1);
    numbers.beta2 = (float)recipe.beta2;
    numbers.beta2_rest = (float)(1.0 - recipe.beta2);
    numbers.eps = (float)recipe.eps;
    numbers.decay_rate = (float)(rate * decay);
    numbers.decay = (float)decay;
    numbers.rate = (float)rate;
    numbers.adam_rate = (float)(rate / (corrected ? 1.0 - power(recipe.beta1, step) : 1.0));
    numbers.root_correction = (float)sqrt(corrected ? 1.0 - power(recipe.beta2, step) : 1.0);
    numbers.adagrad_rate = (float)(rate / (1.0 + (double)(step - 1) * recipe.lr_decay));
    numbers.momentum = (float)recipe.momentum;
    numbers.velocity = step <= 1 ? 0.0f : (float)recipe.momentum;
    numbers.velocity_rest = step <= 1 ? 1.0f : (float)(1.0 - recipe.dampening);
    numbers.nesterov = recipe.nesterov;
    numbers.unscale = unscale;
    numbers.clip = clip;
    return numbers;
}

// DeepSpeed's dynamic loss scaler: see the same function of the processor.
__device__ void move_scale(const Recipe &recipe, bool overflow, Control *control) {
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

// The smallest number of the threads that is not negative; -1 where all are.
__device__ i64 first_of(const i64 *found) {
    i64 first = -1;
    for (int i = 0; i < THREADS; i++) {
        if (found[i] >= 0 && (first < 0 || found[i] < first)) first = found[i];
    }
    return first;
}

// One block. A rank's part of `reports` is its loss, the exact sums of its flats, and their flags; norms follow the record.
extern "C" __global__ void control(u64 ranks, u64 flats, const Recipe *recipe, const StepInput *input,
                                   const u64 *reports, Control *control, Record *record) {
    __shared__ ExactSum lanes[THREADS];
    __shared__ i64 broken_sums[THREADS], flags[THREADS];
    const u64 sum_words = sizeof(ExactSum) / 8, stride = 1 + flats * (sum_words + 1);
    double scale = control->loss_scale;
    double *norms = (double *)(record + 1);
    ExactSum mine;
    clear(mine);
    i64 broken_sum = -1, flag = -1;
    for (u64 flat = threadIdx.x; flat < flats; flat += THREADS) {
        ExactSum of_flat;
        clear(of_flat);
        for (u64 rank = 0; rank < ranks; rank++) {
            const u64 *told = reports + rank * stride + 1;
            merge(of_flat, *(const ExactSum *)(told + flat * sum_words));
            if (flag < 0 && told[flats * sum_words + flat] != 0) flag = (i64)(flat * ranks + rank);
        }
        merge(mine, of_flat);
        double norm = sqrt(total_of(of_flat)) / scale;
        norms[flat] = norm;
        if (norm != norm && broken_sum < 0) broken_sum = (i64)flat;
    }
    broken_sums[threadIdx.x] = broken_sum;
    flags[threadIdx.x] = flag;
    merge_block(lanes, mine);
    if (threadIdx.x != 0) return;
    broken_sum = first_of(broken_sums);
    flag = first_of(flags);
    double loss = 0.0;
    i64 lost_rank = -1;
    for (u64 rank = 0; rank < ranks; rank++) {
        double of_rank = __longlong_as_double((i64)reports[rank * stride]);
        if (lost_rank < 0 && !is_finite(of_rank)) lost_rank = (i64)rank;
        loss += of_rank;
    }
    double norm = sqrt(total_of(lanes[0])) / scale;
    u64 place = control->applied > input->first_rate ? control->applied - input->first_rate : 0;
    double rate = input->rates[place < RATES - 1 ? place : RATES - 1];
    bool broken = flag >= 0 || lost_rank >= 0 || !is_finite(norm);
    if (broken) {
        control->skipped += 1;
        control->halted |= recipe->dynamic == 0 && control->skipped > recipe->tolerated;
    }
    if (recipe->dynamic != 0 && control->halted == 0) move_scale(*recipe, broken, control);
    control->apply = !broken && control->halted == 0;
    if (control->apply) {
        control->applied += 1;
        double clip = 1.0;
        if (recipe->max_norm > 0.0) clip = fmin(recipe->max_norm / (norm + 1e-6), 1.0);
        for (int group = 0; group < GROUPS; group++) {
            control->numbers[group] =
                numbers_of(*recipe, group, control->applied, rate, (float)(1.0 / scale), (float)clip);
        }
    }
    record->loss = loss * input->loss_weight;
    record->norm = norm;
    record->rate = rate;
    record->loss_scale = scale;
    record->applied = control->applied;
    record->skipped = control->skipped;
    record->broken_flat = flag >= 0 ? flag / (i64)ranks : lost_rank >= 0 ? -1 : broken_sum;
    record->broken_rank = flag >= 0 ? flag % (i64)ranks : lost_rank;
    record->apply = control->apply;
    record->halted = control->halted;
    record->at_min_scale = control->at_min_scale;
    record->broken = broken;
}

enum { ADAMW = 0, ADAM = 1, SGD = 2, LION = 3, ADAGRAD = 4 };

// Moments of a flat, null where there are none. Without `chance` those in bf16 are rounded to the nearest.
struct Moments {
    void *first, *second;
    u64 narrow, chance, seed, flat, at;
};

// One of the two bf16 around a number, the nearer one the likelier.
__device__ __forceinline__ float by_chance(float value, u32 bits) {
    return value != value ? value : __uint_as_float((__float_as_uint(value) + bits) & 0xffff0000u);
}

// One weight p with its gradient and moments. Every rounding is meant: see the same functions of the processor.
__device__ __forceinline__ void optimize_one(u64 optimizer, const Numbers &s, bool with_velocity, float g, float &p,
                                             float &m, float &v) {
    g = __fmul_rn(__fmul_rn(g, s.unscale), s.clip);
    if (optimizer != ADAMW && optimizer != LION && s.decay != 0.0f) g = __fmaf_rn(s.decay, p, g);
    if (optimizer == ADAMW || optimizer == ADAM) {
        m = __fmaf_rn(s.beta1, m, __fmul_rn(s.beta1_rest, g));
        v = __fmaf_rn(s.beta2, v, __fmul_rn(s.beta2_rest, __fmul_rn(g, g)));
        float denominator = __fadd_rn(__fdiv_rn(__fsqrt_rn(v), s.root_correction), s.eps);
        float decay = optimizer == ADAMW ? s.decay_rate : 0.0f;
        p = __fsub_rn(p, __fmaf_rn(decay, p, __fmul_rn(s.adam_rate, __fdiv_rn(m, denominator))));
    } else if (optimizer == SGD) {
        float along = g;
        if (with_velocity) {
            m = __fmaf_rn(s.velocity, m, __fmul_rn(s.velocity_rest, g));
            along = s.nesterov ? __fmaf_rn(s.momentum, m, g) : m;
        }
        p = __fmaf_rn(-s.rate, along, p);
    } else if (optimizer == LION) {
        float along = __fmaf_rn(s.beta1, m, __fmul_rn(s.beta1_rest, g));
        float moved = along > 0.0f ? s.rate : along < 0.0f ? -s.rate : 0.0f;
        p = __fsub_rn(p, __fmaf_rn(s.decay_rate, p, moved));
        m = __fmaf_rn(s.beta2, m, __fmul_rn(s.beta2_rest, g));
    } else {
        v = __fmaf_rn(g, g, v);
        p = __fmaf_rn(-s.adagrad_rate, __fdiv_rn(g, __fadd_rn(__fsqrt_rn(v), s.eps)), p);
    }
}

// A type of numbers that is known only when a kernel runs.
enum { OF_F32 = 0, OF_BF16 = 1, OF_F16 = 2 };

__device__ __forceinline__ void take_any(float (&lot)[LOT], const void *from, u64 type, u64 first, u64 count, bool whole) {
    if (type == OF_F32) take(lot, (const float *)from, first, count, whole);
    else if (type == OF_BF16) take(lot, (const Bf16 *)from, first, count, whole);
    else take(lot, (const F16 *)from, first, count, whole);
}

__device__ __forceinline__ void put_any(void *to, u64 type, u64 first, u64 count, bool whole, const float (&lot)[LOT]) {
    if (type == OF_F32) put((float *)to, first, count, whole, lot);
    else if (type == OF_BF16) put((Bf16 *)to, first, count, whole, lot);
    else put((F16 *)to, first, count, whole, lot);
}

// What master weights of bf16 weights are: see `master.rs`.
__device__ __forceinline__ float settled(float master) {
    u32 bits = __float_as_uint(master);
    return __uint_as_float(bits - ((bits & 0x1ffff) == 0x8000));
}

// Master weights from what they are beside their weights, which `lot` holds. Rests are moved like numbers of 16 bits.
__device__ __forceinline__ void take_rests(float (&lot)[LOT], const Bf16 *rests, u64 first, u64 count, bool whole) {
    float upper[LOT];
    take(upper, rests, first, count, whole);
#pragma unroll
    for (int i = 0; i < LOT; i++) {
        i32 rest = (i32)__float_as_uint(upper[i]) >> 16;
        lot[i] = __uint_as_float(__float_as_uint(lot[i]) + (u32)rest);
    }
}

// What settled master weights are beside the weights that are made of them.
__device__ __forceinline__ void put_rests(Bf16 *rests, u64 first, u64 count, bool whole, const float (&lot)[LOT]) {
    u32 rest[LOT];
#pragma unroll
    for (int i = 0; i < LOT; i++)
        rest[i] = (__float_as_uint(lot[i]) - __float_as_uint(rounded<Bf16>(lot[i]))) & 0xffffu;
    if (whole) {
        Packed<Bf16> packed;
        packed.pieces[0] = make_uint4(rest[0] | rest[1] << 16, rest[2] | rest[3] << 16, rest[4] | rest[5] << 16,
                                      rest[6] | rest[7] << 16);
        write_packed(rests + first, packed);
    } else {
#pragma unroll
        for (int i = 0; i < LOT; i++)
            if (first + i < count) rests[first + i].bits = (u16)rest[i];
    }
}

// Gradients and weights have any type; the arithmetic is the same for all of them.
extern "C" __global__ void optimize(u64 optimizer, u64 group, const Control *control, const void *grads, u64 grad_type,
                                    void *master, u64 is_rest, void *first_moments, void *second_moments, u64 narrow, u64 chance,
                                    u64 seed, u64 flat, u64 place, void *weights, u64 weight_type, u64 count) {
    Moments moments = {first_moments, second_moments, narrow, chance, seed, flat, place};
    u64 first = thread_of_grid() * LOT;
    if (first >= count) return;
    bool whole = first + LOT <= count && in_sixteens(grads, master, moments.first, moments.second, weights);
    float p[LOT], g[LOT], m[LOT], v[LOT];
    if (is_rest) {
        take(p, (const Bf16 *)weights, first, count, whole);
        take_rests(p, (const Bf16 *)master, first, count, whole);
    } else {
        take(p, (const float *)master, first, count, whole);
    }
    if (control->apply == 0) {
        // Whoever takes the weights from here finds what they were; beside their rests they are.
        if (weights && !is_rest) put_any(weights, weight_type, first, count, whole, p);
        return;
    }
    const Numbers s = control->numbers[group];
    if (optimizer == SGD && s.momentum == 0.0f) moments.first = 0;
    take_any(g, grads, grad_type, first, count, whole);
    take_any(m, moments.first, moments.narrow, first, moments.first ? count : 0, moments.first && whole);
    take_any(v, moments.second, moments.narrow, first, moments.second ? count : 0, moments.second && whole);
#pragma unroll
    for (int i = 0; i < LOT; i++) optimize_one(optimizer, s, moments.first != 0, g[i], p[i], m[i], v[i]);
    if (moments.narrow && moments.chance) {
#pragma unroll
        for (int i = 0; i < LOT; i++) {
            u64 at = moments.at + first + i;
            Words counter = {{(u32)control->applied, (u32)moments.flat, (u32)at, (u32)(at >> 32)}};
            Words drawn = philox(counter, (u32)moments.seed, (u32)(moments.seed >> 32));
            m[i] = by_chance(m[i], drawn.at[0] >> 16);
            v[i] = by_chance(v[i], drawn.at[1] >> 16);
        }
    }
    // `narrow` is 1 for bf16, as the types count.
    if (moments.first) put_any(moments.first, moments.narrow, first, count, whole, m);
    if (moments.second) put_any(moments.second, moments.narrow, first, count, whole, v);
    if (weights && weight_type == OF_BF16) {
#pragma unroll
        for (int i = 0; i < LOT; i++) p[i] = settled(p[i]);
    }
    if (is_rest) put_rests((Bf16 *)master, first, count, whole, p);
    else put((float *)master, first, count, whole, p);
    if (weights) put_any(weights, weight_type, first, count, whole, p);
}

#define STEP(NAME, T)                                                                                             \
    extern "C" __global__ void block_squares_##NAME(const T *values, u64 count, double *sums) {                   \
        block_squares(values, count, sums);                                                                       \
    }

EACH_TYPE(STEP)
