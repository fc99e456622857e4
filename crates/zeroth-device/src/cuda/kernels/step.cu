// The end of a step: the gradient norm, what it decides, and AdamW. The same bits as on the processor.

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
    u64 tolerated;
};

struct StepInput {
    double loss_weight;
    u64 first_rate;
    double rates[RATES];
};

struct Numbers {
    float beta1, beta1_rest, beta2, beta2_rest, eps, kept, rate, root_correction, unscale, clip;
};

struct Control {
    u64 applied, skipped;
    double loss_scale;
    u32 halted, apply;
    Numbers numbers[GROUPS];
};

struct Record {
    double loss, norm, rate, loss_scale;
    u64 applied, skipped;
    i64 broken_flat, broken_rank;
    u32 apply, halted;
};

static_assert(sizeof(ExactSum) == 88 && sizeof(Recipe) == 56 && sizeof(StepInput) == 528, "layout of the host");
static_assert(sizeof(Control) == 112 && sizeof(Record) == 72, "layout of the host");

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

// A block sums the squares of 2,048 elements: element i in lane i mod 256, lanes folded in halves.
template <typename T>
__device__ void block_squares(const T *values, u64 count, double *sums) {
    __shared__ double lanes[THREADS];
    u64 first = (u64)blockIdx.x * BLOCK, end = first + BLOCK < count ? first + BLOCK : count;
    double mine = 0.0;
    for (u64 i = first + threadIdx.x; i < end; i += THREADS) {
        double value = (double)to_f32(values[i]);
        mine += value * value;
    }
    lanes[threadIdx.x] = mine;
    __syncthreads();
    for (int half = THREADS / 2; half > 0; half /= 2) {
        if (threadIdx.x < half) lanes[threadIdx.x] += lanes[threadIdx.x + half];
        __syncthreads();
    }
    if (threadIdx.x == 0) sums[blockIdx.x] = lanes[0];
}

extern "C" __global__ void exact_sum(const double *sums, u64 count, ExactSum *to) {
    __shared__ ExactSum lanes[THREADS];
    ExactSum mine;
    clear(mine);
    for (u64 i = threadIdx.x; i < count; i += THREADS) add(mine, sums[i]);
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
    numbers.beta1 = (float)recipe.beta1;
    numbers.beta1_rest = (float)(1.0 - recipe.beta1);
    numbers.beta2 = (float)recipe.beta2;
    numbers.beta2_rest = (float)(1.0 - recipe.beta2);
    numbers.eps = (float)recipe.eps;
    numbers.kept = (float)(1.0 - rate * recipe.weight_decay[group]);
    numbers.rate = (float)(rate / (1.0 - power(recipe.beta1, step)));
    numbers.root_correction = (float)sqrt(1.0 - power(recipe.beta2, step));
    numbers.unscale = unscale;
    numbers.clip = clip;
    return numbers;
}

// One block. A rank's part of `reports` is its loss and then the exact sums of its flats; norms follow the record.
extern "C" __global__ void control(u64 ranks, u64 flats, const Recipe *recipe, const StepInput *input,
                                   const u64 *reports, Control *control, Record *record) {
    __shared__ ExactSum lanes[THREADS];
    __shared__ i64 broken[THREADS];
    const u64 sum_words = sizeof(ExactSum) / 8, stride = 1 + flats * sum_words;
    double scale = control->loss_scale;
    double *norms = (double *)(record + 1);
    ExactSum mine;
    clear(mine);
    broken[threadIdx.x] = -1;
    for (u64 flat = threadIdx.x; flat < flats; flat += THREADS) {
        ExactSum of_flat;
        clear(of_flat);
        for (u64 rank = 0; rank < ranks; rank++) {
            merge(of_flat, *(const ExactSum *)(reports + rank * stride + 1 + flat * sum_words));
        }
        merge(mine, of_flat);
        double norm = sqrt(total_of(of_flat)) / scale;
        norms[flat] = norm;
        if (norm != norm && broken[threadIdx.x] < 0) broken[threadIdx.x] = (i64)flat;
    }
    merge_block(lanes, mine);
    if (threadIdx.x != 0) return;
    i64 broken_flat = -1, broken_rank = -1;
    for (int i = 0; i < THREADS; i++) {
        if (broken[i] >= 0 && (broken_flat < 0 || broken[i] < broken_flat)) broken_flat = broken[i];
    }
    double loss = 0.0;
    for (u64 rank = 0; rank < ranks; rank++) {
        double of_rank = __longlong_as_double((i64)reports[rank * stride]);
        if (broken_rank < 0 && !is_finite(of_rank)) broken_rank = (i64)rank;
        loss += of_rank;
    }
    double norm = sqrt(total_of(lanes[0])) / scale;
    u64 place = control->applied > input->first_rate ? control->applied - input->first_rate : 0;
    double rate = input->rates[place < RATES - 1 ? place : RATES - 1];
    bool finite = is_finite(norm) && broken_rank < 0;
    if (!finite) {
        control->skipped += 1;
        control->halted |= control->skipped > recipe->tolerated;
    }
    control->apply = finite && control->halted == 0;
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
    record->broken_flat = broken_flat;
    record->broken_rank = broken_rank;
    record->apply = control->apply;
    record->halted = control->halted;
}

// Every rounding is meant: see the same function of the processor.
template <typename G, typename W>
__device__ void adamw(u64 group, const Control *control, const G *grads, float *master, float *first, float *second,
                      W *weights, u64 count) {
    u64 i = thread_of_grid();
    if (i >= count || control->apply == 0) return;
    Numbers s = control->numbers[group];
    float g = __fmul_rn(__fmul_rn(to_f32(grads[i]), s.unscale), s.clip);
    float m = __fmaf_rn(s.beta1, first[i], __fmul_rn(s.beta1_rest, g));
    float v = __fmaf_rn(s.beta2, second[i], __fmul_rn(s.beta2_rest, __fmul_rn(g, g)));
    float denominator = __fadd_rn(__fdiv_rn(__fsqrt_rn(v), s.root_correction), s.eps);
    float p = __fmaf_rn(-s.rate, __fdiv_rn(m, denominator), __fmul_rn(master[i], s.kept));
    first[i] = m;
    second[i] = v;
    master[i] = p;
    if (weights) weights[i] = from_f32<W>(p);
}

#define ADAMW(NAME, G, TO, W)                                                                                     \
    extern "C" __global__ void adamw_##NAME##_##TO(u64 group, const Control *control, const G *grads,             \
                                                   float *master, float *first, float *second, W *weights,        \
                                                   u64 count) {                                                   \
        adamw(group, control, grads, master, first, second, weights, count);                                      \
    }

#define STEP(NAME, T)                                                                                             \
    extern "C" __global__ void block_squares_##NAME(const T *values, u64 count, double *sums) {                   \
        block_squares(values, count, sums);                                                                       \
    }                                                                                                             \
    ADAMW(NAME, T, f32, float)                                                                                    \
    ADAMW(NAME, T, bf16, Bf16)                                                                                    \
    ADAMW(NAME, T, f16, F16)

EACH_TYPE(STEP)
