// The activations of feed-forward layers, with and without a gate.

// An activation f: `value` is f(x), `value_and_slope` stores f'(x) too.
struct Silu {
    template <typename T> static __device__ __forceinline__ float value(float x) {
        return x * rcp_for<T>(1.0f + exp_for<T>(-x));
    }

    template <typename T> static __device__ __forceinline__ float value_and_slope(float x, float &slope) {
        float sigmoid = rcp_for<T>(1.0f + exp_for<T>(-x)), silu = x * sigmoid;
        slope = sigmoid + silu * (1.0f - sigmoid);
        return silu;
    }
};

// Keeps NaN, unlike fminf and fmaxf.
__device__ __forceinline__ float clamp20(float x) { return x < -20.0f ? -20.0f : x > 20.0f ? 20.0f : x; }

// x Φ(x), Φ the normal distribution function. normcdff keeps its relative accuracy where 1 + erff would cancel.
struct Gelu {
    template <typename T> static __device__ __forceinline__ float value(float x) { return x * normcdff(x); }

    template <typename T> static __device__ __forceinline__ float value_and_slope(float x, float &slope) {
        float cdf = normcdff(x), near = clamp20(x);
        slope = cdf + near * (0.39894228f * expf(-0.5f * near * near));
        return x * cdf;
    }
};

// x (1 + tanh(u)) / 2 = x sigmoid(2u), u = sqrt(2 / pi) (x + 0.044715 x^3). The sigmoid is 0 or 1 where x is clamped.
struct GeluTanh {
    static constexpr float LINEAR = 1.5957691216f, CUBIC = 0.044715f * LINEAR;

    // sigmoid(2u); `tail` is sigmoid(-|2u|), from which the slope is computed without cancellation.
    template <typename T> static __device__ __forceinline__ float sigmoid(float near, float &tail) {
        tail = rcp_for<T>(1.0f + exp_for<T>(fabsf(near) * (LINEAR + CUBIC * near * near)));
        return near < 0.0f ? tail : 1.0f - tail;
    }

    template <typename T> static __device__ __forceinline__ float value(float x) {
        float tail;
        return x * sigmoid<T>(clamp20(x), tail);
    }

    template <typename T> static __device__ __forceinline__ float value_and_slope(float x, float &slope) {
        float tail, near = clamp20(x), cdf = sigmoid<T>(near, tail);
        slope = cdf + tail * (1.0f - tail) * near * (LINEAR + 3.0f * CUBIC * near * near);
        return x * cdf;
    }
};

// max(x, 0); keeps NaN.
struct Relu {
    template <typename T> static __device__ __forceinline__ float value(float x) { return x < 0.0f ? 0.0f : x; }

    template <typename T> static __device__ __forceinline__ float value_and_slope(float x, float &slope) {
        slope = x > 0.0f ? 1.0f : 0.0f;
        return x < 0.0f ? 0.0f : x;
    }
};
