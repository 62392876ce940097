/* The environment variables that configure the software GPU, and its messages. */
#include "device.h"

#include <pthread.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#define DEFAULT_GIB 79.1
#define DEFAULT_NAME "Software GPU (H100 80GB HBM3)"
/* Nobody shall take a result for one of a GPU: each name of the device contains this. */
#define NAME_MARK "Software GPU"

static struct settings settings;
static pthread_once_t settings_once = PTHREAD_ONCE_INIT;

void sw_say(const char *format, ...)
{
    char line[512];
    int used = snprintf(line, sizeof line, "[software GPU] pid %d: ", (int)getpid());
    va_list arguments;
    va_start(arguments, format);
    vsnprintf(line + used, sizeof line - (size_t)used - 1, format, arguments);
    va_end(arguments);
    strcat(line, "\n");
    /* One write, so that lines of several processes do not mix. */
    ssize_t written = write(STDERR_FILENO, line, strlen(line));
    (void)written;
}

static bool refuse(const char *variable, const char *value, const char *expected)
{
    sw_say("%s=%s: %s; this machine has no device", variable, value ? value : "", expected);
    return false;
}

/* A number above 0, or the default where the variable is unset or empty. */
static bool read_number(const char *variable, double fallback, double *value)
{
    const char *text = getenv(variable);
    *value = fallback;
    if (!text || !*text) {
        return true;
    }
    char *end;
    *value = strtod(text, &end);
    return (*end == '\0' && *value > 0) || refuse(variable, text, "expected a number above 0");
}

static bool read_capability(void)
{
    const char *text = getenv("SOFTWARE_GPU_CAPABILITY");
    char rest;
    if (!text || !*text) {
        text = "9.0";
    }
    return sscanf(text, "%d.%d%c", &settings.major, &settings.minor, &rest) == 2 ||
           refuse("SOFTWARE_GPU_CAPABILITY", text, "expected two numbers such as 9.0");
}

static bool read_all(void)
{
    double count, gib, copy_mib;
    const char *trace = getenv("SOFTWARE_GPU_TRACE");
    settings.trace = trace && strcmp(trace, "1") == 0;
    const char *values = getenv("SOFTWARE_GPU_VALUES");
    settings.values =
        values && strcmp(values, "1") == 0 && !getenv("SOFTWARE_GPU_VALUES_LIMIT");
    settings.table = getenv("SOFTWARE_GPU_TABLE");
    settings.name = getenv("SOFTWARE_GPU_NAME");
    if (!settings.name || !*settings.name) {
        settings.name = DEFAULT_NAME;
    }
    if (!settings.table || strncmp(settings.table, "/dev/shm/", 9) != 0) {
        return refuse("SOFTWARE_GPU_TABLE", settings.table, "expected a file under /dev/shm");
    }
    if (!strstr(settings.name, NAME_MARK)) {
        return refuse("SOFTWARE_GPU_NAME", settings.name, "must contain \"" NAME_MARK "\"");
    }
    if (!read_number("SOFTWARE_GPU_COUNT", 1, &count) ||
        !read_number("SOFTWARE_GPU_GIB", DEFAULT_GIB, &gib) ||
        !read_number("SOFTWARE_GPU_COPY_LIMIT_MIB", 0, &copy_mib) || !read_capability()) {
        return false;
    }
    if (count > MAX_DEVICES) {
        return refuse("SOFTWARE_GPU_COUNT", getenv("SOFTWARE_GPU_COUNT"), "expected at most 16");
    }
    settings.count = (int)count;
    settings.bytes = (size_t)(gib * 1024) * MIB;
    settings.copy_limit = (size_t)(copy_mib * (double)MIB);
    return sw_table_open();
}

static void read_settings(void)
{
    settings.usable = read_all();
    if (!settings.usable) {
        settings.count = 0;
    }
}

const struct settings *sw_settings(void)
{
    /* table.c reads the path while the settings are being read. */
    static __thread bool reading;
    if (!reading) {
        reading = true;
        pthread_once(&settings_once, read_settings);
        reading = false;
    }
    return &settings;
}

/* -- CUDA_VISIBLE_DEVICES ---------------------------------------------------------------------- */

static int visible[MAX_DEVICES];
static int visible_count;
static pthread_once_t visible_once = PTHREAD_ONCE_INIT;

/* The device that an index, or the beginning of a UUID, names; -1 for none. */
static int named(const char *text)
{
    int count = sw_settings()->count;
    if (strncmp(text, "GPU-", 4) == 0) {
        for (int i = 0; i < count; i++) {
            char uuid[UUID_TEXT];
            sw_uuid_text(i, uuid);
            if (strncmp(uuid, text, strlen(text)) == 0) {
                return i;
            }
        }
        return -1;
    }
    char *end;
    long index = strtol(text, &end, 10);
    return end == text || *end || index < 0 || index >= count ? -1 : (int)index;
}

static void read_visible(void)
{
    int count = sw_settings()->count;
    const char *variable = getenv("CUDA_VISIBLE_DEVICES");
    if (!variable) {
        for (int i = 0; i < count; i++) {
            visible[i] = i;
        }
        visible_count = count;
        return;
    }
    char *list = strdup(variable);
    char *rest = list;
    const char *item;
    /* As in CUDA, the first name without a device ends the list. */
    while (list && visible_count < MAX_DEVICES && (item = strsep(&rest, ","))) {
        int index = named(item + strspn(item, " "));
        if (index < 0) {
            break;
        }
        visible[visible_count++] = index;
    }
    free(list);
}

int sw_visible_count(void)
{
    pthread_once(&visible_once, read_visible);
    return visible_count;
}

int sw_physical(int ordinal)
{
    return ordinal >= 0 && ordinal < sw_visible_count() ? visible[ordinal] : 0;
}

void sw_uuid(int physical, unsigned char uuid[UUID_BYTES])
{
    /* The index comes first, so that a UUID may be abbreviated. */
    const char rest[] = "software-gpu";
    memset(uuid, 0, UUID_BYTES);
    uuid[3] = (unsigned char)physical;
    memcpy(uuid + 4, rest, UUID_BYTES - 4);
}

void sw_uuid_text(int physical, char text[UUID_TEXT])
{
    unsigned char uuid[UUID_BYTES];
    sw_uuid(physical, uuid);
    char *end = text + sprintf(text, "GPU");
    for (int i = 0; i < UUID_BYTES; i++) {
        bool group = i == 0 || i == 4 || i == 6 || i == 8 || i == 10;
        end += sprintf(end, "%s%02x", group ? "-" : "", uuid[i]);
    }
}

/* -- functions without an implementation ------------------------------------------------------- */

int sw_nothing(const char *function, bool *reported)
{
    if (!*reported && sw_settings()->trace) {
        sw_say("%s does nothing", function);
    }
    *reported = true;
    return 0;
}

int sw_missing(const char *function, bool *reported, int error)
{
    if (!*reported) {
        sw_say("%s is not implemented: it returns error %d", function, error);
    }
    *reported = true;
    return error;
}
