// Copies from global to shared memory that do not wait (PTX ISA, "cp.async"): the copying thread commits a group of them and waits
// for all but the youngest groups. Sources that are not valid are not read; zeros are stored.

__device__ inline void copy_16_bytes_async(void *shared, const void *global, bool valid)
{
    const unsigned target = (unsigned)__cvta_generic_to_shared(shared);
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(target), "l"(global), "r"(valid ? 16 : 0) : "memory");
}

__device__ inline void copy_4_bytes_async(void *shared, const void *global, bool valid)
{
    const unsigned target = (unsigned)__cvta_generic_to_shared(shared);
    asm volatile("cp.async.ca.shared.global [%0], [%1], 4, %2;" ::"r"(target), "l"(global), "r"(valid ? 4 : 0) : "memory");
}

__device__ inline void commit_copies()
{
    asm volatile("cp.async.commit_group;" ::: "memory");
}

// Waits until at most STAGES - 2 groups are not complete.
__device__ inline void wait_for_oldest_copies()
{
    asm volatile("cp.async.wait_group %0;" ::"n"(STAGES - 2) : "memory");
}

__device__ inline void wait_for_all_copies()
{
    asm volatile("cp.async.wait_all;" ::: "memory");
}
