/* A stand-in for the CUDA driver library, for machines without a GPU.
 *
 * Device memory is host memory; a stream is a queue and a thread that works it off in order; everything the
 * driver's documentation demands of a caller and that can be checked here is checked: a context must be
 * current, copies to memory that is not page-locked wait, memory is registered once. The functions named
 * standin_ are for tests: they hold streams, queue work as a training program would, make calls fail, and
 * count. */

#include <pthread.h>
#include <stddef.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

#define EXPORT __attribute__((visibility("default")))

enum {
  SUCCESS = 0,
  INVALID_VALUE = 1,
  OUT_OF_MEMORY = 2,
  NOT_INITIALIZED = 3,
  INVALID_DEVICE = 101,
  INVALID_CONTEXT = 201,
  INVALID_HANDLE = 400,
  NOT_READY = 600,
  ILLEGAL_ADDRESS = 700,
  ALREADY_REGISTERED = 712,
  NOT_REGISTERED = 713,
};

enum { DEVICES = 2, MAX_DEPTH = 16, MAX_REGIONS = 4096, MAX_NAMES = 64 };

struct context {
  int device;
  int retained;
};

struct event {
  uint64_t recorded; /* number of the last record queued */
  uint64_t reached;  /* and of the last one that was reached */
  int references;    /* by the owner and by queued operations */
};

enum kind { COPY, RECORD, WAIT, FILL };

struct operation {
  struct operation* next;
  enum kind kind;
  const char* from;
  char* to;
  size_t from_pitch, to_pitch, width, height;
  int value;
  struct event* event;
  uint64_t number;
};

struct stream {
  struct operation *first, **last;
  uint64_t queued, done;
  int held;
};

static pthread_mutex_t mutex = PTHREAD_MUTEX_INITIALIZER;
static pthread_cond_t changed = PTHREAD_COND_INITIALIZER;

static int initialized;
static struct context contexts[DEVICES];
static struct stream* default_stream;
static _Thread_local struct context* stack[MAX_DEPTH];
static _Thread_local int depth;

static struct region {
  char* base;
  size_t size;
} regions[MAX_REGIONS];

static struct call {
  const char* name;
  int count;
  int fail_at; /* count at which it fails; 0: never */
  int code;
} calls[MAX_NAMES];

static int live_events;
static int unpinned_copies;
static int copies;
static size_t pinned_allocated;

/* ---- bookkeeping; all with the mutex held ---- */

static struct call* call_named(const char* name) {
  for (int i = 0; i < MAX_NAMES; i++) {
    if (calls[i].name == NULL) calls[i].name = strdup(name);
    if (strcmp(calls[i].name, name) == 0) return &calls[i];
  }
  abort();
}

static int enter(const char* name) {
  struct call* call = call_named(name);
  call->count++;
  return call->fail_at == call->count ? call->code : SUCCESS;
}

/* Every function begins so: counted, perhaps failed, and refused where the driver would. */
#define BEGIN(name)           \
  pthread_mutex_lock(&mutex); \
  int result = enter(name);   \
  if (result == SUCCESS && !initialized) result = NOT_INITIALIZED

#define BEGIN_IN_CONTEXT(name) \
  BEGIN(name);                 \
  if (result == SUCCESS && depth == 0) result = INVALID_CONTEXT

#define END                     \
  pthread_mutex_unlock(&mutex); \
  return result

static int is_pinned(const char* address, size_t size) {
  for (int i = 0; i < MAX_REGIONS; i++) {
    const struct region* region = &regions[i];
    if (region->base != NULL && address >= region->base && address + size <= region->base + region->size)
      return 1;
  }
  return 0;
}

static int add_region(char* base, size_t size) {
  for (int i = 0; i < MAX_REGIONS; i++) {
    const struct region* region = &regions[i];
    if (region->base != NULL && base < region->base + region->size && region->base < base + size)
      return ALREADY_REGISTERED;
  }
  for (int i = 0; i < MAX_REGIONS; i++) {
    if (regions[i].base != NULL) continue;
    regions[i].base = base;
    regions[i].size = size;
    return SUCCESS;
  }
  return OUT_OF_MEMORY;
}

static int drop_region(const char* base) {
  for (int i = 0; i < MAX_REGIONS; i++) {
    if (regions[i].base != base) continue;
    regions[i].base = NULL;
    return SUCCESS;
  }
  return NOT_REGISTERED;
}

static void drop_event(struct event* event) {
  if (--event->references > 0) return;
  live_events--;
  free(event);
}

static void queue(struct stream* stream, struct operation operation) {
  struct operation* queued = malloc(sizeof *queued);
  *queued = operation;
  queued->next = NULL;
  *stream->last = queued;
  stream->last = &queued->next;
  stream->queued++;
  pthread_cond_broadcast(&changed);
}

static void wait_until_done(struct stream* stream) {
  const uint64_t until = stream->queued;
  while (stream->done < until) pthread_cond_wait(&changed, &mutex);
}

static void perform(struct operation* operation) {
  switch (operation->kind) {
    case COPY:
      for (size_t row = 0; row < operation->height; row++)
        memcpy(operation->to + row * operation->to_pitch, operation->from + row * operation->from_pitch,
               operation->width);
      break;
    case FILL:
      memset(operation->to, operation->value, operation->width);
      break;
    case RECORD:
    case WAIT:
      break;
  }
}

static void* work(void* argument) {
  struct stream* stream = argument;
  pthread_mutex_lock(&mutex);
  for (;;) {
    struct operation* operation = stream->first;
    if (operation == NULL || stream->held ||
        (operation->kind == WAIT && operation->event->reached < operation->number)) {
      pthread_cond_wait(&changed, &mutex);
      continue;
    }
    stream->first = operation->next;
    if (stream->first == NULL) stream->last = &stream->first;
    pthread_mutex_unlock(&mutex);
    perform(operation);
    pthread_mutex_lock(&mutex);
    copies += operation->kind == COPY;
    if (operation->kind == RECORD) operation->event->reached = operation->number;
    if (operation->event != NULL) drop_event(operation->event);
    free(operation);
    stream->done++;
    pthread_cond_broadcast(&changed);
  }
  return NULL;
}

static struct stream* new_stream(void) {
  struct stream* stream = calloc(1, sizeof *stream);
  stream->last = &stream->first;
  pthread_t thread;
  if (pthread_create(&thread, NULL, work, stream) != 0) abort();
  pthread_detach(thread);
  return stream;
}

static struct stream* stream_of(void* handle) {
  if (handle != NULL) return handle;
  if (default_stream == NULL) default_stream = new_stream();
  return default_stream;
}

/* ---- the driver's functions ---- */

EXPORT int cuInit(unsigned flags) {
  pthread_mutex_lock(&mutex);
  int result = enter("cuInit");
  if (result == SUCCESS && flags != 0) result = INVALID_VALUE;
  if (result == SUCCESS) initialized = 1;
  END;
}

EXPORT int cuDeviceGet(int* device, int ordinal) {
  BEGIN("cuDeviceGet");
  if (result == SUCCESS && (ordinal < 0 || ordinal >= DEVICES)) result = INVALID_DEVICE;
  if (result == SUCCESS) *device = ordinal;
  END;
}

EXPORT int cuDevicePrimaryCtxRetain(void** context, int device) {
  BEGIN("cuDevicePrimaryCtxRetain");
  if (result == SUCCESS) {
    contexts[device].device = device;
    contexts[device].retained++;
    *context = &contexts[device];
  }
  END;
}

EXPORT int cuCtxPushCurrent_v2(void* context) {
  BEGIN("cuCtxPushCurrent_v2");
  if (result == SUCCESS && depth == MAX_DEPTH) result = OUT_OF_MEMORY;
  if (result == SUCCESS) stack[depth++] = context;
  END;
}

EXPORT int cuCtxPopCurrent_v2(void** context) {
  BEGIN_IN_CONTEXT("cuCtxPopCurrent_v2");
  if (result == SUCCESS) *context = stack[--depth];
  END;
}

EXPORT int cuStreamCreate(void** stream, unsigned flags) {
  (void)flags;
  BEGIN_IN_CONTEXT("cuStreamCreate");
  if (result == SUCCESS) *stream = new_stream();
  END;
}

EXPORT int cuStreamWaitEvent(void* stream, void* handle, unsigned flags) {
  (void)flags;
  BEGIN_IN_CONTEXT("cuStreamWaitEvent");
  struct event* event = handle;
  if (result == SUCCESS) {
    event->references++;
    queue(stream_of(stream), (struct operation){.kind = WAIT, .event = event, .number = event->recorded});
  }
  END;
}

EXPORT int cuEventCreate(void** event, unsigned flags) {
  (void)flags;
  BEGIN_IN_CONTEXT("cuEventCreate");
  if (result == SUCCESS) {
    struct event* created = calloc(1, sizeof *created);
    created->references = 1;
    live_events++;
    *event = created;
  }
  END;
}

EXPORT int cuEventRecord(void* handle, void* stream) {
  BEGIN_IN_CONTEXT("cuEventRecord");
  struct event* event = handle;
  if (result == SUCCESS) {
    event->references++;
    event->recorded++;
    queue(stream_of(stream), (struct operation){.kind = RECORD, .event = event, .number = event->recorded});
  }
  END;
}

EXPORT int cuEventQuery(void* handle) {
  BEGIN_IN_CONTEXT("cuEventQuery");
  const struct event* event = handle;
  if (result == SUCCESS && event->reached < event->recorded) result = NOT_READY;
  END;
}

EXPORT int cuEventSynchronize(void* handle) {
  BEGIN_IN_CONTEXT("cuEventSynchronize");
  const struct event* event = handle;
  const uint64_t until = event->recorded;
  while (result == SUCCESS && event->reached < until) pthread_cond_wait(&changed, &mutex);
  END;
}

EXPORT int cuEventDestroy_v2(void* event) {
  BEGIN_IN_CONTEXT("cuEventDestroy_v2");
  if (result == SUCCESS) drop_event(event);
  END;
}

static int copy(struct operation operation, void* handle) {
  struct stream* stream = stream_of(handle);
  const size_t span = operation.to_pitch * (operation.height - 1) + operation.width;
  const int pinned = is_pinned(operation.to, span);
  queue(stream, operation);
  if (pinned) return SUCCESS;
  unpinned_copies++;
  wait_until_done(stream);
  return SUCCESS;
}

EXPORT int cuMemcpyDtoHAsync_v2(void* to, unsigned long long from, size_t size, void* stream) {
  BEGIN_IN_CONTEXT("cuMemcpyDtoHAsync_v2");
  if (result == SUCCESS)
    result = copy((struct operation){.kind = COPY,
                                     .from = (const char*)(uintptr_t)from,
                                     .to = to,
                                     .from_pitch = size,
                                     .to_pitch = size,
                                     .width = size,
                                     .height = 1},
                  stream);
  END;
}

struct copy_2d {
  size_t source_x, source_y;
  unsigned source_type;
  const void* source_host;
  unsigned long long source_device;
  void* source_array;
  size_t source_pitch, to_x, to_y;
  unsigned to_type;
  void* to_host;
  unsigned long long to_device;
  void* to_array;
  size_t to_pitch, width, height;
};

EXPORT int cuMemcpy2DAsync_v2(const struct copy_2d* arguments, void* stream) {
  BEGIN_IN_CONTEXT("cuMemcpy2DAsync_v2");
  const int to_host = arguments->source_type == 2 && arguments->to_type == 1;
  const int wide = arguments->source_pitch >= arguments->width && arguments->to_pitch >= arguments->width;
  if (result == SUCCESS && (!to_host || !wide || arguments->height == 0)) result = INVALID_VALUE;
  if (result == SUCCESS)
    result = copy((struct operation){.kind = COPY,
                                     .from = (const char*)(uintptr_t)arguments->source_device,
                                     .to = arguments->to_host,
                                     .from_pitch = arguments->source_pitch,
                                     .to_pitch = arguments->to_pitch,
                                     .width = arguments->width,
                                     .height = arguments->height},
                  stream);
  END;
}

EXPORT int cuMemHostRegister_v2(void* memory, size_t size, unsigned flags) {
  (void)flags;
  BEGIN_IN_CONTEXT("cuMemHostRegister_v2");
  if (result == SUCCESS) result = add_region(memory, size);
  END;
}

EXPORT int cuMemHostUnregister(void* memory) {
  BEGIN_IN_CONTEXT("cuMemHostUnregister");
  if (result == SUCCESS) result = drop_region(memory);
  END;
}

EXPORT int cuMemHostAlloc(void** memory, size_t size, unsigned flags) {
  (void)flags;
  BEGIN_IN_CONTEXT("cuMemHostAlloc");
  if (result == SUCCESS) {
    *memory = malloc(size);
    result = add_region(*memory, size);
    pinned_allocated += size;
  }
  END;
}

EXPORT int cuMemFreeHost(void* memory) {
  BEGIN_IN_CONTEXT("cuMemFreeHost");
  if (result == SUCCESS) result = drop_region(memory);
  if (result == SUCCESS) free(memory);
  END;
}

EXPORT int cuGetErrorName(int error, const char** name) {
  *name = error == ILLEGAL_ADDRESS ? "CUDA_ERROR_ILLEGAL_ADDRESS" : "CUDA_ERROR_UNKNOWN";
  return SUCCESS;
}

EXPORT int cuGetErrorString(int error, const char** text) {
  *text = error == ILLEGAL_ADDRESS ? "an illegal memory access was encountered" : "unknown error";
  return SUCCESS;
}

/* ---- for tests ---- */

/* A stream as a training program has one. */
EXPORT void* standin_stream(void) {
  pthread_mutex_lock(&mutex);
  struct stream* stream = new_stream();
  pthread_mutex_unlock(&mutex);
  return stream;
}

/* Queues a kernel that sets `size` bytes at `memory` to `value`. */
EXPORT void standin_fill(void* stream, void* memory, int value, size_t size) {
  pthread_mutex_lock(&mutex);
  queue(stream_of(stream), (struct operation){.kind = FILL, .to = memory, .value = value, .width = size});
  pthread_mutex_unlock(&mutex);
}

/* Stops a stream before its next operation, or lets it go on. */
EXPORT void standin_hold(void* stream, int held) {
  pthread_mutex_lock(&mutex);
  stream_of(stream)->held = held;
  pthread_cond_broadcast(&changed);
  pthread_mutex_unlock(&mutex);
}

EXPORT void standin_synchronize(void* stream) {
  pthread_mutex_lock(&mutex);
  wait_until_done(stream_of(stream));
  pthread_mutex_unlock(&mutex);
}

/* Makes the `nth` call from now of a function return `code`, once. */
EXPORT void standin_fail(const char* function, int nth, int code) {
  pthread_mutex_lock(&mutex);
  struct call* call = call_named(function);
  call->fail_at = call->count + nth;
  call->code = code;
  pthread_mutex_unlock(&mutex);
}

EXPORT int standin_count(const char* function) {
  pthread_mutex_lock(&mutex);
  const int count = call_named(function)->count;
  pthread_mutex_unlock(&mutex);
  return count;
}

EXPORT int standin_live_events(void) {
  pthread_mutex_lock(&mutex);
  const int live = live_events;
  pthread_mutex_unlock(&mutex);
  return live;
}

EXPORT int standin_unpinned_copies(void) {
  pthread_mutex_lock(&mutex);
  const int copies = unpinned_copies;
  pthread_mutex_unlock(&mutex);
  return copies;
}

/* Copies that have arrived. */
EXPORT int standin_copies(void) {
  pthread_mutex_lock(&mutex);
  const int arrived = copies;
  pthread_mutex_unlock(&mutex);
  return arrived;
}

EXPORT size_t standin_pinned_allocated(void) {
  pthread_mutex_lock(&mutex);
  const size_t allocated = pinned_allocated;
  pthread_mutex_unlock(&mutex);
  return allocated;
}

EXPORT int standin_registered(void) {
  int count = 0;
  pthread_mutex_lock(&mutex);
  for (int i = 0; i < MAX_REGIONS; i++) count += regions[i].base != NULL;
  pthread_mutex_unlock(&mutex);
  return count;
}

/* Contexts left on the calling thread's stack. */
EXPORT int standin_depth(void) { return depth; }
