/* The memory that each process has taken on each device: a table in shared memory.
 *
 * A row belongs to the process with its pid and start time. Rows of processes that have ended,
 * however they ended, do not count and are used again; so nothing needs to run at exit.
 */
#include "device.h"

#include <errno.h>
#include <fcntl.h>
#include <pthread.h>
#include <stdio.h>
#include <string.h>
#include <sys/file.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

enum { ROWS = 1024 };

/* Another number for another layout. */
#define MAGIC "software-gpu-1"

struct row {
    pid_t pid; /* 0: free */
    unsigned long long started;
    int64_t bytes[MAX_DEVICES];
};

struct table {
    char magic[16];
    pthread_mutex_t lock;
    struct row rows[ROWS];
};

static struct table *table;
static struct row *own;
static pid_t own_pid;

/* Start time of a process in clock ticks since boot; 0 if it has ended, reaped or not. */
static unsigned long long start_time(pid_t pid)
{
    char path[64], stat[1024];
    snprintf(path, sizeof path, "/proc/%d/stat", (int)pid);
    int file = open(path, O_RDONLY | O_CLOEXEC);
    if (file < 0) {
        return 0;
    }
    ssize_t size = read(file, stat, sizeof stat - 1);
    close(file);
    if (size <= 0) {
        return 0;
    }
    stat[size] = '\0';
    /* The name in parentheses may contain anything; the state follows it, the start time is the
     * 22nd field, which is the 19th after the state. */
    const char *rest = strrchr(stat, ')');
    char state;
    unsigned long long started;
    const char *format =
        " %c %*s %*s %*s %*s %*s %*s %*s %*s %*s %*s %*s %*s %*s %*s %*s %*s %*s %*s %llu";
    if (!rest || sscanf(rest + 1, format, &state, &started) != 2) {
        return 0;
    }
    return state == 'Z' || state == 'X' ? 0 : started;
}

bool sw_is_running(pid_t pid)
{
    return start_time(pid) != 0;
}

static bool alive(const struct row *row)
{
    bool is_own = row == own && own_pid == getpid();
    return row->pid && (is_own || start_time(row->pid) == row->started);
}

static void lock_table(void)
{
    if (pthread_mutex_lock(&table->lock) == EOWNERDEAD) {
        /* Its owner was killed between two additions; both are whole numbers. */
        pthread_mutex_consistent(&table->lock);
    }
}

static void unlock_table(void)
{
    pthread_mutex_unlock(&table->lock);
}

static int format_table(void)
{
    pthread_mutexattr_t attributes;
    pthread_mutexattr_init(&attributes);
    pthread_mutexattr_setpshared(&attributes, PTHREAD_PROCESS_SHARED);
    pthread_mutexattr_setrobust(&attributes, PTHREAD_MUTEX_ROBUST);
    int error = pthread_mutex_init(&table->lock, &attributes);
    pthread_mutexattr_destroy(&attributes);
    memcpy(table->magic, MAGIC, sizeof MAGIC);
    return error;
}

/* Map the table from its file, which is locked, and format a new one. Returns what is wrong. */
static const char *map_table(int file)
{
    struct stat status;
    if (fstat(file, &status) != 0) {
        return strerror(errno);
    }
    bool created = status.st_size == 0;
    if (created && ftruncate(file, sizeof *table) != 0) {
        return strerror(errno);
    }
    if (!created && status.st_size != sizeof *table) {
        return "it has another layout: remove it";
    }
    void *memory = mmap(NULL, sizeof *table, PROT_READ | PROT_WRITE, MAP_SHARED, file, 0);
    if (memory == MAP_FAILED) {
        return strerror(errno);
    }
    table = memory;
    if (created && format_table() != 0) {
        return "cannot initialise its lock";
    }
    return memcmp(table->magic, MAGIC, sizeof MAGIC) ? "it has another layout: remove it" : NULL;
}

bool sw_table_open(void)
{
    const char *path = sw_settings()->table;
    int file = open(path, O_RDWR | O_CREAT | O_CLOEXEC, 0600);
    /* Two processes may create it at once. */
    const char *wrong =
        file < 0 || flock(file, LOCK_EX) != 0 ? strerror(errno) : map_table(file);
    if (file >= 0) {
        /* The mapping holds the file open after its closing. */
        flock(file, LOCK_UN);
        close(file);
    }
    if (wrong) {
        sw_say("SOFTWARE_GPU_TABLE=%s: %s; this machine has no device", path, wrong);
    }
    return !wrong;
}

/* This process's row, with the table locked. NULL if all are taken. */
static struct row *own_row(void)
{
    pid_t pid = getpid();
    if (own && own_pid == pid) {
        return own;
    }
    own = NULL; /* a child's copy of its parent's */
    unsigned long long started = start_time(pid);
    for (int i = 0; i < ROWS; i++) {
        struct row *row = &table->rows[i];
        /* A row with this pid and start time is from before an exec, which freed its memory. */
        bool former = row->pid == pid && row->started == started;
        if (former || !alive(row)) {
            *row = (struct row){.pid = pid, .started = started};
            own = row;
            own_pid = pid;
            return row;
        }
    }
    return NULL;
}

static size_t used(int physical)
{
    int64_t bytes = 0;
    for (int i = 0; i < ROWS; i++) {
        if (table->rows[i].bytes[physical] && alive(&table->rows[i])) {
            bytes += table->rows[i].bytes[physical];
        }
    }
    return (size_t)bytes;
}

bool sw_table_take(int physical, size_t bytes)
{
    lock_table();
    struct row *row = own_row();
    bool fits = row && used(physical) + bytes <= sw_settings()->bytes;
    if (fits) {
        row->bytes[physical] += (int64_t)bytes;
    }
    unlock_table();
    if (!row) {
        sw_say("the table has no row left for another process");
    }
    return fits;
}

void sw_table_return(int physical, size_t bytes)
{
    lock_table();
    /* A child has nothing to return: its parent's memory stays its parent's. */
    if (own && own_pid == getpid()) {
        own->bytes[physical] -= (int64_t)bytes;
    }
    unlock_table();
}

size_t sw_table_used(int physical)
{
    lock_table();
    size_t bytes = used(physical);
    unlock_table();
    return bytes;
}

unsigned sw_table_processes(int physical, struct process_use *found, unsigned limit)
{
    unsigned count = 0;
    lock_table();
    for (int i = 0; i < ROWS; i++) {
        const struct row *row = &table->rows[i];
        if (row->bytes[physical] && alive(row)) {
            if (count < limit) {
                found[count] = (struct process_use){row->pid, (size_t)row->bytes[physical]};
            }
            count++;
        }
    }
    unlock_table();
    return count;
}
