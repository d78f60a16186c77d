// Half precision without a header: the runtime compiler is not given CUDA's include folder.

__device__ inline unsigned short to_half(float value)
{
    unsigned short bits;
    asm("{ cvt.rn.f16.f32 %0, %1; }" : "=h"(bits) : "f"(value));
    return bits;
}

__device__ inline float from_half(unsigned short bits)
{
    float value;
    asm("{ cvt.f32.f16 %0, %1; }" : "=f"(value) : "h"(bits));
    return value;
}
