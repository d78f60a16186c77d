// uint8 images that are neither resized nor cropped to the model's tensor: (pixel - mean) / std, layout and type.
//
// Macros set by the compiler's options: CHANNELS (1 or 3), PLANAR (1: channels before height and width), HALF (1: FP16 results), DIVIDES
// (1: divide; 0: multiply by the inverse and correct, if that gives the same bits for all pixels), THREADS (in a block).
//
// Each thread has a group of pixels that fills 16 bytes of each channel; each row of the grid (y) is an image. A block first copies its
// pixels to shared memory: each byte is read once, in order, which matters if it comes over the bus.

#if HALF
typedef unsigned short Value;
#define GROUP 8
#define OF_A_WORD 2
__device__ inline Value stored(float value) { return to_half(value); }
__device__ inline unsigned int word_of(const float *values)
{
    return to_half(values[0]) | (unsigned int)to_half(values[1]) << 16;
}
#else
typedef float Value;
#define GROUP 4
#define OF_A_WORD 1
__device__ inline Value stored(float value) { return value; }
__device__ inline unsigned int word_of(const float *values) { return __float_as_int(values[0]); }
#endif

typedef unsigned long long Address;

#define PIECE 16
#define VALUES (GROUP * CHANNELS) // of a thread, also the bytes that it reads
#define WORDS (VALUES / 4)

// Bits of float32 values.
struct Scale {
    int mean[3], std[3], inverse[3];
};

__device__ inline float scaled(unsigned int pixel, float mean, float std, float inverse)
{
    const float distance = (float)(int)pixel - mean;
#if DIVIDES
    return distance / std;
#else
    const float near = distance * inverse;
    return fmaf(fmaf(-near, std, distance), inverse, near);
#endif
}

// Copies a block's bytes of an image to shared memory.
__device__ inline void fetch(const unsigned char *from, int size, unsigned int *words)
{
    int done = 0;
    if ((Address)from % PIECE == 0) {
        for (int i = threadIdx.x; i < size / PIECE; i += THREADS)
            ((uint4 *)words)[i] = ((const uint4 *)from)[i];
        done = size / PIECE * PIECE;
    } else if ((Address)from % 4 == 0) {
        for (int i = threadIdx.x; i < size / 4; i += THREADS)
            words[i] = ((const unsigned int *)from)[i];
        done = size / 4 * 4;
    }
    for (int i = done + threadIdx.x; i < size; i += THREADS)
        ((unsigned char *)words)[i] = from[i];
    __syncthreads();
}

__device__ inline void scale_one(const unsigned char *picture, Value *result, Scale scale, int pixels)
{
    __shared__ uint4 staged[THREADS * VALUES / PIECE];
    unsigned int *words = (unsigned int *)staged;
    const int begin = blockIdx.x * THREADS * GROUP;
    const int rest = pixels - begin;
    fetch(picture + begin * CHANNELS, (rest < THREADS * GROUP ? rest : THREADS * GROUP) * CHANNELS, words);
    const int first = begin + threadIdx.x * GROUP;
    if (first >= pixels)
        return;
    words += threadIdx.x * WORDS;
    float values[VALUES]; // in the order of the result
#pragma unroll
    for (int i = 0; i < VALUES; ++i) {
        const int c = i % CHANNELS;
        const float value = scaled(
            words[i / 4] >> (i % 4 * 8) & 255u, __int_as_float(scale.mean[c]), __int_as_float(scale.std[c]),
            __int_as_float(scale.inverse[c]));
        values[PLANAR ? c * GROUP + i / CHANNELS : i] = value;
    }
#pragma unroll
    for (int k = 0; k < CHANNELS; ++k) { // 16 bytes each
        Value *to = result + (PLANAR ? k * pixels + first : first * CHANNELS + k * GROUP);
        const float *of = values + k * GROUP;
        if (first + GROUP <= pixels && (Address)to % PIECE == 0) {
            uint4 piece;
            piece.x = word_of(of);
            piece.y = word_of(of + OF_A_WORD);
            piece.z = word_of(of + 2 * OF_A_WORD);
            piece.w = word_of(of + 3 * OF_A_WORD);
            *(uint4 *)to = piece;
            continue;
        }
#pragma unroll
        for (int i = 0; i < GROUP; ++i)
            if ((PLANAR ? first + i : first + (k * GROUP + i) / CHANNELS) < pixels)
                to[i] = stored(of[i]);
    }
}

// Images are contiguous.
extern "C" __launch_bounds__(THREADS) __global__ void scale_all(
    const unsigned char *source, Value *destination, int pixels,
    int mean_0, int mean_1, int mean_2, int std_0, int std_1, int std_2, int inverse_0, int inverse_1, int inverse_2)
{
    const Scale scale = {{mean_0, mean_1, mean_2}, {std_0, std_1, std_2}, {inverse_0, inverse_1, inverse_2}};
    const Address start = (Address)blockIdx.y * pixels * CHANNELS;
    scale_one(source + start, destination + start, scale, pixels);
}

// A table has the address of each image.
extern "C" __launch_bounds__(THREADS) __global__ void scale_each(
    const Address *addresses, Value *destination, int pixels,
    int mean_0, int mean_1, int mean_2, int std_0, int std_1, int std_2, int inverse_0, int inverse_1, int inverse_2)
{
    const Scale scale = {{mean_0, mean_1, mean_2}, {std_0, std_1, std_2}, {inverse_0, inverse_1, inverse_2}};
    const Address start = (Address)blockIdx.y * pixels * CHANNELS;
    scale_one((const unsigned char *)addresses[blockIdx.y], destination + start, scale, pixels);
}
