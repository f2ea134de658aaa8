// A header beside the source: the translated copy must find its own.
#pragma once
#ifdef __HIP__
#include <hip/hip_runtime.h>
#else
#include <cuda_runtime.h>
#endif
