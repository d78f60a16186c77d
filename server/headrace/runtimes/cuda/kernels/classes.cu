// Softmax and top-k of rows of scores.
//
// Macros set by the compiler's options: HALF (1: FP16 scores), THREADS (in a block, 32 to 1024, a power of two), CLASSES (in a row).
//
// One block for each row. Of equal scores the lower class comes first, as in the reference: both sort by one integer that combines
// score and class.

#if HALF
typedef unsigned short Score;
__device__ inline float loaded(Score score) { return from_half(score); }
#else
typedef float Score;
__device__ inline float loaded(Score score) { return score; }
#endif

typedef unsigned long long Key;

__device__ inline Key key_of(float score, int number)
{
    const int bits = __float_as_int(score + 0.0f); // -0 becomes 0: they compare equal
    const unsigned int ascending = bits < 0 ? ~(unsigned int)bits : (unsigned int)bits | 0x80000000u;
    return (Key)ascending << 32 | (0xFFFFFFFFu - (unsigned int)number);
}

__device__ inline float score_of(Key key)
{
    const unsigned int ascending = (unsigned int)(key >> 32);
    return __int_as_float((int)(ascending & 0x80000000u ? ascending & 0x7FFFFFFFu : ~ascending));
}

#define WARP 32
static_assert(THREADS % WARP == 0, "whole warps");
#define WARPS (THREADS / WARP)
#define ALL 0xFFFFFFFFu

// Scores of a thread; up to eight of them stay in its registers.
#define PER_THREAD ((CLASSES + THREADS - 1) / THREADS)
#define IN_REGISTERS (PER_THREAD <= 8)

struct Larger {
    template <class T> __device__ T operator()(T a, T b) const { return a > b ? a : b; }
};
struct Higher { // as fmaxf: ignores NaN
    __device__ float operator()(float a, float b) const { return fmaxf(a, b); }
};
struct Sum {
    __device__ float operator()(float a, float b) const { return a + b; }
};

// Reduces one value of each thread of the block and returns the result to all threads. `shared` has two rows of WARPS values, used
// alternately: before a row is written again, all threads have passed the barrier after reading it.
template <class T, class Join> __device__ inline T reduced(T value, T *shared, int turn, Join join)
{
#pragma unroll
    for (int distance = WARP / 2; distance > 0; distance /= 2)
        value = join(value, __shfl_xor_sync(ALL, value, distance));
    shared += turn % 2 * WARPS;
    if (threadIdx.x % WARP == 0)
        shared[threadIdx.x / WARP] = value;
    __syncthreads();
    value = shared[threadIdx.x % WARPS];
#pragma unroll
    for (int distance = WARPS / 2; distance > 0; distance /= 2)
        value = join(value, __shfl_xor_sync(ALL, value, distance));
    return value;
}

extern "C" __launch_bounds__(THREADS) __global__ void soften(const Score *scores, float *shares)
{
    __shared__ float floats[2 * WARPS];
    scores += (unsigned long long)blockIdx.x * CLASSES;
    shares += (unsigned long long)blockIdx.x * CLASSES;
    float highest = __int_as_float(0xff800000); // minus infinity
    for (int i = threadIdx.x; i < CLASSES; i += THREADS)
        highest = fmaxf(highest, loaded(scores[i]));
    highest = reduced(highest, floats, 0, Higher());
    float sum = 0.0f;
    for (int i = threadIdx.x; i < CLASSES; i += THREADS)
        sum += expf(loaded(scores[i]) - highest);
    sum = reduced(sum, floats, 1, Sum());
    for (int i = threadIdx.x; i < CLASSES; i += THREADS)
        shares[i] = expf(loaded(scores[i]) - highest) / sum;
}

extern "C" __launch_bounds__(THREADS) __global__ void rank(
    const Score *scores, float *best, int *numbers, int top_k, int softmax)
{
    __shared__ Key keys[2 * WARPS];
    __shared__ float floats[2 * WARPS];
    scores += (unsigned long long)blockIdx.x * CLASSES;
    best += (unsigned long long)blockIdx.x * top_k;
    numbers += (unsigned long long)blockIdx.x * top_k;
#if IN_REGISTERS
    Key keys_of_thread[PER_THREAD];
#pragma unroll
    for (int k = 0; k < PER_THREAD; ++k) {
        const int i = threadIdx.x + k * THREADS;
        keys_of_thread[k] = i < CLASSES ? key_of(loaded(scores[i]), i) : 0;
    }
#define KEY(k) keys_of_thread[k]
#define EACH _Pragma("unroll") for (int k = 0; k < PER_THREAD; ++k)
#else
#define KEY(k) key_of(loaded(scores[k]), k)
#define EACH for (int k = threadIdx.x; k < CLASSES; k += THREADS)
#endif
    float highest = 0.0f, sum = 1.0f;
    Key max_key = 0xFFFFFFFFFFFFFFFFull; // upper bound of the next key
    for (int rank = 0; rank < top_k; ++rank) {
        Key next = 0;
        EACH {
            const Key key = KEY(k);
            if (key <= max_key && key > next)
                next = key;
        }
        next = reduced(next, keys, rank, Larger());
        max_key = next - 1;
        if (rank == 0 && softmax) {
            highest = score_of(next);
            sum = 0.0f;
            EACH {
                const Key key = KEY(k);
                if (key)
                    sum += expf(score_of(key) - highest);
            }
            sum = reduced(sum, floats, 0, Sum());
        }
        if (threadIdx.x == rank % THREADS) {
            const int number = (int)(0xFFFFFFFFu - (unsigned int)next);
            const float score = loaded(scores[number]); // read again: a key has no sign of 0
            numbers[rank] = number;
            best[rank] = softmax ? expf(score - highest) / sum : score;
        }
    }
}
