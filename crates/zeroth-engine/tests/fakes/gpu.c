/* A driver, NVRTC, cuBLASLt and NCCL without a GPU, for tests of transports between ranks: device memory is the process's,
 * streams run at once, and kernels do nothing. What fails is listed in the variable FAKE_GPU:
 *
 *   no_peer        GPUs cannot map each other's memory (error 217)
 *   few_peers      no more than eight of them can (error 711)
 *   no_ipc         memory has no handles (error 801): WSL2, vGPU, MIG
 *   corrupt_all    what a GPU reads of another's memory is wrong
 *   corrupt        the same, but for copies to the host
 *   deaf           other ranks' stores to the counters never arrive
 *   init_blocks    ncclCommInitRankConfig never returns
 *   group_blocks   ncclGroupEnd and single exchanges never return
 *   abort_blocks   ncclCommAbort never returns
 *   init_fails     the communicator cannot be opened
 *   first_fails    the first exchange fails, as without room in /dev/shm
 */
#define _GNU_SOURCE
#include <fcntl.h>
#include <pthread.h>
#include <stdatomic.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>

typedef uint64_t u64;
typedef uintptr_t handle;

static int fails(const char *what) {
    const char *all = getenv("FAKE_GPU");
    size_t length = strlen(what);
    for (const char *at = all; at && (at = strstr(at, what)); at += length)
        if ((at == all || at[-1] == ',') && (at[length] == 0 || at[length] == ',')) return 1;
    return 0;
}

static void block(void) {
    for (;;) pause();
}

/* The driver. */

enum { MOST = 16 };
static _Thread_local handle current;
/* Memory of others that a context has mapped. */
static struct { handle context; u64 at, bytes; } opened[MOST * MOST];
static atomic_int openings;
static struct { u64 at, bytes; } allocated[4 * MOST];
static atomic_int allocations;
/* Waits that are not over, by stream. */
struct stream { volatile uint32_t *counter; uint32_t value; };

int cuInit(unsigned flags) { return (int)flags; }
int cuGetErrorString(int code, const char **text) {
    *text = code == 217 ? "peer access is not supported between these two devices"
          : code == 711 ? "peer mapping resources exhausted"
          : code == 801 ? "operation not supported" : "unknown error";
    return 0;
}
int cuDeviceGetCount(int *count) {
    const char *gpus = getenv("FAKE_GPUS");
    *count = gpus ? atoi(gpus) : 2;
    return 0;
}
int cuDeviceGet(int *device, int ordinal) { *device = ordinal; return 0; }
int cuDeviceGetName(char *name, int length, int device) {
    snprintf(name, (size_t)length, "Fake GPU %d", device);
    return 0;
}
int cuDeviceGetAttribute(int *value, int attribute, int device) {
    (void)device;
    *value = attribute == 16 ? 108 : attribute == 75 ? 8 : 0;
    return 0;
}
int cuDeviceGetUuid_v2(unsigned char *uuid, int device) {
    memset(uuid, device + 1, 16);
    return 0;
}
int cuDevicePrimaryCtxRetain(handle *context, int device) { *context = (handle)device + 1; return 0; }
int cuDevicePrimaryCtxRelease_v2(int device) { (void)device; return 0; }
int cuCtxSetCurrent(handle context) { current = context; return 0; }
int cuMemGetInfo_v2(size_t *free, size_t *total) { *free = *total = (size_t)80 << 30; return 0; }
int cuMemAlloc_v2(u64 *address, size_t bytes) {
    *address = (u64)aligned_alloc(4096, (bytes + 4095) / 4096 * 4096);
    int at = allocations++;
    allocated[at].at = *address, allocated[at].bytes = bytes;
    return 0;
}
int cuMemFree_v2(u64 address) { free((void *)address); return 0; }
int cuMemHostAlloc(void **address, size_t bytes, unsigned flags) {
    (void)flags;
    *address = aligned_alloc(4096, (bytes + 4095) / 4096 * 4096);
    return 0;
}
int cuMemFreeHost(void *address) { free(address); return 0; }
int cuMemHostRegister_v2(void *address, size_t bytes, unsigned flags) {
    (void)address, (void)bytes, (void)flags;
    return 0;
}
int cuMemHostUnregister(void *address) { (void)address; return 0; }
int cuMemHostGetDevicePointer_v2(u64 *device, void *address, unsigned flags) {
    (void)flags;
    *device = (u64)address;
    return 0;
}
static int of_another(u64 from) {
    int count = openings;
    for (int at = 0; at < count; at++)
        if (opened[at].context == current && from - opened[at].at < opened[at].bytes) return 1;
    return 0;
}
static void copy(unsigned char *to, u64 from, size_t bytes, int corrupt) {
    memmove(to, (void *)from, bytes);
    if (bytes && corrupt && of_another(from)) to[bytes / 2] ^= 1;
}
int cuMemcpyAsync(u64 to, u64 from, size_t bytes, handle stream) {
    (void)stream;
    copy((unsigned char *)to, from, bytes, fails("corrupt") || fails("corrupt_all"));
    return 0;
}
int cuMemcpyDtoHAsync_v2(void *to, u64 from, size_t bytes, handle stream) {
    (void)stream;
    copy(to, from, bytes, fails("corrupt_all"));
    return 0;
}
int cuMemsetD8Async(u64 to, unsigned char value, size_t bytes, handle stream) {
    (void)stream;
    memset((void *)to, value, bytes);
    return 0;
}
int cuIpcGetMemHandle(unsigned char *memory, u64 address) {
    if (fails("no_ipc")) return 801;
    memset(memory, 0, 64);
    memcpy(memory, &address, 8);
    return 0;
}
struct memory { unsigned char bytes[64]; };
int cuIpcOpenMemHandle_v2(u64 *address, struct memory memory, unsigned flags) {
    int mapped = 0;
    (void)flags;
    for (int at = 0; at < openings; at++) mapped += opened[at].context == current;
    if (fails("no_peer")) return 217;
    if (fails("few_peers") && mapped >= 8) return 711;
    memcpy(address, memory.bytes, 8);
    int at = openings++;
    opened[at].context = current, opened[at].at = *address;
    for (int of = 0; of < allocations; of++)
        if (allocated[of].at == *address) opened[at].bytes = allocated[of].bytes;
    return 0;
}
int cuIpcCloseMemHandle(u64 address) {
    for (int at = 0; at < openings; at++)
        if (opened[at].context == current && opened[at].at == address) opened[at].context = 0;
    return 0;
}
int cuStreamCreate(handle *stream, unsigned flags) {
    (void)flags;
    *stream = (handle)calloc(1, sizeof(struct stream));
    return 0;
}
int cuStreamDestroy_v2(handle stream) { free((void *)stream); return 0; }
static int is_reached(struct stream *stream) {
    if (stream->counter && (int32_t)(*stream->counter - stream->value) >= 0) stream->counter = NULL;
    return !stream->counter;
}
int cuStreamQuery(handle stream) { return is_reached((struct stream *)stream) ? 0 : 600; }
int cuStreamSynchronize(handle stream) {
    while (cuStreamQuery(stream)) usleep(100);
    return 0;
}
int cuStreamWriteValue32_v2(handle stream, u64 address, uint32_t value, unsigned flags) {
    (void)stream, (void)flags;
    if (!fails("deaf")) atomic_store((_Atomic uint32_t *)address, value);
    return 0;
}
int cuStreamWaitValue32_v2(handle stream, u64 address, uint32_t value, unsigned flags) {
    struct stream wait = {(volatile uint32_t *)address, value};
    (void)flags;
    if (fails("deaf")) *(struct stream *)stream = wait;
    else while (!is_reached(&wait)) usleep(10);
    return 0;
}
int cuStreamWaitEvent(handle stream, handle event, unsigned flags) {
    (void)stream, (void)event, (void)flags;
    return 0;
}
int cuEventCreate(handle *event, unsigned flags) { (void)flags; *event = 1; return 0; }
int cuEventDestroy_v2(handle event) { (void)event; return 0; }
int cuEventRecord(handle event, handle stream) { (void)event, (void)stream; return 0; }
int cuEventSynchronize(handle event) { (void)event; return 0; }
int cuEventElapsedTime(float *time, handle from, handle to) { (void)from, (void)to; *time = 0; return 0; }
int cuModuleLoadData(handle *module, const void *image) { (void)image; *module = 1; return 0; }
int cuModuleUnload(handle module) { (void)module; return 0; }
int cuModuleGetFunction(handle *function, handle module, const char *name) {
    (void)module, (void)name;
    *function = 1;
    return 0;
}
int cuFuncSetAttribute(handle function, int attribute, int value) {
    (void)function, (void)attribute, (void)value;
    return 0;
}
int cuLaunchKernel(void) { return 0; }
int cuLaunchHostFunc(handle stream, void (*function)(void *), void *data) {
    (void)stream;
    function(data);
    return 0;
}

/* NVRTC. */

int nvrtcVersion(int *major, int *minor) { *major = 13, *minor = 0; return 0; }
int nvrtcCreateProgram(handle *program) { *program = 1; return 0; }
int nvrtcDestroyProgram(handle *program) { (void)program; return 0; }
int nvrtcCompileProgram(void) { return 0; }
int nvrtcGetCUBINSize(handle program, size_t *bytes) { (void)program; *bytes = 4; return 0; }
int nvrtcGetCUBIN(handle program, char *image) { (void)program; memcpy(image, "\177ELF", 4); return 0; }
int nvrtcGetPTXSize(handle program, size_t *bytes) { (void)program; *bytes = 3; return 0; }
int nvrtcGetPTX(handle program, char *image) { (void)program; memcpy(image, "//", 3); return 0; }
int nvrtcGetProgramLogSize(handle program, size_t *bytes) { (void)program; *bytes = 0; return 0; }
int nvrtcGetProgramLog(void) { return 0; }
const char *nvrtcGetErrorString(int code) { (void)code; return "unknown error"; }

/* cuBLASLt. */

int cublasLtCreate(handle *object) { *object = 1; return 0; }
int cublasLtDestroy(void) { return 0; }
const char *cublasLtGetStatusString(int code) { (void)code; return "unknown error"; }
int cublasLtMatmulDescCreate(handle *object) { *object = 1; return 0; }
int cublasLtMatmulDescSetAttribute(void) { return 0; }
int cublasLtMatmulDescDestroy(void) { return 0; }
int cublasLtMatrixLayoutCreate(handle *object) { *object = 1; return 0; }
int cublasLtMatrixLayoutDestroy(void) { return 0; }
int cublasLtMatmulPreferenceCreate(handle *object) { *object = 1; return 0; }
int cublasLtMatmulPreferenceSetAttribute(void) { return 0; }
int cublasLtMatmulPreferenceDestroy(void) { return 0; }
int cublasLtMatmulAlgoGetHeuristic(void) { return 15; }
int cublasLtMatmul(void) { return 15; }

/* NCCL, over a memory file that all ranks map. Exchanges run in a thread: calls return ncclInProgress. */

enum { CHUNK = 1 << 16, OPERATIONS = 4 * MOST, IN_PROGRESS = 7 };
struct mailbox { atomic_uint full; size_t bytes; unsigned char data[CHUNK]; };
struct job { atomic_int joined; struct mailbox box[MOST][MOST]; };
struct id { char name[128]; };
struct operation { int sends, peer; unsigned char *at; size_t bytes; };
struct communicator {
    struct job *job;
    int rank, world;
    atomic_int state, aborted;
    int exchanges;
    pthread_t thread;
    int has_thread;
    int count;
    struct operation operations[OPERATIONS];
};
static _Thread_local int depth;
static _Thread_local struct communicator *grouped;

int ncclGetVersion(int *version) { *version = 22703; return 0; }
const char *ncclGetErrorString(int code) {
    return code == 2 ? "unhandled system error" : code == 6 ? "remote process exited or there was a network error" : "unknown result code";
}
const char *ncclGetLastError(handle communicator) { (void)communicator; return "fake"; }
int ncclGetUniqueId(struct id *id) {
    /* The folder of the test; only its name crosses to other ranks. */
    snprintf(id->name, sizeof id->name, "%s/nccl-XXXXXX", getenv("XDG_CACHE_HOME"));
    int file = mkstemp(id->name);
    if (file < 0 || ftruncate(file, sizeof(struct job))) return 2;
    close(file);
    return 0;
}
static void *join(void *argument) {
    struct communicator *own = argument;
    own->job->joined++;
    while (own->job->joined < own->world && !own->aborted) usleep(100);
    own->state = own->aborted ? 6 : 0;
    return NULL;
}
static void *exchange(void *argument) {
    struct communicator *own = argument;
    for (int left = 1; left && !own->aborted;) {
        left = 0;
        for (int at = 0; at < own->count; at++) {
            struct operation *operation = &own->operations[at];
            if (!operation->bytes) continue;
            left = 1;
            struct mailbox *box = operation->sends ? &own->job->box[own->rank][operation->peer]
                                                   : &own->job->box[operation->peer][own->rank];
            if (box->full == (unsigned)operation->sends) continue;
            size_t bytes = operation->sends ? (operation->bytes < CHUNK ? operation->bytes : CHUNK) : box->bytes;
            if (operation->sends) memcpy(box->data, operation->at, box->bytes = bytes);
            else memcpy(operation->at, box->data, bytes);
            operation->at += bytes, operation->bytes -= bytes;
            box->full = (unsigned)operation->sends;
        }
        usleep(10);
    }
    own->count = 0;
    own->state = own->aborted ? 6 : 0;
    return NULL;
}
static int start(struct communicator *own, void *(*run)(void *)) {
    if (own->has_thread) pthread_join(own->thread, NULL);
    own->state = IN_PROGRESS;
    own->has_thread = !pthread_create(&own->thread, NULL, run, own);
    return own->has_thread ? IN_PROGRESS : 2;
}
int ncclCommInitRankConfig(struct communicator **communicator, int world, struct id id, int rank, int *config) {
    if (fails("init_blocks")) block();
    if (fails("init_fails")) return 2;
    if (config[2] != (int)0xcafebeef || config[4] != 0 || world > MOST) return 4;
    int file = open(id.name, O_RDWR);
    if (file < 0) return 2;
    struct communicator *own = calloc(1, sizeof *own);
    own->job = mmap(NULL, sizeof *own->job, PROT_READ | PROT_WRITE, MAP_SHARED, file, 0);
    close(file);
    own->rank = rank, own->world = world;
    *communicator = own;
    return start(own, join);
}
int ncclCommGetAsyncError(struct communicator *own, int *state) { *state = own->state; return 0; }
static int end(struct communicator *own) {
    own->aborted = 1;
    if (own->has_thread) pthread_join(own->thread, NULL);
    munmap(own->job, sizeof *own->job);
    free(own);
    return 0;
}
int ncclCommAbort(struct communicator *own) {
    if (fails("abort_blocks")) block();
    return end(own);
}
int ncclCommFinalize(struct communicator *own) { (void)own; return 0; }
int ncclCommDestroy(struct communicator *own) { return end(own); }
static void add(struct communicator *own, int sends, int peer, const void *at, size_t bytes) {
    own->operations[own->count++] = (struct operation){sends, peer, (unsigned char *)at, bytes};
}
int ncclGroupStart(void) { depth++; return 0; }
int ncclGroupEnd(void) {
    struct communicator *own = grouped;
    if (--depth || !own) return 0;
    grouped = NULL;
    if (fails("group_blocks")) block();
    if (fails("first_fails") && !own->exchanges++) return 2;
    return start(own, exchange);
}
static int single(struct communicator *own) {
    grouped = own;
    return depth ? IN_PROGRESS : (depth++, ncclGroupEnd());
}
int ncclSend(const void *from, size_t bytes, int type, int peer, struct communicator *own, handle stream) {
    (void)type, (void)stream;
    add(own, 1, peer, from, bytes);
    return single(own);
}
int ncclRecv(void *to, size_t bytes, int type, int peer, struct communicator *own, handle stream) {
    (void)type, (void)stream;
    add(own, 0, peer, to, bytes);
    return single(own);
}
int ncclAllGather(const void *from, void *to, size_t bytes, int type, struct communicator *own, handle stream) {
    (void)type, (void)stream;
    for (int peer = 0; peer < own->world; peer++) {
        add(own, 1, peer, from, bytes);
        add(own, 0, peer, (unsigned char *)to + (size_t)peer * bytes, bytes);
    }
    return single(own);
}
int ncclBroadcast(const void *from, void *to, size_t bytes, int type, int root, struct communicator *own, handle stream) {
    (void)type, (void)stream;
    for (int peer = 0; peer < own->world && own->rank == root; peer++) add(own, 1, peer, from, bytes);
    add(own, 0, root, to, bytes);
    return single(own);
}
