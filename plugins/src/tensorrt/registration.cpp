// How TensorRT finds the creators, by one of two ways.
//
// IPluginRegistry::loadLibrary, which plan files and many tools use, calls getCreators. Other tools only load the
// library: it then registers its creators itself, with the TensorRT that the process has. What was registered in the
// second way is withdrawn before TensorRT does it in the first: a registry refuses creators that it has.
#include <memory>
#include <mutex>
#include <string>
#include <vector>

#include <NvInferRuntime.h>

#include "creator.h"
#include "embedded.h"
#include "loaded_tensorrt.h"
#include "log.h"

#define TRTLLM_MLA_EXPORT extern "C" __attribute__((visibility("default")))

namespace trtllm_mla {
namespace {

class Creators {
public:
    Creators() {
        const tmla_library *const library = embedded_library();
        const int32_t count = library != nullptr ? tmla_library_num_ops(library) : 0;
        for (int32_t i = 0; i < count; ++i) {
            owned_.push_back(std::make_unique<Creator>(*library, *tmla_library_op(library, i)));
            pointers_.push_back(owned_.back().get());
        }
    }

    const std::vector<nvinfer1::IPluginCreatorInterface *> &pointers() const { return pointers_; }

    // Registers the creators with every TensorRT that is loaded now.
    void enroll() {
        const std::lock_guard<std::mutex> lock(mutex_);
        const LoadedTensorRT loaded = loaded_tensorrt();
        for (const std::string &name : loaded.other_layout) {
            log_warning("compiled with headers of TensorRT " + std::to_string(NV_TENSORRT_MAJOR) + "." +
                        std::to_string(NV_TENSORRT_MINOR) + ", whose registry and logger are not those of " + name +
                        ": expected that the program loads this library with IPluginRegistry::loadLibrary");
        }
        std::string refused;
        for (const TensorRT &tensorrt : loaded.callable) {
            for (const std::unique_ptr<Creator> &creator : owned_) {
                if (tensorrt.registry->registerCreator(*creator, kNAMESPACE)) {
                    enrolled_.push_back({tensorrt.registry, creator.get()});
                } else {
                    refused += (refused.empty() ? "" : ", ") + std::string(creator->getPluginName());
                }
            }
        }
        if (!refused.empty()) {
            log_warning("other plugins of the same names, version and namespace are registered already, and stay: " +
                        refused);
        }
    }

    // Undoes it.
    void withdraw() {
        const std::lock_guard<std::mutex> lock(mutex_);
        for (const auto &[registry, creator] : enrolled_) {
            registry->deregisterCreator(*creator);
        }
        enrolled_.clear();
    }

private:
    std::vector<std::unique_ptr<Creator>> owned_;
    std::vector<nvinfer1::IPluginCreatorInterface *> pointers_;
    std::mutex mutex_;
    std::vector<std::pair<nvinfer1::IPluginRegistry *, Creator *>> enrolled_;
};

// Never destroyed: a registry points to creators until it is destroyed itself, which may be later.
Creators &creators() {
    static Creators &creators = *new Creators();
    return creators;
}

// A static object, made when the library is loaded.
const struct Enrollment {
    Enrollment() noexcept {
        try {
            creators().enroll();
        } catch (const std::exception &error) {
            log_error(std::string("cannot register plugins: ") + error.what());
        }
    }
} enrollment;

} // namespace
} // namespace trtllm_mla

TRTLLM_MLA_EXPORT nvinfer1::IPluginCreatorInterface *const *getCreators(int32_t &num_creators) {
    trtllm_mla::Creators &creators = trtllm_mla::creators();
    creators.withdraw();
    num_creators = static_cast<int32_t>(creators.pointers().size());
    return creators.pointers().data();
}

TRTLLM_MLA_EXPORT void setLoggerFinder(nvinfer1::ILoggerFinder *finder) { trtllm_mla::set_logger_finder(finder); }
