// Tensor Core instructions of compute capability 8.0 and later as functions (PTX ISA, "cp.async", "ldmatrix", "mma.m16n8k16").
//
// A test that compiles kernels for the host defines ON_HOST and supplies functions of the same names.

#ifndef ON_HOST

extern __shared__ __align__(1024) unsigned char dynamic_shared[];

// Address of shared memory as the instructions below take it.
__device__ inline unsigned shared_address(const void *memory)
{
    return (unsigned)__cvta_generic_to_shared(memory);
}

// Queue a copy of 16 bytes to shared memory past L1; `bytes` 0 writes zeros and reads nothing.
__device__ inline void copy_16_bytes(unsigned to, const void *from, int bytes)
{
    asm volatile("cp.async.cg.shared.global.L2::128B [%0], [%1], 16, %2;" ::"r"(to), "l"(from), "r"(bytes) : "memory");
}

// End a group of this thread's copies.
__device__ inline void end_copies()
{
    asm volatile("cp.async.commit_group;" ::: "memory");
}

// Wait until at most PENDING of this thread's groups are incomplete.
template <int PENDING> __device__ inline void wait_for_copies()
{
    asm volatile("cp.async.wait_group %0;" ::"n"(PENDING) : "memory");
}

// Load four matrices of 8x8 halves; a lane passes the address of row lane % 8 of matrix lane / 8.
__device__ inline void load_matrices(unsigned (&to)[4], unsigned row)
{
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
                 : "=r"(to[0]), "=r"(to[1]), "=r"(to[2]), "=r"(to[3])
                 : "r"(row));
}

// sums += a * b of 16x16 and 16x8 halves, in float32.
__device__ inline void multiply_add(float (&sums)[4], const unsigned (&a)[4], unsigned b0, unsigned b1)
{
    asm volatile("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 "
                 "{%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"
                 : "+f"(sums[0]), "+f"(sums[1]), "+f"(sums[2]), "+f"(sums[3])
                 : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}

#endif
