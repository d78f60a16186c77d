// Depthwise convolution: output channel k is a convolution of input channel k alone.
//
// Macros set by the compiler's options: those of elements.cuh; the shape's; THREADS (in a block); of a thread: PIXELS (output
// columns), CHANNELS.
//
// Weights are (r, s, c). A thread's window of PIXELS inputs slides along its row in registers.

#define STRIPS ((OUT_WIDTH + PIXELS - 1) / PIXELS)
#define PARTS (OUT_CHANNELS / CHANNELS)
#define UNROLLED (KERNEL_WIDTH <= 7 ? KERNEL_WIDTH : PIXELS)

typedef unsigned long long Index64;

extern "C" __launch_bounds__(THREADS) __global__ void convolve_depthwise(
    const Element *x, const Element *weights, const float *bias, const Element *residual, Element *y, int rows)
{
    Index64 rest = (Index64)blockIdx.x * THREADS + threadIdx.x;
    const int channel = (int)(rest % PARTS) * CHANNELS;
    rest /= PARTS;
    const int first_column = (int)(rest % STRIPS) * PIXELS;
    rest /= STRIPS;
    const int out_row = (int)(rest % OUT_HEIGHT);
    const Index64 image = rest / OUT_HEIGHT;
    if (image >= rows)
        return;
    x += image * IN_HEIGHT * IN_WIDTH * IN_CHANNELS + channel;
    weights += channel;
    const int in_column = first_column * STRIDE - PADDING;
    float sums[PIXELS][CHANNELS] = {};
    for (int r = 0; r < KERNEL_HEIGHT; ++r) {
        const int in_row = out_row * STRIDE + r - PADDING;
        if (in_row < 0 || in_row >= IN_HEIGHT)
            continue;
        const Element *line = x + (Index64)in_row * IN_WIDTH * IN_CHANNELS;
        float window[PIXELS][CHANNELS] = {};
        if (STRIDE == 1) {
#pragma unroll
            for (int p = 1; p < PIXELS; ++p)
                if ((unsigned)(in_column + p - 1) < IN_WIDTH)
                    load_elements(line + (in_column + p - 1) * IN_CHANNELS, window[p]);
        }
#pragma unroll UNROLLED
        for (int s = 0; s < KERNEL_WIDTH; ++s) {
            float factors[CHANNELS];
            load_elements(weights + (r * KERNEL_WIDTH + s) * IN_CHANNELS, factors);
#pragma unroll
            for (int p = 0; p < PIXELS; ++p) {
                if (STRIDE == 1 && p < PIXELS - 1) {
#pragma unroll
                    for (int c = 0; c < CHANNELS; ++c)
                        window[p][c] = window[p + 1][c];
                } else {
                    const int column = in_column + p * STRIDE + s;
#pragma unroll
                    for (int c = 0; c < CHANNELS; ++c)
                        window[p][c] = 0.0f;
                    if ((unsigned)column < IN_WIDTH)
                        load_elements(line + column * IN_CHANNELS, window[p]);
                }
#pragma unroll
                for (int c = 0; c < CHANNELS; ++c)
                    sums[p][c] += window[p][c] * factors[c];
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
