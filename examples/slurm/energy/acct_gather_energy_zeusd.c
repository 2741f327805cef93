/* acct_gather_energy/zeusd: the GPU energy that zeusd has charged to a job, in sacct's ConsumedEnergy.
 *
 * In each slurmstepd it asks zeusd for the energy of the step's job in this node's ledger, and reports
 * the increase since the step began. Slurm adds up steps and nodes. slurmd and slurmctld load it too,
 * and get 0 joules from it. While zeusd does not answer, the figure stays as it was.
 *
 * READ BEFORE USE
 * - Slurm exits at start if it cannot load this plugin: the node is then down. Build it for each minor
 *   version of Slurm (the Makefile refuses none; Slurm does), and install it before slurm.conf names it.
 * - Set PrologFlags=Contain. The job's figure is its extern step's; without one Slurm adds up
 *   the steps, and their times overlap.
 * - Not beside another plugin that measures GPUs: AcctGatherEnergyType=ipmi,zeusd adds both up.
 * - The prolog has to run `zeusctl allocate --slurm`; see ../prolog.sh.
 */
#define _GNU_SOURCE
#include <inttypes.h>
#include <stdbool.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/socket.h>
#include <sys/time.h>
#include <sys/un.h>
#include <time.h>
#include <unistd.h>

#include <slurm/slurm.h>
#include <slurm/slurm_errno.h>

const char plugin_name[] = "GPU energy that zeusd has charged to the job";
const char plugin_type[] = "acct_gather_energy/zeusd";
const uint32_t plugin_version = SLURM_VERSION_NUMBER;

#ifndef SOCKET
#define SOCKET "/run/zeusd/zeusd.sock"
#endif
#ifndef CGROUP
#define CGROUP "/proc/self/cgroup"
#endif
#define BUCKET_S 900
#define MAX_REPLY 262144

/* ----------------------------------------------------------------- the job this process belongs to */

/* A SLUID is `s` and 13 characters of Crockford's base 32, which has no I, L, O and U. */
#define SLUID 14

static bool is_sluid(const char *text)
{
    return *text == 's' && strspn(text + 1, "0123456789ABCDEFGHJKMNPQRSTVWXYZ") == SLUID - 1 &&
           (text[SLUID] == '/' || text[SLUID] == '\n' || !text[SLUID]);
}

/* Slurm's own groups name it: slurmstepd runs in .../job_123/step_extern/slurm, and from 26.05 on,
 * unless CgroupJobIdPaths=yes, in .../slurmstepd.scope/sEKNKTV3WPV500/step_extern/slurm. */
static bool own_job(char *name, size_t size)
{
    static const char scope[] = "slurmstepd.scope/";
    char line[4096];
    bool found = false;
    FILE *file = fopen(CGROUP, "re");
    while (file && !found && fgets(line, sizeof line, file)) {
        const char *at = strstr(line, "/job_");
        size_t digits = at ? strspn(at + 5, "0123456789") : 0;
        if (digits && digits < size && strstr(line, "slurm")) {
            memcpy(name, at + 5, digits);
            name[digits] = 0;
            found = true;
        }
        at = found ? NULL : strstr(line, scope);
        if (at && is_sluid(at + sizeof scope - 1) && size > SLUID) {
            memcpy(name, at + sizeof scope - 1, SLUID);
            name[SLUID] = 0;
            found = true;
        }
    }
    if (file)
        fclose(file);
    return found;
}

/* -------------------------------------------------------------- one request to zeusd: ZMTP 3, msgpack */

static bool send_all(int fd, const unsigned char *bytes, size_t n)
{
    while (n > 0) {
        ssize_t sent = send(fd, bytes, n, MSG_NOSIGNAL);
        if (sent <= 0)
            return false;
        bytes += sent, n -= (size_t)sent;
    }
    return true;
}

static bool receive_all(int fd, unsigned char *bytes, size_t n)
{
    while (n > 0) {
        ssize_t got = recv(fd, bytes, n, 0);
        if (got <= 0)
            return false;
        bytes += got, n -= (size_t)got;
    }
    return true;
}

/* Reads the next message that is not a command of the protocol. Returns its length, or 0. */
static size_t next_message(int fd, unsigned char *to, size_t size)
{
    for (;;) {
        unsigned char head[9];
        uint64_t n = 0;
        if (!receive_all(fd, head, 2))
            return 0;
        if (head[0] & 2) {
            if (!receive_all(fd, head + 2, 7))
                return 0;
            for (int i = 1; i < 9; i++)
                n = n << 8 | head[i];
        } else {
            n = head[1];
        }
        if (n > size || !receive_all(fd, to, n))
            return 0;
        if (!(head[0] & 4))
            return n;
    }
}

static unsigned char *put_str(unsigned char *p, const char *text)
{
    size_t n = strlen(text);
    *p++ = 0xd9, *p++ = (unsigned char)n;
    memcpy(p, text, n);
    return p + n;
}

static unsigned char *put_uint(unsigned char *p, uint64_t value)
{
    *p++ = 0xcf;
    for (int shift = 56; shift >= 0; shift -= 8)
        *p++ = (unsigned char)(value >> shift);
    return p;
}

/* Adds up the unsigned numbers under a key, anywhere in the reply. That is enough: the requested keys
 * occur only in the sums, and a job's names contain no control characters. */
static uint64_t sum_of(const unsigned char *p, size_t n, const char *key)
{
    size_t length = strlen(key);
    uint64_t sum = 0;
    unsigned char before = 0xa0 | (unsigned char)length;
    for (const unsigned char *end = p + n; p + length + 2 <= end; p++) {
        if (p[0] != before || memcmp(p + 1, key, length))
            continue;
        const unsigned char *value = p + 1 + length;
        int bytes = *value >= 0xcc && *value <= 0xcf ? 1 << (*value - 0xcc) : 0;
        uint64_t number = *value < 0x80 ? *value : 0;
        if (value + bytes >= end)
            break;
        for (int i = 1; i <= bytes; i++)
            number = number << 8 | value[i];
        sum += number;
    }
    return sum;
}

static bool ask(int fd, const char *job, uint64_t *uj)
{
    static const unsigned char greeting[64] = {0xff, 0, 0, 0, 0, 0, 0, 0, 0, 0x7f, 3, 1,
                                               'N', 'U', 'L', 'L'};
    static const unsigned char ready[] = "\x04\x1c\x05READY\x0bSocket-Type\0\0\0\x06" "DEALER";
    unsigned char peer[64], request[256], *p = request + 2;
    unsigned char *reply;
    struct timespec now;
    uint64_t until = ((uint64_t)time(NULL) / BUCKET_S + 1) * BUCKET_S;
    size_t n;
    clock_gettime(CLOCK_MONOTONIC, &now);
    *p++ = 0x87; /* a map of 7 */
    p = put_uint(put_str(p, "v"), 1);
    p = put_uint(put_str(p, "id"), 1);
    p = put_str(put_str(p, "op"), "usage");
    p = put_uint(put_str(p, "deadline_ns"), (uint64_t)now.tv_sec * 1000000000u + 2000000000u);
    p = put_str(p, "edges");
    *p++ = 0x92;
    p = put_uint(put_uint(p, 0), until);
    p = put_str(put_str(p, "by"), "job");
    p = put_str(put_str(p, "name"), job);
    request[0] = 0, request[1] = (unsigned char)(p - request - 2);
    if (p - request > 257 || !send_all(fd, greeting, sizeof greeting) ||
        !send_all(fd, ready, sizeof ready - 1) || !receive_all(fd, peer, sizeof peer) ||
        !send_all(fd, request, (size_t)(p - request)))
        return false;
    reply = malloc(MAX_REPLY);
    n = reply ? next_message(fd, reply, MAX_REPLY) : 0;
    if (n && !memmem(reply, n, "error", 5))
        *uj = sum_of(reply, n, "active_uj") + sum_of(reply, n, "idle_uj");
    else
        n = 0;
    free(reply);
    return n > 0;
}

static bool charged_uj(const char *job, uint64_t *uj)
{
    struct sockaddr_un address = {.sun_family = AF_UNIX, .sun_path = SOCKET};
    struct timeval patience = {.tv_sec = 2};
    int fd = socket(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0);
    bool done = false;
    if (fd < 0)
        return false;
    setsockopt(fd, SOL_SOCKET, SO_RCVTIMEO, &patience, sizeof patience);
    setsockopt(fd, SOL_SOCKET, SO_SNDTIMEO, &patience, sizeof patience);
    if (!connect(fd, (struct sockaddr *)&address, sizeof address))
        done = ask(fd, job, uj);
    close(fd);
    return done;
}

/* ----------------------------------------------------------------------------------------- the plugin */

static struct {
    char job[24];
    bool known, begun;
    uint64_t base_uj, last_uj;
    uint32_t watts;
    time_t began, polled;
} step;

/* A long step is read less often: every 1 % of its time, and at least every 30 s. */
static void look(void)
{
    time_t now = time(NULL), wait = (now - step.began) / 100;
    uint64_t uj = 0;
    if (!step.known || (step.begun && now - step.polled < (wait < 1 ? 1 : wait > 30 ? 30 : wait)))
        return;
    if (!charged_uj(step.job, &uj))
        return;
    if (!step.begun)
        step.begun = true, step.base_uj = uj, step.began = now;
    else if (uj > step.last_uj && now > step.polled)
        step.watts = (uint32_t)((uj - step.last_uj) / 1000000 / (uint64_t)(now - step.polled));
    else
        step.watts = 0;
    step.last_uj = uj > step.last_uj ? uj : step.last_uj;
    step.polled = now;
}

extern int init(void)
{
    step.known = own_job(step.job, sizeof step.job);
    return SLURM_SUCCESS;
}

#if SLURM_VERSION_NUMBER >= SLURM_VERSION_NUM(26, 5, 0)
extern void fini(void)
{
}
#else
extern int fini(void)
{
    return SLURM_SUCCESS;
}
#endif

extern int acct_gather_energy_p_update_node_energy(void)
{
    return SLURM_SUCCESS;
}

extern int acct_gather_energy_p_get_data(enum acct_energy_type type, void *data)
{
    acct_gather_energy_t *energy = data;
    if (!step.known)
        step.known = own_job(step.job, sizeof step.job);
    switch (type) {
    case ENERGY_DATA_JOULES_TASK:
    case ENERGY_DATA_STRUCT:
    case ENERGY_DATA_NODE_ENERGY:
    case ENERGY_DATA_NODE_ENERGY_UP:
        look();
        memset(energy, 0, sizeof *energy);
        energy->consumed_energy = (step.last_uj - step.base_uj) / 1000000;
        energy->current_watts = step.watts;
        energy->poll_time = step.polled;
        return SLURM_SUCCESS;
    case ENERGY_DATA_LAST_POLL:
        *(time_t *)data = step.polled;
        return SLURM_SUCCESS;
    case ENERGY_DATA_SENSOR_CNT:
        *(uint16_t *)data = 1;
        return SLURM_SUCCESS;
    default:
        return SLURM_ERROR;
    }
}

extern int acct_gather_energy_p_set_data(enum acct_energy_type type, void *data)
{
    return SLURM_SUCCESS;
}

extern void acct_gather_energy_p_conf_options(void *options, int *count)
{
}

extern void acct_gather_energy_p_conf_set(int context, void *table)
{
}

extern void acct_gather_energy_p_conf_values(void *values)
{
}
