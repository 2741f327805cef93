/* A SPANK plugin: #SBATCH --gpu-power=200 and --gpu-clocks=900[,1200].
 *
 * It only parses the options and passes them to the node's prolog, as SPANK_GPU_POWER and
 * SPANK_GPU_CLOCKS; there, root sends the request to zeusd. Code that runs in sbatch is the user's, so
 * the prolog checks everything again. What zeusd refused is in REFUSED/JOBID when the job begins, a line
 * for each option; the job then fails with these or, with on_refusal=warn, only prints them. Slurm's
 * own --gpu-freq, which no plugin sees, is the prolog's alone; as in Slurm, its refusal is never more
 * than a warning.
 *
 * plugstack.conf: optional zeusd_spank.so [min=100] [max=500] [on_refusal=fail|warn]
 *
 * spank_job_control_* must not be called in the context of a prolog or epilog (slurmd crashes), so
 * every function checks its context first.
 */
#include <errno.h>
#include <limits.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include <slurm/spank.h>

#define REFUSED "/run/zeusd-slurm"

SPANK_PLUGIN(zeusd, 1)

static long min_w = 1, max_w = 5000;
static int warn_only;
static char power[24], clocks[48];

/* Parses a whole number within bounds, up to `end`; -1 if it is invalid. */
static long number(const char *text, long lowest, long highest, const char **end) {
    char *after;
    long value;
    if (*text < '0' || *text > '9') return -1;
    errno = 0;
    value = strtol(text, &after, 10);
    *end = after;
    return errno || value < lowest || value > highest ? -1 : value;
}

/* Inside an allocation the prolog does not run again, so another value would have no effect. */
static int asked_too_late(const char *option, const char *variable, const char *value) {
    const char *before = getenv(variable);
    if (!getenv("SLURM_JOB_ID") || (before && !strcmp(before, value))) return 0;
    slurm_error("%s=%s: a job's GPUs are set when it begins; give the option to sbatch or salloc",
                option, value);
    return 1;
}

static int take_power(int value, const char *text, int remote) {
    const char *end = "";
    long watts = text ? number(text, min_w, max_w, &end) : -1;
    (void)value;
    if (watts < 0 || (strcmp(end, "") && strcmp(end, "W"))) {
        slurm_error("--gpu-power=%s: write watts from %ld to %ld, such as 200", text ? text : "",
                    min_w, max_w);
        return -1;
    }
    if (!remote && asked_too_late("--gpu-power", "SLURM_SPANK__SLURM_SPANK_OPTION_zeusd_gpu_power",
                                  text)) return -1;
    snprintf(power, sizeof power, "%ld", watts);
    return 0;
}

static int take_clocks(int value, const char *text, int remote) {
    const char *end = "";
    long low = text ? number(text, 1, 10000, &end) : -1, high = low;
    (void)value;
    if (low > 0 && *end == ',') high = number(end + 1, low, 10000, &end);
    if (low < 0 || high < 0 || *end) {
        slurm_error("--gpu-clocks=%s: write MHz, such as 1200, or a range such as 900,1200",
                    text ? text : "");
        return -1;
    }
    if (!remote && asked_too_late("--gpu-clocks",
                                  "SLURM_SPANK__SLURM_SPANK_OPTION_zeusd_gpu_clocks", text))
        return -1;
    snprintf(clocks, sizeof clocks, "%ld,%ld", low, high);
    return 0;
}

static struct spank_option options[] = {
    {"gpu-power", "WATTS", "Power limit of the job's GPUs, in watts.", 1, 0, take_power},
    {"gpu-clocks", "MHZ[,MHZ]", "Lock the graphics clock of the job's GPUs.", 1, 0, take_clocks},
};

int slurm_spank_init(spank_t spank, int count, char **arguments) {
    const char *end;
    for (int n = 0; n < count; n++) {
        if (!strncmp(arguments[n], "min=", 4)) min_w = number(arguments[n] + 4, 1, 5000, &end);
        else if (!strncmp(arguments[n], "max=", 4)) max_w = number(arguments[n] + 4, 1, 5000, &end);
        else if (!strcmp(arguments[n], "on_refusal=warn")) warn_only = 1;
        else if (strcmp(arguments[n], "on_refusal=fail"))
            slurm_error("zeusd_spank: plugstack.conf: unknown argument %s", arguments[n]);
    }
    if (min_w < 1) min_w = 1;
    if (max_w < min_w) max_w = 5000;
    for (size_t n = 0; n < sizeof options / sizeof *options; n++)
        if (spank_option_register(spank, &options[n]) != ESPANK_SUCCESS)
            slurm_error("zeusd_spank: --%s cannot be registered", options[n].name);
    return 0;
}

int slurm_spank_init_post_opt(spank_t spank, int count, char **arguments) {
    spank_context_t context = spank_context();
    (void)count, (void)arguments;
    if (context != S_CTX_ALLOCATOR && context != S_CTX_LOCAL) return 0;
    if (*power && spank_job_control_setenv(spank, "GPU_POWER", power, 1) != ESPANK_SUCCESS)
        slurm_error("--gpu-power could not be passed on to the job");
    if (*clocks && spank_job_control_setenv(spank, "GPU_CLOCKS", clocks, 1) != ESPANK_SUCCESS)
        slurm_error("--gpu-clocks could not be passed on to the job");
    return 0;
}

/* On the node, in each task before it runs: turns a refusal by zeusd into the job's own error. Slurm
 * ignores the result of an optional plugin, and a missing required one drains nodes; so the task itself
 * ends here. */
int slurm_spank_task_init(spank_t spank, int count, char **arguments) {
    char path[PATH_MAX], *line = NULL;
    size_t size = 0;
    int refused = 0, lines = 0;
    uint32_t job = 0;
    FILE *file;
    (void)count, (void)arguments;
    if (spank_context() != S_CTX_REMOTE) return 0;
    if (spank_get_item(spank, S_JOB_ID, &job) != ESPANK_SUCCESS) return 0;
    snprintf(path, sizeof path, REFUSED "/%u", job);
    file = fopen(path, "r");
    if (!file) return 0;
    for (; getline(&line, &size, file) > 0; lines++) {
        line[strcspn(line, "\n")] = 0;
        fprintf(stderr, "zeusd: GPU limits not applied: %s\n", line);
        refused |= !!strncmp(line, "--gpu-freq", 10);
    }
    free(line);
    fclose(file);
    if (!lines) fprintf(stderr, "zeusd: GPU limits not applied\n");
    if (!warn_only && (refused || !lines)) _exit(1);
    return 0;
}
