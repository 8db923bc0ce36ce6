/* The objects that a backend handles, and what the files of the shim share.
 *
 * A worker runs one instance of one model, so backend, model, instance and server are one static object each. Python
 * enters once per batch (`host_execute`). What the backend does with its requests becomes events, which Python takes as
 * an array of words (`host_take`). If nobody is about to take them, `notify` calls Python.
 *
 * Invariants: an object that the backend has given back has the tag DEAD, so that its later use is recognized and named.
 * A request exists as long as one of its responses or factories does. */
#pragma once
#include "interface.h"

#include <pthread.h>

#define EXPORT __attribute__((visibility("default")))

typedef enum {
    DEAD, A_REQUEST = 0x52455155, AN_INPUT, A_RESPONSE, AN_OUTPUT, A_FACTORY, A_STATE, A_MESSAGE, A_PARAMETER, A_FAMILY,
    A_METRIC, AN_ALLOCATOR, A_CALL, A_REPLY
} Tag;

/* The allocator writes to the first 16 bytes of freed memory, so the tag comes after them. */
typedef struct Head {
    struct Head *next;
    void *reserved;
    Tag tag;
} Head;

typedef struct Error {
    ErrorCode code;
    char text[];
} Error;

typedef struct Message {
    Head head;
    size_t size;
    char text[];
} Message;

typedef struct Parameter {
    Head head;
    ParameterType type;
    const char *name;
    union {
        const char *text;
        const void *bytes;
        int64_t number;
        double real;
        bool truth;
    } value;
    uint64_t size;
} Parameter;

typedef struct BufferAttributes {
    size_t size;
    MemoryType memory;
    int64_t memory_id;
    void *ipc;
} BufferAttributes;

/* A name and type from the configuration. */
typedef struct {
    const char *name;
    DataType type;
} Tensor;

/* A state of sequences, from the configuration. */
typedef struct {
    const char *input, *output;
    int index;    /* of the output */
    bool shared; /* the new state begins as the old one, and needs no update: `use_same_buffer_for_input_output` */
} StateSpec;

typedef struct Request Request;
typedef struct State State;

/* A part of an input, as Python writes it in three words. */
typedef struct {
    const void *base;
    uint64_t size, memory;
} Buffer;

typedef struct Input {
    Head head;
    const Tensor *tensor;
    const int64_t *dims;
    uint64_t rank;
    const Buffer *buffers;
    uint64_t buffer_count;
    uint64_t size;
    BufferAttributes attributes;
} Input;

struct Request {
    Head head;
    uint64_t token;
    int references; /* the request itself, its execution, responses and factories */
    int answering;  /* responses and factories */
    bool released, rescheduled, final;
    uint32_t flags;
    uint64_t timeout_us, correlation;
    const char *correlation_text, *id;
    uint64_t output_count, placed_count, input_count, parameter_count;
    const uint64_t *outputs, *placed;
    Input *inputs;
    Parameter *parameters;
    State *states; /* that were not updated; with the lock */
};

typedef struct Response Response;

typedef struct Output {
    Head head;
    Response *response;
    char *name;
    int index; /* in the configuration; -1: not there */
    DataType type;
    uint32_t rank;
    void *buffer;
    uint64_t size;
    MemoryType memory;
    bool placed; /* the memory is Python's */
    BufferAttributes attributes;
    int64_t dims[];
} Output;

struct Response {
    Head head;
    uint64_t number;
    Request *request;
    Output *outputs, *last;
    uint32_t output_count, parameter_count;
    Parameter **parameters;
    bool placed; /* Python was asked for places, and keeps them */
    uint32_t flags;
    Error *error;
};

typedef struct {
    Head head;
    Request *request;
} Factory;

struct State {
    Head head;
    const StateSpec *spec;
    Request *request;
    DataType type;
    uint32_t rank;
    void *buffer;
    uint64_t size;
    BufferAttributes attributes;
    int64_t dims[];
};

typedef struct Backend Backend;
typedef struct Model Model;
typedef struct Instance Instance;
typedef struct Server Server;
typedef struct MemoryManager MemoryManager;

/* What Python provides. */
typedef struct {
    void (*notify)(void);
    /* The address where an output of this response is to be written; 0: anywhere on the host. `memory`: the kind that the
     * backend prefers, then that of the address. */
    uint64_t (*place)(uint64_t response, uint64_t token, uint32_t output, uint64_t rank, const int64_t *dims, uint64_t size,
                      int *memory);
    /* Pinned memory or memory on the GPU. 0, or false: `host_refuse` has set the reason. */
    uint64_t (*allocate)(int memory, uint64_t size);
    bool (*deallocate)(int memory, uint64_t address);
    int (*cancelled)(uint64_t token);
    /* The numbers of a metric, which the server reads: see `metrics.c`. 0: they cannot be shared with it. */
    uint64_t (*metric)(int kind, const char *name, const char *help, uint64_t label_count, const char *const *labels,
                      uint64_t edge_count, const double *edges);
    /* Begins a call, which `host_reply` and `host_end_call` answer. -1: `host_refuse` has set the reason. */
    int64_t (*infer)(uint64_t call, const uint64_t *words, uint64_t count);
    void (*cancel)(uint64_t call);
    /* Asks the server about a model, or for a change of it. Returns the answer, or -1 as `infer`. */
    int64_t (*ask)(int question, const char *model, int64_t version, uint64_t parameters, const uint64_t *words,
                   uint64_t word_count);
} Callbacks;

typedef struct {
    Callbacks python;
    Tensor *inputs, *outputs;
    uint64_t *all_outputs; /* their indexes */
    StateSpec *states;
    const char *model; /* its name */
    uint32_t input_count, output_count, state_count;
    bool decoupled;
    bool on_gpu; /* the instance */
} Host;

extern Host host;
extern pthread_mutex_t host_lock;

void *claim(size_t size);
char *copied(const char *text);
Error *error_of(ErrorCode code, const char *text);
Error *fail(ErrorCode code, const char *format, ...) __attribute__((format(printf, 2, 3)));
Error *refused(void); /* the reason that Python has set in this thread */
_Noreturn void die(const char *format, ...) __attribute__((format(printf, 1, 2)));
void live(const void *object, Tag tag, const char *function);
void bury(void *object);
Error *TRITONSERVER_MessageNewFromSerializedJson(Message **message, const char *base, size_t size);
Error *TRITONSERVER_MessageDelete(Message *message);
uint32_t TRITONSERVER_DataTypeByteSize(DataType type);
Parameter *parameter_of(const char *name, ParameterType type, const void *value, uint64_t size);
const void *value_of(const Parameter *parameter);

/* Words that Python reads. Texts are put as address and size. */
typedef struct {
    uint64_t *words;
    size_t count, room;
} Words;
void put_word(Words *out, uint64_t word);
void put_text(Words *out, const char *text);
void put_parameter(Words *out, const Parameter *parameter);

/* Words from Python. Texts are among them. */
typedef const uint64_t *Cursor;
const char *read_text(Cursor *at);
const uint64_t *read_list(Cursor *at, uint64_t *count);
void read_parameter(Parameter *parameter, Cursor *at);

/* Events. With `host_lock`. */
typedef enum { SENT = 1, FINISHED, RELEASED, LOST, DROPPED, STATE } EventKind;
void add_event(EventKind kind, uint64_t token, uint64_t flags, void *object);
void settle(Request *request);
void unlock_and_notify(void);

void put_response(Words *out, Response *response);
void free_response(Response *response);
bool is_plain(const Response *response, uint64_t rows);
bool responses_match(const Response *one, const Response *other);
uint64_t copy_output(const Response *response, uint32_t output, char *target);
void put_state(Words *out, State *state);
void free_state(State *state);
void end_states(Request *request, bool failed);
int output_index(const char *name);
Input *input_of(Request *request, const char *name);

#define LIVE(object, tag) live(object, tag, __func__)
#define LOCK() pthread_mutex_lock(&host_lock)
#define UNLOCK() pthread_mutex_unlock(&host_lock)
