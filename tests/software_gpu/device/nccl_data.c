/* NCCL: the data of collectives. Each rank reads the inputs of the others and computes its own
 * output; inputs may be overwritten only when all have read them. */
#include "communicator.h"

#include <errno.h>
#include <math.h>
#include <stdlib.h>
#include <string.h>
#include <sys/uio.h>

size_t sw_type_bytes(ncclDataType_t type)
{
    switch (type) {
    case ncclInt8:
    case ncclUint8:
    case ncclFloat8e4m3:
    case ncclFloat8e5m2:
        return 1;
    case ncclFloat16:
    case ncclBfloat16:
        return 2;
    case ncclInt32:
    case ncclUint32:
    case ncclFloat32:
        return 4;
    case ncclInt64:
    case ncclUint64:
    case ncclFloat64:
        return 8;
    default:
        return 0;
    }
}

ncclResult_t sw_read(ncclComm_t comm, int rank, const void *source, void *target, size_t bytes)
{
    if (rank == comm->rank) {
        memcpy(target, source, bytes);
        return ncclSuccess;
    }
    pid_t pid = comm->shared->ranks[rank].pid;
    size_t done = 0;
    while (done < bytes) {
        struct iovec here = {(char *)target + done, bytes - done};
        struct iovec there = {(char *)source + done, bytes - done};
        ssize_t copied = process_vm_readv(pid, &here, 1, &there, 1, 0);
        if (copied <= 0) {
            return sw_nccl_fail(comm, ncclSystemError, "NCCL: cannot read rank %d (pid %d): %s",
                                rank, (int)pid, strerror(errno));
        }
        done += (size_t)copied;
    }
    return ncclSuccess;
}

/* -- reductions -------------------------------------------------------------------------------- */

static float from_bfloat16(uint16_t bits)
{
    uint32_t wide = (uint32_t)bits << 16;
    float value;
    memcpy(&value, &wide, sizeof value);
    return value;
}

static uint16_t to_bfloat16(float value)
{
    uint32_t bits;
    memcpy(&bits, &value, sizeof bits);
    if (isnan(value)) {
        return 0x7fc0;
    }
    /* To the nearest; of two equally near to the even. */
    return (uint16_t)((bits + 0x7fff + ((bits >> 16) & 1)) >> 16);
}

static float from_float16(uint16_t bits)
{
    int exponent = (bits >> 10) & 31;
    int fraction = bits & 1023;
    float size = exponent == 0    ? ldexpf((float)fraction, -24)
                 : exponent == 31 ? (fraction ? NAN : INFINITY)
                                  : ldexpf((float)(fraction + 1024), exponent - 25);
    return bits & 0x8000 ? -size : size;
}

static uint16_t to_float16(float value)
{
    uint16_t sign = signbit(value) ? 0x8000 : 0;
    float size = fabsf(value);
    if (isnan(value)) {
        return 0x7e00;
    }
    if (size >= 65520) { /* half-way from the largest finite number to the next */
        return sign | 0x7c00;
    }
    if (size < ldexpf(1, -14)) {
        return sign | (uint16_t)rintf(ldexpf(size, 24));
    }
    int exponent;
    float fraction = frexpf(size, &exponent); /* in [0.5, 1) */
    /* A fraction that rounds up to 2048 carries into the exponent. */
    int bits = ((exponent + 14) << 10) + (int)rintf(ldexpf(fraction, 11)) - 1024;
    return sign | (uint16_t)bits;
}

#define REDUCE_AS(type)                                                                            \
    do {                                                                                           \
        type *sums = inputs;                                                                       \
        for (int rank = 1; rank < ranks; rank++) {                                                 \
            const type *values = (const type *)inputs + (size_t)rank * count;                      \
            for (size_t i = 0; i < count; i++) {                                                   \
                type a = sums[i], b = values[i];                                                   \
                sums[i] = (type)(reduction == ncclProd  ? a * b                                    \
                                 : reduction == ncclMax ? (a > b ? a : b)                          \
                                 : reduction == ncclMin ? (a < b ? a : b)                          \
                                                        : a + b);                                  \
            }                                                                                      \
        }                                                                                          \
        for (size_t i = 0; reduction == ncclAvg && i < count; i++) {                               \
            sums[i] = (type)(sums[i] / (type)ranks);                                               \
        }                                                                                          \
    } while (0)

/* 16-bit numbers are added as 32-bit ones and rounded once. */
static ncclResult_t reduce_16_bit(void *inputs, int ranks, size_t count, ncclDataType_t type,
                                  ncclRedOp_t reduction)
{
    uint16_t *bits = inputs;
    size_t entries = count * (size_t)ranks;
    float *wide = malloc(entries * sizeof *wide);
    if (!wide && entries) {
        return ncclSystemError;
    }
    for (size_t i = 0; i < entries; i++) {
        wide[i] = type == ncclFloat16 ? from_float16(bits[i]) : from_bfloat16(bits[i]);
    }
    sw_reduce(wide, ranks, count, ncclFloat32, reduction);
    for (size_t i = 0; i < count; i++) {
        bits[i] = type == ncclFloat16 ? to_float16(wide[i]) : to_bfloat16(wide[i]);
    }
    free(wide);
    return ncclSuccess;
}

ncclResult_t sw_reduce(void *inputs, int ranks, size_t count, ncclDataType_t type,
                       ncclRedOp_t reduction)
{
    if (reduction > ncclAvg) {
        return sw_nccl_fail(NULL, ncclInvalidArgument, "NCCL: reduction %d is not implemented",
                            (int)reduction);
    }
    switch (type) {
    case ncclInt8:
        REDUCE_AS(int8_t);
        return ncclSuccess;
    case ncclUint8:
        REDUCE_AS(uint8_t);
        return ncclSuccess;
    case ncclInt32:
        REDUCE_AS(int32_t);
        return ncclSuccess;
    case ncclUint32:
        REDUCE_AS(uint32_t);
        return ncclSuccess;
    case ncclInt64:
        REDUCE_AS(int64_t);
        return ncclSuccess;
    case ncclUint64:
        REDUCE_AS(uint64_t);
        return ncclSuccess;
    case ncclFloat32:
        REDUCE_AS(float);
        return ncclSuccess;
    case ncclFloat64:
        REDUCE_AS(double);
        return ncclSuccess;
    case ncclFloat16:
    case ncclBfloat16:
        return reduce_16_bit(inputs, ranks, count, type, reduction);
    default:
        return sw_nccl_fail(NULL, ncclInvalidArgument,
                            "NCCL: the reduction of type %d is not implemented", (int)type);
    }
}

/* -- collectives ------------------------------------------------------------------------------- */

/* The bytes of each rank's input that this rank reads, one rank after the other. */
struct part {
    int first, ranks;
    size_t offset, bytes;
};

static struct part part_of(ncclComm_t comm, const struct call *call)
{
    size_t bytes = call->count * sw_type_bytes(call->type);
    switch (call->function) {
    case BROADCAST:
        return (struct part){call->root, 1, 0, bytes};
    case REDUCE:
        return (struct part){0, comm->rank == call->root ? comm->size : 0, 0, bytes};
    case REDUCE_SCATTER:
    case ALL_TO_ALL:
        return (struct part){0, comm->size, (size_t)comm->rank * bytes, bytes};
    default:
        return (struct part){0, comm->size, 0, bytes};
    }
}

static bool reduces(enum function function)
{
    return function == ALL_REDUCE || function == REDUCE || function == REDUCE_SCATTER;
}

static ncclResult_t gather(ncclComm_t comm, const struct part *part, char *inputs)
{
    for (int i = 0; i < part->ranks; i++) {
        int rank = part->first + i;
        const char *source = comm->shared->ranks[rank].call.send;
        ncclResult_t error = sw_read(comm, rank, source + part->offset,
                                     inputs + (size_t)i * part->bytes, part->bytes);
        if (error) {
            return error;
        }
    }
    return ncclSuccess;
}

ncclResult_t sw_collective(ncclComm_t comm, const struct call *call)
{
    ncclResult_t error = sw_agree(comm, call);
    if (error) {
        return error;
    }
    struct part part = part_of(comm, call);
    size_t total = (size_t)part.ranks * part.bytes;
    char *inputs = NULL;
    if (total && !sw_left_out(part.bytes)) {
        inputs = malloc(total);
        error = inputs ? gather(comm, &part, inputs) : ncclSystemError;
    }
    ncclResult_t met = sw_meet(comm, call);
    if (!error && !met && inputs) {
        size_t bytes = total;
        if (reduces(call->function)) {
            error = sw_reduce(inputs, part.ranks, call->count, call->type, call->reduction);
            bytes = part.bytes;
        }
        if (!error) {
            memcpy(call->receive, inputs, bytes);
        }
    }
    free(inputs);
    return error ? error : met;
}
