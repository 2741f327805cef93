/* A stand-in for libamd_smi.so that records every setter call, built once per SONAME (-DMAJOR=...).
 *
 * All state lies in a file that the test maps too (AMDSMI_DOUBLE_STATE), so that caps and clocks
 * outlive the process, as in the driver. Setters append a line to AMDSMI_DOUBLE_RECORD. Structures
 * are written in full, as long as that version has them, so that a caller with smaller buffers is
 * caught. Declarations are our own.
 */
#define _GNU_SOURCE
#include <fcntl.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/file.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <time.h>
#include <unistd.h>

#ifndef MAJOR
#error "build with -DMAJOR=24 ... 27 and -DMINOR"
#endif

enum { OK = 0, INVALID = 1, UNSUPPORTED = 2, DENIED = 10, RESOURCES = 15, NOT_FOUND = 31,
       NOT_INITIALISED = 32, NO_DRIVER = 34 };
enum { BY_EUID = 0, ALWAYS = 1, NEVER = 2 };
enum { AUTO = 0, MANUAL = 3 };
enum { GRAPHICS = 0, MEMORY = 4 };
enum { MORE = MAJOR >= 26 ? 39 : MAJOR == 25 ? 57 : RESOURCES };
enum { POWER_SIZE = MAJOR == 24 ? 68 : MAJOR == 25 ? 40 : 192, POWER_AT = MAJOR == 24 ? 0 : 8,
       ASIC_SIZE = MAJOR == 24 ? 456 : 896, OD_SIZE = MAJOR == 27 ? 248 : 184,
       VIOLATION_SIZE = MAJOR == 24 ? 352 : MAJOR == 25 ? 152 : 6016,
       VIOLATION_AT = MAJOR == 24 ? 104 : 120,
       PROCESS_SIZE = MAJOR == 24 ? 224 : 704, PID_AT = MAJOR == 24 ? 32 : 256,
       USED_AT = MAJOR == 24 ? 40 : 264 };
enum { OVERLAPS_HARM = MAJOR < 26 || (MAJOR == 26 && MINOR < 2) };

/* Calls that need no answer from the GPU. */
#define NAMING "amdsmi_get_processor_type amdsmi_get_gpu_device_bdf amdsmi_get_gpu_asic_info " \
               "amdsmi_get_gpu_kfd_info"

#define MAX_SOCKETS 16
#define MAX_PARTITIONS 8
#define MAX_FAULTS 32
#define MAX_PIDS 256

typedef struct {
    int64_t bdf, partitions, kfd_node;
    int64_t cap_uw, cap_min_uw, cap_max_uw, cap_default_uw, has_cap, cap_in_watts;
    int64_t sclk_low, sclk_high, sclk_min, sclk_max, mclk_high, mclk_min, mclk_max, level;
    int64_t power_w, power_form; /* bit 0: current, bit 1: average */
    int64_t load_w; /* what it draws as far as its cap lets it; 0: power_w, whatever its cap */
    int64_t energy_start_ns, energy_counts, energy_bits, energy_permille, energy_absent;
    int64_t temperature_c, temperature_scale, activity, violations, no_violations;
    int64_t presets, preset; /* 0: the default, which every GPU has */
    /* The firmware's samples in violation; of so many, one each ms: 1 if it counts them. */
    int64_t acc_prochot, acc_power, acc_socket, acc_vr, acc_hbm, counts_violations;
    int64_t refuse, resetting, gone, pid_count, pids[MAX_PIDS];
    char name[64];
} gpu_t;

typedef struct { int64_t gpu, code, count; char symbol[64]; } fault_t;

typedef struct {
    int64_t count, privilege, init_code, init_ms, inits, call_us, clock_ns;
    int64_t inside, overlaps, fault_count;
    gpu_t gpus[MAX_SOCKETS];
    fault_t faults[MAX_FAULTS];
} node_t;

static node_t *node;
static int initialised;
static int state_fd = -1;
static char handles[MAX_SOCKETS][MAX_PARTITIONS];

static int64_t now_ns(void) {
    struct timespec t;
    if (node->clock_ns) return *(volatile int64_t *)&node->clock_ns;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return (int64_t)t.tv_sec * 1000000000 + t.tv_nsec;
}

static void sleep_us(int64_t us) {
    struct timespec t = {us / 1000000, (us % 1000000) * 1000};
    if (us > 0) nanosleep(&t, NULL);
}

static int map_state(void) {
    const char *path = getenv("AMDSMI_DOUBLE_STATE");
    struct stat found;
    void *mapped = MAP_FAILED;
    if (node) return OK;
    state_fd = path ? open(path, O_RDWR | O_CLOEXEC) : -1;
    if (state_fd < 0) return NO_DRIVER;
    if (!fstat(state_fd, &found) && found.st_size == (off_t)sizeof *node)
        mapped = mmap(NULL, sizeof *node, PROT_READ | PROT_WRITE, MAP_SHARED, state_fd, 0);
    if (mapped == MAP_FAILED) return NO_DRIVER;
    node = mapped;
    return OK;
}

static int position(const void *handle) {
    intptr_t offset = (const char *)handle - &handles[0][0];
    if (!handle || offset < 0 || offset >= (intptr_t)sizeof handles) return -1;
    if (offset / MAX_PARTITIONS >= node->count) return -1;
    return (int)offset;
}

/* The code that a test wants of this symbol. */
static int fault_of(int gpu, const char *symbol) {
    int64_t i;
    for (i = 0; i < node->fault_count && i < MAX_FAULTS; i++) {
        fault_t *f = &node->faults[i];
        if (f->gpu != gpu || f->count == 0 || strcmp(f->symbol, symbol)) continue;
        if (f->count > 0) f->count--;
        return (int)f->code;
    }
    return OK;
}

/* A call on a GPU: is the handle one, does another call run, what does the test want. */
static int enter(const void *handle, const char *symbol, gpu_t **gpu, int *partition) {
    int at, number, code, others;
    if (!initialised) return NOT_INITIALISED;
    at = position(handle);
    if (at < 0) return INVALID;
    others = (int)__atomic_fetch_add(&node->inside, 1, __ATOMIC_SEQ_CST);
    sleep_us(node->call_us);
    __atomic_sub_fetch(&node->inside, 1, __ATOMIC_SEQ_CST);
    number = at / MAX_PARTITIONS;
    if (others > 0 && OVERLAPS_HARM) {
        node->overlaps++;
        number = (number + 1) % (int)node->count; /* another GPU's values */
    }
    *gpu = &node->gpus[number];
    if (partition) *partition = at % MAX_PARTITIONS;
    if ((*gpu)->gone) return NOT_FOUND;
    if ((*gpu)->resetting && !strstr(NAMING, symbol)) return UNSUPPORTED;
    code = fault_of(number, symbol + strlen("amdsmi_"));
    return code;
}

static void record(const char *symbol, const gpu_t *g, int64_t a, int64_t b, int64_t c, int code) {
    const char *path = getenv("AMDSMI_DOUBLE_RECORD");
    char line[200];
    int fd, size;
    if (!path || (fd = open(path, O_WRONLY | O_APPEND | O_CLOEXEC)) < 0) return;
    size = snprintf(line, sizeof line, "%d %d %s %d %lld %lld %lld %d\n", getpid(), geteuid(),
                    symbol + strlen("amdsmi_"), (int)(g - node->gpus), (long long)a, (long long)b,
                    (long long)c, code);
    if (write(fd, line, (size_t)size) != size) abort();
    close(fd);
}

static int may_set(void) {
    return node->privilege == ALWAYS || (node->privilege == BY_EUID && geteuid() == 0);
}

static void put32(void *to, size_t offset, uint32_t value) { memcpy((char *)to + offset, &value, 4); }
static void put64(void *to, size_t offset, uint64_t value) { memcpy((char *)to + offset, &value, 8); }

#define ENTER(handle) \
    gpu_t *g; int part, entered = enter(handle, __func__, &g, &part); \
    (void)part; if (entered) return (uint32_t)entered

uint32_t amdsmi_init(uint64_t flags) {
    int code = map_state();
    if (code) return (uint32_t)code;
    if (flags != 2) return INVALID;
    sleep_us(node->init_ms * 1000);
    if (node->init_code) return (uint32_t)node->init_code;
    node->inits++;
    initialised = 1; /* not counted before 27 */
    return OK;
}
uint32_t amdsmi_shut_down(void) {
    if (!initialised) return NOT_INITIALISED;
    initialised = 0;
    return OK;
}
uint32_t amdsmi_get_lib_version(void *out) {
    memset(out, 0xEE, 24);
    put32(out, 0, MAJOR);
    put32(out, 4, MINOR);
    return OK;
}
static uint32_t list(uint32_t *count, void **out, char *first, size_t step, int64_t there) {
    int64_t i;
    if (!count) return INVALID;
    if (out)
        for (i = 0; i < there && i < *count; i++) out[i] = first + (size_t)i * step;
    *count = (uint32_t)there;
    return OK;
}
uint32_t amdsmi_get_socket_handles(uint32_t *count, void **out) {
    if (!initialised) return NOT_INITIALISED;
    return list(count, out, &handles[0][0], MAX_PARTITIONS, node->count);
}
uint32_t amdsmi_get_processor_handles(void *socket, uint32_t *count, void **out) {
    int at;
    if (!initialised) return NOT_INITIALISED;
    at = position(socket);
    if (at < 0 || at % MAX_PARTITIONS) return INVALID;
    return list(count, out, socket, 1, node->gpus[at / MAX_PARTITIONS].partitions);
}
uint32_t amdsmi_get_processor_type(void *h, uint32_t *out) { ENTER(h); *out = 1; return OK; }
uint32_t amdsmi_get_gpu_device_bdf(void *h, uint64_t *out) {
    ENTER(h);
    *out = (uint64_t)g->bdf | (uint64_t)part;
    return OK;
}
#if MAJOR > 24 || MINOR > 6
uint32_t amdsmi_get_gpu_kfd_info(void *h, void *out) {
    ENTER(h);
    memset(out, 0, 64);
    put64(out, 0, 0xABCD0000u + (uint64_t)(g->kfd_node + part));
    put32(out, 8, (uint32_t)(g->kfd_node + part));
    put32(out, 12, (uint32_t)part);
    return OK;
}
#endif
uint32_t amdsmi_get_gpu_asic_info(void *h, void *out) {
    ENTER(h);
    memset(out, 0, ASIC_SIZE);
    strcpy(out, g->name);
    return OK;
}
uint32_t amdsmi_get_power_cap_info(void *h, uint32_t sensor, void *out) {
    uint64_t unit;
    ENTER(h);
    if (sensor) return UNSUPPORTED;
    memset(out, 0, 64); /* success with zeros where no read worked */
    if (!g->has_cap || part) return OK;
    unit = g->cap_in_watts ? 1000000 : 1;
    put64(out, 0, (uint64_t)g->cap_uw / unit);
    put64(out, 8, (uint64_t)g->cap_default_uw / unit);
    put64(out, 24, (uint64_t)g->cap_min_uw / unit);
    put64(out, 32, (uint64_t)g->cap_max_uw / unit);
    return OK;
}
/* Power follows the cap; what was drawn until now is counted. */
static void draw(gpu_t *g) {
    int64_t now = now_ns();
    g->energy_counts += (now - g->energy_start_ns) / 1000 * g->power_w / 1000 * 8192 / 125;
    g->energy_start_ns = now;
    g->power_w = g->cap_uw / 1000000 < g->load_w ? g->cap_uw / 1000000 : g->load_w;
}
uint32_t amdsmi_set_power_cap(void *h, uint32_t sensor, uint64_t cap) {
    int code;
    ENTER(h);
    if (g->cap_in_watts) cap *= 1000000;
    code = !may_set() ? DENIED : sensor || part || !g->has_cap ? UNSUPPORTED : OK;
    if (!code && cap && (cap < (uint64_t)g->cap_min_uw || cap > (uint64_t)g->cap_max_uw))
        code = INVALID;
    if (!code && g->refuse) { code = UNSUPPORTED; if (g->refuse > 0) g->refuse--; }
    if (!code && cap) g->cap_uw = (int64_t)(cap / 1000000 * 1000000); /* 0 changes nothing */
    if (!code && g->load_w) draw(g);
    record(__func__, g, (int64_t)cap, 0, 0, code);
    return (uint32_t)code;
}
uint32_t amdsmi_get_power_info(void *h, void *out) {
    ENTER(h);
    memset(out, 0, POWER_SIZE);
    put32(out, POWER_AT, g->power_form & 1 && !part ? (uint32_t)g->power_w : 0xFFFF);
    put32(out, POWER_AT + 4, g->power_form & 2 && !part ? (uint32_t)g->power_w : 0xFFFFFFFF);
    return OK;
}
uint32_t amdsmi_get_energy_count(void *h, uint64_t *counter, float *unit, uint64_t *t_ns) {
    int64_t now, drawn;
    ENTER(h);
    now = now_ns();
    drawn = (now - g->energy_start_ns) / 1000 * g->power_w / 1000 * g->energy_permille / 1000;
    *counter = (uint64_t)(g->energy_counts + drawn * 8192 / 125); /* mJ to 2^-16 J */
    if (g->energy_bits < 64) *counter &= (1ull << g->energy_bits) - 1;
    if (g->energy_absent) *counter = g->energy_absent > 0 ? UINT64_MAX : 0;
    *unit = 15.3f;
    *t_ns = (uint64_t)now;
    return OK;
}
uint32_t amdsmi_get_clock_info(void *h, uint32_t type, void *out) {
    ENTER(h);
    memset(out, 0, 32);
    put32(out, 0, (uint32_t)(type == MEMORY ? g->mclk_high : g->sclk_high));
    return OK;
}
uint32_t amdsmi_get_clk_freq(void *h, uint32_t type, void *out) {
    ENTER(h);
    memset(out, 0, 280);
    put32(out, 4, 2);
    put32(out, 8, 0xFFFFFFFF); /* the domain sleeps */
    put64(out, 16, (uint64_t)(type == MEMORY ? g->mclk_min : g->sclk_min) * 1000000);
    put64(out, 24, (uint64_t)(type == MEMORY ? g->mclk_max : g->sclk_max) * 1000000);
    return OK;
}
/* The driver's rules: the level is manual from the first attempt on, also of one that it refuses. */
static int limit(gpu_t *g, uint32_t type, int is_max, int64_t mhz) {
    int64_t low, high;
    g->level = MANUAL;
    if (g->refuse) { if (g->refuse > 0) g->refuse--; return UNSUPPORTED; }
    if (type == MEMORY) {
        if (!is_max || mhz < g->mclk_min || mhz > g->mclk_max) return UNSUPPORTED;
        g->mclk_high = mhz;
        return OK;
    }
    low = is_max ? g->sclk_low : mhz;
    high = is_max ? mhz : g->sclk_high;
    if (low >= high || low < g->sclk_min || high > g->sclk_max) return UNSUPPORTED;
    g->sclk_low = low;
    g->sclk_high = high;
    return OK;
}
uint32_t amdsmi_set_gpu_clk_limit(void *h, uint32_t type, uint32_t is_max, uint64_t mhz) {
    int code;
    ENTER(h);
    code = !may_set() ? DENIED : part ? UNSUPPORTED : limit(g, type, (int)is_max, (int64_t)mhz);
    record(__func__, g, type, is_max, (int64_t)mhz, code);
    return (uint32_t)code;
}
uint32_t amdsmi_get_gpu_perf_level(void *h, uint32_t *out) {
    ENTER(h);
    *out = (uint32_t)g->level;
    return OK;
}
uint32_t amdsmi_set_gpu_perf_level(void *h, uint32_t level) {
    int code;
    ENTER(h);
    code = may_set() ? OK : DENIED;
    if (!code) {
        g->level = level;
        if (level == AUTO) {
            g->preset = 0;
            g->sclk_low = g->sclk_min;
            g->sclk_high = g->sclk_max;
            g->mclk_high = g->mclk_max;
        }
    }
    record(__func__, g, level, 0, 0, code);
    return (uint32_t)code;
}
/* In force at level manual only, which it sets first, also where the driver then refuses it. */
uint32_t amdsmi_get_gpu_power_profile_presets(void *h, uint32_t sensor, void *out) {
    ENTER(h);
    if (sensor || part) return UNSUPPORTED;
    memset(out, 0, 24);
    put64(out, 0, (uint64_t)g->presets | 64);
    put64(out, 8, (uint64_t)(g->preset ? g->preset : 64));
    put32(out, 16, (uint32_t)__builtin_popcountll((uint64_t)g->presets | 64));
    return OK;
}
uint32_t amdsmi_set_gpu_power_profile(void *h, uint32_t reserved, uint64_t preset) {
    int code;
    ENTER(h);
    code = !may_set() ? DENIED : part ? UNSUPPORTED : OK;
    if (!code && (reserved || preset & (preset - 1) || !(preset & ((uint64_t)g->presets | 64))))
        code = INVALID;
    if (!code) {
        g->level = MANUAL;
        if (g->refuse) { code = UNSUPPORTED; if (g->refuse > 0) g->refuse--; }
        else g->preset = preset == 64 ? 0 : (int64_t)preset;
    }
    record(__func__, g, (int64_t)preset, 0, 0, code);
    return (uint32_t)code;
}
uint32_t amdsmi_get_gpu_od_volt_info(void *h, void *out) {
    int64_t spans[] = {0, 0, 0, 0, 0, 0, 0, 0};
    size_t i;
    ENTER(h);
    memset(out, 0, OD_SIZE);
    spans[0] = g->sclk_low; spans[1] = g->sclk_high;
    spans[2] = g->mclk_min; spans[3] = g->mclk_high;
    spans[4] = g->sclk_min; spans[5] = g->sclk_max;
    spans[6] = g->mclk_min; spans[7] = g->mclk_max;
    for (i = 0; i < 8; i++) put64(out, 8 * i, (uint64_t)spans[i] * 1000000);
    return OK;
}
uint32_t amdsmi_get_temp_metric(void *h, uint32_t sensor, uint32_t metric, int64_t *out) {
    ENTER(h);
    if (sensor != 1 || metric) return UNSUPPORTED;
    *out = g->temperature_c * g->temperature_scale;
    return OK;
}
uint32_t amdsmi_get_gpu_activity(void *h, void *out) {
    ENTER(h);
    memset(out, 0, 64);
    put32(out, 0, (uint32_t)g->activity);
    return OK;
}
uint32_t amdsmi_get_gpu_process_list(void *h, uint32_t *count, char *out) {
    uint32_t room, i;
    ENTER(h);
    room = *count;
    *count = (uint32_t)g->pid_count;
    for (i = 0; out && i < *count && i < room; i++) {
        memset(out + i * PROCESS_SIZE, 0, PROCESS_SIZE);
        strcpy(out + i * PROCESS_SIZE, "python");
        put32(out + i * PROCESS_SIZE, PID_AT, (uint32_t)g->pids[i]);
        put64(out + i * PROCESS_SIZE, USED_AT, (uint64_t)(1 + part) << 30);
    }
    return room < *count ? MORE : OK;
}
#if MAJOR > 24 || MINOR > 6
uint32_t amdsmi_get_violation_status(void *h, char *out) {
    int i;
    ENTER(h);
    memset(out, 0xFF, VIOLATION_SIZE);
    for (i = 0; i < 5 && !g->no_violations; i++)
        out[VIOLATION_AT + i] = (char)(g->violations >> i & 1);
    if (!g->counts_violations) return OK;
    put64(out, 16, (uint64_t)(now_ns() / 1000000));
    for (i = 0; i < 5; i++) put64(out, 24 + 8 * (size_t)i, (uint64_t)(&g->acc_prochot)[i]);
    return OK;
}
#endif
