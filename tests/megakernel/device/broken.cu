// A syntax error.
#include "portable.h"

extern "C" __global__ void broken(float* out) { out[0] = 1.0f }
