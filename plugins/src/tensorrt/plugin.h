// A plugin layer: an operation in an engine. One class for all operations.
#ifndef TRTLLM_MLA_TENSORRT_PLUGIN_H
#define TRTLLM_MLA_TENSORRT_PLUGIN_H

#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include <NvInferRuntime.h>

#include "driver.h"
#include "fields.h"
#include "trtllm_mla/plan.h"

namespace trtllm_mla {

constexpr const char *kNAMESPACE = "trtllm_mla";
constexpr const char *kVERSION = "1";

// What a plugin is made of.
struct PluginState {
    const tmla_library *library;
    const tmla_op *op;
    std::string layer; // its name, for messages
    std::vector<tmla_value> attributes;
    bool is_building; // an engine is being built, and nothing is launched: a builder's inputs are arbitrary memory
    Settings settings; // known when TensorRT has told the shapes
    int64_t workspace_bytes = 0; // what the engine reserves; 0 until then
};

// Types and shapes of a call's inputs, as the evaluator takes them.
struct CallInputs {
    std::vector<int32_t> types;
    std::vector<nvinfer1::Dims> dims;

    // Throws Error where no operation has a type.
    void add(nvinfer1::DataType type, const nvinfer1::Dims &dims);
    // Points into this object.
    std::vector<tmla_shape> shapes() const;
};

// What a plugin remembers of its last call: in most steps the next one is the same.
struct PlannedCall {
    std::vector<nvinfer1::PluginTensorDesc> inputs;
    Device device;
    const tmla_operation *operation;
    std::unique_ptr<tmla_plan, decltype(&tmla_plan_free)> plan;
    std::vector<LoadedKernel> kernels; // one for each launch
};

// What TensorRT calls is documented in NvInferRuntime.h. Every problem is logged and makes the call fail.
class Plugin final : public nvinfer1::IPluginV3,
                     public nvinfer1::IPluginV3OneCore,
                     public nvinfer1::IPluginV3OneBuildV2,
                     public nvinfer1::IPluginV3OneRuntime {
public:
    // Throws Error where the library has no operation for the attributes.
    explicit Plugin(PluginState state);

    nvinfer1::IPluginCapability *getCapabilityInterface(nvinfer1::PluginCapabilityType type) noexcept override;
    nvinfer1::IPluginV3 *clone() noexcept override;

    nvinfer1::AsciiChar const *getPluginName() const noexcept override { return state_.op->name; }
    nvinfer1::AsciiChar const *getPluginVersion() const noexcept override { return kVERSION; }
    nvinfer1::AsciiChar const *getPluginNamespace() const noexcept override { return kNAMESPACE; }

    int32_t getNbOutputs() const noexcept override { return state_.op->num_outputs; }
    int32_t getOutputDataTypes(nvinfer1::DataType *output_types, int32_t num_outputs,
                               nvinfer1::DataType const *input_types, int32_t num_inputs) const noexcept override;
    int32_t getOutputShapes(nvinfer1::DimsExprs const *inputs, int32_t num_inputs,
                            nvinfer1::DimsExprs const *shape_inputs, int32_t num_shape_inputs,
                            nvinfer1::DimsExprs *outputs, int32_t num_outputs,
                            nvinfer1::IExprBuilder &expressions) noexcept override;
    int32_t getAliasedInput(int32_t output) noexcept override;
    bool supportsFormatCombination(int32_t position, nvinfer1::DynamicPluginTensorDesc const *tensors,
                                   int32_t num_inputs, int32_t num_outputs) noexcept override;
    int32_t configurePlugin(nvinfer1::DynamicPluginTensorDesc const *inputs, int32_t num_inputs,
                            nvinfer1::DynamicPluginTensorDesc const *outputs, int32_t num_outputs) noexcept override;
    std::size_t getWorkspaceSize(nvinfer1::DynamicPluginTensorDesc const *inputs, int32_t num_inputs,
                                 nvinfer1::DynamicPluginTensorDesc const *outputs,
                                 int32_t num_outputs) const noexcept override;
    // There is one tactic, so that no timing needs to be taken.
    char const *getTimingCacheID() noexcept override { return ""; }

    int32_t onShapeChange(nvinfer1::PluginTensorDesc const *, int32_t, nvinfer1::PluginTensorDesc const *,
                          int32_t) noexcept override {
        return 0; // enqueue plans anew when shapes are others
    }
    int32_t enqueue(nvinfer1::PluginTensorDesc const *input_desc, nvinfer1::PluginTensorDesc const *output_desc,
                    void const *const *inputs, void *const *outputs, void *workspace,
                    cudaStream_t stream) noexcept override;
    nvinfer1::IPluginV3 *attachToContext(nvinfer1::IPluginResourceContext *context) noexcept override;
    nvinfer1::PluginFieldCollection const *getFieldsToSerialize() noexcept override;

private:
    template <typename Function> bool succeeds(const char *callback, Function function) const noexcept;
    void check_num_inputs(int32_t found) const;
    const tmla_operation *find_operation(const CallInputs &inputs, int32_t compute_capability) const;
    Settings find_settings(const CallInputs &inputs) const;
    void check_gpu_at_hand(const CallInputs &inputs) const;
    void check_aliases(void const *const *inputs, void *const *outputs) const;
    const PlannedCall &planned_call(const nvinfer1::PluginTensorDesc *inputs, const Device &device);

    PluginState state_;
    std::unique_ptr<SerializedFields> fields_;
    std::unique_ptr<PlannedCall> call_;
};

// How often getAliasedInput has named an input.
uint64_t num_aliases() noexcept;

} // namespace trtllm_mla

#endif
