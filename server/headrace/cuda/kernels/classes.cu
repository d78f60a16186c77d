// Scores to probabilities and to the best classes.
//
// Defined by the compiler's options: HALF (1: FP16 scores), THREADS (of a block, 32 to 1024, a power of two), CLASSES (of a row).
//
// One block a row. Of equal scores the lower class comes first, as in the reference: both sort by one whole number made of the score
// and the class.

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
    const int bits = __float_as_int(score + 0.0f); // -0 becomes 0, which it equals
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

// Scores of a thread; few enough of them stay in its registers.
#define OWN ((CLASSES + THREADS - 1) / THREADS)
#define KEPT (OWN <= 8)

struct Larger {
    template <class T> __device__ T operator()(T a, T b) const { return a > b ? a : b; }
};
struct Higher { // as fmaxf: what is no number does not count
    __device__ float operator()(float a, float b) const { return fmaxf(a, b); }
};
struct Sum {
    __device__ float operator()(float a, float b) const { return a + b; }
};

// One of the block's values made of all of them, for all threads. `shared` has two rows of WARPS values, of which calls take turns:
// by the time a row is written again, everybody has passed the barrier behind reading it.
template <class T, class Join> __device__ inline T joined(T mine, T *shared, int turn, Join join)
{
#pragma unroll
    for (int distance = WARP / 2; distance > 0; distance /= 2)
        mine = join(mine, __shfl_xor_sync(ALL, mine, distance));
    shared += turn % 2 * WARPS;
    if (threadIdx.x % WARP == 0)
        shared[threadIdx.x / WARP] = mine;
    __syncthreads();
    mine = shared[threadIdx.x % WARPS];
#pragma unroll
    for (int distance = WARPS / 2; distance > 0; distance /= 2)
        mine = join(mine, __shfl_xor_sync(ALL, mine, distance));
    return mine;
}

extern "C" __launch_bounds__(THREADS) __global__ void soften(const Score *scores, float *shares)
{
    __shared__ float floats[2 * WARPS];
    scores += (unsigned long long)blockIdx.x * CLASSES;
    shares += (unsigned long long)blockIdx.x * CLASSES;
    float highest = __int_as_float(0xff800000); // minus infinity
    for (int i = threadIdx.x; i < CLASSES; i += THREADS)
        highest = fmaxf(highest, loaded(scores[i]));
    highest = joined(highest, floats, 0, Higher());
    float sum = 0.0f;
    for (int i = threadIdx.x; i < CLASSES; i += THREADS)
        sum += expf(loaded(scores[i]) - highest);
    sum = joined(sum, floats, 1, Sum());
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
#if KEPT
    Key own[OWN];
#pragma unroll
    for (int k = 0; k < OWN; ++k) {
        const int i = threadIdx.x + k * THREADS;
        own[k] = i < CLASSES ? key_of(loaded(scores[i]), i) : 0;
    }
#define KEY(k) own[k]
#define EACH _Pragma("unroll") for (int k = 0; k < OWN; ++k)
#else
#define KEY(k) key_of(loaded(scores[k]), k)
#define EACH for (int k = threadIdx.x; k < CLASSES; k += THREADS)
#endif
    float highest = 0.0f, sum = 1.0f;
    Key most = 0xFFFFFFFFFFFFFFFFull; // what comes next is at most this
    for (int place = 0; place < top_k; ++place) {
        Key next = 0;
        EACH {
            const Key key = KEY(k);
            if (key <= most && key > next)
                next = key;
        }
        next = joined(next, keys, place, Larger());
        most = next - 1;
        if (place == 0 && softmax) {
            highest = score_of(next);
            sum = 0.0f;
            EACH {
                const Key key = KEY(k);
                if (key)
                    sum += expf(score_of(key) - highest);
            }
            sum = joined(sum, floats, 0, Sum());
        }
        if (threadIdx.x == place % THREADS) {
            const int number = (int)(0xFFFFFFFFu - (unsigned int)next);
            const float score = loaded(scores[number]); // as it was: 0 has no sign in a key
            numbers[place] = number;
            best[place] = softmax ? expf(score - highest) / sum : score;
        }
    }
}
