// Opens the library data that is part of the program, and prints what it holds.
#include <cstdio>

#include "library_data.h"
#include "trtllm_mla/plan.h"

int main() {
    tmla_library *library = nullptr;
    tmla_message message{};
    if (tmla_library_open(trtllm_mla_library_data, trtllm_mla_library_data_size, &library, &message) != TMLA_OK) {
        std::fprintf(stderr, "%s\n", message.text);
        return 1;
    }
    std::printf("%d operations, %d kernels\n", tmla_library_num_operations(library), tmla_library_num_kernels(library));
    tmla_library_close(library);
    return 0;
}
