/* Arrays of words, by which the shim and Python exchange requests, events and calls (`records.py`). */
#include "host.h"

#include <stdlib.h>
#include <string.h>

void put_word(Words *out, uint64_t word)
{
    if (out->count == out->room) {
        out->room = out->room ? 2 * out->room : 256;
        out->words = realloc(out->words, out->room * sizeof *out->words);
        if (out->words == NULL)
            die("no memory for %zu words", out->room);
    }
    out->words[out->count++] = word;
}

void put_text(Words *out, const char *text)
{
    put_word(out, (uint64_t)text);
    put_word(out, strlen(text));
}

void put_parameter(Words *out, const Parameter *parameter)
{
    uint64_t word = 0;
    put_text(out, parameter->name);
    put_word(out, parameter->type);
    if (parameter->type == PARAMETER_STRING || parameter->type == PARAMETER_BYTES) {
        put_word(out, (uint64_t)parameter->value.bytes);
        put_word(out, parameter->size);
        return;
    }
    if (parameter->type == PARAMETER_BOOL)
        word = parameter->value.truth;
    else
        memcpy(&word, &parameter->value, sizeof word);
    put_word(out, word);
}

const char *read_text(Cursor *at)
{
    const char *text = (const char *)(*at + 1);
    *at += 1 + **at / 8 + 1;
    return text;
}

const uint64_t *read_list(Cursor *at, uint64_t *count)
{
    *count = **at;
    const uint64_t *list = *at + 1;
    *at = list + *count;
    return list;
}

void read_parameter(Parameter *parameter, Cursor *at)
{
    parameter->head.tag = A_PARAMETER;
    parameter->type = *(*at)++;
    parameter->name = read_text(at);
    if (parameter->type == PARAMETER_STRING) {
        parameter->size = **at;
        parameter->value.text = read_text(at);
    } else {
        memcpy(&parameter->value, (*at)++, sizeof(uint64_t));
    }
}
