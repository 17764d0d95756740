/* An NVML that says what a file says: libnvidia-ml.so.1 for machines without a driver. Decides nothing.
 *
 * NVML_STUB_STATE names the file. It is read anew at every call, so a test replaces it to change the machine:
 *
 *     driver 570.86.15
 *     device UUID PCI TOTAL RESERVED FREE USED NAME...     in the order of their indices; bytes
 *     error FUNCTION CODE [UUID]                           FUNCTION may be `all`; of one device, or of the library
 *     hang FUNCTION                                        the call never returns
 *     xid SEQUENCE UUID NUMBER                             an Xid event; received by event sets that are older than it
 *     action UUID NUMBER                                   the recovery action; not supported by devices without one
 *     process UUID PID BYTES                               a process on a device; -1 bytes: unknown
 *
 * As with the real library, a process that has seen a lost driver or device (9, 15, 16, 18, 999) gets that error
 * until it ends, whatever is in the file later.
 */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

typedef int nvmlReturn_t;
typedef void *nvmlDevice_t;
typedef struct event_set *nvmlEventSet_t;

enum {
    OK = 0, UNINITIALIZED = 1, INVALID_ARGUMENT = 2, NOT_SUPPORTED = 3, NOT_FOUND = 6, INSUFFICIENT_SIZE = 7, DRIVER_NOT_LOADED = 9,
    TIMED_OUT = 10, GPU_IS_LOST = 15, RESET_REQUIRED = 16, LIB_RM_VERSION_MISMATCH = 18, VERSION_MISMATCH = 25,
    UNKNOWN = 999
};
enum { MOST_DEVICES = 16, MOST_LINES = 64, XID = 8, ACTION_FIELD = 230, POLL_MICROSECONDS = 5000 };

typedef struct { char busIdLegacy[16]; unsigned domain, bus, device, pciDeviceId, pciSubSystemId; char busId[32]; } pci_t;
typedef struct { unsigned long long total, free, used; } memory_t;
typedef struct { unsigned version; unsigned long long total, reserved, free, used; } memory_v2_t;
typedef struct { unsigned gpu, memory; } utilization_t;
typedef struct {
    unsigned id, scope; long long timestamp, latency; int type; nvmlReturn_t code;
    union { unsigned ui; unsigned long long ull; } value;
} field_t;
typedef struct { unsigned pid; unsigned long long used; unsigned gpuInstance, computeInstance; } process_t;
typedef struct {
    nvmlDevice_t device; unsigned long long type, data; unsigned gpuInstance, computeInstance;
} event_t;

struct device { char uuid[96], pci[32], name[96]; unsigned long long total, reserved, free, used; };
struct fault { char function[64], uuid[96]; int code; };
struct xid { unsigned long long sequence, number; char uuid[96]; };
struct action { char uuid[96]; unsigned number; };
struct process { char uuid[96]; unsigned pid; long long used; };
struct state {
    char driver[80];
    struct device devices[MOST_DEVICES];
    struct fault faults[MOST_LINES];
    char hangs[MOST_LINES][64];
    struct xid xids[MOST_LINES];
    struct action actions[MOST_LINES];
    struct process processes[MOST_LINES];
    int device_count, fault_count, hang_count, xid_count, action_count, process_count;
};
struct event_set { unsigned long long received; int registered[MOST_DEVICES]; };

static int initialized;
static int gone; /* what the whole library answers for the rest of this process */
static int device_gone[MOST_DEVICES];

static void read_state(struct state *state) {
    char line[512];
    const char *path = getenv("NVML_STUB_STATE");
    FILE *file = path ? fopen(path, "r") : NULL;
    memset(state, 0, sizeof *state);
    if (!file) return;
    while (fgets(line, sizeof line, file)) {
        struct device *device = &state->devices[state->device_count];
        struct fault *fault = &state->faults[state->fault_count];
        struct xid *xid = &state->xids[state->xid_count];
        struct action *action = &state->actions[state->action_count];
        struct process *process = &state->processes[state->process_count];
        if (sscanf(line, "driver %79s", state->driver) == 1) continue;
        if (state->device_count < MOST_DEVICES
            && sscanf(line, "device %95s %31s %llu %llu %llu %llu %95[^\n]", device->uuid, device->pci, &device->total,
                      &device->reserved, &device->free, &device->used, device->name) == 7)
            state->device_count++;
        else if (state->fault_count < MOST_LINES
                 && sscanf(line, "error %63s %d %95s", fault->function, &fault->code, fault->uuid) >= 2)
            state->fault_count++;
        else if (state->hang_count < MOST_LINES && sscanf(line, "hang %63s", state->hangs[state->hang_count]) == 1)
            state->hang_count++;
        else if (state->xid_count < MOST_LINES
                 && sscanf(line, "xid %llu %95s %llu", &xid->sequence, xid->uuid, &xid->number) == 3)
            state->xid_count++;
        else if (state->action_count < MOST_LINES
                 && sscanf(line, "action %95s %u", action->uuid, &action->number) == 2)
            state->action_count++;
        else if (state->process_count < MOST_LINES
                 && sscanf(line, "process %95s %u %lld", process->uuid, &process->pid, &process->used) == 3)
            state->process_count++;
    }
    fclose(file);
}

static int is_final(int code) {
    return code == DRIVER_NOT_LOADED || code == GPU_IS_LOST || code == RESET_REQUIRED
        || code == LIB_RM_VERSION_MISMATCH || code == UNKNOWN;
}

/* What a call answers before it does anything: `index` is the device it is about, or -1. */
static int enter(const char *function, int index, struct state *state) {
    const char *uuid;
    read_state(state);
    if (gone) return gone;
    for (int i = 0; i < state->hang_count; i++)
        if (!strcmp(state->hangs[i], function)) for (;;) pause();
    if (!initialized && strncmp(function, "nvmlInit", 8)) return UNINITIALIZED;
    if (index >= state->device_count) return INVALID_ARGUMENT;
    uuid = index < 0 ? "" : state->devices[index].uuid;
    if (index >= 0 && device_gone[index]) return device_gone[index];
    for (int i = 0; i < state->fault_count; i++) {
        const struct fault *fault = &state->faults[i];
        if (strcmp(fault->function, "all") && strcmp(fault->function, function)) continue;
        if (fault->uuid[0] && strcmp(fault->uuid, uuid)) continue;
        if (is_final(fault->code)) {
            if (fault->uuid[0]) device_gone[index] = fault->code;
            else gone = fault->code;
        }
        return fault->code;
    }
    return OK;
}

static int index_of(nvmlDevice_t device) { return (int)(size_t)device - 1; }
static nvmlDevice_t handle_of(int index) { return (nvmlDevice_t)(size_t)(index + 1); }

static int copy(const char *text, char *out, unsigned length) {
    if (strlen(text) >= length) return INSUFFICIENT_SIZE;
    strcpy(out, text);
    return OK;
}

#define ENTER(index) \
    struct state state; \
    int code = enter(__func__, index, &state); \
    if (code) return code

/* --- life ------------------------------------------------------------------------------------------------------- */
nvmlReturn_t nvmlInitWithFlags(unsigned flags) { (void)flags; ENTER(-1); initialized++; return OK; }
nvmlReturn_t nvmlInit_v2(void) { ENTER(-1); initialized++; return OK; }
nvmlReturn_t nvmlInit(void) { return nvmlInit_v2(); }
nvmlReturn_t nvmlShutdown(void) { ENTER(-1); initialized--; return OK; }

const char *nvmlErrorString(nvmlReturn_t code) {
    switch (code) {
        case OK: return "Success";
        case UNINITIALIZED: return "Uninitialized";
        case INVALID_ARGUMENT: return "Invalid Argument";
        case NOT_FOUND: return "Not Found";
        case INSUFFICIENT_SIZE: return "Insufficient Size";
        case DRIVER_NOT_LOADED: return "Driver Not Loaded";
        case TIMED_OUT: return "Timeout";
        case GPU_IS_LOST: return "GPU is lost";
        case RESET_REQUIRED: return "GPU requires reset";
        case LIB_RM_VERSION_MISMATCH: return "Driver/library version mismatch";
        case VERSION_MISMATCH: return "Argument version mismatch";
        default: return "Unknown Error";
    }
}

/* --- the system ------------------------------------------------------------------------------------------------- */
nvmlReturn_t nvmlSystemGetDriverVersion(char *version, unsigned length) {
    ENTER(-1);
    return copy(state.driver, version, length);
}

nvmlReturn_t nvmlDeviceGetCount_v2(unsigned *count) { ENTER(-1); *count = (unsigned)state.device_count; return OK; }

nvmlReturn_t nvmlDeviceGetHandleByIndex_v2(unsigned index, nvmlDevice_t *device) {
    ENTER((int)index);
    *device = handle_of((int)index);
    return OK;
}

nvmlReturn_t nvmlDeviceGetHandleByUUID(const char *uuid, nvmlDevice_t *device) {
    ENTER(-1);
    for (int i = 0; i < state.device_count; i++)
        if (!strcmp(state.devices[i].uuid, uuid)) {
            *device = handle_of(i);
            return device_gone[i];
        }
    return NOT_FOUND;
}

/* --- a device --------------------------------------------------------------------------------------------------- */
nvmlReturn_t nvmlDeviceGetName(nvmlDevice_t device, char *name, unsigned length) {
    ENTER(index_of(device));
    return copy(state.devices[index_of(device)].name, name, length);
}

nvmlReturn_t nvmlDeviceGetUUID(nvmlDevice_t device, char *uuid, unsigned length) {
    ENTER(index_of(device));
    return copy(state.devices[index_of(device)].uuid, uuid, length);
}

nvmlReturn_t nvmlDeviceGetPciInfo_v3(nvmlDevice_t device, pci_t *pci) {
    ENTER(index_of(device));
    memset(pci, 0, sizeof *pci);
    sscanf(state.devices[index_of(device)].pci, "%x:%x:%x", &pci->domain, &pci->bus, &pci->device);
    snprintf(pci->busIdLegacy, sizeof pci->busIdLegacy, "%04X:%02X:%02X.0", pci->domain & 0xffffu, pci->bus & 0xffu,
             pci->device & 0xffu);
    return copy(state.devices[index_of(device)].pci, pci->busId, sizeof pci->busId);
}

nvmlReturn_t nvmlDeviceGetMemoryInfo(nvmlDevice_t device, memory_t *memory) {
    ENTER(index_of(device));
    const struct device *found = &state.devices[index_of(device)];
    memory->total = found->total;
    memory->free = found->free;
    memory->used = found->used + found->reserved; /* the first version knows no reserved bytes */
    return OK;
}

nvmlReturn_t nvmlDeviceGetMemoryInfo_v2(nvmlDevice_t device, memory_v2_t *memory) {
    ENTER(index_of(device));
    if (memory->version != (sizeof *memory | 2u << 24)) return VERSION_MISMATCH;
    const struct device *found = &state.devices[index_of(device)];
    memory->total = found->total;
    memory->reserved = found->reserved;
    memory->free = found->free;
    memory->used = found->used;
    return OK;
}

nvmlReturn_t nvmlDeviceGetComputeRunningProcesses_v3(nvmlDevice_t device, unsigned *count, process_t *out) {
    ENTER(index_of(device));
    unsigned found = 0, room = out ? *count : 0;
    for (int i = 0; i < state.process_count; i++) {
        const struct process *process = &state.processes[i];
        if (strcmp(process->uuid, state.devices[index_of(device)].uuid)) continue;
        if (found < room) out[found] = (process_t){ process->pid, (unsigned long long)process->used, -1u, -1u };
        found++; /* -1 bytes is NVML_VALUE_NOT_AVAILABLE */
    }
    *count = found;
    return found > room ? INSUFFICIENT_SIZE : OK;
}

nvmlReturn_t nvmlDeviceGetFieldValues(nvmlDevice_t device, int count, field_t *fields) {
    ENTER(index_of(device));
    for (int i = 0; i < count; i++) {
        fields[i].code = NOT_SUPPORTED;
        for (int k = 0; fields[i].id == ACTION_FIELD && k < state.action_count; k++)
            if (!strcmp(state.actions[k].uuid, state.devices[index_of(device)].uuid)) {
                fields[i].code = OK;
                fields[i].value.ull = state.actions[k].number;
            }
    }
    return OK;
}

/* --- events ----------------------------------------------------------------------------------------------------- */
nvmlReturn_t nvmlDeviceGetSupportedEventTypes(nvmlDevice_t device, unsigned long long *types) {
    ENTER(index_of(device));
    *types = XID;
    return OK;
}

nvmlReturn_t nvmlEventSetCreate(nvmlEventSet_t *set) {
    ENTER(-1);
    *set = calloc(1, sizeof **set);
    for (int i = 0; i < state.xid_count; i++)
        if (state.xids[i].sequence > (*set)->received) (*set)->received = state.xids[i].sequence;
    return OK;
}

nvmlReturn_t nvmlDeviceRegisterEvents(nvmlDevice_t device, unsigned long long types, nvmlEventSet_t set) {
    ENTER(index_of(device));
    if (types & XID) set->registered[index_of(device)] = 1;
    return OK;
}

nvmlReturn_t nvmlEventSetWait_v2(nvmlEventSet_t set, event_t *event, unsigned milliseconds) {
    for (long left = (long)milliseconds * 1000;; left -= POLL_MICROSECONDS) {
        ENTER(-1);
        for (int i = 0; i < state.xid_count; i++) {
            if (state.xids[i].sequence <= set->received) continue;
            set->received = state.xids[i].sequence;
            for (int k = 0; k < state.device_count; k++)
                if (set->registered[k] && !strcmp(state.devices[k].uuid, state.xids[i].uuid)) {
                    *event = (event_t){handle_of(k), XID, state.xids[i].number, 0xffffffffu, 0xffffffffu};
                    return OK;
                }
        }
        if (left <= 0) return TIMED_OUT;
        usleep(POLL_MICROSECONDS);
    }
}

nvmlReturn_t nvmlEventSetFree(nvmlEventSet_t set) { ENTER(-1); free(set); return OK; }
