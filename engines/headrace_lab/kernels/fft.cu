// FFT convolution: input to planes, products of each frequency, planes to output.
//
// Macros set by the compiler's options: those of elements.cuh; the shape's; SIZE of a plane, SIZE x SIZE; VALID_HEIGHT and VALID_WIDTH,
// outputs of a plane; PLANES_HIGH and PLANES_WIDE of an image; THREADS (256); ROWS and COLUMNS of sums of a thread; WARP_ROWS, warps of a
// block along the rows; UNROLLED channels of the sum.
//
// Planes are (tiles, channels, SIZE, SIZE), spectra (tiles, channels, FREQUENCIES), the kernel's spectrum (c, k, FREQUENCIES), conjugated
// and divided by SIZE * SIZE. A tile is one part of one image; parts overlap by the kernel less one row and column ("overlap-save").

#define FREQUENCIES (SIZE * (SIZE / 2 + 1))
#define FREQUENCY_BLOCKS ((FREQUENCIES + 31) / 32)
#define LINES (THREADS / 32) // rows of 32 threads in a block

typedef unsigned long long Index64;

// A block has one row of a tile's planes, 32 channels: read along the channels, written along the row.
extern "C" __launch_bounds__(THREADS) __global__ void gather_planes(const Element *x, float *planes, int tiles)
{
    __shared__ float staged[32][SIZE + 1];
    const int lane = threadIdx.x % 32, line = threadIdx.x / 32;
    const int tile = blockIdx.x / SIZE, i = blockIdx.x % SIZE, first_channel = blockIdx.y * 32;
    const int part = tile % (PLANES_HIGH * PLANES_WIDE);
    const Index64 image = tile / (PLANES_HIGH * PLANES_WIDE);
    const int row = part / PLANES_WIDE * VALID_HEIGHT + i - PADDING;
    const int first_column = part % PLANES_WIDE * VALID_WIDTH - PADDING;
    for (int j = line; j < SIZE; j += LINES) {
        const int column = first_column + j, channel = first_channel + lane;
        float value = 0.0f;
        if ((unsigned)row < IN_HEIGHT && (unsigned)column < IN_WIDTH && channel < IN_CHANNELS)
            value = loaded(x[((image * IN_HEIGHT + row) * IN_WIDTH + column) * IN_CHANNELS + channel]);
        staged[lane][j] = value;
    }
    __syncthreads();
    for (int c = line; c < 32 && first_channel + c < IN_CHANNELS; c += LINES)
        for (int j = lane; j < SIZE; j += 32)
            planes[(((Index64)tile * IN_CHANNELS + first_channel + c) * SIZE + i) * SIZE + j] = staged[c][j];
}

// A warp has 32 neighbouring frequencies, a thread one frequency of ROWS tiles and COLUMNS output channels.
extern "C" __launch_bounds__(THREADS) __global__ void multiply_spectra(
    const float2 *inputs, const float2 *kernel, float2 *outputs, int tiles)
{
    const int warp = threadIdx.x / 32;
    const int column_blocks = (OUT_CHANNELS + COLUMNS * (LINES / WARP_ROWS) - 1) / (COLUMNS * (LINES / WARP_ROWS));
    const int row_blocks = (tiles + ROWS * WARP_ROWS - 1) / (ROWS * WARP_ROWS);
    // Blocks of the same frequencies are neighbours, so that their spectra are read from L2.
    unsigned block = blockIdx.x;
    const int first_row = (block % row_blocks * WARP_ROWS + warp % WARP_ROWS) * ROWS;
    block /= row_blocks;
    const int first_column = (block % column_blocks * (LINES / WARP_ROWS) + warp / WARP_ROWS) * COLUMNS;
    const int frequency = block / column_blocks * 32 + threadIdx.x % 32;
    if (frequency >= FREQUENCIES || first_column >= OUT_CHANNELS || first_row >= tiles)
        return;
    const float2 *row[ROWS], *column[COLUMNS];
#pragma unroll
    for (int i = 0; i < ROWS; ++i)
        row[i] = inputs + (Index64)min(first_row + i, tiles - 1) * IN_CHANNELS * FREQUENCIES + frequency;
#pragma unroll
    for (int j = 0; j < COLUMNS; ++j)
        column[j] = kernel + (Index64)min(first_column + j, OUT_CHANNELS - 1) * FREQUENCIES + frequency;
    float2 sums[ROWS][COLUMNS] = {};
#pragma unroll UNROLLED
    for (int c = 0; c < IN_CHANNELS; ++c) {
        float2 a[ROWS], b[COLUMNS];
#pragma unroll
        for (int i = 0; i < ROWS; ++i)
            a[i] = row[i][(Index64)c * FREQUENCIES];
#pragma unroll
        for (int j = 0; j < COLUMNS; ++j)
            b[j] = column[j][(Index64)c * OUT_CHANNELS * FREQUENCIES];
#pragma unroll
        for (int i = 0; i < ROWS; ++i)
#pragma unroll
            for (int j = 0; j < COLUMNS; ++j) {
                sums[i][j].x += a[i].x * b[j].x;
                sums[i][j].x -= a[i].y * b[j].y;
                sums[i][j].y += a[i].x * b[j].y;
                sums[i][j].y += a[i].y * b[j].x;
            }
    }
#pragma unroll
    for (int i = 0; i < ROWS; ++i)
#pragma unroll
        for (int j = 0; j < COLUMNS; ++j)
            if (first_row + i < tiles && first_column + j < OUT_CHANNELS)
                outputs[((Index64)(first_row + i) * OUT_CHANNELS + first_column + j) * FREQUENCIES + frequency] = sums[i][j];
}

// A block has one row of a tile's outputs, 32 channels: read along the row, written along the channels.
extern "C" __launch_bounds__(THREADS) __global__ void scatter_planes(
    const float *planes, const float *bias, const Element *residual, Element *y, int tiles)
{
    __shared__ float staged[32][VALID_WIDTH + 1];
    const int lane = threadIdx.x % 32, line = threadIdx.x / 32;
    const int tile = blockIdx.x / VALID_HEIGHT, i = blockIdx.x % VALID_HEIGHT, first_channel = blockIdx.y * 32;
    for (int c = line; c < 32 && first_channel + c < OUT_CHANNELS; c += LINES)
        for (int j = lane; j < VALID_WIDTH; j += 32)
            staged[c][j] = planes[(((Index64)tile * OUT_CHANNELS + first_channel + c) * SIZE + i) * SIZE + j];
    __syncthreads();
    const int part = tile % (PLANES_HIGH * PLANES_WIDE), channel = first_channel + lane;
    const Index64 image = tile / (PLANES_HIGH * PLANES_WIDE);
    const int row = part / PLANES_WIDE * VALID_HEIGHT + i, first_column = part % PLANES_WIDE * VALID_WIDTH;
    for (int j = line; j < VALID_WIDTH; j += LINES) {
        const int column = first_column + j;
        if (row < OUT_HEIGHT && column < OUT_WIDTH && channel < OUT_CHANNELS) {
            float sums[1] = {staged[lane][j]};
            const Index64 pixel = (image * OUT_HEIGHT + row) * OUT_WIDTH + column;
            store_finished(sums, channel, pixel * OUT_CHANNELS + channel, bias, residual, y);
        }
    }
}
