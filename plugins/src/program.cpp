#include "program.h"

#include <algorithm>
#include <limits>

#include "error.h"
#include "text.h"

namespace trtllm_mla {

namespace {

// Expressions are evaluated recursively.
constexpr uint32_t kMaxDepth = 512;
constexpr std::size_t kMaxLaunches = 65536;
constexpr int64_t kInt32Max = std::numeric_limits<int32_t>::max();
constexpr int64_t kInt32Min = std::numeric_limits<int32_t>::min();
constexpr int64_t kMaxGrid[3] = {kInt32Max, 65535, 65535};

bool is_binary(Operator op) {
    switch (op) {
    case Operator::kIntSymbol:
    case Operator::kFloatSymbol:
    case Operator::kInt:
    case Operator::kFloat:
    case Operator::kNegate:
    case Operator::kVariable:
        return false;
    default:
        return true;
    }
}

bool has_real_operands(Operator op) {
    return op == Operator::kFloatMultiply || op == Operator::kFloatLess || op == Operator::kFloatLessEqual ||
           op == Operator::kFloatEqual;
}

bool is_comparison(Operator op) {
    return op == Operator::kLess || op == Operator::kEqual || op == Operator::kFloatLess ||
           op == Operator::kFloatLessEqual || op == Operator::kFloatEqual;
}

} // namespace

Program::Program(Reader &reader, const ProgramContext &context, Tree::Kind result) {
    for (uint32_t i = reader.count(); i > 0; --i) {
        read_expression(reader, context);
    }
    for (uint32_t i = reader.count(); i > 0; --i) {
        read_tree(reader, context);
    }
    if (trees_.empty() || (trees_.back().results & ~(1U << result)) != 0) {
        throw Error("library data: found a program without a result, or with one of another kind");
    }
}

uint32_t Program::operand(Reader &reader, bool real) const {
    const uint32_t index = reader.index(expressions_.size());
    if (expressions_[index].real != real) {
        throw Error("library data: found an operand of the wrong type");
    }
    return index;
}

void Program::read_expression(Reader &reader, const ProgramContext &context) {
    Expression expression{};
    expression.op = static_cast<Operator>(reader.index(static_cast<std::size_t>(Operator::kVariable) + 1));
    switch (expression.op) {
    case Operator::kIntSymbol:
    case Operator::kFloatSymbol:
        expression.real = expression.op == Operator::kFloatSymbol;
        expression.left = reader.index(context.real_symbols->size());
        if ((*context.real_symbols)[expression.left] != expression.real) {
            throw Error("library data: found a symbol of the wrong type");
        }
        break;
    case Operator::kInt:
        expression.value.integer = reader.signed_int();
        break;
    case Operator::kFloat:
        expression.real = true;
        expression.value.real = reader.real();
        break;
    case Operator::kVariable:
        expression.varies = true;
        break;
    default:
        expression.real = expression.op == Operator::kFloatMultiply;
        expression.left = operand(reader, has_real_operands(expression.op));
        expression.right =
            is_binary(expression.op) ? operand(reader, has_real_operands(expression.op)) : expression.left;
        const Expression &left = expressions_[expression.left], &right = expressions_[expression.right];
        expression.depth = std::max(left.depth, right.depth) + 1;
        expression.varies = left.varies || right.varies;
        if (expression.depth > kMaxDepth) {
            throw Error("library data: found expressions that are nested too deeply");
        }
    }
    if (expression.varies) {
        varying_.push_back(static_cast<uint32_t>(expressions_.size()));
    }
    expressions_.push_back(expression);
}

void Program::read_tree(Reader &reader, const ProgramContext &context) {
    Tree tree{};
    tree.kind = static_cast<Tree::Kind>(reader.index(Tree::kNumber + 1));
    switch (tree.kind) {
    case Tree::kBranch:
        tree.expression = operand(reader, false);
        if (!is_comparison(expressions_[tree.expression].op)) {
            throw Error("library data: found a condition that is no comparison");
        }
        tree.then = reader.index(trees_.size());
        tree.otherwise = reader.index(trees_.size());
        tree.results = static_cast<uint8_t>(results(tree.then) | results(tree.otherwise));
        break;
    case Tree::kRefusal:
        for (uint32_t i = reader.count(); i > 0; --i) {
            MessagePart part{};
            part.is_text = reader.index(2) == 0;
            if (part.is_text) {
                part.text = reader.text();
            } else {
                part.expression = reader.index(expressions_.size());
            }
            tree.parts.push_back(part);
        }
        break;
    case Tree::kPlan:
    case Tree::kLaunches:
        tree.results = static_cast<uint8_t>(1U << tree.kind);
        if (tree.kind == Tree::kPlan) {
            tree.expression = operand(reader, false);
        }
        for (uint32_t i = reader.count(); i > 0; --i) {
            const bool is_repetition = reader.index(tree.kind == Tree::kPlan ? 2 : 1) == 1;
            const std::size_t index = is_repetition ? repetitions_.size() : launches_.size();
            tree.items.push_back({is_repetition, static_cast<uint32_t>(index)});
            if (!is_repetition) {
                launches_.push_back(read_launch(reader, context));
                continue;
            }
            ProgramRepetition repetition{};
            repetition.stop = operand(reader, false);
            repetition.step = operand(reader, false);
            repetition.body = reader.index(trees_.size());
            if ((results(repetition.body) & ~(1U << Tree::kLaunches)) != 0) {
                throw Error("library data: found a repetition of something else than launches");
            }
            repetitions_.push_back(repetition);
        }
        break;
    case Tree::kNumber:
        tree.results = static_cast<uint8_t>(1U << tree.kind);
        tree.expression = operand(reader, false);
        break;
    }
    trees_.push_back(std::move(tree));
}

ProgramLaunch Program::read_launch(Reader &reader, const ProgramContext &context) const {
    ProgramLaunch launch{};
    launch.kernel = reader.index(context.kernels->size());
    for (uint32_t &blocks : launch.grid) {
        blocks = operand(reader, false);
    }
    const tmla_kernel *kernel = (*context.kernels)[launch.kernel];
    for (int32_t i = 0; i < kernel->num_parameters; ++i) {
        ProgramLaunch::Operand item{};
        switch (kernel->parameters[i]) {
        case TMLA_PARAMETER_INT32:
            item = {TMLA_ARGUMENT_INT32, operand(reader, false)};
            break;
        case TMLA_PARAMETER_FLOAT32:
            item = {TMLA_ARGUMENT_FLOAT32, operand(reader, true)};
            break;
        default:
            if (reader.index(2) == 0) {
                item = {TMLA_ARGUMENT_TENSOR, reader.index(context.num_tensors)};
            } else {
                item = {TMLA_ARGUMENT_WORKSPACE, operand(reader, false)};
            }
        }
        launch.operands.push_back(item);
    }
    return launch;
}

// One evaluation of a program. Expressions are evaluated where they are needed, and then once.
class Evaluation {
public:
    Evaluation(const Program &program, const std::vector<Value> &symbols, const char *op)
        : program_(program), symbols_(symbols), op_(op), values_(program.expressions_.size()),
          known_(program.expressions_.size(), false) {}

    // The leaf below a node; throws if it is a refusal.
    const Tree &leaf(const Tree *tree) {
        while (tree->kind == Tree::kBranch) {
            tree = &program_.trees_[integer(tree->expression) != 0 ? tree->then : tree->otherwise];
        }
        if (tree->kind == Tree::kRefusal) {
            throw Error(message(*tree));
        }
        return *tree;
    }

    int64_t integer(uint32_t index) {
        evaluate(index);
        return values_[index].integer;
    }

    void add_launches(const Tree &tree, const std::vector<const tmla_kernel *> &kernels, PlanData *plan) {
        for (const Tree::Item &item : tree.items) {
            if (item.is_repetition) {
                repeat(program_.repetitions_[item.index], kernels, plan);
            } else {
                add_launch(program_.launches_[item.index], kernels, plan);
            }
        }
    }

private:
    void repeat(const ProgramRepetition &repetition, const std::vector<const tmla_kernel *> &kernels, PlanData *plan) {
        const int64_t stop = integer(repetition.stop), step = integer(repetition.step);
        if (step < 1) {
            throw Error(std::string(op_) + ": found launches " + std::to_string(step) +
                        " apart, expected a positive number");
        }
        repeating_ = true;
        for (variable_ = 0; variable_ < stop;) {
            count_step();
            forget_variable();
            add_launches(leaf(&program_.trees_[repetition.body]), kernels, plan);
            if (step >= stop - variable_) {
                break;
            }
            variable_ += step;
        }
        repeating_ = false;
        forget_variable();
    }

    void forget_variable() {
        for (const uint32_t index : program_.varying_) {
            known_[index] = false;
        }
    }

    void add_launch(const ProgramLaunch &item, const std::vector<const tmla_kernel *> &kernels, PlanData *plan) {
        count_step();
        const tmla_kernel *kernel = kernels[item.kernel];
        tmla_launch launch{};
        launch.kernel = kernel;
        for (unsigned axis = 0; axis < 3; ++axis) {
            const int64_t blocks = integer(item.grid[axis]);
            if (blocks < 1 || blocks > kMaxGrid[axis]) {
                throw Error(std::string(op_) + ": found " + std::to_string(blocks) + " blocks on axis " +
                            std::to_string(axis) + " of a grid, expected 1 to " + std::to_string(kMaxGrid[axis]));
            }
            launch.grid[axis] = static_cast<uint32_t>(blocks);
        }
        plan->launches.push_back(launch);
        for (const ProgramLaunch::Operand &operand : item.operands) {
            plan->arguments.push_back(argument(operand, plan->workspace_bytes));
        }
    }

    tmla_argument argument(const ProgramLaunch::Operand &operand, int64_t workspace_bytes) {
        tmla_argument result{};
        result.kind = operand.kind;
        switch (operand.kind) {
        case TMLA_ARGUMENT_TENSOR:
            result.index = static_cast<int32_t>(operand.index);
            break;
        case TMLA_ARGUMENT_WORKSPACE:
            result.integer = integer(operand.index);
            if (result.integer < 0 || result.integer > workspace_bytes) {
                throw Error(std::string(op_) + ": found byte " + std::to_string(result.integer) +
                            " of the workspace, expected 0 to " + std::to_string(workspace_bytes));
            }
            break;
        case TMLA_ARGUMENT_INT32:
            result.integer = integer(operand.index);
            if (result.integer < kInt32Min || result.integer > kInt32Max) {
                throw Error(std::string(op_) + ": found " + std::to_string(result.integer) +
                            " for a kernel's parameter, expected a number of 32 bits");
            }
            break;
        case TMLA_ARGUMENT_FLOAT32:
            evaluate(operand.index);
            result.real = values_[operand.index].real;
            break;
        }
        return result;
    }

    // Bounds the work that hostile data can ask for.
    void count_step() {
        if (++steps_ > kMaxLaunches) {
            throw Error(std::string(op_) + ": found more than " + std::to_string(kMaxLaunches) +
                        " launches, expected fewer");
        }
    }

    std::string message(const Tree &tree) {
        std::string result;
        for (const MessagePart &part : tree.parts) {
            if (part.is_text) {
                result += part.text;
                continue;
            }
            evaluate(part.expression);
            const Value value = values_[part.expression];
            result += program_.expressions_[part.expression].real ? to_text(value.real) : std::to_string(value.integer);
        }
        return result;
    }

    void evaluate(uint32_t index) {
        if (known_[index]) {
            return;
        }
        const Expression &item = program_.expressions_[index];
        Value &value = values_[index];
        switch (item.op) {
        case Operator::kIntSymbol:
        case Operator::kFloatSymbol:
            value = symbols_[item.left];
            break;
        case Operator::kInt:
        case Operator::kFloat:
            value = item.value;
            break;
        case Operator::kVariable:
            if (!repeating_) {
                throw Error(std::string(op_) + ": found the variable of a repetition outside of it");
            }
            value.integer = variable_;
            break;
        default:
            evaluate(item.left);
            evaluate(item.right);
            if (has_real_operands(item.op)) {
                value = real_result(item.op, values_[item.left].real, values_[item.right].real);
            } else {
                value.integer = integer_result(item.op, values_[item.left].integer, values_[item.right].integer);
            }
        }
        known_[index] = true;
    }

    static Value real_result(Operator op, double left, double right) {
        Value value{};
        switch (op) {
        case Operator::kFloatMultiply:
            value.real = left * right;
            break;
        case Operator::kFloatLess:
            value.integer = left < right;
            break;
        case Operator::kFloatLessEqual:
            value.integer = left <= right;
            break;
        default:
            value.integer = left == right;
        }
        return value;
    }

    int64_t integer_result(Operator op, int64_t left, int64_t right) const {
        int64_t result = 0;
        bool overflow = false;
        switch (op) {
        case Operator::kAdd:
            overflow = __builtin_add_overflow(left, right, &result);
            break;
        case Operator::kSubtract:
            overflow = __builtin_sub_overflow(left, right, &result);
            break;
        case Operator::kMultiply:
            overflow = __builtin_mul_overflow(left, right, &result);
            break;
        case Operator::kNegate:
            overflow = __builtin_sub_overflow(int64_t{0}, left, &result);
            break;
        case Operator::kFloorDiv:
        case Operator::kMod:
            return divide(left, right, op == Operator::kMod);
        case Operator::kMinimum:
            return std::min(left, right);
        case Operator::kMaximum:
            return std::max(left, right);
        case Operator::kLess:
            return left < right;
        default:
            return left == right;
        }
        if (overflow) {
            fail_overflow();
        }
        return result;
    }

    // The quotient rounded down, or what remains, which has the divisor's sign.
    int64_t divide(int64_t left, int64_t right, bool remainder) const {
        if (right == 0) {
            throw Error(std::string(op_) + ": found a division by 0, expected sizes above 0");
        }
        if (right == -1) { // whose quotient overflows for the least number
            if (left == std::numeric_limits<int64_t>::min() && !remainder) {
                fail_overflow();
            }
            return remainder ? 0 : -left;
        }
        const int64_t quotient = left / right, rest = left % right;
        const bool down = rest != 0 && (rest < 0) != (right < 0);
        return remainder ? rest + (down ? right : 0) : quotient - (down ? 1 : 0);
    }

    [[noreturn]] void fail_overflow() const {
        throw Error(std::string(op_) + ": found sizes whose plan needs numbers of more than 64 bits, expected less");
    }

    const Program &program_;
    const std::vector<Value> &symbols_;
    const char *op_;
    std::vector<Value> values_;
    std::vector<bool> known_;
    std::size_t steps_ = 0;
    int64_t variable_ = 0;
    bool repeating_ = false;
};

void Program::plan(const std::vector<Value> &symbols, const std::vector<const tmla_kernel *> &kernels, const char *op,
                   PlanData *plan) const {
    Evaluation evaluation(*this, symbols, op);
    const Tree &tree = evaluation.leaf(&trees_.back());
    plan->workspace_bytes = evaluation.integer(tree.expression);
    evaluation.add_launches(tree, kernels, plan);
}

int64_t Program::number(const std::vector<Value> &symbols, const char *op) const {
    Evaluation evaluation(*this, symbols, op);
    return evaluation.integer(evaluation.leaf(&trees_.back()).expression);
}

} // namespace trtllm_mla
