// TensorRT's library as far as a plugin library sees it: a registry and a logger, both of which record.
#include <cstdint>
#include <string>
#include <vector>

#include <NvInferRuntime.h>

#define EXPORT extern "C" __attribute__((visibility("default")))

using namespace nvinfer1;

namespace {

std::string &log_text() {
    static std::string &text = *new std::string();
    return text;
}

class Logger final : public ILogger {
public:
    void log(Severity severity, AsciiChar const *message) noexcept override {
        log_text() += std::to_string(static_cast<int32_t>(severity)) + " " + message + "\n";
    }
};

int32_t version = NV_TENSORRT_MAJOR * 10000 + NV_TENSORRT_MINOR * 100;

std::string name_of(const IPluginCreatorInterface &creator) {
    const auto &one = static_cast<const IPluginCreatorV3One &>(creator);
    return std::string(one.getPluginNamespace()) + "::" + one.getPluginName() + " " + one.getPluginVersion();
}

class Registry final : public IPluginRegistry {
public:
    void setErrorRecorder(IErrorRecorder *const) noexcept override {}
    IErrorRecorder *getErrorRecorder() const noexcept override { return nullptr; }
    bool isParentSearchEnabled() const override { return false; }
    void setParentSearchEnabled(bool const) override {}
    PluginLibraryHandle loadLibrary(AsciiChar const *) noexcept override { return nullptr; }
    void deregisterLibrary(PluginLibraryHandle) noexcept override {}

    bool registerCreator(IPluginCreatorInterface &creator, AsciiChar const *const) noexcept override {
        log_text() += "register " + name_of(creator) + "\n";
        creators_.push_back(&creator);
        return true;
    }
    bool deregisterCreator(IPluginCreatorInterface const &creator) noexcept override {
        log_text() += "deregister " + name_of(creator) + "\n";
        for (auto known = creators_.begin(); known != creators_.end(); ++known) {
            if (*known == &creator) {
                creators_.erase(known);
                return true;
            }
        }
        return false;
    }

    IPluginCreatorInterface *const *getAllCreators(int32_t *const count) const noexcept override {
        *count = static_cast<int32_t>(creators_.size());
        return creators_.data();
    }
    IPluginCreatorInterface *const *getAllCreatorsRecursive(int32_t *const count) noexcept override {
        return getAllCreators(count);
    }
    IPluginCreatorInterface *getCreator(AsciiChar const *const, AsciiChar const *const,
                                        AsciiChar const *const) noexcept override {
        return nullptr;
    }
    IPluginResource *acquirePluginResource(AsciiChar const *, IPluginResource *) noexcept override { return nullptr; }
    int32_t releasePluginResource(AsciiChar const *) noexcept override { return 0; }

private:
    std::vector<IPluginCreatorInterface *> creators_;
};

} // namespace

EXPORT IPluginRegistry *getPluginRegistry() noexcept {
    static Registry &registry = *new Registry();
    return &registry;
}

EXPORT int32_t getInferLibVersion() noexcept { return version; }

EXPORT ILogger *getLogger() noexcept {
    static Logger &logger = *new Logger();
    return &logger;
}

// What a test says: 110100 for TensorRT 11.1.
EXPORT void stand_in_set_version(int32_t value) { version = value; }

// What was recorded since the last call, a line for each.
EXPORT const char *stand_in_take_log() {
    static std::string &taken = *new std::string();
    taken = log_text();
    log_text().clear();
    return taken.c_str();
}
