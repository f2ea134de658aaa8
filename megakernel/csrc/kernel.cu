// The launch on a GPU. The same file is compiled as CUDA, as HIP, and as HIP after hipify.
#include "api.h"

#if defined(__HIP_PLATFORM_AMD__)
#define MK_API(name) hip##name
#else
#define MK_API(name) cuda##name
#endif

MK_KERNEL megakernel(MK_PARAMS params) { mk::work(params); }

namespace {

#if defined(__HIP_PLATFORM_AMD__)
typedef hipDeviceProp_t Properties;
#else
typedef cudaDeviceProp Properties;
#endif

MK_API(Error_t) prepare(int device) {
  MK_API(Error_t) error = MK_API(SetDevice)(device);
  if (error != MK_API(Success)) return error;
  return MK_API(FuncSetAttribute)((const void*)megakernel, MK_API(FuncAttributeMaxDynamicSharedMemorySize),
                                  (int)MK_SHARED_AT_LAUNCH);
}

}  // namespace

extern "C" const char* mk_error(int code) { return MK_API(GetErrorString)((MK_API(Error_t))code); }

// How many blocks can be on the device at the same time; a launch of more would wait for itself.
extern "C" int mk_most_workers(int device, int* workers) {
  MK_API(Error_t) error = prepare(device);
  if (error != MK_API(Success)) return (int)error;
  int each = 0;
  error = MK_API(OccupancyMaxActiveBlocksPerMultiprocessor)(&each, (const void*)megakernel, mk::THREADS, MK_SHARED_AT_LAUNCH);
  if (error != MK_API(Success)) return (int)error;
  Properties properties;
  error = MK_API(GetDeviceProperties)(&properties, device);
  *workers = each * properties.multiProcessorCount;
  return (int)error;
}

extern "C" int mk_launch(const mk::Params* params, int device, void* stream) {
  MK_API(Error_t) error = prepare(device);
  if (error != MK_API(Success)) return (int)error;
  void* arguments[] = {(void*)params};
  return (int)MK_API(LaunchCooperativeKernel)((const void*)megakernel, dim3(params->workers), dim3(mk::THREADS), arguments,
                                              MK_SHARED_AT_LAUNCH, (MK_API(Stream_t))stream);
}
