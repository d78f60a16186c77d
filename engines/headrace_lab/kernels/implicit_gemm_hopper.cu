// Convolution as an implicit matrix product with `wgmma`. implicit_gemm_hopper.py describes layout and budget.
//
// Follows elements.cuh, gemm_epilogue.cuh and hopper.cuh. Macros: BM, BN (tile), CONSUMERS (warpgroups that multiply), STAGES,
// POINTWISE (1: the input is a matrix of pixels and channels), BLOCKS (blocks on a multiprocessor), SPLITS (blocks of a cluster,
// which share a tile). One dimension of blocks, whose threads are the warpgroups that multiply, then one warp that copies. Without
// clusters there may be fewer blocks than tiles: a block takes one tile after the other.

#define BK 64
#define A_BYTES (BM * 128)
#define STAGE_BYTES ((BM + BN) * 128)
#define ROWS (BM / CONSUMERS) // of a warpgroup
#define CONSUMER_THREADS (CONSUMERS * 128)
// An output tile is in columns of 64 channels, as the copy engine swizzles them; it takes the place of one or two stages.
#define OUT_COLUMNS (BN / 64)
#define COLUMNS_OF_A_STAGE ((BM + BN) / BM)
#define OUT_STAGES ((OUT_COLUMNS + COLUMNS_OF_A_STAGE - 1) / COLUMNS_OF_A_STAGE)

static_assert(ROWS == 64 || ROWS == 128, "one or two products of 64 rows");
static_assert(STAGES > OUT_STAGES, "one stage besides the output");

// Place in the ring of stages, and the parity of its barriers.
struct Ring {
    int stage;
    unsigned parity;

    __device__ inline void advance()
    {
        if (++stage == STAGES) {
            stage = 0;
            parity ^= 1;
        }
    }
};

// Sizes of the convolution and addresses of the ring in shared memory.
struct Work {
    int pixels, c, k, out_h, out_w, r, s, stride, pad;
    unsigned tiles, full, empty;

    __device__ inline int n_tiles() const { return (k + BN - 1) / BN; }
    __device__ inline int all_tiles() const { return (pixels + BM - 1) / BM * n_tiles(); }
    __device__ inline int steps() const { return r * s * ((c + BK - 1) / BK); }
};

// Queue the copies of a tile, by one thread: steps `first` to `end`, then the residual in the place of the output.
__device__ inline void copy_tile(
    const Work &work, Ring &ring, int tile, int first, int end, const TensorMap *x, const TensorMap *weights, const TensorMap *residual)
{
    const int first_pixel = tile / work.n_tiles() * BM, first_filter = tile % work.n_tiles() * BN;
    const int line = first_pixel / work.out_w, image = line / work.out_h;
    const int top = (line - image * work.out_h) * work.stride - work.pad;
    const int left = (first_pixel - line * work.out_w) * work.stride - work.pad;
    const int steps_of_tap = (work.c + BK - 1) / BK;
    int tap = first / steps_of_tap, channel = first % steps_of_tap * BK;
    int row = tap / work.s, column = tap % work.s;
    for (int step = first; step < end; ++step) {
        wait(work.empty + ring.stage * 8, ring.parity);
        const unsigned to = work.tiles + ring.stage * STAGE_BYTES, barrier = work.full + ring.stage * 8;
        arrive_and_expect(barrier, STAGE_BYTES);
        if (POINTWISE)
            copy_box(to, x, barrier, channel, first_pixel);
        else
            copy_pixels(to, x, barrier, channel, left, top, image, column, row);
        copy_box(to + A_BYTES, weights, barrier, channel, tap, first_filter);
        channel += BK;
        if (channel >= work.c) {
            channel = 0;
            ++tap;
            if (++column == work.s) {
                column = 0;
                ++row;
            }
        }
        ring.advance();
    }
    if (SPLITS > 1)
        return;
    for (int first_column = 0; first_column < OUT_COLUMNS; first_column += COLUMNS_OF_A_STAGE) {
        wait(work.empty + ring.stage * 8, ring.parity);
        const unsigned barrier = work.full + ring.stage * 8;
        unsigned to = work.tiles + ring.stage * STAGE_BYTES;
        int columns = 0;
        if (RESIDUAL)
            while (columns < COLUMNS_OF_A_STAGE && first_column + columns < OUT_COLUMNS &&
                   first_filter + (first_column + columns) * 64 < work.k)
                ++columns;
        if (columns > 0)
            arrive_and_expect(barrier, columns * A_BYTES);
        else
            arrive(barrier);
        for (int i = 0; i < columns; ++i)
            for (int group = 0; group < CONSUMERS; ++group, to += ROWS * 128)
                copy_box(to, residual, barrier, first_filter + (first_column + i) * 64, first_pixel + group * ROWS);
        ring.advance();
    }
}

// Multiply the steps of a tile; `sums` are those of 64 rows each, as `wgmma` lays them out.
__device__ inline void multiply_tile(const Work &work, Ring &ring, int steps, int consumer, int t, float (&sums)[ROWS / 64][BN / 2])
{
#pragma unroll
    for (int i = 0; i < ROWS / 64; ++i)
#pragma unroll
        for (int e = 0; e < BN / 2; ++e)
            sums[i][e] = 0;
    int previous = 0;
    for (int step = 0; step < steps; ++step) {
        wait(work.full + ring.stage * 8, ring.parity);
        const unsigned long long a = describe(work.tiles + ring.stage * STAGE_BYTES + consumer * ROWS * 128);
        const unsigned long long b = describe(work.tiles + ring.stage * STAGE_BYTES + A_BYTES);
        start_products();
#pragma unroll
        for (int part = 0; part < BK / 16; ++part)
#pragma unroll
            for (int i = 0; i < ROWS / 64; ++i)
                multiply_add(sums[i], a + i * 512 + part * 2, b + part * 2);
        end_products();
        wait_for_products<1>();
        // The products of the step before are complete: its stage may be overwritten.
        if (step > 0 && t == 0)
            arrive(work.empty + previous * 8);
        previous = ring.stage;
        ring.advance();
    }
    wait_for_products<0>();
    if (steps > 0 && t == 0)
        arrive(work.empty + previous * 8);
}

#if SPLITS == 1

// Finish the sums of a warpgroup in the place of the output, where the residual is, and store them by the copy engine.
__device__ inline void store_sums(
    const Work &work, Ring &ring, int tile, int consumer, int t, const float (&sums)[ROWS / 64][BN / 2], const float *bias,
    const TensorMap *y)
{
    const int lane = t % 32, k = work.k;
    const int first_pixel = tile / work.n_tiles() * BM + consumer * ROWS, first_filter = tile % work.n_tiles() * BN;
    unsigned places[OUT_STAGES];
    int stages[OUT_STAGES];
#pragma unroll
    for (int i = 0; i < OUT_STAGES; ++i) {
        stages[i] = ring.stage;
        places[i] = work.tiles + ring.stage * STAGE_BYTES + consumer * ROWS * 128;
        wait(work.full + ring.stage * 8, ring.parity);
        ring.advance();
    }
    const unsigned at = (t / 32 * 16 + lane / 4) * 128 + lane % 4 * 4;
#pragma unroll
    for (int column = 0; column < OUT_COLUMNS; ++column) {
        const unsigned place = places[column / COLUMNS_OF_A_STAGE] + column % COLUMNS_OF_A_STAGE * A_BYTES + at;
#pragma unroll
        for (int j = 0; j < 8; ++j) {
            const int filter = first_filter + column * 64 + j * 8 + lane % 4 * 2;
            float2 added = make_float2(0, 0);
            if (BIAS && filter < k)
                added = *(const float2 *)(bias + filter);
#pragma unroll
            for (int i = 0; i < ROWS / 64 * 2; ++i) {
                const unsigned to = place + i / 2 * 8192 + i % 2 * 1024 + ((j ^ lane / 4) << 4);
                float low = sums[i / 2][(column * 8 + j) * 4 + i % 2 * 2] + added.x;
                float high = sums[i / 2][(column * 8 + j) * 4 + i % 2 * 2 + 1] + added.y;
                if (RESIDUAL) {
                    const unsigned pair = load_shared(to);
                    low += from_half((unsigned short)pair);
                    high += from_half((unsigned short)(pair >> 16));
                }
                if (RELU) {
                    low = low < 0 ? 0 : low;
                    high = high < 0 ? 0 : high;
                }
                store_shared(to, pair_of_halves(low, high));
            }
        }
    }
    publish_writes();
    const NamedBarrier<128> group = {1 + consumer};
    group.wait();
    if (t == 0) {
#pragma unroll
        for (int column = 0; column < OUT_COLUMNS; ++column)
            if (first_filter + column * 64 < k)
                store_box(
                    places[column / COLUMNS_OF_A_STAGE] + column % COLUMNS_OF_A_STAGE * A_BYTES, y, first_filter + column * 64,
                    first_pixel);
        wait_for_stores();
#pragma unroll
        for (int i = 0; i < OUT_STAGES; ++i)
            arrive(work.empty + stages[i] * 8);
    }
}

#else

// Write the sums of a warpgroup to shared memory in rows.
__device__ inline void lay_out_sums(float *rows, int consumer, int t, const float (&sums)[ROWS / 64][BN / 2])
{
    const int lane = t % 32;
#pragma unroll
    for (int i = 0; i < ROWS / 64; ++i)
#pragma unroll
        for (int j = 0; j < BN / 8; ++j) {
            const int row = consumer * ROWS + i * 64 + t / 32 * 16 + lane / 4;
            float *to = rows + row * SUMS_ROW(BN) + j * 8 + lane % 4 * 2;
            to[0] = sums[i][j * 4], to[1] = sums[i][j * 4 + 1];
            to[8 * SUMS_ROW(BN)] = sums[i][j * 4 + 2], to[8 * SUMS_ROW(BN) + 1] = sums[i][j * 4 + 3];
        }
}

// Add the sums of the blocks of a cluster in order, and store those rows of the tile that fall to block `split`.
__device__ inline void store_shared_tile(
    const Work &work, int tile, int split, int t, const float *bias, const Element *residual, Element *y)
{
    const int first_pixel = tile / work.n_tiles() * BM, first_filter = tile % work.n_tiles() * BN;
    const int column = t % (BN / 8) * 8, filter = first_filter + column;
#pragma unroll 2
    for (int row = t / (BN / 8) * SPLITS + split; row < BM; row += CONSUMER_THREADS / (BN / 8) * SPLITS) {
        const int pixel = first_pixel + row;
        if (pixel >= work.pixels || filter >= work.k)
            continue;
        const unsigned from = work.tiles + (row * SUMS_ROW(BN) + column) * 4;
        float4 parts[SPLITS][2];
#pragma unroll
        for (int i = 0; i < SPLITS; ++i) {
            parts[i][0] = load_of_block(from, i);
            parts[i][1] = load_of_block(from + 16, i);
        }
        float values[8] = {0, 0, 0, 0, 0, 0, 0, 0};
#pragma unroll
        for (int part = 0; part < SPLITS; ++part)
#pragma unroll
            for (int i = 0; i < 2; ++i) {
                values[i * 4] += parts[part][i].x, values[i * 4 + 1] += parts[part][i].y;
                values[i * 4 + 2] += parts[part][i].z, values[i * 4 + 3] += parts[part][i].w;
            }
        store_finished(values, filter, (unsigned long long)pixel * work.k + filter, bias, residual, y);
    }
}

#endif

extern "C"
#if SPLITS > 1
    __cluster_dims__(SPLITS, 1, 1)
#endif
    __launch_bounds__(CONSUMER_THREADS + 32, BLOCKS) __global__ void implicit_gemm_hopper(
        const __grid_constant__ TensorMap x_map, const __grid_constant__ TensorMap weights_map,
        const __grid_constant__ TensorMap residual_map, const __grid_constant__ TensorMap y_map, const float *bias,
        const Element *residual, Element *y, int pixels, int c, int k, int out_h, int out_w, int r, int s, int stride, int pad)
{
    __shared__ alignas(8) unsigned long long barriers[2 * STAGES];
    const unsigned full = shared_address(barriers);
    const Work work = {
        pixels, c, k, out_h, out_w, r, s, stride, pad, shared_address(dynamic_shared), full, full + STAGES * 8};
    const int split = SPLITS > 1 ? cluster_rank() : 0;
    const int first_step = work.steps() * split / SPLITS, end_step = work.steps() * (split + 1) / SPLITS;
    const int t = threadIdx.x % 128, consumer = threadIdx.x / 128;

    if (threadIdx.x == 0) {
        prefetch_map(&x_map);
        prefetch_map(&weights_map);
        for (int i = 0; i < STAGES; ++i) {
            initialise_barrier(work.full + i * 8, 1);
            initialise_barrier(work.empty + i * 8, CONSUMERS);
        }
        publish_barriers();
    }
    __syncthreads();

#if SPLITS == 1
    if (threadIdx.x >= CONSUMER_THREADS) {
        if (t == 0) {
            Ring ring = {0, 1};
            for (int tile = blockIdx.x; tile < work.all_tiles(); tile += gridDim.x)
                copy_tile(work, ring, tile, first_step, end_step, &x_map, &weights_map, &residual_map);
        }
    } else {
        Ring ring = {0, 0};
        float sums[ROWS / 64][BN / 2];
        for (int tile = blockIdx.x; tile < work.all_tiles(); tile += gridDim.x) {
            multiply_tile(work, ring, end_step - first_step, consumer, t, sums);
            store_sums(work, ring, tile, consumer, t, sums, bias, &y_map);
        }
    }
#else
    const int tile = blockIdx.x / SPLITS;
    if (threadIdx.x >= CONSUMER_THREADS) {
        if (t == 0) {
            Ring ring = {0, 1};
            copy_tile(work, ring, tile, first_step, end_step, &x_map, &weights_map, &residual_map);
        }
        wait_for_cluster();
    } else {
        Ring ring = {0, 0};
        float sums[ROWS / 64][BN / 2];
        multiply_tile(work, ring, end_step - first_step, consumer, t, sums);
        // Every stage has been read by all warpgroups; the sums take their place.
        const NamedBarrier<CONSUMER_THREADS> consumers = {1};
        consumers.wait();
        lay_out_sums((float *)dynamic_shared, consumer, t, sums);
        wait_for_cluster();
        store_shared_tile(work, tile, split, threadIdx.x, bias, residual, y);
    }
    // Other blocks read the sums of this one, so it must not end before them.
    wait_for_cluster();
#endif
}
