/* A stand-in for libnvidia-ml.so.1 that records every setter call.
 *
 * All state is in a file that the test maps too (NVML_DOUBLE_STATE), so that settings survive the
 * process, as in a driver with persistence, and a test can read and change them.
 * Setters append one line each to NVML_DOUBLE_RECORD. Declarations are our own.
 *
 * Processes share the state, so every access holds the file's lock: a setter's write and its record
 * are one step, and the records are in the order of the writes. Every wait
 * (latency, injected delay) is outside the lock: a call stuck on one GPU delays no other.
 */
#define _GNU_SOURCE
#include <errno.h>
#include <fcntl.h>
#include <pthread.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/file.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <time.h>
#include <unistd.h>

enum { OK = 0, UNINITIALIZED = 1, INVALID = 2, UNSUPPORTED = 3, DENIED = 4, NOT_FOUND = 6,
       SMALL = 7, NO_DRIVER = 9, VERSION = 25 };
enum { BY_EUID = 0, ALWAYS = 1, NEVER = 2 };

#define MAX_GPUS 16
#define MAX_FAULTS 32
#define MAX_BURSTS 512

typedef struct {
    int64_t limit_mw, limit_min_mw, limit_max_mw, limit_default_mw, board_limit_mw;
    int64_t lock_min, lock_max, memory_lock_min, memory_lock_max, persistence;
    int64_t architecture, memory_mib, load_mw, tick_us;
    int64_t clock_top, clock_step, clock_count, memory_clock;
    int64_t has_energy, has_average, module_only, memory_power_mw, mig, capability, compute_pid;
    int64_t graphics_pid, instance, memory_used_mib, utilization;
    int64_t start_ns, updated_ns, energy_nj, shown_tick, shown_nj;
    int64_t round_mw, clamp_min_mw, clamp_max_mw, ignored_sets, delay_ms, stale_after_set;
    int64_t next_mw, due_ns, before_mw, stale_reads;
    int64_t idle_mw, burst_count; /* of load: outside bursts it idles, if idle_mw is set */
    int64_t window_us, average_us, jitter_us, quantum_mw, counter_quantum_mj, counter_windowed;
    int64_t counter_permille, counter_stuck_mj, power_stuck_mw; /* a driver that lies */
    int64_t module_mw; /* of the superchip */
    int64_t ignores_scope; /* as drivers do that know no scopes: every one reads as the GPU's */
    /* The counter shows the energy until so long before its tick, less than a tick. A read of it takes
     * counter_read_us, or counter_slow_us: one in counter_slow_every. */
    int64_t counter_lag_us, counter_read_us, counter_slow_us, counter_slow_every;
    int64_t counter_reads, counted_nj;
    /* Power is measured when it is read, a tick's time after the last time or later; needs a window. */
    int64_t power_on_read, power_ns, power_count;
    /* Workload power profiles, as masks; profiles_old: a driver without UpdateProfiles. A profile's
     * table entry is profile_shift places from its number. */
    int64_t profiles_valid, profiles_requested, profiles_old, profile_shift;
    /* Use by process, in samples that end use_age_us ago, those of the second process twice as long.
     * MIG instances FIRST_INSTANCE and the next; no GPM before Hopper. */
    int64_t compute_percent, second_pid, second_instance, second_percent, use_age_us;
    int64_t mig_slices[2], mig_percent[2];
    /* Time limited since the driver was loaded, which counts what the power limit takes; the rest
     * is what a test sets. counts_limited: whether the driver has these fields, and those of the
     * limits requested and in force. */
    int64_t counts_limited, limited_power_ns, limited_heat_ns, limited_board_ns, limited_sync_ns;
    int64_t limited_reliability_ns, limited_slowdown_ns, limited_brake_ns;
    int64_t bmc_limit_mw; /* in force, and seen only as the current limit */
    int64_t sample_us; /* time between the samples of power that the driver keeps; 0: it keeps none */
    char name[96], uuid[96], pci[32];
    struct { int64_t begin_ns, end_ns; } bursts[MAX_BURSTS]; /* a ring, ascending and apart */
} gpu_t;

typedef struct {
    int64_t gpu, code, count, delay_ms;
    char symbol[64];
} fault_t;

typedef struct {
    int64_t count, privilege, latency_us, init_code, fault_count, fault_epoch, clock_ns, read_us;
    int64_t session_code; /* of every call about a GPU, until the library is shut down */
    int64_t samples; /* of GPM that are not freed */
    gpu_t gpus[MAX_GPUS];
    fault_t faults[MAX_FAULTS];
} node_t;

typedef struct { uint32_t field, scope; int64_t timestamp, latency_us; int32_t type, result;
                 union { double d; uint32_t u; uint64_t ull; } value; } field_t;
_Static_assert(sizeof(field_t) == 40, "nvmlFieldValue_t");
typedef struct {
    char legacy[16];
    uint32_t domain, bus, device, id, subsystem;
    char bus_id[32];
} pci_t;
_Static_assert(sizeof(pci_t) == 68, "nvmlPciInfo_t");
typedef struct { unsigned long long total, free, used; } memory_t;
_Static_assert(sizeof(memory_t) == 24, "nvmlMemory_t");
typedef struct { uint32_t pid; uint64_t memory; uint32_t instance, compute; } process_t;
_Static_assert(sizeof(process_t) == 24, "nvmlProcessInfo_v2_t");
typedef struct { unsigned gpu, memory; } utilization_t;
typedef struct { uint32_t pid; uint64_t t_us; uint32_t sm, memory, encoder, decoder; } use_t;
_Static_assert(sizeof(use_t) == 32, "nvmlProcessUtilizationSample_t");
typedef struct { uint64_t t_us; union { double d; uint32_t u; } value; } sample_t;
_Static_assert(sizeof(sample_t) == 16, "nvmlSample_t");
typedef struct { uint32_t sms, copy, decoders, encoders, jpeg, ofa, gpu_slices, compute_slices;
                 uint64_t memory_mib; } attributes_t;
_Static_assert(sizeof(attributes_t) == 40, "nvmlDeviceAttributes_t");
typedef struct { uint32_t id, p2p, slices, instances, sms, copy, decoders, encoders, jpeg, ofa;
                 uint64_t memory_mib; } profile_info_t;
_Static_assert(sizeof(profile_info_t) == 48, "nvmlGpuInstanceProfileInfo_t");
typedef struct { double percent; } gpm_sample_t;
typedef struct { uint32_t version, count; gpm_sample_t *first, *second;
                 struct { uint32_t id, result; double value; const char *names[3]; } metric[];
               } gpm_metrics_t;
_Static_assert(sizeof(gpm_metrics_t) == 24, "nvmlGpmMetricsGet_t");
typedef struct { uint32_t version, sensor; int32_t celsius; } temperature_t;
_Static_assert(sizeof(temperature_t) == 12, "nvmlTemperature_v1_t");

static node_t *node;
static int initialised;
static int device_fd = -1;
static int state_fd = -1;
static pid_t state_owner;
static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;

static int open_state(void) {
    const char *path = getenv("NVML_DOUBLE_STATE");
    state_fd = path ? open(path, O_RDWR | O_CLOEXEC) : -1;
    state_owner = getpid();
    return state_fd;
}

/* Between threads the mutex excludes, between processes the file's lock. A forked child opens the
 * file again, as it would share its parent's lock otherwise. */
static void hold(void) {
    pthread_mutex_lock(&lock);
    if (state_owner != getpid()) { close(state_fd); open_state(); }
    if (flock(state_fd, LOCK_EX)) abort();
}

static void release(void) {
    flock(state_fd, LOCK_UN);
    pthread_mutex_unlock(&lock);
}

/* CLOCK_MONOTONIC, or the time that the state file has, where a test sets it. */
static int64_t clock_of(const node_t *n) {
    struct timespec t;
    if (n && n->clock_ns) return *(const volatile int64_t *)&n->clock_ns;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return (int64_t)t.tv_sec * 1000000000 + t.tv_nsec;
}

static int64_t now_ns(void) { return clock_of(node); }

static void sleep_us(int64_t us) {
    struct timespec t = {us / 1000000, (us % 1000000) * 1000};
    if (us <= 0) return;
    if (node && node->clock_ns) __atomic_add_fetch(&node->clock_ns, us * 1000, __ATOMIC_SEQ_CST);
    else nanosleep(&t, NULL);
}

/* The GPU a handle stands for, or -1: handles are the addresses of the GPUs in the mapping. */
static int index_of(const gpu_t *g) {
    uintptr_t offset = (uintptr_t)g - (uintptr_t)(node ? node->gpus : NULL);
    if (!node || offset % sizeof *g || offset / sizeof *g >= (uintptr_t)node->count) return -1;
    return (int)(offset / sizeof *g);
}

static int64_t enforced_mw(const gpu_t *g) {
    return g->board_limit_mw && g->board_limit_mw < g->limit_mw ? g->board_limit_mw : g->limit_mw;
}

static int64_t current_mw(const gpu_t *g) {
    int64_t mw = enforced_mw(g);
    return g->bmc_limit_mw && g->bmc_limit_mw < mw ? g->bmc_limit_mw : mw;
}

static int64_t under_limit_mw(const gpu_t *g, int64_t mw) {
    int64_t limit_mw = current_mw(g);
    return mw < limit_mw ? mw : limit_mw;
}

/* Time under load between two instants, of the newest bursts. */
static int64_t loaded_us(const gpu_t *g, int64_t from_ns, int64_t until_ns) {
    int64_t loaded_ns = 0, n;
    for (n = g->burst_count; n > 0 && n > g->burst_count - MAX_BURSTS; n--) {
        int64_t begin = g->bursts[(n - 1) % MAX_BURSTS].begin_ns;
        int64_t end = g->bursts[(n - 1) % MAX_BURSTS].end_ns;
        if (end <= from_ns) break;
        if (begin < from_ns) begin = from_ns;
        if (end > until_ns) end = until_ns;
        if (end > begin) loaded_ns += end - begin;
    }
    return loaded_ns / 1000;
}

/* Energy between two instants, nJ (us * mW), at the present settings. */
static int64_t drawn_nj(const gpu_t *g, int64_t from_ns, int64_t until_ns) {
    int64_t span_us = (until_ns - from_ns) / 1000, loaded;
    if (!g->idle_mw) return span_us * under_limit_mw(g, g->load_mw);
    loaded = loaded_us(g, from_ns, until_ns);
    return loaded * under_limit_mw(g, g->load_mw)
         + (span_us - loaded) * under_limit_mw(g, g->idle_mw);
}

static int64_t power_mw(const gpu_t *g) {
    int64_t now = now_ns();
    int loaded = !g->idle_mw || loaded_us(g, now - 1000, now);
    return under_limit_mw(g, loaded ? g->load_mw : g->idle_mw);
}

/* A number below `end` that looks random, the same for the same tick or read. */
static int64_t pick(int64_t number, int64_t end) {
    uint64_t mixed = (uint64_t)number * 0x9E3779B97F4A7C15u;
    mixed = (mixed ^ mixed >> 29) * 0xBF58476D1CE4E5B9u;
    return (int64_t)((mixed >> 33) % (uint64_t)end);
}

/* When a tick is: late by up to the jitter, each by its own. */
static int64_t tick_at(const gpu_t *g, int64_t tick) {
    int64_t late_us = g->jitter_us ? pick(tick, g->jitter_us + 1) : 0;
    return g->start_ns + (tick * g->tick_us + late_us) * 1000;
}

static int64_t tick_until(const gpu_t *g, int64_t t_ns) {
    int64_t tick = (t_ns - g->start_ns) / (g->tick_us * 1000);
    return tick > 0 && tick_at(g, tick) > t_ns ? tick - 1 : tick;
}

static int64_t mean_mw(const gpu_t *g, int64_t until, int64_t window_us) {
    return drawn_nj(g, until - window_us * 1000, until) / window_us;
}

/* Energy until a tick's lag before it: if that is past, as it was found then. */
static int64_t counted_nj(const gpu_t *g, int64_t until_ns) {
    if (until_ns <= g->updated_ns) return g->counted_nj;
    return g->energy_nj + drawn_nj(g, g->updated_ns, until_ns);
}

/* Integrates true power until now, in whole microseconds (us * mW = nJ), and keeps the rest for the
 * next time: frequent readers must not get less. The counter shows the value of the last update. */
static void integrate(gpu_t *g, int64_t now) {
    int64_t lag_ns = g->counter_lag_us * 1000;
    int64_t tick = tick_until(g, now);
    int64_t counted_ns = tick_at(g, tick) - lag_ns;
    int64_t elapsed_us = (now - g->updated_ns) / 1000;
    if (tick > g->shown_tick) {
        if (g->counter_windowed && g->window_us)
            for (; g->shown_tick < tick; g->shown_tick++)
                g->shown_nj += mean_mw(g, tick_at(g, g->shown_tick + 1), g->window_us) * g->tick_us;
        else
            g->shown_nj = counted_nj(g, counted_ns);
        g->shown_tick = tick;
    }
    g->counted_nj = counted_nj(g, tick_at(g, tick_until(g, now + lag_ns)) - lag_ns);
    g->energy_nj += drawn_nj(g, g->updated_ns, g->updated_ns + elapsed_us * 1000);
    if (current_mw(g) < g->load_mw)
        g->limited_power_ns += 1000 * (!g->idle_mw ? elapsed_us :
            loaded_us(g, g->updated_ns, g->updated_ns + elapsed_us * 1000));
    g->updated_ns += elapsed_us * 1000;
}

/* A limit that takes effect late is in force once its time has come. */
static void settle(gpu_t *g) {
    if (g->next_mw && now_ns() >= g->due_ns) { g->limit_mw = g->next_mw; g->next_mw = 0; }
}

/* Whether a set is answered with success and has no effect: so many more (-1: all). */
static int ignores(gpu_t *g) {
    if (g->ignored_sets > 0) g->ignored_sets--;
    else if (g->ignored_sets == 0) return 0;
    return 1;
}

/* What a driver that is odd makes of a limit: moved into a range, truncated to a grid, late. */
static void take_limit(gpu_t *g, int64_t mw) {
    settle(g);
    if (ignores(g)) return;
    if (g->clamp_max_mw && mw > g->clamp_max_mw) mw = g->clamp_max_mw;
    if (g->clamp_max_mw && mw < g->clamp_min_mw) mw = g->clamp_min_mw;
    if (g->round_mw) mw -= mw % g->round_mw;
    g->before_mw = g->limit_mw;
    g->stale_reads = g->stale_after_set;
    g->next_mw = mw;
    g->due_ns = now_ns() + g->delay_ms * 1000000;
    settle(g);
}

static void record(const char *symbol, const gpu_t *g, int64_t a, int64_t b, int result) {
    const char *path = getenv("NVML_DOUBLE_RECORD");
    char line[256];
    int fd, size;
    if (!path || (fd = open(path, O_WRONLY | O_APPEND | O_CREAT | O_CLOEXEC, 0666)) < 0) return;
    size = snprintf(line, sizeof line, "%lld %d %d %s %d %lld %lld %d\n", (long long)now_ns(),
                    getpid(), geteuid(), symbol, index_of(g), (long long)a, (long long)b, result);
    if (write(fd, line, (size_t)size) != size && errno != EFBIG) abort(); /* a full disk */
    close(fd);
}

/* The code a test wants this symbol to return, and how long to wait first. Call it locked. */
static int fault_of(const gpu_t *g, const char *symbol, int64_t *delay_ms) {
    int64_t i;
    for (i = 0; i < node->fault_count && i < MAX_FAULTS; i++) {
        fault_t *f = &node->faults[i];
        if (f->gpu != index_of(g) || f->count == 0) continue;
        if (strcmp(f->symbol, "*") && strcmp(f->symbol, symbol)) continue;
        if (f->count > 0) f->count--;
        if (delay_ms) *delay_ms = f->delay_ms;
        return (int)f->code;
    }
    return OK;
}

/* What every call on a device has in common: faults, delays, and whether the handle is one. A delay
 * ends early when the faults are cleared, so that no test has to sit one out. */
static int enter(gpu_t *g, const char *symbol) {
    int64_t delay_ms = 0, epoch, end;
    int code;
    if (!initialised) return UNINITIALIZED;
    if (index_of(g) < 0) return INVALID;
    hold();
    code = node->session_code ? (int)node->session_code : fault_of(g, symbol, &delay_ms);
    epoch = node->fault_epoch;
    release();
    sleep_us(node->read_us);
    end = now_ns() + delay_ms * 1000000;
    while (now_ns() < end && *(volatile int64_t *)&node->fault_epoch == epoch) sleep_us(1000);
    return code;
}

/* From R615 on, who may open a capability's device file may change profiles. */
static int may_set(const char *symbol) {
    const char *capability = getenv("NVML_DOUBLE_CAPABILITY");
    if (capability && strstr(symbol, "UpdateProfiles") && !access(capability, R_OK)) return 1;
    return node->privilege == ALWAYS || (node->privilege == BY_EUID && geteuid() == 0);
}

/* A setter is begin_set, its own checks and writes where the code is still OK, end_set. */
static int begin_set(gpu_t *g, const char *symbol) {
    int code = enter(g, symbol);
    if (code == OK) sleep_us(node->latency_us);
    if (code == OK && !may_set(symbol)) code = DENIED;
    if (node) hold();
    if (code == OK) integrate(g, now_ns());
    return code;
}

static int end_set(const gpu_t *g, const char *symbol, int64_t a, int64_t b, int code) {
    if (!node) return code;
    if (code != UNINITIALIZED) record(symbol, g, a, b, code);
    release();
    return code;
}

#define ENTER(g) do { int entered = enter(g, __func__); if (entered) return entered; } while (0)

static int map_state(void) {
    struct stat found;
    void *mapped = MAP_FAILED;
    if (node) return OK;
    if (open_state() < 0) return NO_DRIVER;
    if (!fstat(state_fd, &found) && found.st_size == (off_t)sizeof *node)
        mapped = mmap(NULL, sizeof *node, PROT_READ | PROT_WRITE, MAP_SHARED, state_fd, 0);
    if (mapped == MAP_FAILED) { close(state_fd); return NO_DRIVER; }
    node = mapped;
    return OK;
}
/* As the driver's library has /dev/nvidiactl open from init to shutdown: a file beside the state. */
static void open_device(void) {
    char path[4096];
    const char *state = getenv("NVML_DOUBLE_STATE");
    if (state && snprintf(path, sizeof path, "%s.nvidiactl", state) < (int)sizeof path)
        device_fd = open(path, O_RDWR | O_CREAT | O_CLOEXEC, 0666);
}
int nvmlInitWithFlags(unsigned flags) {
    int code;
    (void)flags;
    pthread_mutex_lock(&lock);
    code = map_state();
    if (code == OK) code = (int)node->init_code;
    if (code == OK && initialised++ == 0) open_device();
    pthread_mutex_unlock(&lock);
    return code;
}
int nvmlInit_v2(void) { return nvmlInitWithFlags(0); }
int nvmlShutdown(void) {
    int code = UNINITIALIZED;
    pthread_mutex_lock(&lock);
    if (initialised) {
        if (--initialised == 0 && device_fd >= 0) { close(device_fd); device_fd = -1; }
        code = node->session_code == UNINITIALIZED ? UNINITIALIZED : OK;
        if (!initialised) node->session_code = 0;
    }
    pthread_mutex_unlock(&lock);
    return code;
}
const char *nvmlErrorString(int code) {
    switch (code) {
    case OK: return "Success";
    case INVALID: return "Invalid Argument";
    case UNSUPPORTED: return "Not Supported";
    case DENIED: return "Insufficient Permissions";
    default: return "Unknown Error";
    }
}
static int copy(char *to, unsigned size, const char *text) {
    if (!to) return INVALID;
    if (strlen(text) + 1 > size) return SMALL;
    strcpy(to, text);
    return OK;
}
int nvmlSystemGetDriverVersion(char *to, unsigned size) {
    return initialised ? copy(to, size, "595.58.03") : UNINITIALIZED;
}
int nvmlSystemGetNVMLVersion(char *to, unsigned size) {
    return initialised ? copy(to, size, "13.595.58") : UNINITIALIZED;
}
int nvmlSystemGetCudaDriverVersion_v2(int *version) { *version = 13000; return OK; }
int nvmlSystemGetCudaDriverVersion(int *version) { *version = 13000; return OK; }
int nvmlDeviceGetCount_v2(unsigned *count) {
    if (!initialised) return UNINITIALIZED;
    if (!count) return INVALID;
    *count = (unsigned)node->count;
    return OK;
}
int nvmlDeviceGetHandleByIndex_v2(unsigned index, gpu_t **g) {
    if (!initialised) return UNINITIALIZED;
    if (!g || index >= node->count) return INVALID;
    *g = &node->gpus[index];
    return enter(*g, __func__);
}
int nvmlDeviceGetHandleByUUID(const char *uuid, gpu_t **g) {
    int64_t i;
    if (!initialised) return UNINITIALIZED;
    for (i = 0; i < node->count; i++)
        if (!strcmp(node->gpus[i].uuid, uuid)) { *g = &node->gpus[i]; return OK; }
    return NOT_FOUND;
}
int nvmlDeviceGetIndex(gpu_t *g, unsigned *index) {
    ENTER(g);
    *index = (unsigned)(g - node->gpus);
    return OK;
}
int nvmlDeviceGetMinorNumber(gpu_t *g, unsigned *n) {
    ENTER(g);
    *n = (unsigned)(g - node->gpus);
    return OK;
}
int nvmlDeviceGetName(gpu_t *g, char *to, unsigned size) {
    ENTER(g);
    return copy(to, size, g->name);
}
int nvmlDeviceGetVbiosVersion(gpu_t *g, char *to, unsigned size) {
    ENTER(g);
    return copy(to, size, "92.00.45.00.03");
}
static gpu_t *parent_of(const void *handle, int *number);
int nvmlDeviceGetUUID(gpu_t *g, char *to, unsigned size) {
    char name[96];
    int number;
    const gpu_t *parent = parent_of(g, &number);
    if (parent) {
        snprintf(name, sizeof name, "MIG-%.80s-%d", parent->uuid + 4, number);
        return copy(to, size, name);
    }
    ENTER(g);
    return copy(to, size, g->uuid);
}
int nvmlDeviceGetArchitecture(gpu_t *g, unsigned *a) {
    ENTER(g);
    *a = (unsigned)g->architecture;
    return OK;
}
int nvmlDeviceGetCudaComputeCapability(gpu_t *g, int *major, int *minor) {
    ENTER(g);
    if (g->capability) {
        *major = (int)g->capability / 10;
        *minor = (int)g->capability % 10;
        return OK;
    }
    *major = g->architecture >= 9 ? 9 : g->architecture >= 7 ? 8 : 7;
    *minor = g->architecture == 6 ? 5 : g->architecture == 8 ? 9 : 0;
    return OK;
}
int nvmlDeviceGetPciInfo_v3(gpu_t *g, pci_t *p) {
    ENTER(g);
    memset(p, 0, sizeof *p);
    strncpy(p->bus_id, g->pci, sizeof p->bus_id - 1);
    strncpy(p->legacy, g->pci + 4, sizeof p->legacy - 1);
    return OK;
}
int nvmlDeviceGetMemoryInfo(gpu_t *g, memory_t *m) {
    ENTER(g);
    m->total = (unsigned long long)g->memory_mib << 20;
    m->used = (unsigned long long)g->memory_used_mib << 20;
    m->free = m->total - m->used;
    return OK;
}
int nvmlDeviceGetPowerManagementLimitConstraints(gpu_t *g, unsigned *low, unsigned *high) {
    ENTER(g);
    *low = (unsigned)g->limit_min_mw;
    *high = (unsigned)g->limit_max_mw;
    return OK;
}
int nvmlDeviceGetPowerManagementDefaultLimit(gpu_t *g, unsigned *mw) {
    ENTER(g);
    *mw = (unsigned)g->limit_default_mw;
    return OK;
}
int nvmlDeviceGetPowerManagementLimit(gpu_t *g, unsigned *mw) {
    ENTER(g);
    hold();
    settle(g);
    *mw = (unsigned)(g->stale_reads ? g->before_mw : g->limit_mw);
    if (g->stale_reads) g->stale_reads--;
    release();
    return OK;
}
int nvmlDeviceGetEnforcedPowerLimit(gpu_t *g, unsigned *mw) {
    ENTER(g);
    hold();
    settle(g);
    *mw = (unsigned)enforced_mw(g);
    release();
    return OK;
}
int nvmlDeviceGetPowerManagementMode(gpu_t *g, unsigned *on) { ENTER(g); *on = 1; return OK; }

/* A power reading: of the window before the last tick (or measurement, with power_on_read), or of this
 * moment where no window is set. No two ticks read the same, unless the readings are rounded. */
static int64_t shown_mw(gpu_t *g, int64_t window_us) {
    int64_t mw, now = now_ns();
    integrate(g, now);
    if (g->power_stuck_mw) return g->power_stuck_mw;
    if (g->power_on_read && now - g->power_ns >= g->tick_us * 1000) {
        g->power_ns = now;
        g->power_count++;
    }
    if (!window_us) mw = power_mw(g);
    else mw = mean_mw(g, g->power_on_read ? g->power_ns : tick_at(g, g->shown_tick), window_us);
    mw += (g->power_on_read ? g->power_count : g->shown_tick) % 5 + 1;
    return g->quantum_mw ? (mw + g->quantum_mw / 2) / g->quantum_mw * g->quantum_mw : mw;
}
static uint64_t shown_mj(gpu_t *g) {
    int64_t mj;
    if (g->counter_stuck_mj) return (uint64_t)g->counter_stuck_mj;
    integrate(g, now_ns());
    mj = g->shown_nj / 1000000;
    if (g->counter_permille) mj = mj * g->counter_permille / 1000;
    return (uint64_t)(g->counter_quantum_mj ? mj - mj % g->counter_quantum_mj : mj);
}
int nvmlDeviceGetPowerUsage(gpu_t *g, unsigned *mw) {
    ENTER(g);
    hold();
    *mw = (unsigned)shown_mw(g, g->average_us ? g->average_us : g->window_us);
    release();
    return OK;
}
/* Waits until the counter's value is taken, some time within its read. Returns the rest of it, us. */
static int64_t await_counter(gpu_t *g) {
    int64_t number = __atomic_add_fetch(&g->counter_reads, 1, __ATOMIC_SEQ_CST);
    int slow = g->counter_slow_every && !pick(number, g->counter_slow_every);
    int64_t took_us = slow ? g->counter_slow_us : g->counter_read_us;
    int64_t before_us = pick(number, took_us + 1);
    sleep_us(before_us);
    return took_us - before_us;
}
int nvmlDeviceGetTotalEnergyConsumption(gpu_t *g, unsigned long long *mj) {
    int64_t rest_us;
    ENTER(g);
    if (!g->has_energy) return UNSUPPORTED;
    rest_us = await_counter(g);
    hold();
    *mj = shown_mj(g);
    release();
    sleep_us(rest_us);
    return OK;
}
static uint32_t scope_of(const gpu_t *g, const field_t *f) {
    return g->ignores_scope ? 0 : f->scope;
}
static int reads_counter(const gpu_t *g, const field_t *f) {
    return f->field == 83 && scope_of(g, f) == 0 && g->has_energy;
}
/* The counters of time limited and the limits that software requested and that is in force; the
 * fields 251 to 253 of drivers before 580.82 are others here. */
static const int64_t *slow_field(const gpu_t *g, uint32_t field, int64_t *current) {
    *current = current_mw(g);
    if (!g->counts_limited) return NULL;
    switch (field) {
    case 190: return current;
    case 192: return &g->limit_mw;
    case 74: return &g->limited_power_ns;
    case 75: return &g->limited_heat_ns;
    case 76: return &g->limited_sync_ns;
    case 77: return &g->limited_board_ns;
    case 79: return &g->limited_reliability_ns;
    case 270: return &g->limited_slowdown_ns;
    case 271: return &g->limited_brake_ns;
    default: return NULL;
    }
}
int nvmlDeviceGetFieldValues(gpu_t *g, int count, field_t *fields) {
    char name[32];
    int64_t rest_us = 0;
    int i;
    ENTER(g);
    if (count < 1 || !fields) return INVALID;
    for (i = 0; i < count; i++)
        if (reads_counter(g, &fields[i])) { rest_us = await_counter(g); break; }
    hold();
    for (i = 0; i < count; i++) {
        field_t *f = &fields[i];
        uint32_t scope = g->module_only ? 1 : 0, asked = scope_of(g, f);
        snprintf(name, sizeof name, "field.%u.%u", f->field, f->scope);
        f->type = 1;
        f->value.ull = 0;
        f->result = fault_of(g, name, NULL);
        if (f->result != OK) continue;
        f->result = UNSUPPORTED;
        if (reads_counter(g, f)) {
            f->type = 3;
            f->value.ull = shown_mj(g);
            f->result = OK;
        } else if ((f->field == 185 || f->field == 186) && asked == 1 && g->module_mw) {
            f->value.u = (uint32_t)g->module_mw;
            f->result = OK;
        } else if (f->field == 186 && asked == scope) {
            f->value.u = (uint32_t)shown_mw(g, g->window_us);
            f->result = OK;
        } else if (f->field == 185 && asked == scope && g->has_average) {
            f->value.u = (uint32_t)shown_mw(g, g->average_us ? g->average_us : g->window_us);
            f->result = OK;
        } else if (f->field == 185 && asked == 2) {
            f->value.u = (uint32_t)g->memory_power_mw;
            f->result = OK; /* with zero where it is not measured */
        } else if (asked == 0) {
            int64_t current;
            integrate(g, now_ns());
            settle(g);
            const int64_t *slow = slow_field(g, f->field, &current);
            if (!slow) continue;
            f->type = f->field < 190 || f->field > 192 ? 3 : 1;
            f->value.ull = (uint64_t)*slow;
            f->result = OK;
        }
    }
    release();
    sleep_us(rest_us);
    return OK;
}
int nvmlDeviceGetSupportedMemoryClocks(gpu_t *g, unsigned *count, unsigned *clocks) {
    ENTER(g);
    if (!count) return INVALID;
    if (!clocks || *count < 1) { *count = 1; return SMALL; }
    *count = 1;
    clocks[0] = (unsigned)g->memory_clock;
    return OK;
}
int nvmlDeviceGetSupportedGraphicsClocks(gpu_t *g, unsigned memory, unsigned *count,
                                         unsigned *clocks) {
    unsigned i;
    ENTER(g);
    if (!count) return INVALID;
    if (memory != g->memory_clock) return NOT_FOUND;
    if (!clocks || *count < g->clock_count) { *count = (unsigned)g->clock_count; return SMALL; }
    *count = (unsigned)g->clock_count;
    for (i = 0; i < *count; i++) clocks[i] = (unsigned)(g->clock_top - i * g->clock_step);
    return OK;
}
int nvmlDeviceGetClockInfo(gpu_t *g, int type, unsigned *mhz) {
    ENTER(g);
    if (type == 2) *mhz = (unsigned)(g->memory_lock_max ? g->memory_lock_max : g->memory_clock);
    else *mhz = (unsigned)(g->lock_max ? g->lock_max : g->clock_top);
    return OK;
}
int nvmlDeviceGetPersistenceMode(gpu_t *g, int *on) {
    ENTER(g);
    *on = (int)g->persistence;
    return OK;
}
int nvmlDeviceGetTemperature(gpu_t *g, int sensor, unsigned *c) {
    ENTER(g);
    (void)sensor;
    *c = 41;
    return OK;
}
int nvmlDeviceGetTemperatureV(gpu_t *g, temperature_t *t) {
    ENTER(g);
    if (t->version != 0x0100000C) return VERSION;
    t->celsius = 42;
    return OK;
}
static unsigned long long reasons(const gpu_t *g) { return power_mw(g) < g->load_mw ? 4 : 0; }
int nvmlDeviceGetCurrentClocksEventReasons(gpu_t *g, unsigned long long *r) {
    ENTER(g);
    *r = reasons(g);
    return OK;
}
int nvmlDeviceGetCurrentClocksThrottleReasons(gpu_t *g, unsigned long long *r) {
    ENTER(g);
    *r = reasons(g);
    return OK;
}
static process_t listed(int64_t pid, int64_t instance, uint64_t memory) {
    uint32_t part = instance < 0 ? UINT32_MAX : (uint32_t)instance;
    return (process_t){(uint32_t)pid, memory, part, instance < 0 ? UINT32_MAX : 0};
}
static int list(const process_t *found, unsigned n, unsigned *count, process_t *processes) {
    unsigned room = *count;
    *count = n;
    if (!n) return OK;
    if (!processes || room < n) return SMALL;
    memcpy(processes, found, n * sizeof *found);
    return OK;
}
int nvmlDeviceGetComputeRunningProcesses_v3(gpu_t *g, unsigned *count, process_t *processes) {
    process_t found[2];
    unsigned n = 0;
    ENTER(g);
    if (g->compute_pid) found[n++] = listed(g->compute_pid, g->instance, 1 << 20);
    if (g->second_pid) found[n++] = listed(g->second_pid, g->second_instance, 1 << 20);
    return list(found, n, count, processes);
}
int nvmlDeviceGetGraphicsRunningProcesses_v3(gpu_t *g, unsigned *count, process_t *processes) {
    process_t found;
    ENTER(g);
    found = listed(g->graphics_pid, g->instance, 3 << 20);
    return list(&found, g->graphics_pid ? 1 : 0, count, processes);
}
/* One sample of each process that used the GPU, if it ends after what was seen last. */
int nvmlDeviceGetProcessUtilization(gpu_t *g, use_t *samples, unsigned *count, uint64_t seen_us) {
    struct timespec t;
    uint64_t end_us;
    use_t found[2];
    unsigned n = 0, room = *count;
    ENTER(g);
    if (g->mig) return UNSUPPORTED;
    clock_gettime(CLOCK_REALTIME, &t);
    end_us = (uint64_t)t.tv_sec * 1000000 + (uint64_t)(t.tv_nsec / 1000 - g->use_age_us);
    if (g->compute_percent && end_us > seen_us)
        found[n++] = (use_t){(uint32_t)g->compute_pid, end_us, (uint32_t)g->compute_percent, 0, 0, 0};
    end_us -= (uint64_t)g->use_age_us;
    if (g->second_percent && end_us > seen_us)
        found[n++] = (use_t){(uint32_t)g->second_pid, end_us, (uint32_t)g->second_percent, 0, 0, 0};
    *count = n;
    if (!n) return NOT_FOUND;
    if (!samples || room < n) return SMALL;
    memcpy(samples, found, n * sizeof *found);
    return OK;
}

/* The time of day is that of CLOCK_REALTIME, or so long after a test's clock. */
static int64_t epoch_ns(void) {
    struct timespec t;
    int64_t now = now_ns();
    if (node->clock_ns) return 1600000000000000000;
    clock_gettime(CLOCK_REALTIME, &t);
    return (int64_t)t.tv_sec * 1000000000 + t.tv_nsec - now;
}
/* Samples of power: each is the mean since the one before, of what was drawn SAMPLE_LAG earlier. */
enum { SAMPLES = 119, SAMPLE_LAG_NS = 2500000, SAMPLE_APPEARS_NS = 1500000 };
static int64_t sample_at(const gpu_t *g, int64_t number) {
    return g->start_ns + (number * g->sample_us + pick(number, g->sample_us / 4 + 1)) * 1000;
}
int nvmlDeviceGetSamples(gpu_t *g, int type, unsigned long long seen_us, int *kind, unsigned *count,
                         sample_t *samples) {
    int64_t number, last, epoch = epoch_ns();
    unsigned n = 0, room = *count;
    ENTER(g);
    if (type || !g->sample_us) return UNSUPPORTED;
    *kind = 1;
    if (!samples) { *count = SAMPLES; return OK; }
    last = (now_ns() - g->start_ns) / (g->sample_us * 1000);
    while (sample_at(g, last) + SAMPLE_APPEARS_NS > now_ns()) last--;
    for (number = last - SAMPLES + 1; number <= last && n < room; number++) {
        int64_t from = sample_at(g, number - 1), until = sample_at(g, number);
        uint64_t t_us = (uint64_t)(until + epoch) / 1000;
        if (t_us <= seen_us) continue;
        memset(&samples[n], 0, sizeof *samples);
        samples[n].t_us = t_us;
        samples[n++].value.u = (uint32_t)(drawn_nj(g, from - SAMPLE_LAG_NS, until - SAMPLE_LAG_NS)
                                          / ((until - from) / 1000));
    }
    *count = n;
    return n ? OK : NOT_FOUND;
}

/* Handles of MIG devices are addresses of their own. */
enum { FIRST_INSTANCE = 7, WHOLE = 7, SEVEN_SLICES = 4, SM_UTIL = 2, HOPPER = 9 };
static char mig_handles[MAX_GPUS][2];
static gpu_t *parent_of(const void *handle, int *number) {
    uintptr_t place = (uintptr_t)handle - (uintptr_t)mig_handles;
    if (!node || place >= sizeof mig_handles) return NULL;
    *number = (int)(place % 2);
    return &node->gpus[place / 2];
}
int nvmlDeviceGetMaxMigDeviceCount(gpu_t *g, unsigned *count) {
    ENTER(g);
    *count = g->mig ? WHOLE : 0;
    return OK;
}
int nvmlDeviceGetMigDeviceHandleByIndex(gpu_t *g, unsigned number, void **handle) {
    ENTER(g);
    if (!g->mig || number > 1 || !g->mig_slices[number]) return NOT_FOUND;
    *handle = &mig_handles[index_of(g)][number];
    return OK;
}
int nvmlDeviceGetGpuInstanceId(const void *handle, unsigned *id) {
    int number;
    if (!parent_of(handle, &number)) return INVALID;
    *id = (unsigned)(FIRST_INSTANCE + number);
    return OK;
}
int nvmlDeviceGetComputeInstanceId(const void *handle, unsigned *id) {
    int number;
    if (!parent_of(handle, &number)) return INVALID;
    *id = 0;
    return OK;
}
int nvmlDeviceGetAttributes_v2(const void *handle, attributes_t *found) {
    int number;
    gpu_t *g = parent_of(handle, &number);
    if (!g) return INVALID;
    memset(found, 0, sizeof *found);
    found->gpu_slices = found->compute_slices = (uint32_t)g->mig_slices[number];
    return OK;
}
int nvmlDeviceGetGpuInstanceProfileInfo(gpu_t *g, unsigned profile, profile_info_t *info) {
    ENTER(g);
    if (profile != SEVEN_SLICES) return UNSUPPORTED;
    memset(info, 0, sizeof *info);
    info->slices = WHOLE;
    return OK;
}
int nvmlGpmQueryDeviceSupport(gpu_t *g, unsigned *support) {
    ENTER(g);
    if (support[0] != 1) return VERSION;
    support[1] = g->architecture >= HOPPER;
    return OK;
}
int nvmlGpmSampleAlloc(gpm_sample_t **sample) {
    *sample = calloc(1, sizeof **sample);
    if (!*sample) return NO_DRIVER;
    node->samples++;
    return OK;
}
int nvmlGpmSampleFree(gpm_sample_t *sample) {
    free(sample);
    node->samples--;
    return OK;
}
int nvmlGpmMigSampleGet(gpu_t *g, unsigned instance, gpm_sample_t *sample) {
    unsigned number = instance - FIRST_INSTANCE;
    ENTER(g);
    if (number > 1 || !g->mig_slices[number]) return INVALID;
    sample->percent = (double)g->mig_percent[number];
    return OK;
}
int nvmlGpmMetricsGet(gpm_metrics_t *m) {
    unsigned i;
    if (m->version != 1 || !m->first || !m->second) return INVALID;
    for (i = 0; i < m->count; i++) {
        m->metric[i].result = m->metric[i].id == SM_UTIL ? OK : UNSUPPORTED;
        m->metric[i].value = m->second->percent;
    }
    return OK;
}
int nvmlDeviceGetUtilizationRates(gpu_t *g, utilization_t *rates) {
    ENTER(g);
    if (g->mig) return UNSUPPORTED;
    *rates = (utilization_t){(unsigned)g->utilization, 0};
    return OK;
}
int nvmlDeviceGetMigMode(gpu_t *g, unsigned *current, unsigned *pending) {
    ENTER(g);
    if (g->architecture < 7) return UNSUPPORTED;
    *current = *pending = (unsigned)g->mig;
    return OK;
}

int nvmlDeviceSetPowerManagementLimit(gpu_t *g, unsigned mw) {
    int code = begin_set(g, __func__);
    if (code == OK && !g->clamp_max_mw && (mw < g->limit_min_mw || mw > g->limit_max_mw))
        code = INVALID;
    if (code == OK) take_limit(g, mw);
    return end_set(g, __func__, mw, 0, code);
}
static int set_range(gpu_t *g, const char *symbol, int64_t *low, int64_t *high, unsigned a,
                     unsigned b) {
    int code = begin_set(g, symbol);
    if (code == OK && a > b) code = INVALID;
    if (code == OK) { *low = a; *high = b; }
    return end_set(g, symbol, a, b, code);
}
int nvmlDeviceSetGpuLockedClocks(gpu_t *g, unsigned a, unsigned b) {
    return set_range(g, __func__, &g->lock_min, &g->lock_max, a, b);
}
int nvmlDeviceResetGpuLockedClocks(gpu_t *g) {
    return set_range(g, __func__, &g->lock_min, &g->lock_max, 0, 0);
}
int nvmlDeviceSetMemoryLockedClocks(gpu_t *g, unsigned a, unsigned b) {
    return set_range(g, __func__, &g->memory_lock_min, &g->memory_lock_max, a, b);
}
int nvmlDeviceResetMemoryLockedClocks(gpu_t *g) {
    return set_range(g, __func__, &g->memory_lock_min, &g->memory_lock_max, 0, 0);
}
int nvmlDeviceSetPersistenceMode(gpu_t *g, int on) {
    int code = begin_set(g, __func__);
    if (code == OK && (on < 0 || on > 1)) code = INVALID;
    if (code == OK && !ignores(g)) g->persistence = on;
    return end_set(g, __func__, on, 0, code);
}

/* Workload power profiles. Of 0 and 1, 2 and 3, 6 and 7 one is enforced: that with the lower number.
 * Masks have 256 bits; here the first 64 do. */
typedef struct { uint32_t word[8]; } mask_t;
typedef struct { uint32_t version, profile, priority; mask_t conflicts; } profile_t;
typedef struct { uint32_t version; mask_t valid; profile_t profiles[255]; } profiles_t;
typedef struct { uint32_t version; mask_t valid, requested, enforced; } current_t;
typedef struct { uint32_t version; mask_t mask; } requested_t;
typedef struct { uint32_t operation; mask_t mask; } update_t;
_Static_assert(sizeof(profiles_t) == 11256 && sizeof(current_t) == 100, "profiles");
_Static_assert(sizeof(requested_t) == 36 && sizeof(update_t) == 36, "profile requests");

static mask_t to_mask(int64_t numbers, const gpu_t *g) {
    uint64_t bits = (uint64_t)numbers << g->profile_shift;
    mask_t m = {{(uint32_t)bits, (uint32_t)(bits >> 32)}};
    return m;
}
static int64_t from_mask(const mask_t *m, const gpu_t *g) {
    return (int64_t)((m->word[0] | (uint64_t)m->word[1] << 32) >> g->profile_shift);
}
static int64_t conflicts_of(const gpu_t *g, int profile) {
    int paired = profile < 4 || profile == 6 || profile == 7;
    return paired ? g->profiles_valid & INT64_C(1) << (profile ^ 1) : 0;
}
static int64_t enforced(const gpu_t *g) {
    int64_t found = 0;
    int i;
    for (i = 0; i < 62; i++)
        if (g->profiles_requested >> i & 1 && !(conflicts_of(g, i) & found)) found |= INT64_C(1) << i;
    return found;
}
int nvmlDeviceWorkloadPowerProfileGetProfilesInfo(gpu_t *g, profiles_t *p) {
    int i;
    ENTER(g);
    if (!g->profiles_valid) return UNSUPPORTED;
    if (p->version != 0x1002bf8) return VERSION;
    p->valid = to_mask(g->profiles_valid, g);
    for (i = 0; i < 62; i++)
        if (g->profiles_valid >> i & 1) {
            profile_t *one = &p->profiles[i + g->profile_shift];
            one->profile = one->priority = (uint32_t)i;
            one->conflicts = to_mask(conflicts_of(g, i), g);
        }
    return OK;
}
int nvmlDeviceWorkloadPowerProfileGetCurrentProfiles(gpu_t *g, current_t *c) {
    ENTER(g);
    if (!g->profiles_valid) return UNSUPPORTED;
    if (c->version != 0x1000064) return VERSION;
    hold();
    c->valid = to_mask(g->profiles_valid, g);
    c->requested = to_mask(g->profiles_requested, g);
    c->enforced = to_mask(enforced(g), g);
    release();
    return OK;
}
static int change_profiles(gpu_t *g, const char *symbol, int operation, int64_t profiles) {
    int code = begin_set(g, symbol);
    if (code == OK && (!g->profiles_valid || operation > 1)) code = UNSUPPORTED;
    if (code == OK && profiles & ~g->profiles_valid) code = INVALID;
    if (code == OK && !ignores(g)) {
        if (operation) g->profiles_requested |= profiles;
        else g->profiles_requested &= ~profiles;
    }
    return end_set(g, symbol, operation, profiles, code);
}
int nvmlDeviceWorkloadPowerProfileUpdateProfiles_v1(gpu_t *g, const update_t *u) {
    if (g->profiles_old) return UNSUPPORTED;
    return change_profiles(g, __func__, (int)u->operation, from_mask(&u->mask, g));
}
int nvmlDeviceWorkloadPowerProfileSetRequestedProfiles(gpu_t *g, const requested_t *r) {
    if (r->version != 0x1000024) return VERSION;
    return change_profiles(g, __func__, 1, from_mask(&r->mask, g));
}
int nvmlDeviceWorkloadPowerProfileClearRequestedProfiles(gpu_t *g, const requested_t *r) {
    if (r->version != 0x1000024) return VERSION;
    return change_profiles(g, __func__, 0, from_mask(&r->mask, g));
}

/* Where a GPU of a rack is, what it is part of, and the driver's estimates: from Blackwell on. Others
 * have no fabric, and succeed in saying so. */
typedef struct {
    unsigned version;
    char guid[16], chassis[16], slot, tray, host, peer_type, module;
} platform_t;
int nvmlDeviceGetPlatformInfo(gpu_t *g, platform_t *p) {
    if (p->version != 0x200002c) return VERSION;
    ENTER(g);
    if (g->architecture < 10) return UNSUPPORTED;
    memcpy(p->guid, "\1\2\0\3", 4);
    strncpy(p->chassis, "CHASSIS-77", sizeof p->chassis);
    p->slot = 3, p->tray = 5, p->host = 1, p->peer_type = 1, p->module = 2;
    return OK;
}
typedef struct {
    unsigned version;
    unsigned char cluster[16];
    unsigned status, clique, state, health;
} fabric_t;
int nvmlDeviceGetGpuFabricInfoV(gpu_t *g, fabric_t *f) {
    if (f->version != 0x2000024) return VERSION;
    ENTER(g);
    memset(f->cluster, 0, sizeof f->cluster);
    f->status = f->clique = f->state = f->health = 0;
    if (g->architecture < 10) return OK;
    f->cluster[0] = 0xab;
    f->clique = 32766, f->state = 3, f->health = 0x2a;
    return OK;
}
typedef struct { unsigned khz; unsigned long long share; } rail_t;
typedef struct { unsigned char valid; rail_t core[2], memory; unsigned mw, ms; } observed_t;
typedef struct { observed_t at[8]; unsigned char count; } at_memory_clock_t;
typedef struct { unsigned khz, mw; } operating_point_t;
typedef struct {
    unsigned char count;
    struct { unsigned khz[16], mw; } at[32];
    unsigned char valid;
    operating_point_t efficient, fastest;
    unsigned headroom_mw;
} predicted_t;
typedef struct {
    unsigned type;
    union {
        struct { at_memory_clock_t at[3]; observed_t now; } observed;
        predicted_t predicted;
    } of;
} controller_t;
typedef struct {
    unsigned count;
    struct { unsigned char count; controller_t of[4]; } sample[13];
} samples_t;
static void observe(observed_t *one, unsigned mhz, unsigned memory_mhz) {
    one->valid = 1;
    one->core[0].khz = mhz * 1000, one->memory.khz = memory_mhz * 1000;
    one->mw = 300 * mhz, one->ms = 100000 / mhz;
}
/* The first samples have estimates that do not hold any more; of the last, one is not valid. */
int nvmlDevicePerfMetricsGetSamples_v1(gpu_t *g, samples_t *s) {
    ENTER(g);
    if (g->architecture < 10) return UNSUPPORTED;
    memset(s, 0xff, sizeof *s);
    s->count = 2;
    for (unsigned n = 0; n < s->count; n++) {
        controller_t *sees = s->sample[n].of, *predicts = sees + 1;
        predicted_t *p = &predicts->of.predicted;
        s->sample[n].count = 2;
        sees->type = 0, predicts->type = 1;
        observe(&sees->of.observed.now, 1200 + 10 * n, 2619);
        for (int one = 0; one < 3; one++) sees->of.observed.at[one].count = 0;
        sees->of.observed.at[0].count = 2;
        observe(&sees->of.observed.at[0].at[0], 1100, 1593);
        sees->of.observed.at[0].at[1].valid = 0;
        p->valid = 1, p->count = 3;
        for (unsigned one = 0; one < p->count; one++)
            p->at[one].khz[0] = 1000000 * (one + 1), p->at[one].mw = 200000 * (one + 1 + n);
        p->efficient = (operating_point_t){1000000, 400000};
        p->fastest = (operating_point_t){1980000, 700000};
        p->headroom_mw = 25500;
    }
    return OK;
}

/* Not NVML: how a test changes one number of a GPU, as someone else on the node would. The energy
 * up to now is counted at the power up to now. */
int nvml_double_set(const char *state, int gpu, int64_t offset, int64_t value) {
    int fd = open(state, O_RDWR | O_CLOEXEC);
    node_t *n;
    if (fd < 0) return NOT_FOUND;
    n = mmap(NULL, sizeof *n, PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
    if (n == MAP_FAILED || flock(fd, LOCK_EX)) { close(fd); return NO_DRIVER; }
    integrate(&n->gpus[gpu], clock_of(n));
    *(int64_t *)(void *)((char *)&n->gpus[gpu] + offset) = value;
    munmap(n, sizeof *n);
    close(fd);
    return OK;
}

/* What other clients of NVML look up: present, and not supported. */
#define STUB(name) int name(void); int name(void) { return UNSUPPORTED; }
STUB(nvmlDeviceGetSerial) STUB(nvmlDeviceGetHandleBySerial) STUB(nvmlDeviceGetHandleByPciBusId_v2)
STUB(nvmlDeviceGetBrand) STUB(nvmlDeviceGetC2cModeInfoV)
STUB(nvmlDeviceSetPowerManagementLimit_v2) STUB(nvmlDeviceGetClock) STUB(nvmlDeviceGetMaxClockInfo)
STUB(nvmlDeviceGetApplicationsClock) STUB(nvmlDeviceGetSupportedClocksEventReasons)
STUB(nvmlDeviceGetViolationStatus) STUB(nvmlDeviceGetTemperatureThreshold)
STUB(nvmlDeviceGetPerformanceState) STUB(nvmlDeviceGetPowerState)
STUB(nvmlDeviceGetMemoryInfo_v2)
STUB(nvmlDeviceIsMigDeviceHandle)
STUB(nvmlEventSetCreate) STUB(nvmlEventSetWait_v2) STUB(nvmlDeviceGetComputeMode)
STUB(nvmlDeviceGetDeviceHandleFromMigDeviceHandle)
STUB(nvmlDeviceGetDecoderUtilization) STUB(nvmlDeviceGetEncoderUtilization)
STUB(nvmlDeviceGetDisplayActive) STUB(nvmlDeviceGetDisplayMode) STUB(nvmlDeviceGetDriverModel)
STUB(nvmlDeviceGetDriverModel_v2) STUB(nvmlDeviceGetFanSpeed) STUB(nvmlDeviceGetPcieThroughput)
STUB(nvmlDeviceGetTotalEccErrors) STUB(nvmlDeviceGetBAR1MemoryInfo)
