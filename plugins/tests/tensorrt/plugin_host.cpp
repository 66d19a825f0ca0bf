// Calls the plugin library as TensorRT does, for tests that have no TensorRT. Functions return 0 where they can do what
// they are asked, and otherwise what the plugin returned, or 1.
#include <cstdint>
#include <cstdio>
#include <cstring>
#include <string>
#include <vector>

#include <NvInferRuntime.h>
#include <dlfcn.h>

#define EXPORT extern "C" __attribute__((visibility("default")))

using namespace nvinfer1;

namespace {

// A tensor's element type, and its shape or largest shape.
struct HostTensor {
    int32_t type;
    int32_t rank;
    int64_t sizes[Dims::MAX_DIMS];

    PluginTensorDesc desc() const {
        PluginTensorDesc desc{};
        desc.type = static_cast<DataType>(type);
        desc.format = TensorFormat::kLINEAR;
        desc.scale = 1;
        desc.dims.nbDims = rank;
        std::memcpy(desc.dims.d, sizes, sizeof(sizes));
        return desc;
    }
    DynamicPluginTensorDesc dynamic_desc() const {
        DynamicPluginTensorDesc dynamic{};
        dynamic.desc = desc();
        dynamic.min = dynamic.opt = dynamic.max = dynamic.desc.dims;
        return dynamic;
    }
};

template <typename T> T &capability(IPluginV3 *plugin, PluginCapabilityType type) {
    return *static_cast<T *>(plugin->getCapabilityInterface(type));
}

IPluginV3OneBuildV2 &build_of(IPluginV3 *plugin) {
    return capability<IPluginV3OneBuildV2>(plugin, PluginCapabilityType::kBUILD);
}

IPluginV3OneRuntime &runtime_of(IPluginV3 *plugin) {
    return capability<IPluginV3OneRuntime>(plugin, PluginCapabilityType::kRUNTIME);
}

std::vector<DynamicPluginTensorDesc> dynamic_descs(const HostTensor *tensors, int32_t count) {
    std::vector<DynamicPluginTensorDesc> descs;
    for (int32_t i = 0; i < count; ++i) {
        descs.push_back(tensors[i].dynamic_desc());
    }
    return descs;
}

class RecordingLogger final : public ILogger {
public:
    void log(Severity severity, AsciiChar const *message) noexcept override {
        text += std::to_string(static_cast<int32_t>(severity)) + " " + message + "\n";
    }
    std::string text;
};

RecordingLogger logger;

class Finder final : public ILoggerFinder {
public:
    ILogger *findLogger() override { return &logger; }
};

Finder finder;
IPluginCreatorInterface *const *creators = nullptr;
int32_t num_creators = 0;

std::string returned;

} // namespace

EXPORT const char *host_take_log() {
    returned = logger.text;
    logger.text.clear();
    return returned.c_str();
}

EXPORT int32_t host_open(const char *path) {
    void *const library = dlopen(path, RTLD_NOW | RTLD_LOCAL);
    if (library == nullptr) {
        std::fprintf(stderr, "%s\n", dlerror());
        return 1;
    }
    reinterpret_cast<void (*)(ILoggerFinder *)>(dlsym(library, "setLoggerFinder"))(&finder);
    creators = reinterpret_cast<IPluginCreatorInterface *const *(*)(int32_t &)>(dlsym(library, "getCreators"))(
        num_creators);
    return 0;
}

EXPORT int32_t host_num_creators() { return num_creators; }

// Null where the creator makes none.
EXPORT IPluginV3 *host_create(const char *op, const char *layer, int32_t num_fields, const char *const *names,
                              const void *const *data, const int32_t *types, const int32_t *lengths, int32_t phase) {
    std::vector<PluginField> fields;
    for (int32_t i = 0; i < num_fields; ++i) {
        fields.emplace_back(names[i], data[i], static_cast<PluginFieldType>(types[i]), lengths[i]);
    }
    const PluginFieldCollection collection{num_fields, fields.data()};
    for (int32_t i = 0; i < num_creators; ++i) {
        auto &creator = *static_cast<IPluginCreatorV3One *>(creators[i]);
        if (std::strcmp(creator.getPluginName(), op) == 0) {
            return creator.createPlugin(layer, &collection, static_cast<TensorRTPhase>(phase));
        }
    }
    return nullptr;
}

EXPORT IPluginV3 *host_attach(IPluginV3 *plugin) { return runtime_of(plugin).attachToContext(nullptr); }

EXPORT void host_destroy(IPluginV3 *plugin) { delete plugin; }

EXPORT int32_t host_output_types(IPluginV3 *plugin, const int32_t *input_types, int32_t num_inputs,
                                 int32_t *output_types, int32_t num_outputs) {
    return build_of(plugin).getOutputDataTypes(reinterpret_cast<DataType *>(output_types), num_outputs,
                                               reinterpret_cast<const DataType *>(input_types), num_inputs);
}

EXPORT int32_t host_aliased_input(IPluginV3 *plugin, int32_t output) {
    return build_of(plugin).getAliasedInput(output);
}

EXPORT int32_t host_supports(IPluginV3 *plugin, int32_t position, const HostTensor *tensors, int32_t num_inputs,
                             int32_t num_outputs, int32_t is_linear) {
    std::vector<DynamicPluginTensorDesc> descs = dynamic_descs(tensors, num_inputs + num_outputs);
    if (is_linear == 0) {
        descs[static_cast<std::size_t>(position)].desc.format = TensorFormat::kCHW32;
    }
    return build_of(plugin).supportsFormatCombination(position, descs.data(), num_inputs, num_outputs) ? 1 : 0;
}

EXPORT int32_t host_configure(IPluginV3 *plugin, const HostTensor *inputs, int32_t num_inputs, int32_t num_outputs) {
    const std::vector<DynamicPluginTensorDesc> outputs(static_cast<std::size_t>(num_outputs));
    return build_of(plugin).configurePlugin(dynamic_descs(inputs, num_inputs).data(), num_inputs, outputs.data(),
                                            num_outputs);
}

EXPORT int64_t host_workspace_bytes(IPluginV3 *plugin) {
    return static_cast<int64_t>(build_of(plugin).getWorkspaceSize(nullptr, 0, nullptr, 0));
}

// Fields to serialise, a line for each: name, type, number of values, and bytes in hexadecimal digits.
EXPORT const char *host_fields(IPluginV3 *plugin) {
    const PluginFieldCollection *const fields = runtime_of(plugin).getFieldsToSerialize();
    returned.clear();
    for (int32_t i = 0; fields != nullptr && i < fields->nbFields; ++i) {
        const PluginField &field = fields->fields[i];
        const bool is_wide = field.type == PluginFieldType::kINT64;
        const int32_t size = field.type == PluginFieldType::kCHAR ? 1 : is_wide ? 8 : 4;
        returned += std::string(field.name) + " " + std::to_string(static_cast<int32_t>(field.type)) + " " +
                    std::to_string(field.length) + " ";
        for (int32_t byte = 0; byte < size * field.length; ++byte) {
            char text[3];
            std::snprintf(text, sizeof(text), "%02x", static_cast<const unsigned char *>(field.data)[byte]);
            returned += text;
        }
        returned += "\n";
    }
    return returned.c_str();
}

EXPORT int32_t host_enqueue(IPluginV3 *plugin, const HostTensor *inputs, int32_t num_inputs,
                            const void *const *input_addresses, void *const *output_addresses, void *workspace,
                            void *stream) {
    std::vector<PluginTensorDesc> descs;
    for (int32_t i = 0; i < num_inputs; ++i) {
        descs.push_back(inputs[i].desc());
    }
    return runtime_of(plugin).enqueue(descs.data(), nullptr, input_addresses, output_addresses, workspace,
                                      static_cast<cudaStream_t>(stream));
}
