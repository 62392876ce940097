/* NCCL: collectives, messages between two ranks, and groups of them.
 *
 * A call returns when it is finished. Calls of a group are kept until ncclGroupEnd: collectives run
 * in their order, then all messages together, so that ranks may send to each other.
 */
#include "communicator.h"

#include <stdlib.h>

struct member {
    ncclComm_t comm;
    struct call call;
    bool posted, done;
};

static __thread int group_depth;
static __thread struct member *group;
static __thread size_t group_size, group_capacity;

static bool is_message(const struct member *member)
{
    return member->call.function == SEND || member->call.function == RECEIVE;
}

/* -- messages ---------------------------------------------------------------------------------- */

/* Post a message where the mailbox is empty; then see whether it was taken. */
static ncclResult_t try_send(struct member *member)
{
    ncclComm_t comm = member->comm;
    struct mailbox *box = &comm->shared->mail[comm->rank][member->call.peer];
    bool empty = atomic_load(&box->posted) == atomic_load(&box->taken);
    if (!empty) {
        return ncclSuccess;
    }
    if (!member->posted) {
        box->call = member->call;
        member->posted = true;
        atomic_fetch_add(&box->posted, 1);
        return ncclSuccess;
    }
    member->done = true;
    if (!box->mismatch) {
        return ncclSuccess;
    }
    return sw_nccl_fail(comm, ncclInvalidUsage,
                        "NCCL MISMATCH: rank %d sends count %zu, type %d; rank %d receives "
                        "something else (communicator %s)",
                        comm->rank, box->call.count, (int)box->call.type, member->call.peer,
                        comm->name);
}

static ncclResult_t try_receive(struct member *member)
{
    ncclComm_t comm = member->comm;
    const struct call *call = &member->call;
    struct mailbox *box = &comm->shared->mail[call->peer][comm->rank];
    if (atomic_load(&box->posted) == atomic_load(&box->taken)) {
        return ncclSuccess;
    }
    member->done = true;
    ncclResult_t error = ncclSuccess;
    size_t bytes = call->count * sw_type_bytes(call->type);
    box->mismatch = box->call.count != call->count || box->call.type != call->type;
    if (box->mismatch) {
        error = sw_nccl_fail(comm, ncclInvalidUsage,
                             "NCCL MISMATCH: rank %d receives count %zu, type %d; rank %d sends "
                             "count %zu, type %d (communicator %s)",
                             comm->rank, call->count, (int)call->type, call->peer,
                             box->call.count, (int)box->call.type, comm->name);
    } else if (!sw_left_out(bytes)) {
        error = sw_read(comm, call->peer, box->call.send, call->receive, bytes);
    }
    atomic_fetch_add(&box->taken, 1);
    return error;
}

/* Messages between the same two ranks keep their order. */
static bool is_first(const struct member *members, size_t i)
{
    for (size_t j = 0; j < i; j++) {
        if (!members[j].done && members[j].comm == members[i].comm &&
            members[j].call.function == members[i].call.function &&
            members[j].call.peer == members[i].call.peer) {
            return false;
        }
    }
    return true;
}

static ncclResult_t run_messages(struct member *members, size_t count)
{
    struct wait wait = {0};
    ncclResult_t result = ncclSuccess;
    for (;;) {
        struct member *pending = NULL;
        for (size_t i = 0; i < count; i++) {
            struct member *member = &members[i];
            if (!member->done && is_message(member) && is_first(members, i)) {
                ncclResult_t error =
                    member->call.function == SEND ? try_send(member) : try_receive(member);
                result = result ? result : error;
            }
            if (!member->done && is_message(member)) {
                pending = member;
            }
        }
        if (!pending) {
            return result;
        }
        if (!sw_pause(pending->comm, &wait, &pending->call)) {
            return ncclInternalError;
        }
    }
}

/* -- groups ------------------------------------------------------------------------------------ */

static ncclResult_t run(struct member *members, size_t count)
{
    for (size_t i = 0; i < count; i++) {
        if (!is_message(&members[i])) {
            ncclResult_t error = sw_collective(members[i].comm, &members[i].call);
            if (error) {
                return error;
            }
        }
    }
    return run_messages(members, count);
}

static ncclResult_t submit(ncclComm_t comm, struct call call)
{
    if (sw_type_bytes(call.type) == 0 || call.root < 0 || call.root >= comm->size ||
        call.peer < 0 || call.peer >= comm->size) {
        return sw_nccl_fail(comm, ncclInvalidArgument, "NCCL: type %d, root %d, peer %d",
                            (int)call.type, call.root, call.peer);
    }
    struct member member = {.comm = comm, .call = call};
    if (group_depth == 0) {
        return run(&member, 1);
    }
    if (group_size == group_capacity) {
        group_capacity = group_capacity ? 2 * group_capacity : 64;
        struct member *larger = realloc(group, group_capacity * sizeof *group);
        if (!larger) {
            return ncclSystemError;
        }
        group = larger;
    }
    group[group_size++] = member;
    return ncclSuccess;
}

ncclResult_t ncclGroupStart(void)
{
    group_depth++;
    return ncclSuccess;
}

ncclResult_t ncclGroupEnd(void)
{
    if (group_depth == 0) {
        return ncclInvalidUsage;
    }
    if (--group_depth > 0) {
        return ncclSuccess;
    }
    size_t count = group_size;
    group_size = 0;
    return run(group, count);
}

/* -- the calls --------------------------------------------------------------------------------- */

ncclResult_t ncclAllReduce(const void *send, void *receive, size_t count, ncclDataType_t type,
                           ncclRedOp_t reduction, ncclComm_t comm, cudaStream_t stream)
{
    return submit(comm, (struct call){.function = ALL_REDUCE, .type = type, .count = count,
                                      .reduction = reduction, .send = send, .receive = receive});
}

ncclResult_t ncclReduce(const void *send, void *receive, size_t count, ncclDataType_t type,
                        ncclRedOp_t reduction, int root, ncclComm_t comm, cudaStream_t stream)
{
    return submit(comm, (struct call){.function = REDUCE, .type = type, .count = count,
                                      .reduction = reduction, .root = root, .send = send,
                                      .receive = receive});
}

ncclResult_t ncclBroadcast(const void *send, void *receive, size_t count, ncclDataType_t type,
                           int root, ncclComm_t comm, cudaStream_t stream)
{
    return submit(comm, (struct call){.function = BROADCAST, .type = type, .count = count,
                                      .root = root, .send = send, .receive = receive});
}

ncclResult_t ncclBcast(void *data, size_t count, ncclDataType_t type, int root, ncclComm_t comm,
                       cudaStream_t stream)
{
    return ncclBroadcast(data, data, count, type, root, comm, stream);
}

ncclResult_t ncclAllGather(const void *send, void *receive, size_t count, ncclDataType_t type,
                           ncclComm_t comm, cudaStream_t stream)
{
    return submit(comm, (struct call){.function = ALL_GATHER, .type = type, .count = count,
                                      .send = send, .receive = receive});
}

ncclResult_t ncclReduceScatter(const void *send, void *receive, size_t count, ncclDataType_t type,
                               ncclRedOp_t reduction, ncclComm_t comm, cudaStream_t stream)
{
    return submit(comm, (struct call){.function = REDUCE_SCATTER, .type = type, .count = count,
                                      .reduction = reduction, .send = send, .receive = receive});
}

ncclResult_t ncclAlltoAll(const void *send, void *receive, size_t count, ncclDataType_t type,
                          ncclComm_t comm, cudaStream_t stream)
{
    return submit(comm, (struct call){.function = ALL_TO_ALL, .type = type, .count = count,
                                      .send = send, .receive = receive});
}

ncclResult_t ncclSend(const void *send, size_t count, ncclDataType_t type, int peer,
                      ncclComm_t comm, cudaStream_t stream)
{
    return submit(comm, (struct call){.function = SEND, .type = type, .count = count,
                                      .send = send, .peer = peer});
}

ncclResult_t ncclRecv(void *receive, size_t count, ncclDataType_t type, int peer, ncclComm_t comm,
                      cudaStream_t stream)
{
    return submit(comm, (struct call){.function = RECEIVE, .type = type, .count = count,
                                      .receive = receive, .peer = peer});
}
