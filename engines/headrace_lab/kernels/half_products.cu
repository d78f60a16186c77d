// A batch of matrix products of float16 on Tensor Cores, with float32 results:
//     y[b] (rows, COLUMNS) = x[b] (rows, DEPTH) * factors[b] (COLUMNS, DEPTH) transposed, blockIdx.y = b * SPLITS + split,
// in SPLITS parts: y is (SPLITS, batch, rows, COLUMNS).
//
// Follows tensor_cores.cuh. Macros set by the compiler's options: DEPTH, COLUMNS; BM, BN, BK (64) of a block's tile; WARPS_M, WARPS_N;
// STAGES of copies in flight; SPLITS of the sum. Rows of a tile in shared memory have 128 bytes; their pieces of 16 bytes are permuted by the row, so that
// ldmatrix has no bank conflicts.

#define THREADS (WARPS_M * WARPS_N * 32)
#define ROWS_OF_A_PASS (THREADS / 8)
#define STAGE_BYTES ((BM + BN) * 128)
#define M_FRAGMENTS (BM / WARPS_M / 16)
#define N_FRAGMENTS (BN / WARPS_N / 8)
#define STEPS ((DEPTH + BK - 1) / BK)

static_assert(BK == 64 && DEPTH % 8 == 0 && COLUMNS % 2 == 0, "whole pieces of 16 bytes, pairs of results");
static_assert(BM % ROWS_OF_A_PASS == 0 && BN % ROWS_OF_A_PASS == 0, "whole passes over a tile");

typedef unsigned long long Index64;

// Copies COUNT rows of a tile, of which the first `valid` exist.
template <int COUNT>
__device__ inline void copy_rows(unsigned to, const unsigned short *from, int valid, int depth)
{
    const int piece = threadIdx.x % 8;
#pragma unroll
    for (int i = 0; i < COUNT; i += ROWS_OF_A_PASS) {
        const int row = i + threadIdx.x / 8;
        const bool is_read = row < valid && depth + piece * 8 < DEPTH;
        const unsigned short *source = is_read ? from + (Index64)row * DEPTH + depth + piece * 8 : from;
        copy_16_bytes(to + row * 128 + ((piece ^ row & 7) << 4), source, is_read ? 16 : 0);
    }
}

extern "C" __launch_bounds__(THREADS) __global__ void multiply_halves(
    const unsigned short *x, const unsigned short *factors, float *y, int rows)
{
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
    const int n_tiles = (COLUMNS + BN - 1) / BN;
    const int first_row = blockIdx.x / n_tiles * BM, first_column = blockIdx.x % n_tiles * BN;
    const int product = blockIdx.y / SPLITS, split = blockIdx.y % SPLITS;
    const int begin = STEPS * split / SPLITS, end = STEPS * (split + 1) / SPLITS;
    x += ((Index64)product * rows + first_row) * DEPTH;
    factors += ((Index64)product * COLUMNS + first_column) * DEPTH;
    y += ((Index64)split * (gridDim.y / SPLITS) + product) * rows * COLUMNS;
    const unsigned tiles = shared_address(dynamic_shared);
    const int warp_row = warp / WARPS_N * (BM / WARPS_M), warp_column = warp % WARPS_N * (BN / WARPS_N);
    float sums[M_FRAGMENTS][N_FRAGMENTS][4] = {};
#pragma unroll
    for (int step = 0; step < STAGES - 1; ++step) {
        if (begin + step < end) {
            copy_rows<BM>(tiles + step * STAGE_BYTES, x, rows - first_row, (begin + step) * BK);
            copy_rows<BN>(tiles + step * STAGE_BYTES + BM * 128, factors, COLUMNS - first_column, (begin + step) * BK);
        }
        end_copies();
    }
    const int a_row = warp_row + lane % 16, b_row = warp_column + lane % 8 + lane / 16 * 8;
    for (int step = 0; step < end - begin; ++step) {
        wait_for_copies<STAGES - 2>();
        __syncthreads();
        const int next = step + STAGES - 1;
        if (begin + next < end) {
            const unsigned stage = tiles + next % STAGES * STAGE_BYTES;
            copy_rows<BM>(stage, x, rows - first_row, (begin + next) * BK);
            copy_rows<BN>(stage + BM * 128, factors, COLUMNS - first_column, (begin + next) * BK);
        }
        end_copies();
        const unsigned stage = tiles + step % STAGES * STAGE_BYTES;
#pragma unroll
        for (int part = 0; part < BK / 16; ++part) {
            unsigned a[M_FRAGMENTS][4], b[N_FRAGMENTS / 2][4];
#pragma unroll
            for (int i = 0; i < M_FRAGMENTS; ++i)
                load_matrices(a[i], stage + (a_row + i * 16) * 128 + ((part * 2 + lane / 16 ^ a_row & 7) << 4));
#pragma unroll
            for (int j = 0; j < N_FRAGMENTS / 2; ++j)
                load_matrices(
                    b[j], stage + (BM + b_row + j * 16) * 128 + ((part * 2 + lane / 8 % 2 ^ b_row & 7) << 4));
#pragma unroll
            for (int i = 0; i < M_FRAGMENTS; ++i)
#pragma unroll
                for (int j = 0; j < N_FRAGMENTS; ++j)
                    multiply_add(sums[i][j], a[i], b[j / 2][j % 2 * 2], b[j / 2][j % 2 * 2 + 1]);
        }
    }
#pragma unroll
    for (int i = 0; i < M_FRAGMENTS; ++i)
#pragma unroll
        for (int half = 0; half < 2; ++half) {
            const int row = first_row + warp_row + i * 16 + half * 8 + lane / 4;
            if (row >= rows)
                continue;
#pragma unroll
            for (int j = 0; j < N_FRAGMENTS; ++j) {
                const int column = first_column + warp_column + j * 8 + lane % 4 * 2;
                if (column < COLUMNS)
                    *(float2 *)(y + (Index64)row * COLUMNS + column) = make_float2(sums[i][j][half * 2], sums[i][j][half * 2 + 1]);
            }
        }
}
