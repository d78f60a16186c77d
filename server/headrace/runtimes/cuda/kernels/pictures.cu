// uint8 images to the model's tensor: resize, crop, (pixel - mean) / std, layout and type in one pass over memory.
//
// Macros set by the compiler's options: CHANNELS (1 or 3), PLANAR (1: channels before height and width), HALF (1: FP16 results),
// PRECISION_BITS (fixed point of the weights).
//
// One thread for each pixel of the result, one row of the grid (y) for each image. Integer weights and rounding to 8 bits between the
// two passes give the same bits as the reference. A copy is a single tap with the weight 1.

#if HALF
typedef unsigned short Value;
__device__ inline Value stored(float value) { return to_half(value); }
#else
typedef float Value;
__device__ inline Value stored(float value) { return value; }
#endif

#define ROUNDING (1 << (PRECISION_BITS - 1))

__device__ inline int to_8_bits(int total)
{
    const int value = total >> PRECISION_BITS;
    return value < 0 ? 0 : value > 255 ? 255 : value;
}

extern "C" __global__ void prepare(
    const unsigned char *source, Value *destination,
    const int *first_down, const int *weights_down, int taps_down,
    const int *first_across, const int *weights_across, int taps_across,
    const float *mean, const float *std,
    int source_height, int source_width, int height, int width)
{
    const int index = blockIdx.x * blockDim.x + threadIdx.x;
    if (index >= height * width)
        return;
    const int y = index / width;
    const int x = index - y * width;
    const unsigned long long picture = blockIdx.y;
    source += picture * source_height * source_width * CHANNELS;
    destination += picture * height * width * CHANNELS;

    int total[CHANNELS];
    for (int c = 0; c < CHANNELS; ++c)
        total[c] = ROUNDING;
    for (int j = 0; j < taps_down; ++j) {
        const int weight = weights_down[y * taps_down + j];
        if (weight == 0) // beyond the edge: must not be read
            continue;
        const unsigned char *line = source + (first_down[y] + j) * source_width * CHANNELS;
        int sum[CHANNELS];
        for (int c = 0; c < CHANNELS; ++c)
            sum[c] = ROUNDING;
        for (int i = 0; i < taps_across; ++i) {
            const int share = weights_across[x * taps_across + i];
            if (share == 0)
                continue;
            const unsigned char *pixel = line + (first_across[x] + i) * CHANNELS;
            for (int c = 0; c < CHANNELS; ++c)
                sum[c] += pixel[c] * share;
        }
        for (int c = 0; c < CHANNELS; ++c)
            total[c] += to_8_bits(sum[c]) * weight;
    }
    for (int c = 0; c < CHANNELS; ++c) {
        const float value = ((float)to_8_bits(total[c]) - mean[c]) / std[c];
        destination[PLANAR ? (c * height + y) * width + x : index * CHANNELS + c] = stored(value);
    }
}
