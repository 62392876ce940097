/* The memory that this process has mapped, and the files that stand for a device's memory.
 *
 * Device memory is a memory file per allocation: other processes map it through /proc (CUDA IPC),
 * and pages that nothing has written take no host memory.
 */
#include "device.h"

#include <errno.h>
#include <pthread.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>

/* Allocations sorted by address. They do not overlap. */
static struct allocation *sorted;
static size_t count, capacity;
static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;

/* Position of the first allocation that ends above an address. */
static size_t position(uintptr_t address)
{
    size_t low = 0, high = count;
    while (low < high) {
        size_t middle = (low + high) / 2;
        if (sorted[middle].start + sorted[middle].size <= address) {
            low = middle + 1;
        } else {
            high = middle;
        }
    }
    return low;
}

static void remove_at(size_t i)
{
    count--;
    memmove(&sorted[i], &sorted[i + 1], (count - i) * sizeof *sorted);
}

bool sw_find(const void *address, struct allocation *found)
{
    pthread_mutex_lock(&lock);
    size_t i = position((uintptr_t)address);
    bool inside = i < count && sorted[i].start <= (uintptr_t)address;
    if (inside) {
        *found = sorted[i];
    }
    pthread_mutex_unlock(&lock);
    return inside;
}

void sw_insert(struct allocation allocation)
{
    pthread_mutex_lock(&lock);
    size_t i = position(allocation.start);
    /* Registered memory that its owner has unmapped without cudaHostUnregister. */
    while (i < count && sorted[i].start < allocation.start + allocation.size) {
        remove_at(i);
    }
    if (count == capacity) {
        capacity = capacity ? 2 * capacity : 1024;
        struct allocation *larger = realloc(sorted, capacity * sizeof *sorted);
        if (!larger) {
            sw_say("out of host memory");
            abort();
        }
        sorted = larger;
    }
    memmove(&sorted[i + 1], &sorted[i], (count - i) * sizeof *sorted);
    sorted[i] = allocation;
    count++;
    pthread_mutex_unlock(&lock);
}

bool sw_remove(const void *start, enum kind kind, struct allocation *removed)
{
    pthread_mutex_lock(&lock);
    size_t i = position((uintptr_t)start);
    bool found = i < count && sorted[i].start == (uintptr_t)start && sorted[i].kind == kind;
    if (found) {
        *removed = sorted[i];
        remove_at(i);
    }
    pthread_mutex_unlock(&lock);
    return found;
}

struct physical *sw_physical_create(int device, size_t size)
{
    if (!sw_table_take(device, size)) {
        return NULL;
    }
    struct physical *memory = malloc(sizeof *memory);
    int file = memfd_create("software_gpu", MFD_CLOEXEC);
    if (!memory || file < 0 || ftruncate(file, (off_t)size) != 0) {
        sw_say("no memory file of %zu bytes: %s", size, strerror(errno));
        if (file >= 0) {
            close(file);
        }
        free(memory);
        sw_table_return(device, size);
        return NULL;
    }
    *memory = (struct physical){file, size, device, .counted = true, .references = 1};
    return memory;
}

void sw_physical_release(struct physical *memory)
{
    if (__sync_sub_and_fetch(&memory->references, 1) > 0) {
        return;
    }
    if (memory->counted) {
        sw_table_return(memory->device, memory->size);
    }
    close(memory->file);
    free(memory);
}

CUresult sw_allocate(void **address, size_t size, int ordinal)
{
    CUresult error = sw_context(ordinal);
    if (error) {
        return error;
    }
    size_t rounded = (size ? size + PAGE_BYTES - 1 : PAGE_BYTES) / PAGE_BYTES * PAGE_BYTES;
    struct physical *memory = sw_physical_create(sw_physical(ordinal), rounded);
    if (!memory) {
        return CUDA_ERROR_OUT_OF_MEMORY;
    }
    int access = PROT_READ | PROT_WRITE;
    void *mapped = mmap(NULL, rounded, access, MAP_SHARED | MAP_NORESERVE, memory->file, 0);
    if (mapped == MAP_FAILED) {
        sw_say("cannot map %zu bytes: %s", rounded, strerror(errno));
        sw_physical_release(memory);
        return CUDA_ERROR_OUT_OF_MEMORY;
    }
    sw_insert((struct allocation){(uintptr_t)mapped, rounded, DEVICE_MEMORY, ordinal, memory});
    if (sw_settings()->trace) {
        sw_say("device %d: %zu bytes at %p", sw_physical(ordinal), rounded, mapped);
    }
    *address = mapped;
    return CUDA_SUCCESS;
}

CUresult sw_free(void *address)
{
    struct allocation removed;
    if (!address) {
        return CUDA_SUCCESS;
    }
    if (!sw_remove(address, DEVICE_MEMORY, &removed)) {
        return CUDA_ERROR_INVALID_VALUE;
    }
    munmap(address, removed.size);
    sw_physical_release(removed.physical);
    return CUDA_SUCCESS;
}
