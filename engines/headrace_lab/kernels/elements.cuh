// Elements of a convolution's tensors, and its epilogue.
//
// Macros set by the compiler's options: HALF (1: FP16 elements), BIAS, RESIDUAL, RELU (1: part of the epilogue).
// Vectors of 2, 4 or 8 elements lie at multiples of their size; other counts are read and written one by one.

#if HALF
typedef unsigned short Element;
__device__ inline float loaded(Element value) { return from_half(value); }
__device__ inline Element stored(float value) { return to_half(value); }
#else
typedef float Element;
__device__ inline float loaded(Element value) { return value; }
__device__ inline Element stored(float value) { return value; }
#endif

__device__ inline unsigned pair_of_halves(float low, float high)
{
    return (unsigned)to_half(low) | (unsigned)to_half(high) << 16;
}

template <int COUNT> __device__ inline void load_floats(const float *source, float (&values)[COUNT])
{
    if constexpr (COUNT % 4 == 0) {
#pragma unroll
        for (int i = 0; i < COUNT; i += 4) {
            const float4 four = *(const float4 *)(source + i);
            values[i] = four.x, values[i + 1] = four.y, values[i + 2] = four.z, values[i + 3] = four.w;
        }
    } else if constexpr (COUNT == 2) {
        const float2 two = *(const float2 *)source;
        values[0] = two.x, values[1] = two.y;
    } else {
#pragma unroll
        for (int i = 0; i < COUNT; ++i)
            values[i] = source[i];
    }
}

template <int COUNT> __device__ inline void store_floats(float *target, const float (&values)[COUNT])
{
    if constexpr (COUNT % 4 == 0) {
#pragma unroll
        for (int i = 0; i < COUNT; i += 4)
            *(float4 *)(target + i) = make_float4(values[i], values[i + 1], values[i + 2], values[i + 3]);
    } else if constexpr (COUNT == 2) {
        *(float2 *)target = make_float2(values[0], values[1]);
    } else {
#pragma unroll
        for (int i = 0; i < COUNT; ++i)
            target[i] = values[i];
    }
}

template <int COUNT> __device__ inline void load_halves(const unsigned short *source, float (&values)[COUNT])
{
    if constexpr (COUNT % 2 == 0) {
        unsigned pairs[COUNT / 2];
        if constexpr (COUNT % 8 == 0) {
#pragma unroll
            for (int i = 0; i < COUNT; i += 8) {
                const uint4 eight = *(const uint4 *)(source + i);
                pairs[i / 2] = eight.x, pairs[i / 2 + 1] = eight.y, pairs[i / 2 + 2] = eight.z, pairs[i / 2 + 3] = eight.w;
            }
        } else if constexpr (COUNT == 2) {
            pairs[0] = *(const unsigned *)source;
        } else {
#pragma unroll
            for (int i = 0; i < COUNT; i += 4) {
                const uint2 four = *(const uint2 *)(source + i);
                pairs[i / 2] = four.x, pairs[i / 2 + 1] = four.y;
            }
        }
#pragma unroll
        for (int i = 0; i < COUNT; ++i)
            values[i] = from_half((unsigned short)(pairs[i / 2] >> i % 2 * 16));
    } else {
#pragma unroll
        for (int i = 0; i < COUNT; ++i)
            values[i] = from_half(source[i]);
    }
}

template <int COUNT> __device__ inline void store_halves(unsigned short *target, const float (&values)[COUNT])
{
    if constexpr (COUNT % 8 == 0) {
#pragma unroll
        for (int i = 0; i < COUNT; i += 8) {
            uint4 eight;
            eight.x = pair_of_halves(values[i], values[i + 1]), eight.y = pair_of_halves(values[i + 2], values[i + 3]);
            eight.z = pair_of_halves(values[i + 4], values[i + 5]), eight.w = pair_of_halves(values[i + 6], values[i + 7]);
            *(uint4 *)(target + i) = eight;
        }
    } else if constexpr (COUNT % 4 == 0) {
#pragma unroll
        for (int i = 0; i < COUNT; i += 4) {
            uint2 four;
            four.x = pair_of_halves(values[i], values[i + 1]), four.y = pair_of_halves(values[i + 2], values[i + 3]);
            *(uint2 *)(target + i) = four;
        }
    } else if constexpr (COUNT == 2) {
        *(unsigned *)target = pair_of_halves(values[0], values[1]);
    } else {
#pragma unroll
        for (int i = 0; i < COUNT; ++i)
            target[i] = to_half(values[i]);
    }
}

template <int COUNT> __device__ inline void load_elements(const Element *source, float (&values)[COUNT])
{
#if HALF
    load_halves(source, values);
#else
    load_floats(source, values);
#endif
}

template <int COUNT> __device__ inline void store_elements(Element *target, const float (&values)[COUNT])
{
#if HALF
    store_halves(target, values);
#else
    store_floats(target, values);
#endif
}

// Adds bias and residual to the sums of consecutive channels, applies ReLU (NaN stays NaN), and stores them.
template <int COUNT>
__device__ inline void store_finished(
    float (&sums)[COUNT], int channel, unsigned long long at, const float *bias, const Element *residual, Element *y)
{
    float added[COUNT];
    if (BIAS) {
        load_floats(bias + channel, added);
#pragma unroll
        for (int i = 0; i < COUNT; ++i)
            sums[i] += added[i];
    }
    if (RESIDUAL) {
        load_elements(residual + at, added);
#pragma unroll
        for (int i = 0; i < COUNT; ++i)
            sums[i] += added[i];
    }
    if (RELU) {
#pragma unroll
        for (int i = 0; i < COUNT; ++i)
            sums[i] = sums[i] < 0.0f ? 0.0f : sums[i];
    }
    store_elements(y + at, sums);
}
