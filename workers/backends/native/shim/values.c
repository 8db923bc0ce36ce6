/* Plain values: errors, messages, parameters, data types, buffer attributes, logs. */
#define _GNU_SOURCE
#include "host.h"

#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

void *claim(size_t size)
{
    void *memory = calloc(1, size ? size : 1);
    if (memory == NULL)
        die("no memory for %zu bytes", size);
    return memory;
}

char *copied(const char *text)
{
    size_t size = strlen(text) + 1;
    return memcpy(claim(size), text, size);
}

/* Ends the process: an object was used wrongly, and what it would do next is unknown. */
void die(const char *format, ...)
{
    char line[1024] = "error: the backend broke the interface: ";
    size_t start = strlen(line);
    va_list arguments;
    va_start(arguments, format);
    vsnprintf(line + start, sizeof line - start - 1, format, arguments);
    va_end(arguments);
    strcat(line, "\n");
    if (write(STDERR_FILENO, line, strlen(line)) < 0)
        _exit(1);
    abort();
}

void live(const void *object, Tag tag, const char *function)
{
    if (object == NULL)
        die("%s was called with NULL", function);
    if (((const Head *)object)->tag != tag)
        die("%s was called with an object that was released, sent or deleted before, or is of another kind", function);
}

void bury(void *object)
{
    ((Head *)object)->tag = DEAD;
    free(object);
}

/* ---------------------------------------------------------------------------------------------------------- errors */

Error *error_of(ErrorCode code, const char *text)
{
    size_t size = strlen(text) + 1;
    Error *error = claim(sizeof *error + size);
    error->code = code;
    memcpy(error->text, text, size);
    return error;
}

Error *fail(ErrorCode code, const char *format, ...)
{
    char text[1024];
    va_list arguments;
    va_start(arguments, format);
    vsnprintf(text, sizeof text, format, arguments);
    va_end(arguments);
    return error_of(code, text);
}

static _Thread_local Error *refusal;

EXPORT void host_refuse(ErrorCode code, const char *text)
{
    free(refusal);
    refusal = error_of(code, text);
}

Error *refused(void)
{
    Error *error = refusal;
    refusal = NULL; /* the caller deletes it */
    return error ? error : error_of(INTERNAL, "the server has failed; its log has the reason");
}

EXPORT Error *TRITONSERVER_ErrorNew(ErrorCode code, const char *text) { return error_of(code, text ? text : ""); }

EXPORT void TRITONSERVER_ErrorDelete(Error *error) { free(error); }

EXPORT ErrorCode TRITONSERVER_ErrorCode(Error *error) { return error->code; }

EXPORT const char *TRITONSERVER_ErrorMessage(Error *error) { return error->text; }

EXPORT const char *TRITONSERVER_ErrorCodeString(Error *error)
{
    static const char *const names[] = {"Unknown",     "Internal",    "Not found",      "Invalid argument",
                                        "Unavailable", "Unsupported", "Already exists", "Cancelled"};
    return error->code <= CANCELLED ? names[error->code] : "<invalid code>";
}

/* -------------------------------------------------------------------------------------------------------- messages */

EXPORT Error *TRITONSERVER_MessageNewFromSerializedJson(Message **message, const char *base, size_t size)
{
    Message *made = claim(sizeof *made + size + 1);
    made->head.tag = A_MESSAGE;
    made->size = size;
    memcpy(made->text, base, size);
    *message = made;
    return NULL;
}

EXPORT Error *TRITONSERVER_MessageDelete(Message *message)
{
    LIVE(message, A_MESSAGE);
    bury(message);
    return NULL;
}

EXPORT Error *TRITONSERVER_MessageSerializeToJson(Message *message, const char **base, size_t *size)
{
    LIVE(message, A_MESSAGE);
    *base = message->text;
    *size = message->size;
    return NULL;
}

/* ------------------------------------------------------------------------------------------------------ parameters */

/* One block: the parameter, its name, its text or bytes. */
Parameter *parameter_of(const char *name, ParameterType type, const void *value, uint64_t size)
{
    size_t name_size = strlen(name) + 1;
    Parameter *made = claim(sizeof *made + name_size + size + 1);
    char *own = (char *)(made + 1);
    made->head.tag = A_PARAMETER;
    made->type = type;
    made->name = memcpy(own, name, name_size);
    made->size = size;
    switch (type) {
    case PARAMETER_INT: made->value.number = *(const int64_t *)value; break;
    case PARAMETER_BOOL: made->value.truth = *(const bool *)value; break;
    case PARAMETER_DOUBLE: made->value.real = *(const double *)value; break;
    default: made->value.bytes = memcpy(own + name_size, value, size); break;
    }
    return made;
}

const void *value_of(const Parameter *parameter)
{
    bool text = parameter->type == PARAMETER_STRING || parameter->type == PARAMETER_BYTES;
    return text ? parameter->value.bytes : (const void *)&parameter->value;
}

EXPORT Parameter *TRITONSERVER_ParameterNew(const char *name, ParameterType type, const void *value)
{
    return parameter_of(name, type, value, type == PARAMETER_STRING ? strlen(value) : 0);
}

EXPORT Parameter *TRITONSERVER_ParameterBytesNew(const char *name, const void *bytes, uint64_t size)
{
    return parameter_of(name, PARAMETER_BYTES, bytes, size);
}

EXPORT void TRITONSERVER_ParameterDelete(Parameter *parameter)
{
    LIVE(parameter, A_PARAMETER);
    bury(parameter);
}

EXPORT const char *TRITONSERVER_ParameterTypeString(ParameterType type)
{
    static const char *const names[] = {"STRING", "INT", "BOOL", "DOUBLE", "BYTES"};
    return type <= PARAMETER_BYTES ? names[type] : "<invalid>";
}

/* ----------------------------------------------------------------------------------------------------------- types */

static const struct {
    const char *name;
    uint32_t size;
} types[TYPES] = {{"<invalid>", 0}, {"BOOL", 1},  {"UINT8", 1}, {"UINT16", 2}, {"UINT32", 4},
                  {"UINT64", 8},    {"INT8", 1},  {"INT16", 2}, {"INT32", 4},  {"INT64", 8},
                  {"FP16", 2},      {"FP32", 4},  {"FP64", 8},  {"BYTES", 0},  {"BF16", 2}};

EXPORT const char *TRITONSERVER_DataTypeString(DataType type) { return types[type < TYPES ? type : 0].name; }

EXPORT uint32_t TRITONSERVER_DataTypeByteSize(DataType type) { return types[type < TYPES ? type : 0].size; }

EXPORT DataType TRITONSERVER_StringToDataType(const char *name)
{
    for (int type = 1; type < TYPES; type++)
        if (strcmp(name, types[type].name) == 0)
            return type;
    return TYPE_INVALID;
}

EXPORT const char *TRITONSERVER_MemoryTypeString(MemoryType type)
{
    static const char *const names[] = {"CPU", "CPU_PINNED", "GPU"};
    return type <= MEMORY_GPU ? names[type] : "<invalid>";
}

EXPORT const char *TRITONSERVER_InstanceGroupKindString(InstanceKind kind)
{
    static const char *const names[] = {"AUTO", "CPU", "GPU", "MODEL"};
    return kind <= KIND_MODEL ? names[kind] : "<invalid>";
}

/* ----------------------------------------------------------------------------------------------- buffer attributes */

EXPORT Error *TRITONSERVER_BufferAttributesNew(BufferAttributes **attributes)
{
    *attributes = claim(sizeof **attributes);
    return NULL;
}

EXPORT Error *TRITONSERVER_BufferAttributesDelete(BufferAttributes *attributes)
{
    free(attributes);
    return NULL;
}

#define ATTRIBUTE(name, field, type)                                                         \
    EXPORT Error *TRITONSERVER_BufferAttributesSet##name(BufferAttributes *attributes, type value) \
    {                                                                                        \
        attributes->field = value;                                                           \
        return NULL;                                                                         \
    }                                                                                        \
    EXPORT Error *TRITONSERVER_BufferAttributes##name(BufferAttributes *attributes, type *value)   \
    {                                                                                        \
        *value = attributes->field;                                                          \
        return NULL;                                                                         \
    }

ATTRIBUTE(MemoryTypeId, memory_id, int64_t)
ATTRIBUTE(MemoryType, memory, MemoryType)
ATTRIBUTE(CudaIpcHandle, ipc, void *)
ATTRIBUTE(ByteSize, size, size_t)

/* ------------------------------------------------------------------------------------------------------------ logs */

static bool verbose;

EXPORT void host_set_verbose(bool enabled) { verbose = enabled; }

EXPORT bool TRITONSERVER_LogIsEnabled(LogLevel level) { return level != LOG_VERBOSE || verbose; }

/* One line for each message, as all workers write them. */
EXPORT Error *TRITONSERVER_LogMessage(LogLevel level, const char *file, int line, const char *text)
{
    static const char *const words[] = {"info", "warning", "error", "debug"};
    if (!TRITONSERVER_LogIsEnabled(level))
        return NULL;
    const char *name = strrchr(file, '/');
    char *record;
    int size = asprintf(&record, "%s: %s:%d: %s\n", words[level <= LOG_VERBOSE ? level : LOG_ERROR], name ? name + 1 : file,
                        line, text);
    if (size < 0)
        die("no memory for a message");
    for (int at = 0; at < size - 1; at++)
        if (record[at] == '\n')
            record[at] = ' ';
    ssize_t written = write(STDERR_FILENO, record, size);
    free(record);
    return written < 0 ? fail(INTERNAL, "the log cannot be written") : NULL;
}
