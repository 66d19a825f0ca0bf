#include "loaded_tensorrt.h"

#include <type_traits>

#include <dlfcn.h>

namespace trtllm_mla {
namespace {

// Whether loggers are versioned interfaces, of which there is one in every layout.
constexpr bool kHEADERS_VERSION_LOGGERS = std::is_base_of<nvinfer1::IVersionedInterface, nvinfer1::ILogger>::value;

struct Library {
    const char *name;
    bool builds_for_other_gpus;
    int32_t first_with_versioned_loggers; // as getInferLibVersion has it
    int32_t last_without;
};

constexpr Library kLIBRARIES[] = {
    {"libtensorrt_rtx.so.1", true, 1'07'00, 0}, // what earlier ones have is not known
    {"libnvinfer.so.11", false, 11'00'00, 0},
    {"libnvinfer.so.10", false, 11'00'00, 10'99'99},
};

template <typename Function> Function *find(void *library, const char *name) {
    return reinterpret_cast<Function *>(dlsym(library, name));
}

bool has_layout_of_headers(const Library &library, int32_t version) {
    return kHEADERS_VERSION_LOGGERS ? version >= library.first_with_versioned_loggers : version <= library.last_without;
}

} // namespace

LoadedTensorRT loaded_tensorrt() {
    LoadedTensorRT loaded;
    for (const Library &library : kLIBRARIES) {
        void *const handle = dlopen(library.name, RTLD_LAZY | RTLD_NOLOAD);
        if (handle == nullptr) {
            continue;
        }
        loaded.builds_for_other_gpus = loaded.builds_for_other_gpus || library.builds_for_other_gpus;
        const auto get_version = find<int32_t()>(handle, "getInferLibVersion");
        const auto get_registry = find<nvinfer1::IPluginRegistry *()>(handle, "getPluginRegistry");
        const auto get_logger = find<nvinfer1::ILogger *()>(handle, "getLogger");
        if (get_version != nullptr && get_registry != nullptr && get_logger != nullptr && get_registry() != nullptr) {
            if (has_layout_of_headers(library, get_version())) {
                loaded.callable.push_back({get_registry(), get_logger()});
            } else {
                loaded.other_layout.emplace_back(library.name);
            }
        }
        dlclose(handle); // The process has it open without this.
    }
    return loaded;
}

} // namespace trtllm_mla
