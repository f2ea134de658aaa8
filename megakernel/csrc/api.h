// What every build of the device code tells about itself.
#pragma once

#include "runtime.h"

// As megakernel.abi.layout(); returns how many numbers there are.
extern "C" int mk_layout(int32_t* out, int room) {
  int count = (int)(sizeof mk::LAYOUT / sizeof mk::LAYOUT[0]);
  for (int i = 0; i < count && i < room; ++i) out[i] = mk::LAYOUT[i];
  return count;
}

extern "C" int mk_shared_bytes() { return (int)sizeof(mk::Shared); }
