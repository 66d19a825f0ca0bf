#include "embedded.h"

#include "library_data.h"
#include "log.h"
#include "trtllm_mla/plugin.h"

namespace trtllm_mla {
namespace {

const tmla_library *open() noexcept {
    tmla_library *library = nullptr;
    tmla_message message{};
    if (tmla_library_open(trtllm_mla_library_data, trtllm_mla_library_data_size, &library, &message) != TMLA_OK) {
        log_error(std::string("library data: ") + message.text);
    }
    return library;
}

} // namespace

const tmla_library *embedded_library() noexcept {
    // Never closed: TensorRT may call creators and plugins until the process ends.
    static const tmla_library *const library = open();
    return library;
}

} // namespace trtllm_mla

const tmla_library *trtllm_mla_plugin_library(void) { return trtllm_mla::embedded_library(); }
