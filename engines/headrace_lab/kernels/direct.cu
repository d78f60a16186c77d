// Direct convolution.
//
// Macros set by the compiler's options: those of elements.cuh; the shape: IN_CHANNELS, IN_HEIGHT, IN_WIDTH, OUT_CHANNELS,
// OUT_HEIGHT, OUT_WIDTH, KERNEL_HEIGHT, KERNEL_WIDTH, STRIDE, PADDING, GROUPS; THREADS (in a block); of a thread: PIXELS (output
// columns), CHANNELS (output channels), INPUTS (input channels that it reads at once).
//
// Weights are (r, s, c / groups, k): neighbouring threads read neighbouring output channels and the same input.

#define GROUP_INPUTS (IN_CHANNELS / GROUPS)
#define GROUP_OUTPUTS (OUT_CHANNELS / GROUPS)
#define STRIPS ((OUT_WIDTH + PIXELS - 1) / PIXELS)
#define CHANNEL_PARTS (OUT_CHANNELS / CHANNELS)

typedef unsigned long long Index64;

extern "C" __launch_bounds__(THREADS) __global__ void convolve_direct(
    const Element *x, const Element *weights, const float *bias, const Element *residual, Element *y, int rows)
{
    Index64 rest = (Index64)blockIdx.x * THREADS + threadIdx.x;
    const int channel = (int)(rest % CHANNEL_PARTS) * CHANNELS;
    rest /= CHANNEL_PARTS;
    const int first_column = (int)(rest % STRIPS) * PIXELS;
    rest /= STRIPS;
    const int out_row = (int)(rest % OUT_HEIGHT);
    const Index64 image = rest / OUT_HEIGHT;
    if (image >= rows)
        return;
    x += image * IN_HEIGHT * IN_WIDTH * IN_CHANNELS + channel / GROUP_OUTPUTS * GROUP_INPUTS;
    weights += channel;
    float sums[PIXELS][CHANNELS] = {};
    for (int r = 0; r < KERNEL_HEIGHT; ++r) {
        const int in_row = out_row * STRIDE + r - PADDING;
        if (in_row < 0 || in_row >= IN_HEIGHT)
            continue;
        for (int s = 0; s < KERNEL_WIDTH; ++s) {
            const Element *tap = weights + (Index64)(r * KERNEL_WIDTH + s) * GROUP_INPUTS * OUT_CHANNELS;
            const int in_column = first_column * STRIDE + s - PADDING;
            for (int c = 0; c < GROUP_INPUTS; c += INPUTS) {
                float values[PIXELS][INPUTS];
#pragma unroll
                for (int p = 0; p < PIXELS; ++p) {
                    const int column = in_column + p * STRIDE;
                    if (column >= 0 && column < IN_WIDTH) {
                        load_elements(x + ((Index64)in_row * IN_WIDTH + column) * IN_CHANNELS + c, values[p]);
                    } else {
#pragma unroll
                        for (int i = 0; i < INPUTS; ++i)
                            values[p][i] = 0.0f;
                    }
                }
#pragma unroll
                for (int i = 0; i < INPUTS; ++i) {
                    float factors[CHANNELS];
                    load_elements(tap + (Index64)(c + i) * OUT_CHANNELS, factors);
#pragma unroll
                    for (int p = 0; p < PIXELS; ++p)
#pragma unroll
                        for (int k = 0; k < CHANNELS; ++k)
                            sums[p][k] += values[p][i] * factors[k];
                }
            }
        }
    }
#pragma unroll
    for (int p = 0; p < PIXELS; ++p) {
        const int column = first_column + p;
        if (column < OUT_WIDTH) {
            const Index64 pixel = (image * OUT_HEIGHT + out_row) * OUT_WIDTH + column;
            store_finished(sums[p], channel, pixel * OUT_CHANNELS + channel, bias, residual, y);
        }
    }
}
