// Library data, read and checked: contracts, kernels, and operations with their programs.
#ifndef TRTLLM_MLA_LIBRARY_H
#define TRTLLM_MLA_LIBRARY_H

#include <deque>
#include <memory>
#include <string>
#include <vector>

#include "program.h"
#include "reader.h"
#include "trtllm_mla/plan.h"

namespace trtllm_mla {

// The contract of an operation, and the memory that it points to.
struct Op {
    tmla_op contract{};
    std::vector<bool> real_symbols; // symbols of its programs: sizes, multiprocessors, workspace, real attributes
    uint32_t num_sizes = 0;         // dimensions of all inputs together

    uint32_t num_tensors() const { return static_cast<uint32_t>(contract.num_inputs + contract.num_outputs); }
};

// An operation on one target, and the memory that it points to.
struct Operation : tmla_operation {
    Operation() : tmla_operation{} {}

    std::vector<tmla_value> attribute_values;
    std::vector<int32_t> tensor_types;
    std::vector<tmla_fixed_size> sizes;
    std::vector<const tmla_kernel *> all_kernels;
    std::unique_ptr<Program> plan;
    std::unique_ptr<Program> workspace;
};

} // namespace trtllm_mla

// Pointers into the deques stay valid while they grow.
struct tmla_library {
    tmla_library(const void *data, uint64_t size);

    // Operations of an op for attributes; throws Error if there are none.
    std::vector<const trtllm_mla::Operation *> with_attributes(const tmla_op *op, const tmla_value *attributes) const;
    // Of these, those whose first tensors have certain types.
    static std::vector<const trtllm_mla::Operation *>
    with_types(const std::vector<const trtllm_mla::Operation *> &operations, const int32_t *types, int32_t num_types);
    // Of these, those with the sizes of a call.
    static std::vector<const trtllm_mla::Operation *>
    with_shapes(const std::vector<const trtllm_mla::Operation *> &operations, const tmla_shape *shapes);

    std::string version;
    std::vector<int32_t> targets;
    std::deque<trtllm_mla::Op> ops;
    std::deque<tmla_kernel> kernels;
    std::deque<trtllm_mla::Operation> operations;

private:
    void read_op(trtllm_mla::Reader &reader);
    const tmla_tensor *read_tensors(trtllm_mla::Reader &reader, uint32_t count, const trtllm_mla::Op &op,
                                    bool are_inputs);
    void read_kernel(trtllm_mla::Reader &reader);
    void read_operation(trtllm_mla::Reader &reader);
    const char *keep(std::string text);

    std::deque<std::string> texts_;
    std::deque<std::vector<tmla_attribute>> attributes_;
    std::deque<std::vector<tmla_tensor>> tensors_;
    std::deque<std::vector<tmla_dim>> dims_;
    std::deque<std::vector<int32_t>> numbers_;
};

#endif
