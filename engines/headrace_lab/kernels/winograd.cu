// Winograd's transforms of inputs and outputs of 3x3 convolutions, F(TILE x TILE, 3 x 3); TILE is 2 or 4.
//
// Macros set by the compiler's options: those of elements.cuh; the shape's; TILE; THREADS (in a block); CHANNELS (of a thread);
// SPLITS of the products, which are added up; HALF_PRODUCTS (1: the transformed input is FP16, scaled by 2**-INPUT_SHIFT; sums are scaled by 2**OUTPUT_EXPONENT).
//
// A tile is TILE x TILE outputs and needs POINTS x POINTS inputs. The transformed input is (POINTS**2, tiles, c), the products are
// (SPLITS, POINTS**2, tiles, k): neighbouring threads read and write neighbouring channels. The matrices are those of Lavin and Gray (2015).

#define POINTS (TILE + 2)
#define TILES_HIGH ((OUT_HEIGHT + TILE - 1) / TILE)
#define TILES_WIDE ((OUT_WIDTH + TILE - 1) / TILE)

typedef unsigned long long Index64;

#if TILE == 2
__device__ constexpr float INPUT_MATRIX[4][4] = {{1, 0, -1, 0}, {0, 1, 1, 0}, {0, -1, 1, 0}, {0, 1, 0, -1}};
__device__ constexpr float OUTPUT_MATRIX[2][4] = {{1, 1, 1, 0}, {0, 1, -1, -1}};
#else
__device__ constexpr float INPUT_MATRIX[6][6] = {{4, 0, -5, 0, 1, 0}, {0, -4, -4, 1, 1, 0}, {0, 4, -4, -1, 1, 0},
    {0, -2, -1, 2, 1, 0}, {0, 2, -1, -2, 1, 0}, {0, 4, 0, -5, 0, 1}};
__device__ constexpr float OUTPUT_MATRIX[4][6] = {
    {1, 1, 1, 1, 1, 0}, {0, 1, -1, 2, -2, 0}, {0, 1, 1, 4, 4, 0}, {0, 1, -1, 8, -8, 1}};
#endif

// One row of a matrix times a vector; zeros and ones of the matrix cost nothing once the loop is unrolled.
#define DOT(result, row, vector)                                \
    {                                                           \
        float sum = 0.0f;                                       \
        _Pragma("unroll") for (int q = 0; q < POINTS; ++q)      \
            if (row[q] != 0.0f)                                 \
                sum += row[q] * vector[q];                      \
        result = sum;                                           \
    }

#if HALF_PRODUCTS
typedef unsigned short Factor;
#else
typedef float Factor;
#endif

struct Place { // of a thread: tile and first channel
    Index64 tile;
    int image, row, column, channel;
};

__device__ inline Place place_of(int channels)
{
    const Index64 number = (Index64)blockIdx.x * THREADS + threadIdx.x;
    const unsigned parts = channels / CHANNELS;
    Place place;
    place.tile = number / parts;
    place.channel = (int)(number % parts) * CHANNELS;
    const unsigned tile = (unsigned)place.tile;
    place.column = tile % TILES_WIDE * TILE;
    place.row = tile / TILES_WIDE % TILES_HIGH * TILE;
    place.image = tile / (TILES_WIDE * TILES_HIGH);
    return place;
}

extern "C" __launch_bounds__(THREADS) __global__ void transform_input(const Element *x, Factor *transformed, int tiles)
{
    const Place place = place_of(IN_CHANNELS);
    if (place.tile >= tiles)
        return;
    x += (Index64)place.image * IN_HEIGHT * IN_WIDTH * IN_CHANNELS + place.channel;
    float half_way[CHANNELS][POINTS * POINTS];
#pragma unroll
    for (int j = 0; j < POINTS; ++j) {
        float inputs[CHANNELS][POINTS];
        const int column = place.column + j - PADDING;
#pragma unroll
        for (int i = 0; i < POINTS; ++i) {
            const int row = place.row + i - PADDING;
            float values[CHANNELS] = {};
            if ((unsigned)row < IN_HEIGHT && (unsigned)column < IN_WIDTH)
                load_elements(x + ((Index64)row * IN_WIDTH + column) * IN_CHANNELS, values);
#pragma unroll
            for (int c = 0; c < CHANNELS; ++c)
                inputs[c][i] = values[c];
        }
#pragma unroll
        for (int c = 0; c < CHANNELS; ++c)
#pragma unroll
            for (int i = 0; i < POINTS; ++i)
                DOT(half_way[c][i * POINTS + j], INPUT_MATRIX[i], inputs[c])
    }
    transformed += place.tile * IN_CHANNELS + place.channel;
#pragma unroll
    for (int i = 0; i < POINTS; ++i)
#pragma unroll
        for (int j = 0; j < POINTS; ++j) {
            float values[CHANNELS];
#pragma unroll
            for (int c = 0; c < CHANNELS; ++c)
                DOT(values[c], INPUT_MATRIX[j], (half_way[c] + i * POINTS))
            Factor *target = transformed + (Index64)(i * POINTS + j) * tiles * IN_CHANNELS;
#if HALF_PRODUCTS
#pragma unroll
            for (int c = 0; c < CHANNELS; ++c)
                values[c] *= 1.0f / (1 << INPUT_SHIFT);
            store_halves(target, values);
#else
            store_floats(target, values);
#endif
        }
}

extern "C" __launch_bounds__(THREADS) __global__ void transform_output(
    const float *products, const float *bias, const Element *residual, Element *y, int tiles)
{
    const Place place = place_of(OUT_CHANNELS);
    if (place.tile >= tiles)
        return;
    products += place.tile * OUT_CHANNELS + place.channel;
    float half_way[CHANNELS][TILE * POINTS];
#pragma unroll
    for (int j = 0; j < POINTS; ++j) {
        float inputs[CHANNELS][POINTS];
#pragma unroll
        for (int i = 0; i < POINTS; ++i) {
            float values[CHANNELS];
            load_floats(products + (Index64)(i * POINTS + j) * tiles * OUT_CHANNELS, values);
#pragma unroll
            for (int split = 1; split < SPLITS; ++split) {
                float part[CHANNELS];
                load_floats(products + (Index64)((split * POINTS + i) * POINTS + j) * tiles * OUT_CHANNELS, part);
#pragma unroll
                for (int c = 0; c < CHANNELS; ++c)
                    values[c] += part[c];
            }
#pragma unroll
            for (int c = 0; c < CHANNELS; ++c)
                inputs[c][i] = values[c];
        }
#pragma unroll
        for (int c = 0; c < CHANNELS; ++c)
#pragma unroll
            for (int i = 0; i < TILE; ++i)
                DOT(half_way[c][i * POINTS + j], OUTPUT_MATRIX[i], inputs[c])
    }
#pragma unroll
    for (int i = 0; i < TILE; ++i)
#pragma unroll
        for (int j = 0; j < TILE; ++j) {
            float sums[CHANNELS];
#pragma unroll
            for (int c = 0; c < CHANNELS; ++c) {
                DOT(sums[c], OUTPUT_MATRIX[j], (half_way[c] + i * POINTS))
#if HALF_PRODUCTS
                sums[c] *= __int_as_float((127 + OUTPUT_EXPONENT) << 23); // a power of two
#endif
            }
            const int row = place.row + i, column = place.column + j;
            if (row < OUT_HEIGHT && column < OUT_WIDTH) {
                const Index64 pixel = ((Index64)place.image * OUT_HEIGHT + row) * OUT_WIDTH + column;
                store_finished(sums, place.channel, pixel * OUT_CHANNELS + place.channel, bias, residual, y);
            }
        }
}
