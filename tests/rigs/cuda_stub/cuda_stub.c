/* A CUDA driver library for machines without one: libcuda.so.1 as far as checkpoints and copies need it. Decides nothing.
 *
 * CUDA_STUB names a directory. PID.state in it is the state of a process (0 to 3; none: running). `faults` is read anew
 * at every call, a line each:
 *
 *     error FUNCTION CODE     the call fails, and changes nothing
 *     hang FUNCTION           it never returns
 *     corrupt                 a byte of what is copied from the device is wrong
 *     version NUMBER          what cuDriverGetVersion says
 *
 * Device memory is the process's own. A process that is checkpointed is stopped, so it does not answer until
 * it is restored; the real driver stops only those threads that call it.
 */
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

typedef int CUresult;
enum { OK = 0, INVALID_VALUE = 1, NO_CONTEXT = 201, ILLEGAL_STATE = 401, NOT_PERMITTED = 800, UNKNOWN = 999 };
enum { RUNNING, LOCKED, CHECKPOINTED };
typedef struct { unsigned timeout_ms, reserved0; unsigned long long reserved1[7]; } lock_args;

static __thread void *current;

static int fault(const char *word, const char *function, int *number) {
    char path[4096], line[256], kind[32], name[64];
    int found = 0, value;
    snprintf(path, sizeof path, "%s/faults", getenv("CUDA_STUB"));
    FILE *file = fopen(path, "r");
    if (!file) return 0;
    while (!found && fgets(line, sizeof line, file)) {
        name[0] = 0;
        value = 0;
        if (sscanf(line, "%31s %63s %d", kind, name, &value) < 1 || strcmp(kind, word)) continue;
        found = !function || !strcmp(function, name);
        if (number) *number = function ? value : atoi(name);
    }
    fclose(file);
    return found;
}

static int enter(const char *function) {
    int code;
    if (fault("hang", function, NULL)) for (;;) pause();
    return fault("error", function, &code) ? code : OK;
}

#define ENTER() do { int code = enter(__func__); if (code) return code; } while (0)

static void path_of(int pid, char *path, size_t size) {
    snprintf(path, size, "%s/%d.state", getenv("CUDA_STUB"), pid);
}

static int state_of(int pid) {
    char path[4096];
    int state = RUNNING;
    path_of(pid, path, sizeof path);
    FILE *file = fopen(path, "r");
    if (!file) return state;
    if (fscanf(file, "%d", &state) != 1) state = RUNNING;
    fclose(file);
    return state;
}

static CUresult move(int pid, int from, int to) {
    char path[4096], fresh[4100];
    if (kill(pid, 0)) return INVALID_VALUE;
    if (state_of(pid) != from) return ILLEGAL_STATE;
    path_of(pid, path, sizeof path);
    snprintf(fresh, sizeof fresh, "%s.new", path);
    FILE *file = fopen(fresh, "w");
    if (!file) return UNKNOWN;
    fprintf(file, "%d\n", to);
    fclose(file);
    return rename(fresh, path) ? UNKNOWN : OK;  // a concurrent reader never finds an empty file
}

/* --- the library ------------------------------------------------------------------------------------------------ */
CUresult cuInit(unsigned flags) { ENTER(); return flags ? INVALID_VALUE : OK; }

CUresult cuDriverGetVersion(int *version) {
    ENTER();
    *version = 12080;
    fault("version", NULL, version);
    return OK;
}

CUresult cuGetErrorName(CUresult error, const char **name) {
    *name = NULL;
    switch (error) {
        case OK: *name = "CUDA_SUCCESS"; break;
        case INVALID_VALUE: *name = "CUDA_ERROR_INVALID_VALUE"; break;
        case NO_CONTEXT: *name = "CUDA_ERROR_INVALID_CONTEXT"; break;
        case ILLEGAL_STATE: *name = "CUDA_ERROR_ILLEGAL_STATE"; break;
        case NOT_PERMITTED: *name = "CUDA_ERROR_NOT_PERMITTED"; break;
        case UNKNOWN: *name = "CUDA_ERROR_UNKNOWN"; break;
        default: return INVALID_VALUE;
    }
    return OK;
}

/* --- a device and its memory ------------------------------------------------------------------------------------ */
CUresult cuDeviceGet(int *device, int ordinal) { ENTER(); *device = ordinal; return OK; }
CUresult cuDevicePrimaryCtxRetain(void **context, int device) { ENTER(); *context = &current + device; return OK; }
CUresult cuCtxSetCurrent(void *context) { ENTER(); current = context; return OK; }

CUresult cuMemAlloc_v2(unsigned long long *address, size_t count) {
    ENTER();
    if (!current) return NO_CONTEXT;
    *address = (unsigned long long)(size_t)malloc(count);
    return OK;
}

CUresult cuMemcpyHtoD_v2(unsigned long long to, const void *from, size_t count) {
    ENTER();
    if (!current) return NO_CONTEXT;
    memcpy((void *)(size_t)to, from, count);
    return OK;
}

CUresult cuMemcpyDtoH_v2(void *to, unsigned long long from, size_t count) {
    ENTER();
    if (!current) return NO_CONTEXT;
    memcpy(to, (void *)(size_t)from, count);
    if (fault("corrupt", NULL, NULL)) *(char *)to ^= 1;
    return OK;
}

CUresult cuMemHostAlloc(void **memory, size_t count, unsigned flags) {
    ENTER();
    if (!current) return NO_CONTEXT;
    if (flags) return INVALID_VALUE;
    *memory = malloc(count);
    return OK;
}

CUresult cuCtxSynchronize(void) { ENTER(); return current ? OK : NO_CONTEXT; }

/* --- checkpoints ------------------------------------------------------------------------------------------------ */
CUresult cuCheckpointProcessLock(int pid, lock_args *args) {
    ENTER();
    if (!args || !args->timeout_ms || args->reserved0) return INVALID_VALUE;
    for (int i = 0; i < 7; i++) if (args->reserved1[i]) return INVALID_VALUE;
    return move(pid, RUNNING, LOCKED);
}

CUresult cuCheckpointProcessCheckpoint(int pid, void *args) {
    ENTER();
    if (args) return INVALID_VALUE;
    int code = move(pid, LOCKED, CHECKPOINTED);
    if (!code) kill(pid, SIGSTOP);
    return code;
}

CUresult cuCheckpointProcessRestore(int pid, void *args) {
    ENTER();
    if (args) return INVALID_VALUE;
    int code = move(pid, CHECKPOINTED, LOCKED);
    if (!code) kill(pid, SIGCONT);
    return code;
}

CUresult cuCheckpointProcessUnlock(int pid, void *args) {
    ENTER();
    return args ? INVALID_VALUE : move(pid, LOCKED, RUNNING);
}

CUresult cuCheckpointProcessGetState(int pid, int *state) {
    ENTER();
    *state = state_of(pid);
    return OK;
}
