// Matrix product in FP32 without Tensor Cores: a convolution as implicit GEMM, or a batch of plain products.
//
// Macros set by the compiler's options: those of elements.cuh, HALF being 0; TILE_M, TILE_N, TILE_K of a block; STAGES of copies in
// flight; THREAD_ROWS; THREADS (TILE_M / THREAD_ROWS * TILE_N / 8); BLOCKS (of a multiprocessor); SPLITS of the sum; PLAIN. If PLAIN,
// DEPTH and COLUMNS, and y is (SPLITS, batch, rows, COLUMNS):
//     y[b] (rows, COLUMNS) = x[b] (rows, DEPTH) * weights[b], blockIdx.y = b * SPLITS + split;
// otherwise the shape's macros, with the rows of x being the kernel's windows, read where they lie:
//     y (pixels, k) = windows (pixels, r * s * c) * weights (r * s * c, k), blockIdx.y = group * SPLITS + split.
// Weights are padded with zeros to whole tiles. If SPLITS > 1, the sums are partial: (SPLITS, pixels, k), added up by add_splits.
//
// A thread has THREAD_ROWS x 8 sums. A warp's threads are 4 along the rows and 8 along the columns. A stage of x is (TILE_M, TILE_K) with rows
// padded by 4 floats, one of the weights is (TILE_K, TILE_N): reads of 16 bytes by a warp hit every bank once.

typedef unsigned long long Index64;

#if PLAIN
#define GROUP_INPUTS DEPTH
#define GROUP_OUTPUTS COLUMNS
#define ROW_STRIDE COLUMNS
#else
#define GROUP_INPUTS (IN_CHANNELS / GROUPS)
#define GROUP_OUTPUTS (OUT_CHANNELS / GROUPS)
#define DEPTH (KERNEL_HEIGHT * KERNEL_WIDTH * GROUP_INPUTS)
#define ROW_STRIDE OUT_CHANNELS
#endif
#define DEPTH_TILES ((DEPTH + TILE_K - 1) / TILE_K)
#define COLUMN_TILES ((GROUP_OUTPUTS + TILE_N - 1) / TILE_N)
#define PADDED_COLUMNS (COLUMN_TILES * TILE_N)

#define ROW (TILE_K + 4)              // floats of a row of x in shared memory
#define READ (GROUP_INPUTS % 4 ? 1 : 4) // floats of x that a thread copies at once
#define READS_PER_ROW (TILE_K / READ)
#define ROWS_AT_ONCE (THREADS / READS_PER_ROW)
#define READ_ROWS (TILE_M / ROWS_AT_ONCE)
#define WEIGHT_ROWS_AT_ONCE (THREADS / (TILE_N / 4))
#define STORE (GROUP_OUTPUTS % 4 ? 1 : 4) // floats that a thread stores at once

static_assert(THREADS == TILE_M / THREAD_ROWS * TILE_N / 8 && THREADS % 32 == 0, "whole warps of threads with 8 columns");
static_assert(TILE_M % ROWS_AT_ONCE == 0 && THREADS % READS_PER_ROW == 0, "threads copy whole rows");
static_assert(TILE_K % WEIGHT_ROWS_AT_ONCE == 0 || WEIGHT_ROWS_AT_ONCE == TILE_K, "threads copy whole rows of weights");

struct Window { // of an output pixel, in the input
    const float *start;
    int row, column;
};

__device__ inline void copy_windows(float *stage, const Window (&windows)[READ_ROWS], const float *safe, int depth)
{
    const int part = threadIdx.x % READS_PER_ROW;
    depth += part * READ;
    float *target = stage + threadIdx.x / READS_PER_ROW * ROW + part * READ;
#if PLAIN
    const int r = 0, s = 0;
    const long long offset = depth;
#else
    const int tap = depth / GROUP_INPUTS;
    const int r = tap / KERNEL_WIDTH, s = tap % KERNEL_WIDTH;
    const long long offset = ((long long)r * IN_WIDTH + s) * IN_CHANNELS + depth % GROUP_INPUTS;
#endif
#pragma unroll
    for (int i = 0; i < READ_ROWS; ++i) {
#if PLAIN
        const bool valid = windows[i].row == 0 && depth < DEPTH;
#else
        const int row = windows[i].row + r, column = windows[i].column + s;
        const bool valid = (unsigned)row < IN_HEIGHT && (unsigned)column < IN_WIDTH && depth < DEPTH;
#endif
        const float *source = valid ? windows[i].start + offset : safe;
        if (READ == 4)
            copy_16_bytes_async(target + i * ROWS_AT_ONCE * ROW, source, valid);
        else
            copy_4_bytes_async(target + i * ROWS_AT_ONCE * ROW, source, valid);
    }
}

__device__ inline void copy_weights(float *stage, const float *weights, int depth)
{
    const int column = threadIdx.x % (TILE_N / 4) * 4;
#pragma unroll
    for (int i = threadIdx.x / (TILE_N / 4); i < TILE_K; i += WEIGHT_ROWS_AT_ONCE)
        copy_16_bytes_async(stage + i * TILE_N + column, weights + (Index64)(depth + i) * PADDED_COLUMNS + column, true);
}

__device__ inline void multiply(const float *inputs, const float *weights, float (&sums)[THREAD_ROWS][8], int row, int column)
{
#pragma unroll
    for (int depth = 0; depth < TILE_K; depth += 4) {
        float a[THREAD_ROWS][4];
#pragma unroll
        for (int i = 0; i < THREAD_ROWS; ++i)
            load_floats(inputs + (row + i * (TILE_M / THREAD_ROWS)) * ROW + depth, a[i]);
#pragma unroll
        for (int k = 0; k < 4; ++k) {
            float left[4], right[4];
            load_floats(weights + (depth + k) * TILE_N + column, left);
            load_floats(weights + (depth + k) * TILE_N + column + TILE_N / 2, right);
#pragma unroll
            for (int i = 0; i < THREAD_ROWS; ++i)
#pragma unroll
                for (int j = 0; j < 4; ++j) {
                    sums[i][j] += a[i][k] * left[j];
                    sums[i][j + 4] += a[i][k] * right[j];
                }
        }
    }
}

extern "C" __launch_bounds__(THREADS, BLOCKS) __global__ void multiply_tiles(
    const float *x, const float *weights, const float *bias, const float *residual, float *y, int rows)
{
    __shared__ __align__(16) float inputs[STAGES][TILE_M * ROW];
    __shared__ __align__(16) float factors[STAGES][TILE_K * TILE_N];
    const int first_column = blockIdx.x % COLUMN_TILES * TILE_N;
    const int first_row = blockIdx.x / COLUMN_TILES * TILE_M;
    const int group = blockIdx.y / SPLITS, split = blockIdx.y % SPLITS;
    weights += (Index64)group * DEPTH_TILES * TILE_K * PADDED_COLUMNS + first_column;
    Window windows[READ_ROWS];
#pragma unroll
    for (int i = 0; i < READ_ROWS; ++i) {
        const int pixel = first_row + threadIdx.x / READS_PER_ROW + i * ROWS_AT_ONCE;
#if PLAIN
        windows[i] = {x + ((Index64)group * rows + pixel) * DEPTH, pixel < rows ? 0 : -1, 0};
#else
        const int image = pixel / (OUT_HEIGHT * OUT_WIDTH), place = pixel % (OUT_HEIGHT * OUT_WIDTH);
        const int row = place / OUT_WIDTH * STRIDE - PADDING, column = place % OUT_WIDTH * STRIDE - PADDING;
        const long long start = (((long long)image * IN_HEIGHT + row) * IN_WIDTH + column) * IN_CHANNELS;
        windows[i] = {x + start + group * GROUP_INPUTS, pixel < rows ? row : -KERNEL_HEIGHT, column};
#endif
    }
    const int begin = DEPTH_TILES * split / SPLITS, end = DEPTH_TILES * (split + 1) / SPLITS;
#pragma unroll
    for (int stage = 0; stage < STAGES - 1; ++stage) {
        if (begin + stage < end) {
            copy_windows(inputs[stage], windows, x, (begin + stage) * TILE_K);
            copy_weights(factors[stage], weights, (begin + stage) * TILE_K);
        }
        commit_copies();
    }
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    const int row = warp / (TILE_N / 64) * 4 + lane / 8;
    const int column = (warp % (TILE_N / 64) * 8 + lane % 8) * 4;
    float sums[THREAD_ROWS][8] = {};
    int stage = 0, free_stage = STAGES - 1;
    for (int tile = begin; tile < end; ++tile) {
        wait_for_oldest_copies();
        __syncthreads();
        if (tile + STAGES - 1 < end) {
            copy_windows(inputs[free_stage], windows, x, (tile + STAGES - 1) * TILE_K);
            copy_weights(factors[free_stage], weights, (tile + STAGES - 1) * TILE_K);
        }
        commit_copies();
        multiply(inputs[stage], factors[stage], sums, row, column);
        free_stage = stage;
        stage = stage + 1 == STAGES ? 0 : stage + 1;
    }
#pragma unroll
    for (int i = 0; i < THREAD_ROWS; ++i) {
        const int pixel = first_row + row + i * (TILE_M / THREAD_ROWS);
        if (pixel >= rows)
            continue;
#pragma unroll
        for (int j = 0; j < 8; j += STORE) {
            const int channel = first_column + column + j % 4 + j / 4 * (TILE_N / 2);
            if (channel >= GROUP_OUTPUTS)
                continue;
            float part[STORE];
#pragma unroll
            for (int k = 0; k < STORE; ++k)
                part[k] = sums[i][j + k];
#if PLAIN
            const Index64 product = (Index64)split * (gridDim.y / SPLITS) + group;
            store_floats(y + (product * rows + pixel) * COLUMNS + channel, part);
#else
            const int out = group * GROUP_OUTPUTS + channel;
            if (SPLITS > 1)
                store_floats(y + ((Index64)split * rows + pixel) * ROW_STRIDE + out, part);
            else
                store_finished(part, out, (Index64)pixel * ROW_STRIDE + out, bias, residual, y);
#endif
        }
    }
}

// Adds up the partial sums of STORE channels of a pixel.
extern "C" __launch_bounds__(THREADS) __global__ void add_splits(
    const float *partial, const float *bias, const float *residual, float *y, int rows)
{
    const Index64 at = ((Index64)blockIdx.x * THREADS + threadIdx.x) * STORE;
    const Index64 size = (Index64)rows * ROW_STRIDE;
    if (at >= size)
        return;
    float sums[STORE];
    load_floats(partial + at, sums);
#pragma unroll
    for (int split = 1; split < SPLITS; ++split) {
        float part[STORE];
        load_floats(partial + split * size + at, part);
#pragma unroll
        for (int k = 0; k < STORE; ++k)
            sums[k] += part[k];
    }
    store_finished(sums, (int)(at % ROW_STRIDE), at, bias, residual, y);
}
