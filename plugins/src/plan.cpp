// The C interface: every exception ends here.
#include "trtllm_mla/plan.h"

#include <algorithm>
#include <cstring>
#include <exception>
#include <memory>

#include "error.h"
#include "library.h"

using trtllm_mla::Error;
using trtllm_mla::Operation;
using trtllm_mla::Value;

namespace {

// A plan and the memory that it points to.
struct OwnedPlan : tmla_plan {
    trtllm_mla::PlanData data;
};

void write_message(tmla_message *message, const char *text) noexcept {
    if (message != nullptr) {
        const std::size_t size = std::min(std::strlen(text), sizeof(message->text) - 1);
        std::memcpy(message->text, text, size);
        message->text[size] = '\0';
    }
}

template <typename Function> int32_t guarded(tmla_message *message, Function function) noexcept {
    try {
        function();
        return TMLA_OK;
    } catch (const Error &error) {
        write_message(message, error.what());
    } catch (const std::bad_alloc &) {
        write_message(message, "found too little memory for a launch plan");
    } catch (const std::exception &error) {
        write_message(message, error.what());
    } catch (...) {
        write_message(message, "found an unknown error in a launch plan");
    }
    return TMLA_ERROR;
}

template <typename Container>
auto item(const Container &items, int32_t index) -> const typename Container::value_type * {
    const bool valid = index >= 0 && static_cast<std::size_t>(index) < items.size();
    return valid ? &items[static_cast<std::size_t>(index)] : nullptr;
}

// Values of a program's symbols: sizes of all inputs, multiprocessors, workspace, real attributes.
std::vector<Value> symbols(const tmla_op &op, const tmla_value *attributes, const tmla_shape *shapes,
                           int64_t multiprocessors, int64_t workspace_bytes) {
    std::vector<Value> values;
    const auto add = [&values](int64_t number) {
        Value value{};
        value.integer = number;
        values.push_back(value);
    };
    for (int32_t i = 0; i < op.num_inputs; ++i) {
        std::for_each(shapes[i].sizes, shapes[i].sizes + op.inputs[i].num_dims, add);
    }
    add(multiprocessors);
    add(workspace_bytes);
    for (int32_t i = 0; i < op.num_attributes; ++i) {
        if (op.attributes[i].type == TMLA_ATTRIBUTE_FLOAT) {
            Value value{};
            value.real = attributes[i].real;
            values.push_back(value);
        }
    }
    return values;
}

} // namespace

int32_t tmla_library_open(const void *data, uint64_t size, tmla_library **library, tmla_message *message) {
    return guarded(message, [&] { *library = new tmla_library(data, size); });
}

void tmla_library_close(tmla_library *library) { delete library; }

const char *tmla_library_version(const tmla_library *library) { return library->version.c_str(); }

int32_t tmla_library_num_ops(const tmla_library *library) { return static_cast<int32_t>(library->ops.size()); }

const tmla_op *tmla_library_op(const tmla_library *library, int32_t index) {
    const trtllm_mla::Op *op = item(library->ops, index);
    return op ? &op->contract : nullptr;
}

const tmla_op *tmla_library_find_op(const tmla_library *library, const char *name) {
    for (const trtllm_mla::Op &op : library->ops) {
        if (std::strcmp(op.contract.name, name) == 0) {
            return &op.contract;
        }
    }
    return nullptr;
}

int32_t tmla_library_num_targets(const tmla_library *library) { return static_cast<int32_t>(library->targets.size()); }

int32_t tmla_library_target(const tmla_library *library, int32_t index) {
    const int32_t *target = item(library->targets, index);
    return target ? *target : 0;
}

int32_t tmla_library_num_operations(const tmla_library *library) {
    return static_cast<int32_t>(library->operations.size());
}

const tmla_operation *tmla_library_operation(const tmla_library *library, int32_t index) {
    return item(library->operations, index);
}

int32_t tmla_library_num_kernels(const tmla_library *library) { return static_cast<int32_t>(library->kernels.size()); }

const tmla_kernel *tmla_library_kernel(const tmla_library *library, int32_t index) {
    return item(library->kernels, index);
}

int32_t tmla_check_types(const tmla_library *library, const tmla_op *op, const tmla_value *attributes,
                         const int32_t *types, int32_t num_types, tmla_message *message) {
    return guarded(message, [&] {
        tmla_library::with_types(library->with_attributes(op, attributes), types, num_types);
    });
}

int32_t tmla_output_types(const tmla_library *library, const tmla_op *op, const tmla_value *attributes,
                          const int32_t *input_types, int32_t *output_types, tmla_message *message) {
    return guarded(message, [&] {
        const auto found =
            tmla_library::with_types(library->with_attributes(op, attributes), input_types, op->num_inputs);
        for (const Operation *operation : found) {
            if (operation->tensor_types != found.front()->tensor_types) {
                throw Error(std::string(op->name) + ": found outputs of several types for these inputs, expected one");
            }
        }
        const auto &types = found.front()->tensor_types;
        std::copy(types.begin() + op->num_inputs, types.end(), output_types);
    });
}

int32_t tmla_workspace_bytes(const tmla_library *library, const tmla_op *op, const tmla_value *attributes,
                             const int32_t *input_types, const tmla_shape *max_shapes, int64_t *bytes,
                             tmla_message *message) {
    return guarded(message, [&] {
        const auto typed =
            tmla_library::with_types(library->with_attributes(op, attributes), input_types, op->num_inputs);
        const auto values = symbols(*op, attributes, max_shapes, 0, 0);
        int64_t largest = 0;
        for (const Operation *operation : tmla_library::with_shapes(typed, max_shapes)) {
            largest = std::max(largest, operation->workspace->number(values, op->name));
        }
        *bytes = largest;
    });
}

int32_t tmla_find_operation(const tmla_library *library, const tmla_op *op, const tmla_value *attributes,
                            const int32_t *input_types, const tmla_shape *shapes, int32_t compute_capability,
                            const tmla_operation **operation, tmla_message *message) {
    return guarded(message, [&] {
        const auto typed =
            tmla_library::with_types(library->with_attributes(op, attributes), input_types, op->num_inputs);
        const auto found = tmla_library::with_shapes(typed, shapes);
        const auto match = std::find_if(found.begin(), found.end(), [&](const Operation *candidate) {
            return candidate->compute_capability == compute_capability;
        });
        if (match == found.end()) {
            std::string targets;
            for (const Operation *candidate : found) {
                targets += (targets.empty() ? "sm_" : ", sm_") + std::to_string(candidate->compute_capability);
            }
            throw Error(std::string(op->name) + ": found a GPU of generation sm_" +
                        std::to_string(compute_capability) + ", expected one that the library was made for: " +
                        targets);
        }
        *operation = *match;
    });
}

int32_t tmla_plan_create(const tmla_operation *operation, const tmla_value *attributes, const tmla_shape *shapes,
                         int32_t multiprocessors, int64_t workspace_bytes, tmla_plan **plan, tmla_message *message) {
    return guarded(message, [&] {
        const auto &found = static_cast<const Operation &>(*operation);
        const tmla_op &op = *operation->op;
        tmla_library::with_shapes({&found}, shapes);
        auto owned = std::make_unique<OwnedPlan>();
        const auto values = symbols(op, attributes, shapes, multiprocessors, workspace_bytes);
        found.plan->plan(values, found.all_kernels, op.name, &owned->data);
        if (owned->data.workspace_bytes < 0 || owned->data.workspace_bytes > workspace_bytes) {
            throw Error(std::string(op.name) + ": found a plan with a workspace of " +
                        std::to_string(owned->data.workspace_bytes) + " bytes, expected at most " +
                        std::to_string(workspace_bytes));
        }
        const tmla_argument *next = owned->data.arguments.data();
        for (tmla_launch &launch : owned->data.launches) {
            launch.arguments = next;
            next += launch.kernel->num_parameters;
        }
        owned->workspace_bytes = owned->data.workspace_bytes;
        owned->num_launches = static_cast<int32_t>(owned->data.launches.size());
        owned->launches = owned->data.launches.data();
        *plan = owned.release();
    });
}

void tmla_plan_free(tmla_plan *plan) { delete static_cast<OwnedPlan *>(plan); }
