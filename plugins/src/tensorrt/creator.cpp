#include "creator.h"

#include <exception>
#include <memory>
#include <string>
#include <utility>

#include "error.h"
#include "log.h"

using nvinfer1::PluginFieldType;

namespace trtllm_mla {

Creator::Creator(const tmla_library &library, const tmla_op &op) : library_(library), op_(op) {
    for (int32_t i = 0; i < op.num_attributes; ++i) {
        const bool is_integer = op.attributes[i].type == TMLA_ATTRIBUTE_INT;
        fields_.emplace_back(op.attributes[i].name, nullptr,
                             is_integer ? PluginFieldType::kINT32 : PluginFieldType::kFLOAT32, 1);
    }
    field_names_.nbFields = static_cast<int32_t>(fields_.size());
    field_names_.fields = fields_.data();
}

nvinfer1::IPluginV3 *Creator::createPlugin(nvinfer1::AsciiChar const *name,
                                           nvinfer1::PluginFieldCollection const *collection,
                                           nvinfer1::TensorRTPhase phase) noexcept {
    const std::string layer = name != nullptr ? name : "";
    std::string problem;
    try {
        const FieldReader fields(collection);
        PluginState state{&library_, &op_, layer, fields.attributes(op_), phase == nvinfer1::TensorRTPhase::kBUILD,
                          {}, 0};
        if (!state.is_building) {
            state.settings = {fields.text(kMODEL_DTYPE), fields.text(kCACHE_DTYPE), fields.integers(kTILES)};
            state.workspace_bytes = fields.integer(kWORKSPACE);
        }
        tmla_message message{};
        if (tmla_check_types(&library_, &op_, state.attributes.data(), nullptr, 0, &message) == TMLA_OK) {
            return std::make_unique<Plugin>(std::move(state)).release();
        }
        problem = message.text;
    } catch (const std::exception &error) {
        problem = std::string(op_.name) + ": " + error.what();
    }
    log_error(problem + " (createPlugin, layer '" + layer + "')");
    return nullptr;
}

} // namespace trtllm_mla
