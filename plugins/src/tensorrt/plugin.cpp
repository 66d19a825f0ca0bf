#include "plugin.h"

#include <algorithm>
#include <atomic>
#include <cstdio>
#include <cstring>
#include <exception>
#include <utility>

#include "error.h"
#include "loaded_tensorrt.h"
#include "log.h"
#include "trtllm_mla/plugin.h"

using nvinfer1::DataType;
using nvinfer1::Dims;
using nvinfer1::DimsExprs;
using nvinfer1::DynamicPluginTensorDesc;
using nvinfer1::IDimensionExpr;
using nvinfer1::IPluginV3;
using nvinfer1::PluginTensorDesc;

namespace trtllm_mla {
namespace {

constexpr int32_t kSUCCESS = 0;
constexpr int32_t kFAILURE = 1;

std::atomic<uint64_t> aliases_named{0};

// An error of the evaluator, whose messages name the operation already.
class PlanError : public Error {
public:
    using Error::Error;
};

void check(int32_t status, const tmla_message &message) {
    if (status != TMLA_OK) {
        throw PlanError(message.text);
    }
}

struct TypeName {
    tmla_type type;
    DataType data_type;
};

constexpr TypeName kTYPES[] = {
    {TMLA_FLOAT32, DataType::kFLOAT}, {TMLA_FLOAT16, DataType::kHALF}, {TMLA_BFLOAT16, DataType::kBF16},
    {TMLA_INT8, DataType::kINT8},     {TMLA_INT32, DataType::kINT32},
};

// False where no operation has the type.
bool find_type(DataType data_type, int32_t &type) {
    for (const TypeName &name : kTYPES) {
        if (name.data_type == data_type) {
            type = name.type;
            return true;
        }
    }
    return false;
}

DataType data_type(int32_t type) {
    for (const TypeName &name : kTYPES) {
        if (name.type == type) {
            return name.data_type;
        }
    }
    throw Error("found the element type " + std::to_string(type) + " in the library data");
}

std::string address_text(const void *address) {
    char text[2 + 2 * sizeof(address) + 1];
    std::snprintf(text, sizeof(text), "0x%llx", static_cast<unsigned long long>(reinterpret_cast<uintptr_t>(address)));
    return text;
}

// The parameters of a launch, and what points to each. Every parameter has 8 bytes, of which kernels read the first.
class Parameters {
public:
    explicit Parameters(const tmla_kernel &kernel)
        : values_(static_cast<std::size_t>(kernel.num_parameters) +
                  static_cast<std::size_t>(kernel.num_null_pointers)) {}

    template <typename T> void set(int32_t index, T value) {
        static_assert(sizeof(T) <= sizeof(uint64_t), "a parameter has 8 bytes");
        std::memcpy(&values_[static_cast<std::size_t>(index)], &value, sizeof(T));
    }

    std::vector<void *> pointers() {
        std::vector<void *> pointers;
        for (uint64_t &value : values_) {
            pointers.push_back(&value);
        }
        return pointers;
    }

private:
    std::vector<uint64_t> values_;
};

// Where the memory of a call lies.
struct Addresses {
    const tmla_op *op;
    void const *const *inputs;
    void *const *outputs;
    void *workspace;

    const void *tensor(int32_t index) const {
        return index < op->num_inputs ? inputs[index] : outputs[index - op->num_inputs];
    }
    std::string name(const tmla_argument &argument) const {
        if (argument.kind == TMLA_ARGUMENT_WORKSPACE) {
            return "workspace at byte " + std::to_string(argument.integer);
        }
        const int32_t output = argument.index - op->num_inputs;
        return "tensor '" + std::string(output < 0 ? op->inputs[argument.index].name : op->outputs[output].name) + "'";
    }
};

Parameters make_parameters(const tmla_launch &launch, const Addresses &addresses) {
    const tmla_kernel &kernel = *launch.kernel;
    Parameters parameters(kernel);
    for (int32_t i = 0; i < kernel.num_parameters; ++i) {
        const tmla_argument &argument = launch.arguments[i];
        if (argument.kind == TMLA_ARGUMENT_INT32) {
            parameters.set(i, static_cast<int32_t>(argument.integer));
        } else if (argument.kind == TMLA_ARGUMENT_FLOAT32) {
            parameters.set(i, static_cast<float>(argument.real));
        } else {
            const auto address = argument.kind == TMLA_ARGUMENT_TENSOR
                                     ? reinterpret_cast<uintptr_t>(addresses.tensor(argument.index))
                                     : reinterpret_cast<uintptr_t>(addresses.workspace) +
                                           static_cast<uintptr_t>(argument.integer);
            if (address % static_cast<uintptr_t>(kernel.pointer_alignment) != 0) {
                throw Error(addresses.name(argument) + " lies at address " +
                            address_text(reinterpret_cast<const void *>(address)) + ", expected a multiple of " +
                            std::to_string(kernel.pointer_alignment) + " bytes: kernels load that many at once");
            }
            parameters.set(i, static_cast<uint64_t>(address));
        }
    }
    return parameters;
}

bool are_same(const PluginTensorDesc &first, const PluginTensorDesc &second) {
    return first.type == second.type && first.dims.nbDims == second.dims.nbDims &&
           std::equal(first.dims.d, first.dims.d + std::max(first.dims.nbDims, 0), second.dims.d);
}

} // namespace

void CallInputs::add(DataType type, const Dims &size) {
    int32_t found = 0;
    if (!find_type(type, found)) {
        throw Error("input " + std::to_string(types.size()) + ": found TensorRT's element type " +
                    std::to_string(static_cast<int32_t>(type)) + ", expected one of float32, float16, bfloat16, int8 "
                    "and int32");
    }
    types.push_back(found);
    dims.push_back(size);
}

std::vector<tmla_shape> CallInputs::shapes() const {
    std::vector<tmla_shape> shapes;
    for (const Dims &size : dims) {
        shapes.push_back({size.nbDims, size.d});
    }
    return shapes;
}

Plugin::Plugin(PluginState state) : state_(std::move(state)) {}

template <typename Function> bool Plugin::succeeds(const char *callback, Function function) const noexcept {
    const auto fail = [&](const std::string &text) {
        log_error(text + " (" + callback + ", layer '" + state_.layer + "')");
    };
    try {
        try {
            function();
            return true;
        } catch (const PlanError &error) {
            fail(error.what());
        } catch (const std::exception &error) {
            fail(std::string(state_.op->name) + ": " + error.what());
        }
    } catch (...) {
        log_error(callback); // There is too little memory for more.
    }
    return false;
}

nvinfer1::IPluginCapability *Plugin::getCapabilityInterface(nvinfer1::PluginCapabilityType type) noexcept {
    switch (type) {
    case nvinfer1::PluginCapabilityType::kCORE:
        return static_cast<nvinfer1::IPluginV3OneCore *>(this);
    case nvinfer1::PluginCapabilityType::kBUILD:
        return static_cast<nvinfer1::IPluginV3OneBuildV2 *>(this);
    case nvinfer1::PluginCapabilityType::kRUNTIME:
        return static_cast<nvinfer1::IPluginV3OneRuntime *>(this);
    }
    return nullptr;
}

IPluginV3 *Plugin::clone() noexcept {
    IPluginV3 *copy = nullptr;
    succeeds("clone", [&] { copy = new Plugin(state_); });
    return copy;
}

IPluginV3 *Plugin::attachToContext(nvinfer1::IPluginResourceContext *) noexcept { return clone(); }

int32_t Plugin::getOutputDataTypes(DataType *output_types, int32_t num_outputs, DataType const *input_types,
                                   int32_t num_inputs) const noexcept {
    return succeeds("getOutputDataTypes", [&] {
               check_num_inputs(num_inputs);
               CallInputs inputs;
               std::for_each(input_types, input_types + num_inputs,
                             [&inputs](DataType type) { inputs.add(type, Dims{}); });
               std::vector<int32_t> types(static_cast<std::size_t>(state_.op->num_outputs));
               tmla_message message{};
               check(tmla_output_types(state_.library, state_.op, state_.attributes.data(), inputs.types.data(),
                                       types.data(), &message),
                     message);
               std::transform(types.begin(), types.begin() + std::min(num_outputs, state_.op->num_outputs),
                              output_types, data_type);
           })
               ? kSUCCESS
               : kFAILURE;
}

int32_t Plugin::getOutputShapes(DimsExprs const *inputs, int32_t num_inputs, DimsExprs const *, int32_t,
                                DimsExprs *outputs, int32_t num_outputs,
                                nvinfer1::IExprBuilder &expressions) noexcept {
    return succeeds("getOutputShapes", [&] {
               check_num_inputs(num_inputs);
               for (int32_t i = 0; i < num_inputs; ++i) {
                   if (inputs[i].nbDims != state_.op->inputs[i].num_dims) {
                       throw Error("input '" + std::string(state_.op->inputs[i].name) + "': found " +
                                   std::to_string(inputs[i].nbDims) + " dimensions, expected " +
                                   std::to_string(state_.op->inputs[i].num_dims));
                   }
               }
               const auto size = [&](const tmla_dim &dim) -> const IDimensionExpr * {
                   if (dim.source == TMLA_DIM_NUMBER) {
                       return expressions.constant(dim.offset);
                   }
                   if (dim.source == TMLA_DIM_ATTRIBUTE) {
                       const auto attribute = static_cast<std::size_t>(dim.attribute);
                       return expressions.constant(state_.attributes[attribute].integer + dim.offset);
                   }
                   const IDimensionExpr *const source = inputs[dim.input].d[dim.axis];
                   return dim.offset == 0 ? source
                                          : expressions.operation(nvinfer1::DimensionOperation::kSUM, *source,
                                                                  *expressions.constant(dim.offset));
               };
               for (int32_t i = 0; i < std::min(num_outputs, state_.op->num_outputs); ++i) {
                   const tmla_tensor &tensor = state_.op->outputs[i];
                   outputs[i].nbDims = tensor.num_dims;
                   std::transform(tensor.dims, tensor.dims + tensor.num_dims, outputs[i].d, size);
               }
           })
               ? kSUCCESS
               : kFAILURE;
}

int32_t Plugin::getAliasedInput(int32_t output) noexcept {
    const bool exists = output >= 0 && output < state_.op->num_outputs;
    const int32_t input = exists ? state_.op->aliases[output] : -1;
    if (input >= 0) {
        ++aliases_named;
    }
    return input;
}

bool Plugin::supportsFormatCombination(int32_t position, DynamicPluginTensorDesc const *tensors, int32_t num_inputs,
                                       int32_t num_outputs) noexcept {
    // The builder asks for types that a plugin need not have: these are no errors.
    if (num_inputs != state_.op->num_inputs || num_outputs != state_.op->num_outputs ||
        tensors[position].desc.format != nvinfer1::TensorFormat::kLINEAR) {
        return false;
    }
    bool is_supported = false;
    return succeeds("supportsFormatCombination", [&] {
               std::vector<int32_t> types(static_cast<std::size_t>(position) + 1);
               for (std::size_t i = 0; i < types.size(); ++i) {
                   if (!find_type(tensors[i].desc.type, types[i])) {
                       return;
                   }
               }
               is_supported = tmla_check_types(state_.library, state_.op, state_.attributes.data(), types.data(),
                                               position + 1, nullptr) == TMLA_OK;
           }) &&
           is_supported;
}

int32_t Plugin::configurePlugin(DynamicPluginTensorDesc const *inputs, int32_t num_inputs,
                                DynamicPluginTensorDesc const *, int32_t) noexcept {
    return succeeds("configurePlugin", [&] {
               check_num_inputs(num_inputs);
               CallInputs largest;
               std::for_each(inputs, inputs + num_inputs, [&largest](const DynamicPluginTensorDesc &input) {
                   largest.add(input.desc.type, input.max);
               });
               int64_t bytes = 0;
               tmla_message message{};
               check(tmla_workspace_bytes(state_.library, state_.op, state_.attributes.data(), largest.types.data(),
                                          largest.shapes().data(), &bytes, &message),
                     message);
               check_gpu_at_hand(largest);
               state_.settings = find_settings(largest);
               // An engine may have several profiles.
               state_.workspace_bytes = std::max(state_.workspace_bytes, bytes);
           })
               ? kSUCCESS
               : kFAILURE;
}

std::size_t Plugin::getWorkspaceSize(DynamicPluginTensorDesc const *, int32_t, DynamicPluginTensorDesc const *,
                                     int32_t) const noexcept {
    return static_cast<std::size_t>(state_.workspace_bytes);
}

int32_t Plugin::enqueue(PluginTensorDesc const *input_desc, PluginTensorDesc const *, void const *const *inputs,
                        void *const *outputs, void *workspace, cudaStream_t stream) noexcept {
    if (state_.is_building) {
        return kSUCCESS;
    }
    return succeeds("enqueue", [&] {
               check_aliases(inputs, outputs);
               Driver &driver = Driver::get();
               const PlannedCall &call = planned_call(input_desc, driver.current_device());
               const Addresses addresses{state_.op, inputs, outputs, workspace};
               // Nothing is launched where anything is wrong.
               std::vector<Parameters> parameters;
               for (int32_t i = 0; i < call.plan->num_launches; ++i) {
                   parameters.push_back(make_parameters(call.plan->launches[i], addresses));
               }
               for (std::size_t i = 0; i < parameters.size(); ++i) {
                   std::vector<void *> pointers = parameters[i].pointers();
                   driver.launch(call.kernels[i], call.plan->launches[i].grid, pointers, stream);
               }
           })
               ? kSUCCESS
               : kFAILURE;
}

nvinfer1::PluginFieldCollection const *Plugin::getFieldsToSerialize() noexcept {
    const bool is_made = succeeds("getFieldsToSerialize", [&] {
        fields_ = std::make_unique<SerializedFields>(*state_.op, state_.attributes, state_.settings,
                                                     state_.workspace_bytes);
    });
    return is_made ? &fields_->collection() : nullptr;
}

void Plugin::check_num_inputs(int32_t found) const {
    if (found != state_.op->num_inputs) {
        throw Error("found " + std::to_string(found) + " inputs, expected " + std::to_string(state_.op->num_inputs));
    }
}

const tmla_operation *Plugin::find_operation(const CallInputs &inputs, int32_t compute_capability) const {
    const tmla_operation *operation = nullptr;
    tmla_message message{};
    check(tmla_find_operation(state_.library, state_.op, state_.attributes.data(), inputs.types.data(),
                              inputs.shapes().data(), compute_capability, &operation, &message),
          message);
    return operation;
}

Settings Plugin::find_settings(const CallInputs &inputs) const {
    Settings settings;
    for (int32_t i = 0; i < tmla_library_num_targets(state_.library); ++i) {
        const tmla_operation *operation = nullptr;
        const int32_t target = tmla_library_target(state_.library, i);
        // A library of several networks need not have all of them for every target.
        if (tmla_find_operation(state_.library, state_.op, state_.attributes.data(), inputs.types.data(),
                                inputs.shapes().data(), target, &operation, nullptr) == TMLA_OK) {
            settings.model_dtype = operation->model_dtype;
            settings.cache_dtype = operation->cache_dtype;
            settings.tiles.insert(settings.tiles.end(), {target, operation->tile_s, operation->num_stages});
        }
    }
    return settings;
}

void Plugin::check_gpu_at_hand(const CallInputs &inputs) const {
    const LoadedTensorRT loaded = loaded_tensorrt();
    const bool is_loaded = !loaded.callable.empty() || !loaded.other_layout.empty();
    if (is_loaded && !loaded.builds_for_other_gpus) {
        find_operation(inputs, Driver::get().current_device().compute_capability);
    }
}

void Plugin::check_aliases(void const *const *inputs, void *const *outputs) const {
    for (int32_t output = 0; output < state_.op->num_outputs; ++output) {
        const int32_t input = state_.op->aliases[output];
        if (input >= 0 && outputs[output] != inputs[input]) {
            throw Error("output '" + std::string(state_.op->outputs[output].name) + "' lies at " +
                        address_text(outputs[output]) + " and input '" + state_.op->inputs[input].name + "' at " +
                        address_text(inputs[input]) + ", expected one address: it is updated in place");
        }
    }
}

const PlannedCall &Plugin::planned_call(const PluginTensorDesc *inputs, const Device &device) {
    const PluginTensorDesc *const end = inputs + state_.op->num_inputs;
    if (call_ && call_->device.context == device.context &&
        std::equal(inputs, end, call_->inputs.begin(), call_->inputs.end(), are_same)) {
        return *call_;
    }
    CallInputs found;
    std::for_each(inputs, end, [&found](const PluginTensorDesc &input) { found.add(input.type, input.dims); });
    const tmla_operation *const operation = find_operation(found, device.compute_capability);
    Driver &driver = Driver::get();
    if (!call_ || call_->operation != operation || call_->device.context != device.context) {
        // All that the operation may launch: nothing is loaded in later calls, which may be captured in a CUDA graph.
        std::for_each(operation->kernels, operation->kernels + operation->num_kernels,
                      [&](const tmla_kernel *kernel) { driver.load(device, *kernel); });
    }
    tmla_plan *plan = nullptr;
    tmla_message message{};
    check(tmla_plan_create(operation, state_.attributes.data(), found.shapes().data(), device.multiprocessors,
                           state_.workspace_bytes, &plan, &message),
          message);
    auto call = std::make_unique<PlannedCall>(
        PlannedCall{{inputs, end}, device, operation, {plan, tmla_plan_free}, {}});
    for (int32_t i = 0; i < plan->num_launches; ++i) {
        call->kernels.push_back(driver.load(device, *plan->launches[i].kernel));
    }
    call_ = std::move(call);
    return *call_;
}

uint64_t num_aliases() noexcept { return aliases_named; }

} // namespace trtllm_mla

uint64_t trtllm_mla_plugin_num_aliases(void) { return trtllm_mla::num_aliases(); }
