// Feeds the evaluator with damaged library data, random attributes, element types and sizes, for some seconds.
//
//     trtllm_mla_fuzz library.bin SECONDS [SEED]
//
// It is meant to be built with TRTLLM_MLA_SANITIZE. What it finds ends the program; otherwise it prints how much it
// tried. A plan that the evaluator gives is checked against what the interface promises.
#include <algorithm>
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <fstream>
#include <iterator>
#include <limits>
#include <random>
#include <vector>

#include "trtllm_mla/plan.h"

namespace {

using Bytes = std::vector<unsigned char>;

struct Counts {
    unsigned long libraries = 0, opened = 0, calls = 0, found = 0, plans = 0;
};

void require(bool condition, const char *what) {
    if (!condition) {
        std::fprintf(stderr, "found a plan that breaks the interface: %s\n", what);
        std::abort();
    }
}

class Fuzzer {
public:
    Fuzzer(Bytes data, uint64_t seed) : data_(std::move(data)), random_(seed) {}

    void round() {
        ++counts.libraries;
        // Memory of exactly this size, so that the sanitizer sees every byte read beyond it.
        Bytes damaged = below(4) == 0 ? data_ : damage();
        tmla_library *library = nullptr;
        tmla_message message{};
        if (tmla_library_open(damaged.data(), damaged.size(), &library, &message) != TMLA_OK) {
            require(message.text[0] != '\0', "an error without a message");
            return;
        }
        ++counts.opened;
        for (int i = 0; i < 20; ++i) {
            call(library);
        }
        tmla_library_close(library);
    }

    Counts counts;

private:
    uint64_t below(uint64_t limit) { return random_() % limit; }

    int64_t size() {
        constexpr int64_t kNotable[] = {0,       1,          2,          -1,         INT32_MAX, int64_t{INT32_MAX} + 1,
                                        1 << 16, 1LL << 40, INT64_MAX, INT64_MIN, 64,        128};
        switch (below(4)) {
        case 0:
            return kNotable[below(std::size(kNotable))];
        case 1:
            return static_cast<int64_t>(random_());
        default:
            return static_cast<int64_t>(below(uint64_t{1} << below(20)));
        }
    }

    Bytes damage() {
        Bytes bytes = data_;
        // Kernels fill most of the data: damage is done anywhere, or at either end, where the rest is.
        const auto place = [&] {
            const uint64_t range = below(3) ? std::min<uint64_t>(bytes.size(), 4096) : bytes.size();
            const uint64_t offset = below(range);
            return static_cast<std::ptrdiff_t>(below(2) ? offset : bytes.size() - 1 - offset);
        };
        for (uint64_t i = below(8) + 1; i > 0 && bytes.size() > 1; --i) {
            switch (below(6)) {
            case 0:
                bytes.resize(below(bytes.size()) + 1);
                break;
            case 1:
                bytes.erase(bytes.begin() + place());
                break;
            case 2:
                bytes.insert(bytes.begin() + place(), static_cast<unsigned char>(below(256)));
                break;
            default:
                bytes[static_cast<std::size_t>(place())] = static_cast<unsigned char>(below(3) ? below(24) : below(256));
            }
        }
        bytes.shrink_to_fit();
        return bytes;
    }

    // A call of one of the library's operations, of which some of what must match is changed.
    void call(const tmla_library *library) {
        const int32_t count = tmla_library_num_operations(library);
        require(tmla_library_operation(library, count) == nullptr, "an operation out of range");
        if (count == 0) {
            return;
        }
        ++counts.calls;
        const tmla_operation *example =
            tmla_library_operation(library, static_cast<int32_t>(below(static_cast<uint64_t>(count))));
        const tmla_op *op = example->op;

        std::vector<tmla_value> attributes(example->attributes, example->attributes + op->num_attributes);
        for (tmla_value &value : attributes) {
            value.real = real();
            if (below(16) == 0) {
                value.integer = size();
            }
        }
        std::vector<int32_t> types(example->types, example->types + op->num_inputs + op->num_outputs);
        if (!types.empty() && below(16) == 0) {
            types[below(types.size())] = static_cast<int32_t>(below(7)) - 1;
        }
        const std::vector<std::vector<int64_t>> sizes = call_sizes(*example);
        std::vector<tmla_shape> shapes;
        for (const auto &shape : sizes) {
            shapes.push_back({static_cast<int32_t>(shape.size()), shape.data()});
        }

        tmla_message message{};
        const auto num_types = static_cast<int32_t>(below(types.size() + 1));
        checked(tmla_check_types(library, op, attributes.data(), types.data(), num_types, &message), &message);
        std::vector<int32_t> output_types(static_cast<std::size_t>(op->num_outputs));
        checked(tmla_output_types(library, op, attributes.data(), types.data(), output_types.data(), &message),
                &message);
        int64_t bytes = 0;
        checked(tmla_workspace_bytes(library, op, attributes.data(), types.data(), shapes.data(), &bytes, &message),
                &message);
        const tmla_operation *found = nullptr;
        if (!checked(tmla_find_operation(library, op, attributes.data(), types.data(), shapes.data(),
                                         example->compute_capability, &found, &message),
                     &message)) {
            return;
        }
        ++counts.found;
        tmla_plan *plan = nullptr;
        const auto multiprocessors = static_cast<int32_t>(below(8) ? 1 + below(300) : static_cast<uint64_t>(size()));
        bytes = below(4) ? INT64_MAX : bytes;
        if (checked(tmla_plan_create(found, attributes.data(), shapes.data(), multiprocessors, bytes, &plan, &message),
                    &message)) {
            ++counts.plans;
            check_plan(*found, *plan);
        }
        tmla_plan_free(plan);
    }

    double real() {
        const double values[] = {0.5, 1, 1, 1, 0.1, 0, -1, 1e300, std::numeric_limits<double>::quiet_NaN(),
                                 std::numeric_limits<double>::infinity()};
        return values[below(std::size(values))];
    }

    // Sizes of all inputs: mostly those that agree with the contract.
    std::vector<std::vector<int64_t>> call_sizes(const tmla_operation &example) {
        const tmla_op &op = *example.op;
        std::vector<std::vector<int64_t>> sizes;
        for (int32_t i = 0; i < op.num_inputs; ++i) {
            const tmla_tensor &input = op.inputs[i];
            sizes.emplace_back();
            for (int32_t axis = 0; axis < input.num_dims; ++axis) {
                const tmla_dim &dim = input.dims[axis];
                const bool first = dim.source != TMLA_DIM_INPUT || (dim.input == i && dim.axis == axis);
                int64_t value = dim.source == TMLA_DIM_NUMBER ? dim.offset : size();
                if (!first) {
                    const auto &source = sizes[static_cast<std::size_t>(dim.input)];
                    // Without the undefined behaviour of an overflow.
                    value = static_cast<int64_t>(static_cast<uint64_t>(source[static_cast<std::size_t>(dim.axis)]) +
                                                 static_cast<uint64_t>(dim.offset));
                }
                for (int32_t j = 0; j < example.num_fixed_sizes; ++j) {
                    const tmla_fixed_size &fixed = example.fixed_sizes[j];
                    value = fixed.input == i && fixed.axis == axis ? fixed.size : value;
                }
                sizes.back().push_back(below(200) ? value : size());
            }
            if (below(200) == 0) {
                sizes.back().resize(below(5), 1);
            }
        }
        return sizes;
    }

    bool checked(int32_t status, tmla_message *message) {
        require(status == TMLA_OK || (status == TMLA_ERROR && message->text[0] != '\0'), "an error without a message");
        *message = tmla_message{};
        return status == TMLA_OK;
    }

    void check_plan(const tmla_operation &operation, const tmla_plan &plan) {
        for (int32_t i = 0; i < plan.num_launches; ++i) {
            const tmla_launch &launch = plan.launches[i];
            require(launch.grid[0] >= 1 && launch.grid[0] <= INT32_MAX, "a grid out of range");
            require(launch.grid[1] >= 1 && launch.grid[1] <= 65535, "a grid out of range");
            require(launch.grid[2] >= 1 && launch.grid[2] <= 65535, "a grid out of range");
            require(launch.kernel->compute_capability == operation.compute_capability, "a kernel of another target");
            for (int32_t j = 0; j < launch.kernel->num_parameters; ++j) {
                check_argument(*operation.op, plan, launch.arguments[j], launch.kernel->parameters[j]);
            }
        }
    }

    void check_argument(const tmla_op &op, const tmla_plan &plan, const tmla_argument &argument, int32_t parameter) {
        switch (argument.kind) {
        case TMLA_ARGUMENT_TENSOR:
            require(parameter == TMLA_PARAMETER_POINTER, "an argument of another type");
            require(argument.index >= 0 && argument.index < op.num_inputs + op.num_outputs, "a tensor out of range");
            break;
        case TMLA_ARGUMENT_WORKSPACE:
            require(parameter == TMLA_PARAMETER_POINTER, "an argument of another type");
            require(argument.integer >= 0 && argument.integer <= plan.workspace_bytes, "workspace out of range");
            break;
        case TMLA_ARGUMENT_INT32:
            require(parameter == TMLA_PARAMETER_INT32, "an argument of another type");
            require(argument.integer >= INT32_MIN && argument.integer <= INT32_MAX, "a number out of range");
            break;
        default:
            require(argument.kind == TMLA_ARGUMENT_FLOAT32 && parameter == TMLA_PARAMETER_FLOAT32,
                    "an argument of another type");
        }
    }

    Bytes data_;
    std::mt19937_64 random_;
};

} // namespace

int main(int argc, char **argv) {
    if (argc < 3) {
        std::fprintf(stderr, "usage: %s library.bin SECONDS [SEED]\n", argv[0]);
        return 2;
    }
    std::ifstream file(argv[1], std::ios::binary);
    const std::vector<char> content((std::istreambuf_iterator<char>(file)), std::istreambuf_iterator<char>());
    if (content.empty()) {
        std::fprintf(stderr, "%s: found no data\n", argv[1]);
        return 2;
    }
    const uint64_t seed = argc > 3 ? std::strtoull(argv[3], nullptr, 10) : std::random_device{}();
    std::printf("seed %llu\n", static_cast<unsigned long long>(seed));
    std::fflush(stdout);
    Fuzzer fuzzer(Bytes(content.begin(), content.end()), seed);
    const auto end = std::chrono::steady_clock::now() + std::chrono::duration<double>(std::atof(argv[2]));
    while (std::chrono::steady_clock::now() < end) {
        fuzzer.round();
    }
    const Counts &counts = fuzzer.counts;
    std::printf("libraries %lu opened %lu calls %lu found %lu plans %lu\n", counts.libraries, counts.opened,
                counts.calls, counts.found, counts.plans);
    return 0;
}
