// A launch from a file, for sanitizers: program FILE SEED reads what megakernel.native.run_program wrote and writes
// FILE.out. Every array is an allocation of its own, so that leaving one of them is seen.
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include <string>
#include <vector>

#include "abi.h"

extern "C" int mk_launch(const mk::Params* params, uint64_t seed);

namespace {

// Params begins with its pointers.
constexpr size_t POINTERS = offsetof(mk::Params, spin_budget) / sizeof(uint64_t);

bool read(FILE* file, void* to, size_t bytes) { return fread(to, 1, bytes, file) == bytes; }

}  // namespace

int main(int count, char** words) {
  if (count != 3) return fprintf(stderr, "usage: %s FILE SEED\n", words[0]), 2;
  FILE* file = fopen(words[1], "rb");
  if (!file) return perror(words[1]), 2;
  std::vector<void*> arrays(POINTERS);
  std::vector<size_t> sizes(POINTERS);
  for (size_t i = 0; i < POINTERS; ++i) {
    int64_t bytes = 0;
    if (!read(file, &bytes, sizeof bytes)) return fprintf(stderr, "%s ends early\n", words[1]), 2;
    sizes[i] = (size_t)bytes;
    if (posix_memalign(&arrays[i], 256, sizes[i])) return fprintf(stderr, "no memory\n"), 2;
    if (!read(file, arrays[i], sizes[i])) return fprintf(stderr, "%s ends early\n", words[1]), 2;
  }
  mk::Params params;
  if (!read(file, &params, sizeof params)) return fprintf(stderr, "%s ends early\n", words[1]), 2;
  fclose(file);
  for (size_t i = 0; i < POINTERS; ++i) memcpy((char*)&params + i * sizeof(uint64_t), &arrays[i], sizeof(uint64_t));

  if (int code = mk_launch(&params, strtoull(words[2], nullptr, 10)))
    return fprintf(stderr, "the launch ended with %d\n", code), 3;

  FILE* out = fopen((std::string(words[1]) + ".out").c_str(), "wb");
  if (!out) return perror("output"), 2;
  const size_t results[] = {offsetof(mk::Params, abort), offsetof(mk::Params, tokens), offsetof(mk::Params, times),
                            offsetof(mk::Params, trace), offsetof(mk::Params, dump)};
  for (size_t offset : results) fwrite(arrays[offset / sizeof(uint64_t)], 1, sizes[offset / sizeof(uint64_t)], out);
  fclose(out);
  for (void* array : arrays) free(array);
  return 0;
}
