/* A communicator of the software GPU's NCCL: ranks that meet in shared memory. */
#ifndef SOFTWARE_GPU_COMMUNICATOR_H
#define SOFTWARE_GPU_COMMUNICATOR_H

#include "device.h"

#include <stdatomic.h>

#include <nccl.h>

enum { MAX_RANKS = 64, NAME_BYTES = 32 };

enum function {
    INIT,
    SPLIT,
    ALL_REDUCE,
    REDUCE,
    BROADCAST,
    ALL_GATHER,
    REDUCE_SCATTER,
    ALL_TO_ALL,
    SEND,
    RECEIVE,
};

/* A call of one rank. All ranks must agree in the first five fields. */
struct call {
    enum function function;
    ncclDataType_t type;
    size_t count;
    ncclRedOp_t reduction;
    int root;         /* of REDUCE and BROADCAST */
    const void *send; /* address in the process of that rank */
    void *receive;
    int peer;       /* of SEND and RECEIVE */
    int color, key; /* of SPLIT */
};

struct rank {
    pid_t pid;
    struct call call;
    _Atomic uint64_t arrived; /* number of meetings that it has reached */
};

/* Messages from one rank to another: one at a time. */
struct mailbox {
    _Atomic uint64_t posted, taken;
    struct call call;
    bool mismatch; /* the receiver's verdict on the last one */
};

struct shared {
    struct rank ranks[MAX_RANKS];
    struct mailbox mail[MAX_RANKS][MAX_RANKS]; /* [sender][receiver] */
};

struct ncclComm {
    int size, rank, device;
    char name[NAME_BYTES];
    struct shared *shared;
    uint64_t meetings;
    uint64_t calls; /* collectives so far: the same number on all ranks */
    atomic_bool aborted;
    ncclResult_t error; /* the first */
};

const char *sw_function_name(enum function function);

/* Keep a line for ncclGetLastError, print it, and return the result. */
ncclResult_t sw_nccl_fail(ncclComm_t comm, ncclResult_t result, const char *format, ...)
    __attribute__((format(printf, 3, 4)));

/* A wait: between its steps. False if the communicator was aborted.
 * After a minute, one line with the word WAITS names the ranks that are missing. */
struct wait {
    double since;
    unsigned long steps;
    bool reported;
};
bool sw_pause(ncclComm_t comm, struct wait *wait, const struct call *call);

/* Wait until all ranks have reached this meeting. */
ncclResult_t sw_meet(ncclComm_t comm, const struct call *call);

/* Publish a call, meet, and compare the calls of all ranks. */
ncclResult_t sw_agree(ncclComm_t comm, const struct call *call);

size_t sw_type_bytes(ncclDataType_t type);
/* Copy from the memory of a rank, which may be another process. */
ncclResult_t sw_read(ncclComm_t comm, int rank, const void *source, void *target, size_t bytes);
/* Reduce the inputs of all ranks, which lie one after the other, into the first. */
ncclResult_t sw_reduce(void *inputs, int ranks, size_t count, ncclDataType_t type,
                       ncclRedOp_t reduction);

/* Run a collective whose calls agree. */
ncclResult_t sw_collective(ncclComm_t comm, const struct call *call);

#endif
