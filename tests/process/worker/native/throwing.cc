// A backend that throws an exception out of its execution.
#include "backend.h"

#include <stdexcept>

extern "C" CALL(ModelInstanceExecute, Object *, Object **, uint32_t) { throw std::runtime_error("a fault in C++"); }
