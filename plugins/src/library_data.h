// The library data that is part of the plugin library.
#ifndef TRTLLM_MLA_LIBRARY_DATA_H
#define TRTLLM_MLA_LIBRARY_DATA_H

#include <cstdint>

extern "C" {
__attribute__((visibility("hidden"))) extern const unsigned char trtllm_mla_library_data[];
__attribute__((visibility("hidden"))) extern const uint64_t trtllm_mla_library_data_size;
}

#endif
