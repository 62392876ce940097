/* CUDA driver: virtual memory management, with which vLLM's sleep mode frees and restores memory.
 *
 * Addresses are reserved as inaccessible memory; cuMemMap maps a memory file over them.
 */
#include "device.h"

#include <errno.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

enum { RESERVED = MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE };

static struct physical *memory_of(CUmemGenericAllocationHandle handle)
{
    return (struct physical *)(uintptr_t)handle;
}

CUresult cuMemGetAllocationGranularity(size_t *bytes, const CUmemAllocationProp *properties,
                                       CUmemAllocationGranularity_flags option)
{
    *bytes = PAGE_BYTES;
    return CUDA_SUCCESS;
}

CUresult cuMemCreate(CUmemGenericAllocationHandle *handle, size_t size,
                     const CUmemAllocationProp *properties, unsigned long long flags)
{
    if (properties->location.type != CU_MEM_LOCATION_TYPE_DEVICE || size % PAGE_BYTES) {
        return CUDA_ERROR_INVALID_VALUE;
    }
    CUmemAllocationHandleType file = CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR;
    if (properties->requestedHandleTypes & ~(unsigned)file) {
        return CUDA_ERROR_NOT_SUPPORTED; /* handles of a fabric of nodes */
    }
    CUresult error = sw_context(properties->location.id);
    if (error) {
        return error;
    }
    struct physical *memory = sw_physical_create(sw_physical(properties->location.id), size);
    if (!memory) {
        return CUDA_ERROR_OUT_OF_MEMORY;
    }
    *handle = (CUmemGenericAllocationHandle)(uintptr_t)memory;
    return CUDA_SUCCESS;
}

CUresult cuMemRelease(CUmemGenericAllocationHandle handle)
{
    sw_physical_release(memory_of(handle));
    return CUDA_SUCCESS;
}

CUresult cuMemAddressReserve(CUdeviceptr *address, size_t size, size_t alignment,
                             CUdeviceptr wanted, unsigned long long flags)
{
    size_t aligned = alignment > PAGE_BYTES ? alignment : PAGE_BYTES;
    char *memory = mmap(NULL, size + aligned, PROT_NONE, RESERVED, -1, 0);
    if (memory == MAP_FAILED) {
        return CUDA_ERROR_OUT_OF_MEMORY;
    }
    /* Give back what precedes the aligned address and what follows. */
    size_t before = (aligned - (uintptr_t)memory % aligned) % aligned;
    if (before) {
        munmap(memory, before);
    }
    munmap(memory + before + size, aligned - before);
    *address = (CUdeviceptr)(memory + before);
    return CUDA_SUCCESS;
}

CUresult cuMemAddressFree(CUdeviceptr address, size_t size)
{
    return munmap((void *)address, size) ? CUDA_ERROR_INVALID_VALUE : CUDA_SUCCESS;
}

/* Visible device with an index of the machine; the current one where it is not visible. */
static int ordinal_of(int physical)
{
    for (int ordinal = 0; ordinal < sw_visible_count(); ordinal++) {
        if (sw_physical(ordinal) == physical) {
            return ordinal;
        }
    }
    return sw_current();
}

CUresult cuMemMap(CUdeviceptr address, size_t size, size_t offset,
                  CUmemGenericAllocationHandle handle, unsigned long long flags)
{
    struct physical *memory = memory_of(handle);
    struct allocation found;
    if (offset + size > memory->size || sw_find((void *)address, &found)) {
        return CUDA_ERROR_INVALID_VALUE;
    }
    /* Accessible only after cuMemSetAccess. */
    int mode = MAP_SHARED | MAP_FIXED | MAP_NORESERVE;
    void *mapped = mmap((void *)address, size, PROT_NONE, mode, memory->file, (off_t)offset);
    if (mapped == MAP_FAILED) {
        sw_say("cuMemMap of %zu bytes: %s", size, strerror(errno));
        return CUDA_ERROR_INVALID_VALUE;
    }
    __sync_add_and_fetch(&memory->references, 1);
    sw_insert((struct allocation){address, size, MAPPED_MEMORY, ordinal_of(memory->device),
                                  memory});
    return CUDA_SUCCESS;
}

CUresult cuMemSetAccess(CUdeviceptr address, size_t size, const CUmemAccessDesc *access,
                        size_t count)
{
    for (size_t i = 0; i < count; i++) {
        if (access[i].flags == CU_MEM_ACCESS_FLAGS_PROT_READWRITE &&
            mprotect((void *)address, size, PROT_READ | PROT_WRITE) != 0) {
            return CUDA_ERROR_INVALID_VALUE;
        }
    }
    return CUDA_SUCCESS;
}

CUresult cuMemUnmap(CUdeviceptr address, size_t size)
{
    CUdeviceptr at = address;
    /* One call may unmap several neighbours. */
    while (at < address + size) {
        struct allocation removed;
        if (!sw_remove((void *)at, MAPPED_MEMORY, &removed)) {
            return CUDA_ERROR_INVALID_VALUE;
        }
        mmap((void *)at, removed.size, PROT_NONE, RESERVED | MAP_FIXED, -1, 0);
        sw_physical_release(removed.physical);
        at += removed.size;
    }
    return CUDA_SUCCESS;
}

/* -- memory of another process, by file descriptor --------------------------------------------- */

CUresult cuMemExportToShareableHandle(void *file, CUmemGenericAllocationHandle handle,
                                      CUmemAllocationHandleType type, unsigned long long flags)
{
    if (type != CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR) {
        return CUDA_ERROR_NOT_SUPPORTED;
    }
    int copy = dup(memory_of(handle)->file);
    if (copy < 0) {
        return CUDA_ERROR_OUT_OF_MEMORY;
    }
    memcpy(file, &copy, sizeof copy);
    return CUDA_SUCCESS;
}

CUresult cuMemImportFromShareableHandle(CUmemGenericAllocationHandle *handle, void *given,
                                        CUmemAllocationHandleType type)
{
    struct stat status;
    int file = dup((int)(intptr_t)given);
    struct physical *memory = malloc(sizeof *memory);
    if (file < 0 || !memory || fstat(file, &status) != 0) {
        if (file >= 0) {
            close(file);
        }
        free(memory);
        return CUDA_ERROR_INVALID_VALUE;
    }
    int device = sw_physical(sw_current());
    *memory = (struct physical){file, (size_t)status.st_size, device, .references = 1};
    *handle = (CUmemGenericAllocationHandle)(uintptr_t)memory;
    return CUDA_SUCCESS;
}

CUresult cuMemGetAllocationPropertiesFromHandle(CUmemAllocationProp *properties,
                                                CUmemGenericAllocationHandle handle)
{
    memset(properties, 0, sizeof *properties);
    properties->type = CU_MEM_ALLOCATION_TYPE_PINNED;
    properties->requestedHandleTypes = CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR;
    properties->location.type = CU_MEM_LOCATION_TYPE_DEVICE;
    properties->location.id = ordinal_of(memory_of(handle)->device);
    return CUDA_SUCCESS;
}

CUresult cuMemRetainAllocationHandle(CUmemGenericAllocationHandle *handle, void *address)
{
    struct allocation found;
    if (!sw_find(address, &found) || found.kind != MAPPED_MEMORY) {
        return CUDA_ERROR_INVALID_VALUE;
    }
    __sync_add_and_fetch(&found.physical->references, 1);
    *handle = (CUmemGenericAllocationHandle)(uintptr_t)found.physical;
    return CUDA_SUCCESS;
}
