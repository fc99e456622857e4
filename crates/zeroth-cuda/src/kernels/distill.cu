// Distillation over a slice of logits: cross-entropy, the divergence from a teacher, and the gradient of both in place of the
// student's logits.

// Vectors of each model that a thread keeps in flight.
#define UNROLL 2

// log: full f32 accuracy for f32 results, the hardware approximation for 16-bit results.
template <typename T> __device__ __forceinline__ float log_for(float value) {
    if constexpr (sizeof(T) == 4) return logf(value);
    float result;
    asm("lg2.approx.ftz.f32 %0, %1;" : "=f"(result) : "f"(value));
    return result * 0.693147180559945309417f;
}

// A log-softmax at a temperature.
struct LogSoftmax {
    float maximum, inverse, log_total;

    __device__ __forceinline__ float at(float logit) const { return fmaf(logit - maximum, inverse, -log_total); }
};

// The log of the mixture of two probabilities, given their logs: log-sum-exp with the larger one outside.
template <typename T> __device__ __forceinline__ float log_mixture(float student, float teacher, float beta) {
    bool teacher_is_larger = teacher >= student;
    float larger = teacher_is_larger ? teacher : student, smaller = teacher_is_larger ? student : teacher;
    float share = teacher_is_larger ? beta : 1.0f - beta, other = teacher_is_larger ? 1.0f - beta : beta;
    // Exactly 1 where both are equal.
    float sum = fmaf(other, exp_for<T>(smaller - larger) - 1.0f, 1.0f);
    return larger + log_for<T>(sum < share ? share : sum);
}

// Which divergence: KL(teacher || student), KL(student || teacher), or the generalised Jensen-Shannon divergence.
enum Divergence { FORWARD, REVERSE, MIXED };

// The term of one outcome, given both log-probabilities: first the sums it adds to, then its slope once those are known.
template <typename T, Divergence KIND> struct Outcome {
    float log_student, log_teacher, student, teacher, excess;

    __device__ __forceinline__ Outcome(float log_student, float log_teacher, float beta)
        : log_student(log_student), log_teacher(log_teacher), student(exp_for<T>(log_student)) {
        if (KIND == FORWARD) teacher = exp_for<T>(log_teacher);
        if (KIND == REVERSE) excess = log_student - log_teacher;
        if (KIND == MIXED) {
            float mixture = log_mixture<T>(log_student, log_teacher, beta);
            excess = log_student - mixture;
            teacher = exp_for<T>(log_teacher) * (log_teacher - mixture);
        }
    }

    // Its term of the divergence from the student's side; of the only one, where there is one.
    __device__ __forceinline__ float of_student() const {
        return KIND == FORWARD ? teacher * (log_teacher - log_student) : student * excess;
    }

    // Its term of KL(teacher || mixture).
    __device__ __forceinline__ float of_teacher() const { return KIND == MIXED ? teacher : 0.0f; }

    // The gradient of the student's logit; `mean` is the block's sum of `of_student`.
    __device__ __forceinline__ float slope(float mean) const {
        return KIND == FORWARD ? student - teacher : student * (excess - mean);
    }
};

// What does not depend on the row.
struct Terms {
    float beta, inverse, ce_scale, kd_scale;
};

// A row's label: whether the row is trained. An ignored row has no loss, one with a label past the vocabulary a NaN loss.
template <typename T>
__device__ __forceinline__ bool is_trained(T *row, i32 label, u64 vocab, float *ce_loss, float *kd_loss) {
    if (label >= 0 && (u64)label < vocab) return true;
    if (threadIdx.x == 0) *ce_loss = *kd_loss = label < 0 ? 0.0f : QUIET_NAN;
    for (u64 i = threadIdx.x; i < vocab; i += THREADS) row[i] = from_f32<T>(0.0f);
    return false;
}

// Both models' vectors from `first` on, UNROLL of them, THREADS · VEC apart.
template <typename T> struct Vectors {
    Packed<T> student[UNROLL], teacher[UNROLL];

    __device__ __forceinline__ void load(const T *row, const T *other, u64 first, u64 vocab, u64 shared) {
#pragma unroll
        for (int i = 0; i < UNROLL; i++) {
            if (first + i * SPAN < vocab) student[i] = load_packed(row + first + i * SPAN);
            teacher[i] = first + i * SPAN < shared ? load_packed(other + first + i * SPAN) : Packed<T>{};
        }
    }
};

// A row with the teacher's logits.
template <typename T, Divergence KIND>
__device__ void online_row(T *row, const T *other, i32 label, u64 vocab, u64 shared, Terms terms, bool with_grad,
                           float *ce_loss, float *kd_loss) {
    float inverse = terms.inverse, vec[VEC], others[VEC];
    Denominators<T, true, true> own;
    Denominators<T, false, true> theirs;
    // Logits that the teacher does not have.
    Denominators<T, true, false> rest;
    Vectors<T> vectors;
    // Rows are 16-byte aligned, and the last vector may extend into their padding.
    for (u64 begin = threadIdx.x * VEC; begin < shared; begin += UNROLL * SPAN) {
        vectors.load(row, other, begin, shared, shared);
#pragma unroll
        for (int i = 0; i < UNROLL; i++) {
            u64 first = begin + i * SPAN;
            if (first >= shared) continue;
            unpack(vec, vectors.student[i]);
            unpack(others, vectors.teacher[i]);
            if (first + VEC > shared) {
                mask(vec, first, shared);
                mask(others, first, shared);
            }
            own.add(vec, inverse);
            theirs.add(others, inverse);
        }
    }
    own.reduce(inverse);
    theirs.reduce(inverse);
    LogSoftmax ce = {own.maximum, 1.0f, 0.0f};
    float total = own.ce;
    if (shared < vocab) {
        for (u64 i = shared + threadIdx.x; i < vocab; i += THREADS) rest.add(to_f32(row[i]), 1.0f);
        rest.reduce(1.0f);
        ce.maximum = fmaxf(own.maximum, rest.maximum);
        total = own.ce * exp_for<T>(own.maximum - ce.maximum) + rest.ce * exp_for<T>(rest.maximum - ce.maximum);
    }
    ce.log_total = logf(total);
    LogSoftmax student = {own.maximum, inverse, logf(own.kd)};
    LogSoftmax teacher = {theirs.maximum, inverse, logf(theirs.kd)};
    if (threadIdx.x == 0) *ce_loss = -ce.at(to_f32(row[label]));
    float sums[2] = {0.0f, 0.0f}, mean = 0.0f;
    if (KIND != FORWARD) {
        for (u64 begin = threadIdx.x * VEC; begin < shared; begin += UNROLL * SPAN) {
            vectors.load(row, other, begin, shared, shared);
#pragma unroll
            for (int i = 0; i < UNROLL; i++) {
                if (begin + i * SPAN >= shared) continue;
                int both = (int)min(shared - (begin + i * SPAN), (u64)VEC);
                unpack(vec, vectors.student[i]);
                unpack(others, vectors.teacher[i]);
#pragma unroll
                for (int j = 0; j < VEC; j++) {
                    Outcome<T, KIND> outcome(student.at(vec[j]), teacher.at(others[j]), terms.beta);
                    sums[0] += j < both ? outcome.of_student() : 0.0f;
                    sums[1] += j < both ? outcome.of_teacher() : 0.0f;
                }
            }
        }
        mean = block_reduce<false, WARPS>(sums[0]);
        if (KIND == MIXED) sums[1] = block_reduce<false, WARPS>(sums[1]);
        float kd = KIND == REVERSE ? mean : terms.beta * sums[1] + (1.0f - terms.beta) * mean;
        if (threadIdx.x == 0) *kd_loss = kd;
        if (!with_grad) return;
    }
    // The label's logit has been read.
    __syncthreads();
    float kd_scale = KIND == MIXED ? terms.kd_scale * (1.0f - terms.beta) : terms.kd_scale;
    // Backwards, so that it starts with what the last pass left in L2.
    for (u64 round = (vocab + UNROLL * SPAN - 1) / (UNROLL * SPAN); round-- > 0;) {
        u64 begin = round * UNROLL * SPAN + threadIdx.x * VEC;
        vectors.load(row, other, begin, vocab, shared);
#pragma unroll
        for (int i = 0; i < UNROLL; i++) {
            u64 first = begin + i * SPAN;
            if (first >= vocab) continue;
            int both = first < shared ? (int)min(shared - first, (u64)VEC) : 0;
            unpack(vec, vectors.student[i]);
            unpack(others, vectors.teacher[i]);
#pragma unroll
            for (int j = 0; j < VEC; j++) {
                // What is past the teacher's logits is computed and dropped.
                Outcome<T, KIND> outcome(student.at(vec[j]), teacher.at(others[j]), terms.beta);
                if (KIND == FORWARD) sums[0] += j < both ? outcome.of_student() : 0.0f;
                float of_kd = j < both ? kd_scale * outcome.slope(mean) : 0.0f;
                vec[j] = terms.ce_scale * exp_for<T>(ce.at(vec[j])) + of_kd;
            }
            if ((u64)label - first < VEC) {
#pragma unroll
                for (int j = 0; j < VEC; j++) vec[j] -= (u64)label == first + j ? terms.ce_scale : 0.0f;
            }
            store_vec(row + first, vec);
        }
    }
    if (KIND == FORWARD) {
        float kd = block_reduce<false, WARPS>(sums[0]);
        if (threadIdx.x == 0) *kd_loss = kd;
    }
}

__device__ __forceinline__ Terms make_terms(float beta, float inverse, float factor, const double *ce_weight,
                                            const double *kd_weight, const double *loss_scale) {
    return {beta, inverse, (float)(*ce_weight * *loss_scale), (float)(*kd_weight * *loss_scale) * factor * inverse};
}

// Sum over a block in f64, broadcast to every thread.
__device__ double block_sum_f64(double value) {
    __shared__ double warp_values[WARPS];
    for (int step = WARP / 2; step > 0; step /= 2) value += __shfl_xor_sync(FULL_MASK, value, step);
    if (threadIdx.x % WARP == 0) warp_values[threadIdx.x / WARP] = value;
    __syncthreads();
    double total = warp_values[0];
    for (int warp = 1; warp < WARPS; warp++) total += warp_values[warp];
    __syncthreads();
    return total;
}

// The cached tokens of a row. One that is not in both vocabularies belongs to the tail.
struct Cached {
    const i32 *ids;
    const float *log_probs;
    // The student's logits of the tokens.
    float *logits;
    u64 k, shared;

    __device__ __forceinline__ bool is_known(u64 place) const { return (u64)(i64)ids[place] < shared; }
};

template <typename T, Divergence KIND>
__device__ void cached_row(T *row, Cached cached, bool tail, i32 label, u64 vocab, Terms terms, bool with_grad,
                           float *ce_loss, float *kd_loss) {
    float inverse = terms.inverse, vec[VEC];
    float label_logit = to_f32(row[label]), found = 0.0f;
    double listed = 0.0;
    Denominators<T, true, false> known;
    Denominators<T, false, true> outcomes, theirs;
    for (u64 i = threadIdx.x; i < cached.k; i += THREADS) {
        if (!cached.is_known(i)) continue;
        float logit = to_f32(row[cached.ids[i]]);
        cached.logits[i] = logit;
        found += 1.0f;
        listed += exp((double)cached.log_probs[i]);
        known.add(logit, 1.0f);
        outcomes.add(logit * inverse, 1.0f);
        theirs.add(cached.log_probs[i], 1.0f);
    }
    // Exact: a vocabulary is below 2^24. It also separates the reads above from the writes below.
    bool has_tail = block_reduce<false, WARPS>(found) < (float)cached.shared && tail;
    if (has_tail) {
        listed = block_sum_f64(listed);
        for (u64 i = threadIdx.x; i < cached.k; i += THREADS)
            if (cached.is_known(i)) row[cached.ids[i]] = from_f32<T>(-INF);
        __syncthreads();
    }
    // Of the tail's tokens, and the sum of cross-entropy without listed ones; else of all tokens.
    Denominators<T, true, true> others;
    Denominators<T, true, false> rest;
    for (u64 first = threadIdx.x * VEC; first < vocab; first += SPAN) {
        load_vec(vec, row + first);
        if (first + VEC > cached.shared) {
            float further[VEC];
#pragma unroll
            for (int j = 0; j < VEC; j++) further[j] = first + j >= cached.shared && first + j < vocab ? vec[j] : -INF;
            rest.add(further, 1.0f);
            mask(vec, first, cached.shared);
        }
        others.add(vec, inverse);
    }
    others.reduce(inverse);
    rest.reduce(1.0f);
    known.reduce(1.0f);
    LogSoftmax ce = {fmaxf(others.maximum, rest.maximum), 1.0f, 0.0f};
    if (has_tail) ce.maximum = fmaxf(ce.maximum, known.maximum);
    float total = others.ce * exp_for<T>(others.maximum - ce.maximum) + rest.ce * exp_for<T>(rest.maximum - ce.maximum);
    if (has_tail) total += known.ce * exp_for<T>(known.maximum - ce.maximum);
    ce.log_total = logf(total);
    LogSoftmax within = {others.maximum, inverse, logf(others.kd)};
    float tail_logit = fmaf(within.maximum, inverse, within.log_total);
    if (has_tail && threadIdx.x == 0) outcomes.add(tail_logit, 1.0f);
    outcomes.reduce(1.0f);
    theirs.reduce(1.0f);
    LogSoftmax student = {outcomes.maximum, 1.0f, logf(outcomes.kd)};
    LogSoftmax teacher = {0.0f, 1.0f, 0.0f};
    float tail_log_prob = logf(fmaxf((float)(1.0 - listed), 1.0f / (1 << 24)));
    if (!has_tail) teacher = {theirs.maximum, 1.0f, logf(theirs.kd)};
    Outcome<T, KIND> of_tail(student.at(tail_logit), tail_log_prob, terms.beta);
    float sums[2] = {0.0f, 0.0f};
    if (has_tail && threadIdx.x == 0) {
        sums[0] = of_tail.of_student();
        sums[1] = of_tail.of_teacher();
    }
    for (u64 i = threadIdx.x; i < cached.k; i += THREADS) {
        if (!cached.is_known(i)) continue;
        float log_student = student.at(cached.logits[i] * inverse);
        Outcome<T, KIND> outcome(log_student, teacher.at(cached.log_probs[i]), terms.beta);
        sums[0] += outcome.of_student();
        sums[1] += outcome.of_teacher();
    }
    float mean = block_reduce<false, WARPS>(sums[0]), kd = mean;
    if (KIND == MIXED) kd = terms.beta * block_reduce<false, WARPS>(sums[1]) + (1.0f - terms.beta) * mean;
    if (threadIdx.x == 0) {
        *ce_loss = -ce.at(label_logit);
        *kd_loss = kd;
    }
    if (!with_grad) return;
    float kd_scale = KIND == MIXED ? terms.kd_scale * (1.0f - terms.beta) : terms.kd_scale;
    float tail_scale = has_tail ? kd_scale * of_tail.slope(mean) : 0.0f;
    for (u64 first = threadIdx.x * VEC; first < vocab; first += SPAN) {
        load_vec(vec, row + first);
#pragma unroll
        for (int j = 0; j < VEC; j++) {
            float of_ce = terms.ce_scale * exp_for<T>(ce.at(vec[j]));
            bool in_tail = has_tail && first + j < cached.shared;
            vec[j] = in_tail ? of_ce + tail_scale * exp_for<T>(within.at(vec[j])) : of_ce;
            if ((u64)label == first + j) vec[j] -= terms.ce_scale;
        }
        store_vec(row + first, vec);
    }
    __syncthreads();
    for (u64 i = threadIdx.x; i < cached.k; i += THREADS) {
        if (!cached.is_known(i)) continue;
        float logit = cached.logits[i], own = cached.ids[i] == label ? terms.ce_scale : 0.0f;
        Outcome<T, KIND> outcome(student.at(logit * inverse), teacher.at(cached.log_probs[i]), terms.beta);
        float of_ce = terms.ce_scale * exp_for<T>(ce.at(logit)) - own;
        row[cached.ids[i]] = from_f32<T>(of_ce + kd_scale * outcome.slope(mean));
    }
}

// One block per row. `shared` are the tokens that both models have, the first of the student's; the cached kernels have scratch
// `known` [rows, k].
#define INSTANTIATE(KIND, DIVERGENCE)                                                                                  \
    extern "C" __global__ void __launch_bounds__(THREADS, 2)                                                           \
        distill_##KIND(DTYPE *logits, u64 row_stride, const DTYPE *teacher, u64 teacher_stride, const i32 *labels,     \
                       float *ce_losses, float *kd_losses, u64 vocab, u64 shared, float beta, float inverse,           \
                       float factor, const double *ce_weight, const double *kd_weight, const double *loss_scale,       \
                       u64 with_grad) {                                                                                \
        u64 at = blockIdx.x;                                                                                           \
        DTYPE *row = logits + at * row_stride;                                                                         \
        float *ce_loss = ce_losses + at, *kd_loss = kd_losses + at;                                                    \
        if (!is_trained(row, labels[at], vocab, ce_loss, kd_loss)) return;                                             \
        Terms terms = make_terms(beta, inverse, factor, ce_weight, kd_weight, loss_scale);                             \
        online_row<DTYPE, DIVERGENCE>(row, teacher + at * teacher_stride, labels[at], vocab, shared, terms, with_grad, \
                                      ce_loss, kd_loss);                                                               \
        if (threadIdx.x == 0) *kd_loss *= factor;                                                                      \
    }                                                                                                                  \
    extern "C" __global__ void __launch_bounds__(THREADS, 2)                                                           \
        distill_cached_##KIND(DTYPE *logits, u64 row_stride, const i32 *ids, const float *log_probs, float *known,     \
                              u64 k, u64 tail, const i32 *labels, float *ce_losses, float *kd_losses, u64 vocab,       \
                              u64 shared, float beta, float inverse, float factor, const double *ce_weight,            \
                              const double *kd_weight, const double *loss_scale, u64 with_grad) {                      \
        u64 at = blockIdx.x;                                                                                           \
        DTYPE *row = logits + at * row_stride;                                                                         \
        float *ce_loss = ce_losses + at, *kd_loss = kd_losses + at;                                                    \
        if (!is_trained(row, labels[at], vocab, ce_loss, kd_loss)) return;                                             \
        Terms terms = make_terms(beta, inverse, factor, ce_weight, kd_weight, loss_scale);                             \
        Cached cached = {ids + at * k, log_probs + at * k, known + at * k, k, shared};                                 \
        cached_row<DTYPE, DIVERGENCE>(row, cached, tail, labels[at], vocab, terms, with_grad, ce_loss, kd_loss);       \
        if (threadIdx.x == 0) *kd_loss *= factor;                                                                      \
    }

INSTANTIATE(forward, FORWARD)
INSTANTIATE(reverse, REVERSE)
INSTANTIATE(mixed, MIXED)
