// Plan programs: launch plans for all sizes at once, as `trtllm_mla/ops/program.py` makes them.
#ifndef TRTLLM_MLA_PROGRAM_H
#define TRTLLM_MLA_PROGRAM_H

#include <cstdint>
#include <string>
#include <vector>

#include "reader.h"
#include "trtllm_mla/plan.h"

namespace trtllm_mla {

union Value {
    int64_t integer;
    double real;
};

// What an expression does with its operands; `Operator` in trtllm_mla/ops/expression.py.
enum class Operator : uint8_t {
    kIntSymbol = 0,
    kFloatSymbol = 1,
    kInt = 2,
    kFloat = 3,
    kAdd = 4,
    kSubtract = 5,
    kMultiply = 6,
    kFloorDiv = 7,
    kMod = 8,
    kNegate = 9,
    kMinimum = 10,
    kMaximum = 11,
    kLess = 12,
    kEqual = 13,
    kFloatMultiply = 14,
    kFloatLess = 15,
    kFloatLessEqual = 16,
    kFloatEqual = 17,
    kVariable = 18,
};

struct Expression {
    Operator op;
    bool real;
    bool varies; // depends on the variable of a repetition
    uint32_t depth;
    uint32_t left; // operand, or number of a symbol
    uint32_t right;
    Value value; // of a constant
};

// A launch whose numbers are expressions.
struct ProgramLaunch {
    struct Operand {
        tmla_argument_kind kind;
        uint32_t index; // of the tensor, or of the expression
    };
    uint32_t kernel; // number among the operation's
    uint32_t grid[3];
    std::vector<Operand> operands;
};

struct ProgramRepetition {
    uint32_t stop;
    uint32_t step;
    uint32_t body;
};

// A piece of a message: a text, or the value of an expression.
struct MessagePart {
    bool is_text;
    std::string text;
    uint32_t expression;
};

// A node of the tree of decisions.
struct Tree {
    enum Kind : uint8_t { kBranch = 0, kRefusal = 1, kPlan = 2, kLaunches = 3, kNumber = 4 };
    // A launch or a repetition, by its number.
    struct Item {
        bool is_repetition;
        uint32_t index;
    };
    Kind kind;
    uint8_t results;             // bit set of the kinds that lie below, but for refusals
    uint32_t expression;         // condition, workspace bytes, or the number
    uint32_t then;               // of a branch
    uint32_t otherwise;
    std::vector<MessagePart> parts;
    std::vector<Item> items;
};

// What the expressions of a program refer to.
struct ProgramContext {
    const std::vector<bool> *real_symbols;           // for each symbol, whether it is real
    const std::vector<const tmla_kernel *> *kernels; // the operation's
    uint32_t num_tensors;
};

// Launches, before addresses within them are fixed.
struct PlanData {
    int64_t workspace_bytes = 0;
    std::vector<tmla_launch> launches;
    std::vector<tmla_argument> arguments;
};

class Program {
public:
    // Reads and checks a program whose results are plans, or numbers.
    Program(Reader &reader, const ProgramContext &context, Tree::Kind result);

    // Evaluates it; throws Error with the message of a refusal, or where numbers go beyond their types.
    void plan(const std::vector<Value> &symbols, const std::vector<const tmla_kernel *> &kernels, const char *op,
              PlanData *plan) const;
    int64_t number(const std::vector<Value> &symbols, const char *op) const;

private:
    friend class Evaluation;

    void read_expression(Reader &reader, const ProgramContext &context);
    void read_tree(Reader &reader, const ProgramContext &context);
    ProgramLaunch read_launch(Reader &reader, const ProgramContext &context) const;
    // Index of an expression that is real, or whole.
    uint32_t operand(Reader &reader, bool real) const;
    uint8_t results(uint32_t tree) const { return trees_[tree].results; }

    std::vector<Expression> expressions_;
    std::vector<uint32_t> varying_; // expressions that depend on the variable
    std::vector<Tree> trees_;       // the last one is the root; others come before what they lie below
    std::vector<ProgramLaunch> launches_;
    std::vector<ProgramRepetition> repetitions_;
};

} // namespace trtllm_mla

#endif
