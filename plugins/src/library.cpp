#include "library.h"

#include <algorithm>
#include <cstring>
#include <limits>
#include <set>

#include "error.h"
#include "text.h"

using trtllm_mla::any_of_text;
using trtllm_mla::Error;
using trtllm_mla::Op;
using trtllm_mla::Operation;
using trtllm_mla::Program;
using trtllm_mla::ProgramContext;
using trtllm_mla::Reader;
using trtllm_mla::Tree;
using trtllm_mla::tuple_text;

namespace {

constexpr char kMagic[] = {'T', 'M', 'L', 'A', 'P', 'L', 'A', 'N'};
constexpr uint64_t kFormat = 1;
constexpr int32_t kWarpSize = 32, kMaxWarps = 32;
constexpr const char *kTypeNames[] = {"float32", "float16", "bfloat16", "int8", "int32"};

std::string type_text(int32_t type) {
    const bool known = type >= 0 && type <= TMLA_INT32;
    return known ? kTypeNames[type] : "type " + std::to_string(type);
}

// What some operations have, each once, in their order.
template <typename Describe>
std::string alternatives(const std::vector<const Operation *> &operations, Describe describe) {
    std::vector<std::string> found;
    for (const Operation *operation : operations) {
        const std::string text = describe(*operation);
        if (std::find(found.begin(), found.end(), text) == found.end()) {
            found.push_back(text);
        }
    }
    return any_of_text(found);
}

std::string types_text(const int32_t *types, int32_t count) {
    std::vector<std::string> texts;
    for (int32_t i = 0; i < count; ++i) {
        texts.push_back(type_text(types[i]));
    }
    return tuple_text(texts);
}

// Names of the integer attributes with their values: (causal 0, first_expert 3).
std::string attributes_text(const tmla_op &op, const tmla_value *values) {
    std::vector<std::string> texts;
    for (int32_t i = 0; i < op.num_attributes; ++i) {
        if (op.attributes[i].type == TMLA_ATTRIBUTE_INT) {
            texts.push_back(std::string(op.attributes[i].name) + " " + std::to_string(values[i].integer));
        }
    }
    return tuple_text(texts);
}

bool has_attributes(const Operation &operation, const tmla_value *values) {
    const tmla_op &op = *operation.op;
    for (int32_t i = 0; i < op.num_attributes; ++i) {
        if (op.attributes[i].type == TMLA_ATTRIBUTE_INT && operation.attributes[i].integer != values[i].integer) {
            return false;
        }
    }
    return true;
}

} // namespace

tmla_library::tmla_library(const void *data, uint64_t size) {
    if (data == nullptr || size < sizeof(kMagic) || std::memcmp(data, kMagic, sizeof(kMagic)) != 0) {
        throw Error("library data: found no 'TMLAPLAN' at its beginning, expected a file library.bin");
    }
    Reader reader(static_cast<const char *>(data) + sizeof(kMagic), size - sizeof(kMagic));
    const uint64_t format = reader.unsigned_int();
    if (format != kFormat) {
        throw Error("library data: found format " + std::to_string(format) + ", expected " + std::to_string(kFormat) +
                    ": it was written by another version of trtllm-mla");
    }
    version = reader.text();
    for (uint32_t i = reader.count(); i > 0; --i) {
        read_op(reader);
    }
    for (uint32_t i = reader.count(); i > 0; --i) {
        read_kernel(reader);
    }
    for (uint32_t i = reader.count(); i > 0; --i) {
        read_operation(reader);
    }
    if (!reader.at_end()) {
        throw Error("library data: found bytes behind the last operation");
    }
    std::set<int32_t> found;
    for (const Operation &operation : operations) {
        found.insert(operation.compute_capability);
    }
    targets.assign(found.begin(), found.end());
}

const char *tmla_library::keep(std::string text) {
    texts_.push_back(std::move(text));
    return texts_.back().c_str();
}

void tmla_library::read_op(Reader &reader) {
    ops.emplace_back();
    Op &op = ops.back();
    op.contract.name = keep(reader.text());
    attributes_.emplace_back();
    for (uint32_t i = reader.count(); i > 0; --i) {
        const char *name = keep(reader.text());
        attributes_.back().push_back({name, static_cast<int32_t>(reader.index(TMLA_ATTRIBUTE_FLOAT + 1))});
    }
    op.contract.num_attributes = static_cast<int32_t>(attributes_.back().size());
    op.contract.attributes = attributes_.back().data();

    const uint32_t num_inputs = reader.count();
    op.contract.inputs = read_tensors(reader, num_inputs, op, true);
    op.contract.num_inputs = static_cast<int32_t>(num_inputs);
    const uint32_t num_outputs = reader.count();
    op.contract.outputs = read_tensors(reader, num_outputs, op, false);
    op.contract.num_outputs = static_cast<int32_t>(num_outputs);
    numbers_.emplace_back();
    for (uint32_t i = 0; i < num_outputs; ++i) {
        numbers_.back().push_back(static_cast<int32_t>(reader.index(std::size_t{num_inputs} + 1)) - 1);
    }
    op.contract.aliases = numbers_.back().data();

    for (uint32_t i = 0; i < num_inputs; ++i) {
        op.num_sizes += static_cast<uint32_t>(op.contract.inputs[i].num_dims);
    }
    op.real_symbols.assign(std::size_t{op.num_sizes} + 2, false);
    for (int32_t i = 0; i < op.contract.num_attributes; ++i) {
        if (op.contract.attributes[i].type == TMLA_ATTRIBUTE_FLOAT) {
            op.real_symbols.push_back(true);
        }
    }
}

const tmla_tensor *tmla_library::read_tensors(Reader &reader, uint32_t count, const Op &op, bool are_inputs) {
    tensors_.emplace_back();
    std::vector<tmla_tensor> &tensors = tensors_.back();
    for (uint32_t i = 0; i < count; ++i) {
        tmla_tensor tensor{};
        tensor.name = keep(reader.text());
        tensor.element = static_cast<int32_t>(reader.index(TMLA_ELEMENT_FLOAT32 + 1));
        tensor.num_dims = static_cast<int32_t>(reader.count());
        dims_.emplace_back();
        for (int32_t axis = 0; axis < tensor.num_dims; ++axis) {
            tmla_dim dim{};
            dim.name = keep(reader.text());
            dim.source = static_cast<int32_t>(reader.index(TMLA_DIM_ATTRIBUTE + 1));
            dim.offset = reader.signed_int();
            if (dim.source == TMLA_DIM_INPUT) {
                // An input's dimension may refer to itself, and to what comes before it.
                dim.input = static_cast<int32_t>(
                    reader.index(are_inputs ? std::size_t{i} + 1 : static_cast<std::size_t>(op.contract.num_inputs)));
                const bool own = are_inputs && dim.input == static_cast<int32_t>(i);
                const tmla_tensor *inputs = are_inputs ? tensors.data() : op.contract.inputs;
                dim.axis = static_cast<int32_t>(
                    reader.index(static_cast<std::size_t>(own ? axis + 1 : inputs[dim.input].num_dims)));
            } else if (dim.source == TMLA_DIM_ATTRIBUTE) {
                dim.attribute =
                    static_cast<int32_t>(reader.index(static_cast<std::size_t>(op.contract.num_attributes)));
                if (op.contract.attributes[dim.attribute].type != TMLA_ATTRIBUTE_INT) {
                    throw Error("library data: found a dimension that is a real attribute");
                }
            }
            dims_.back().push_back(dim);
        }
        tensor.dims = dims_.back().data();
        tensors.push_back(tensor);
    }
    return tensors.data();
}

void tmla_library::read_kernel(Reader &reader) {
    tmla_kernel kernel{};
    kernel.key = keep(reader.text());
    kernel.op = keep(reader.text());
    kernel.entry = keep(reader.text());
    kernel.compute_capability = reader.small_int();
    kernel.block_threads = kWarpSize * static_cast<int32_t>(reader.index(kMaxWarps + 1));
    kernel.shared_bytes = reader.small_int();
    kernel.pointer_alignment = reader.small_int();
    if (kernel.block_threads == 0 || kernel.pointer_alignment == 0) {
        throw Error("library data: found a kernel without threads or alignment");
    }
    numbers_.emplace_back();
    for (uint32_t i = reader.count(); i > 0; --i) {
        numbers_.back().push_back(static_cast<int32_t>(reader.index(TMLA_PARAMETER_FLOAT32 + 1)));
    }
    kernel.num_parameters = static_cast<int32_t>(numbers_.back().size());
    kernel.parameters = numbers_.back().data();
    kernel.num_null_pointers = static_cast<int32_t>(reader.index(kMaxWarps));
    kernel.cubin_size = reader.unsigned_int();
    kernel.cubin = reader.bytes(kernel.cubin_size);
    kernels.push_back(kernel);
}

void tmla_library::read_operation(Reader &reader) {
    operations.emplace_back();
    Operation &operation = operations.back();
    const Op &op = ops[reader.index(ops.size())];
    operation.op = &op.contract;
    operation.compute_capability = reader.small_int();
    operation.model_dtype = keep(reader.text());
    operation.cache_dtype = keep(reader.text());
    operation.tile_s = reader.small_int();
    operation.num_stages = reader.small_int();
    for (int32_t i = 0; i < op.contract.num_attributes; ++i) {
        const bool real = op.contract.attributes[i].type == TMLA_ATTRIBUTE_FLOAT;
        operation.attribute_values.push_back({real ? 0 : reader.signed_int(), 0.0});
    }
    operation.attributes = operation.attribute_values.data();
    for (uint32_t i = 0; i < op.num_tensors(); ++i) {
        operation.tensor_types.push_back(static_cast<int32_t>(reader.index(TMLA_INT32 + 1)));
    }
    operation.types = operation.tensor_types.data();
    for (uint32_t i = reader.count(); i > 0; --i) {
        tmla_fixed_size fixed{};
        fixed.input = static_cast<int32_t>(reader.index(static_cast<std::size_t>(op.contract.num_inputs)));
        fixed.axis =
            static_cast<int32_t>(reader.index(static_cast<std::size_t>(op.contract.inputs[fixed.input].num_dims)));
        fixed.size = reader.signed_int();
        operation.sizes.push_back(fixed);
    }
    operation.fixed_sizes = operation.sizes.data();
    operation.num_fixed_sizes = static_cast<int32_t>(operation.sizes.size());
    for (uint32_t i = reader.count(); i > 0; --i) {
        const tmla_kernel *kernel = &kernels[reader.index(kernels.size())];
        if (kernel->compute_capability != operation.compute_capability) {
            throw Error("library data: found an operation with a kernel for another target");
        }
        operation.all_kernels.push_back(kernel);
    }
    operation.num_kernels = static_cast<int32_t>(operation.all_kernels.size());
    operation.kernels = operation.all_kernels.data();
    const ProgramContext context = {&op.real_symbols, &operation.all_kernels, op.num_tensors()};
    operation.plan = std::make_unique<Program>(reader, context, Tree::kPlan);
    operation.workspace = std::make_unique<Program>(reader, context, Tree::kNumber);
}

std::vector<const Operation *> tmla_library::with_attributes(const tmla_op *op, const tmla_value *attributes) const {
    std::vector<const Operation *> all, found;
    for (const Operation &operation : operations) {
        if (operation.op == op) {
            all.push_back(&operation);
            if (has_attributes(operation, attributes)) {
                found.push_back(&operation);
            }
        }
    }
    if (all.empty()) {
        throw Error(std::string(op->name) +
                    ": found no kernels for it in this library, expected a library made for the network: run "
                    "trtllm-mla plugin-library with it");
    }
    if (found.empty()) {
        throw Error(std::string(op->name) + ": found attributes " + attributes_text(*op, attributes) + ", expected " +
                    alternatives(all, [op](const Operation &item) { return attributes_text(*op, item.attributes); }));
    }
    return found;
}

std::vector<const Operation *> tmla_library::with_types(const std::vector<const Operation *> &operations,
                                                        const int32_t *types, int32_t num_types) {
    const tmla_op &op = *operations.front()->op;
    if (num_types < 0 || num_types > op.num_inputs + op.num_outputs) {
        throw Error(std::string(op.name) + ": found " + std::to_string(num_types) + " tensors, expected at most " +
                    std::to_string(op.num_inputs + op.num_outputs));
    }
    std::vector<const Operation *> found;
    for (const Operation *operation : operations) {
        if (std::equal(types, types + num_types, operation->types)) {
            found.push_back(operation);
        }
    }
    if (found.empty()) {
        throw Error(std::string(op.name) + ": found element types " + types_text(types, num_types) + ", expected " +
                    alternatives(operations, [num_types](const Operation &item) {
                        return types_text(item.types, num_types);
                    }));
    }
    return found;
}

std::vector<const Operation *> tmla_library::with_shapes(const std::vector<const Operation *> &operations,
                                                         const tmla_shape *shapes) {
    const tmla_op &op = *operations.front()->op;
    for (int32_t i = 0; i < op.num_inputs; ++i) {
        const tmla_tensor &input = op.inputs[i];
        if (shapes[i].rank == input.num_dims) {
            continue;
        }
        std::vector<std::string> found, expected;
        for (int32_t axis = 0; axis < shapes[i].rank; ++axis) {
            found.push_back(std::to_string(shapes[i].sizes[axis]));
        }
        for (int32_t axis = 0; axis < input.num_dims; ++axis) {
            const bool number = input.dims[axis].source == TMLA_DIM_NUMBER;
            expected.push_back(number ? input.dims[axis].name : "'" + std::string(input.dims[axis].name) + "'");
        }
        throw Error(std::string(op.name) + ": input '" + input.name + "': found shape " + tuple_text(found) +
                    ", expected dimensions " + tuple_text(expected));
    }
    std::vector<const Operation *> matching;
    for (const Operation *operation : operations) {
        const auto &fixed = operation->sizes;
        if (std::all_of(fixed.begin(), fixed.end(), [shapes](const tmla_fixed_size &item) {
                return shapes[item.input].sizes[item.axis] == item.size;
            })) {
            matching.push_back(operation);
        }
    }
    if (matching.empty()) {
        const auto sizes = [&op](const Operation &item, const tmla_shape *found) {
            std::vector<std::string> texts;
            for (const tmla_fixed_size &fixed : item.sizes) {
                const int64_t size = found ? found[fixed.input].sizes[fixed.axis] : fixed.size;
                texts.push_back(std::string(op.inputs[fixed.input].dims[fixed.axis].name) + " " + std::to_string(size));
            }
            return tuple_text(texts);
        };
        throw Error(std::string(op.name) + ": found sizes " + sizes(*operations.front(), shapes) + ", expected " +
                    alternatives(operations, [&sizes](const Operation &item) { return sizes(item, nullptr); }));
    }
    return matching;
}
