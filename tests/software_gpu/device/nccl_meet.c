/* NCCL: communicators, and how their ranks meet and compare their calls. */
#include "communicator.h"

#include <errno.h>
#include <fcntl.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/prctl.h>
#include <sys/random.h>
#include <time.h>
#include <unistd.h>

/* Seconds after which a wait is reported. */
enum { REPORT_AFTER = 60 };
/* Steps of a wait without sleep, and the sleep between the later ones. */
enum { BUSY_STEPS = 2000, SLEEP_US = 100 };

static __thread char last_line[400];

const char *sw_function_name(enum function function)
{
    static const char *const names[] = {
        [INIT] = "init",
        [SPLIT] = "split",
        [ALL_REDUCE] = "all_reduce",
        [REDUCE] = "reduce",
        [BROADCAST] = "broadcast",
        [ALL_GATHER] = "all_gather",
        [REDUCE_SCATTER] = "reduce_scatter",
        [ALL_TO_ALL] = "all_to_all",
        [SEND] = "send",
        [RECEIVE] = "recv",
    };
    return names[function];
}

ncclResult_t sw_nccl_fail(ncclComm_t comm, ncclResult_t result, const char *format, ...)
{
    va_list arguments;
    va_start(arguments, format);
    vsnprintf(last_line, sizeof last_line, format, arguments);
    va_end(arguments);
    sw_say("%s", last_line);
    if (comm && !comm->error) {
        comm->error = result;
    }
    return result;
}

static double now(void)
{
    struct timespec time;
    clock_gettime(CLOCK_MONOTONIC, &time);
    return (double)time.tv_sec + (double)time.tv_nsec * 1e-9;
}

static void report(ncclComm_t comm, const struct call *call)
{
    char missing[256] = "";
    size_t used = 0;
    for (int i = 0; i < comm->size && used < sizeof missing - 40; i++) {
        struct rank *rank = &comm->shared->ranks[i];
        bool awaited = call->function == SEND || call->function == RECEIVE
                           ? i == call->peer
                           : atomic_load(&rank->arrived) < comm->meetings;
        if (awaited) {
            const char *remark = sw_is_running(rank->pid) ? "" : ", ended";
            used += (size_t)snprintf(missing + used, sizeof missing - used, " %d (pid %d%s)", i,
                                     (int)rank->pid, remark);
        }
    }
    sw_say("NCCL WAITS: rank %d of %d has waited %d s in %s (call %llu of communicator %s) for "
           "rank%s",
           comm->rank, comm->size, REPORT_AFTER, sw_function_name(call->function),
           (unsigned long long)comm->calls, comm->name, missing);
}

bool sw_pause(ncclComm_t comm, struct wait *wait, const struct call *call)
{
    if (wait->steps++ == 0) {
        wait->since = now();
    }
    if (wait->steps > BUSY_STEPS) {
        usleep(SLEEP_US);
    }
    if (!wait->reported && now() - wait->since > REPORT_AFTER) {
        wait->reported = true;
        report(comm, call);
    }
    return !atomic_load(&comm->aborted);
}

ncclResult_t sw_meet(ncclComm_t comm, const struct call *call)
{
    struct rank *ranks = comm->shared->ranks;
    comm->meetings++;
    atomic_store(&ranks[comm->rank].arrived, comm->meetings);
    for (int i = 0; i < comm->size; i++) {
        struct wait wait = {0};
        while (atomic_load(&ranks[i].arrived) < comm->meetings) {
            if (!sw_pause(comm, &wait, call)) {
                return ncclInternalError;
            }
        }
    }
    return ncclSuccess;
}

static void describe(char *text, size_t size, const struct call *call)
{
    snprintf(text, size, "%s(count %zu, type %d, reduction %d, root %d)",
             sw_function_name(call->function), call->count, (int)call->type, (int)call->reduction,
             call->root);
}

ncclResult_t sw_agree(ncclComm_t comm, const struct call *call)
{
    struct rank *ranks = comm->shared->ranks;
    ranks[comm->rank].call = *call;
    comm->calls++;
    ncclResult_t error = sw_meet(comm, call);
    int other = -1;
    for (int i = 0; !error && i < comm->size && other < 0; i++) {
        const struct call *theirs = &ranks[i].call;
        if (theirs->function != call->function || theirs->type != call->type ||
            theirs->count != call->count || theirs->reduction != call->reduction ||
            theirs->root != call->root) {
            other = i;
        }
    }
    if (other < 0) {
        return error;
    }
    char mine[128], theirs[128];
    describe(mine, sizeof mine, call);
    describe(theirs, sizeof theirs, &ranks[other].call);
    /* All ranks have read the calls of all before one of them publishes its next. */
    sw_meet(comm, call);
    return sw_nccl_fail(comm, ncclInvalidUsage,
                        "NCCL MISMATCH: rank %d calls %s, rank %d calls %s (call %llu of "
                        "communicator %s)",
                        comm->rank, mine, other, theirs, (unsigned long long)comm->calls,
                        comm->name);
}

/* -- communicators ----------------------------------------------------------------------------- */

ncclResult_t ncclGetUniqueId(ncclUniqueId *id)
{
    uint64_t number;
    memset(id, 0, sizeof *id);
    if (getrandom(&number, sizeof number, 0) != sizeof number) {
        return ncclSystemError;
    }
    snprintf(id->internal, NAME_BYTES, "%016llx", (unsigned long long)number);
    return ncclSuccess;
}

static struct shared *map_shared(const char *path)
{
    int file = open(path, O_RDWR | O_CREAT | O_CLOEXEC, 0600);
    if (file < 0 || ftruncate(file, sizeof(struct shared)) != 0) {
        sw_say("%s: %s", path, strerror(errno));
        if (file >= 0) {
            close(file);
        }
        return NULL;
    }
    int access = PROT_READ | PROT_WRITE;
    void *memory = mmap(NULL, sizeof(struct shared), access, MAP_SHARED, file, 0);
    close(file);
    return memory == MAP_FAILED ? NULL : memory;
}

ncclResult_t ncclCommInitRank(ncclComm_t *given, int size, ncclUniqueId id, int rank)
{
    if (size < 1 || size > MAX_RANKS || rank < 0 || rank >= size) {
        return sw_nccl_fail(NULL, ncclInvalidArgument, "NCCL: rank %d of %d ranks (most: %d)",
                            rank, size, MAX_RANKS);
    }
    if (sw_context(sw_current()) != CUDA_SUCCESS) {
        return ncclUnhandledCudaError;
    }
    ncclComm_t comm = calloc(1, sizeof *comm);
    char path[256];
    if (!comm) {
        return ncclSystemError;
    }
    comm->size = size;
    comm->rank = rank;
    comm->device = sw_current();
    memcpy(comm->name, id.internal, NAME_BYTES - 1);
    snprintf(path, sizeof path, "%s.nccl.%s", sw_settings()->table, comm->name);
    comm->shared = map_shared(path);
    if (!comm->shared) {
        free(comm);
        return ncclSystemError;
    }
    /* The other ranks read this process's memory. */
    prctl(PR_SET_PTRACER, PR_SET_PTRACER_ANY);
    comm->shared->ranks[rank].pid = getpid();
    struct call call = {.function = INIT, .count = (size_t)size};
    ncclResult_t error = sw_agree(comm, &call);
    if (!error) {
        error = sw_meet(comm, &call);
    }
    if (rank == 0) {
        unlink(path);
    }
    if (error) {
        ncclCommDestroy(comm);
        return error;
    }
    if (sw_settings()->trace) {
        sw_say("NCCL: rank %d of %d of communicator %s on device %d", rank, size, comm->name,
               sw_physical(comm->device));
    }
    *given = comm;
    return ncclSuccess;
}

ncclResult_t ncclCommInitRankConfig(ncclComm_t *comm, int size, ncclUniqueId id, int rank,
                                    ncclConfig_t *config)
{
    return ncclCommInitRank(comm, size, id, rank);
}

ncclResult_t ncclCommInitRankScalable(ncclComm_t *comm, int size, int rank, int id_count,
                                      ncclUniqueId *ids, ncclConfig_t *config)
{
    return ncclCommInitRank(comm, size, ids[0], rank);
}

/* An identifier that the ranks of one color, and no others, compute. */
static ncclUniqueId id_of_part(ncclComm_t comm, int color)
{
    ncclUniqueId id;
    char text[NAME_BYTES + 48];
    uint64_t hash = 14695981039346656037ull; /* FNV-1a */
    snprintf(text, sizeof text, "%s %llu %d", comm->name, (unsigned long long)comm->calls, color);
    for (const char *at = text; *at; at++) {
        hash = (hash ^ (unsigned char)*at) * 1099511628211ull;
    }
    memset(&id, 0, sizeof id);
    snprintf(id.internal, NAME_BYTES, "%016llx", (unsigned long long)hash);
    return id;
}

ncclResult_t ncclCommSplit(ncclComm_t comm, int color, int key, ncclComm_t *part,
                           ncclConfig_t *config)
{
    struct call call = {.function = SPLIT, .color = color, .key = key};
    ncclResult_t error = sw_agree(comm, &call);
    if (error) {
        return error;
    }
    int size = 0, rank = 0;
    for (int i = 0; i < comm->size; i++) {
        const struct call *theirs = &comm->shared->ranks[i].call;
        if (theirs->color == color) {
            size++;
            rank += theirs->key < key || (theirs->key == key && i < comm->rank);
        }
    }
    error = sw_meet(comm, &call);
    *part = NULL;
    if (error || color == NCCL_SPLIT_NOCOLOR) {
        return error;
    }
    return ncclCommInitRank(part, size, id_of_part(comm, color), rank);
}

ncclResult_t ncclCommFinalize(ncclComm_t comm)
{
    return ncclSuccess;
}

ncclResult_t ncclCommDestroy(ncclComm_t comm)
{
    if (comm) {
        munmap(comm->shared, sizeof *comm->shared);
        free(comm);
    }
    return ncclSuccess;
}

/* Another thread may be in a call of the communicator: end its wait; the memory stays. */
ncclResult_t ncclCommAbort(ncclComm_t comm)
{
    if (comm) {
        atomic_store(&comm->aborted, true);
    }
    return ncclSuccess;
}

ncclResult_t ncclCommGetAsyncError(ncclComm_t comm, ncclResult_t *error)
{
    *error = comm->error;
    return ncclSuccess;
}

ncclResult_t ncclCommCount(const ncclComm_t comm, int *size)
{
    *size = comm->size;
    return ncclSuccess;
}

ncclResult_t ncclCommUserRank(const ncclComm_t comm, int *rank)
{
    *rank = comm->rank;
    return ncclSuccess;
}

ncclResult_t ncclCommCuDevice(const ncclComm_t comm, int *device)
{
    *device = comm->device;
    return ncclSuccess;
}

/* vLLM's sleep mode releases a communicator's device memory. These have none. */
ncclResult_t ncclCommSuspend(ncclComm_t comm, int flags)
{
    return ncclSuccess;
}

ncclResult_t ncclCommResume(ncclComm_t comm)
{
    return ncclSuccess;
}

ncclResult_t ncclGetVersion(int *version)
{
    *version = NCCL_VERSION_CODE;
    return ncclSuccess;
}

const char *ncclGetErrorString(ncclResult_t result)
{
    static const char *const texts[] = {
        [ncclSuccess] = "no error",
        [ncclUnhandledCudaError] = "unhandled cuda error",
        [ncclSystemError] = "unhandled system error",
        [ncclInternalError] = "internal error",
        [ncclInvalidArgument] = "invalid argument",
        [ncclInvalidUsage] = "invalid usage",
    };
    bool known = (size_t)result < sizeof texts / sizeof *texts;
    return known ? texts[result] : "unknown result code";
}

const char *ncclGetLastError(ncclComm_t comm)
{
    return last_line;
}
