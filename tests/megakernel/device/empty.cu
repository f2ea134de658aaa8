// Compiles, but to no kernel.
#include "portable.h"

#ifdef NEVER_DEFINED
extern "C" __global__ void absent(float* out) { out[0] = 1.0f; }
#endif
